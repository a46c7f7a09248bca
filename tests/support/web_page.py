"""Datasets to look at, made without a model; and `spile serve` in a process of its own."""

import io
import json
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from spile.core.index import BOS, END, FIRST, INDEX_DTYPE, LAST, POOLED_INDEX_DTYPE
from spile.dataset.codec.documents import encode_documents
from spile.dataset.format import TapInfo
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table
from spile.dataset.write.unit_writer import UnitWriter
from spile.objects import LocalObjects
from support import stored, tiny, zygote

TAPS = {"resid_post.0": 12, "mlp_out.1": 5, "resid_post.1": 12}  # by layer
SINK = 40.0  # what rows of position 0 are multiplied by
LOUD = 3  # the channel that is large
LOUD_TOKEN = "z"  # wherever this is read
# A plain tap and an encoded one, which stores the 4 largest of 40 latents.
LATENT_TAP = "resid_post_latents.1"
LATENT_TAPS: stored.Taps = {
    LATENT_TAP: TapInfo((4,), "float32", latents=40),
    "resid_post_latent_ids.1": TapInfo((4,), "int16", latents=40),
    "mlp_out.1": 5,
}
LATENT_PAIR = ",".join(name for name in LATENT_TAPS if "latent" in name)
LOUD_LATENT = 31  # the one that is large
SILENT_LATENT = 39  # and the one that never is
# Beside a plain tap the three likeliest next tokens, and the three keys that two heads weigh most.
BESIDE_TAPS: stored.Taps = {
    "resid_post.1": 5,
    "next_rank": TapInfo((), "int32"),
    "top_token_ids": TapInfo((3,), "int32"),
    "top_logprobs": TapInfo((3,), "float32"),
    "attn_top_keys.1.h0.h2": TapInfo((2, 3), "int32"),
    "attn_top_weights.1.h0.h2": TapInfo((2, 3), "float32"),
}
LENS_TAPS: stored.Taps = {
    "resid_post.1": 5,
    "lens_top_ids.0": TapInfo((2,), "int32"),
    "lens_top_logprobs.0": TapInfo((2,), "float32"),
}
# Columns that documents may keep: a text with two values, and a number.
KEPT: dict[str, Callable[[int], Any]] = {
    "parity": lambda doc: "odd" if doc % 2 else "even",
    "score": lambda doc: doc / 2,
}
HOSTILE = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'> & \"quotes\" zz"

Rows = Callable[[str, int, np.ndarray], np.ndarray]


def texts(count: int = 30, seed: int = 0) -> list[str]:
    """Documents of a few words; the fourth is hostile."""
    rng = np.random.default_rng(seed)
    found = [f"document {number} " + tiny.words(rng, 6 + number % 9) for number in range(count)]
    found[3] = HOSTILE
    found[5] += " needle in it"
    return found


def tokens(text: str) -> np.ndarray:
    """The tiny tokenizer's ids: BOS, then bytes."""
    alphabet = {char: number for number, char in enumerate(_alphabet())}
    return np.array([tiny.BOS, *(alphabet[_char(byte)] for byte in text.encode())], np.int32)


@cache
def _alphabet() -> list[str]:
    return sorted(_char(byte) for byte in range(256))


@cache
def _char(byte: int) -> str:
    """Byte-level BPE's name of a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in plain:
        return chr(byte)
    return chr(256 + [each for each in range(256) if each not in plain].index(byte))


def planted(tap: str, width: int, index: np.ndarray) -> np.ndarray:
    """Random rows with a sink at the beginning of each context, and a loud channel."""
    rng = np.random.default_rng([len(tap), len(index), int(index["doc"][0]) if len(index) else 0])
    rows = rng.standard_normal((len(index), width)).astype(np.float32)
    rows[index["pos"] == 0] *= SINK
    loud = tokens(LOUD_TOKEN)[1]
    rows[index["token_id"] == loud, min(LOUD, width - 1)] = (
        500 + index["offset"][index["token_id"] == loud]
    )
    return rows


def planted_latents(tap: str, width: int, index: np.ndarray) -> np.ndarray:
    """Latents of each row and their ids; a loud token has a large latent."""
    if not tap.startswith("resid_post_latent"):
        return planted(tap, width, index)
    values, ids = np.zeros((2, len(index), width), np.float32)
    loud = tokens(LOUD_TOKEN)[1]
    for row, entry in enumerate(index):
        rng = np.random.default_rng([int(entry["doc"]), int(entry["offset"])])
        ids[row] = rng.permutation(LOUD_LATENT)[:width]
        values[row] = -np.sort(-np.maximum(rng.integers(-2, 9, width), 0))
        if entry["token_id"] == loud:
            ids[row, 0], values[row, 0] = LOUD_LATENT, 500 + entry["offset"]
    return ids if "ids" in tap else values


def planted_beside(tap: str, width: int, index: np.ndarray) -> np.ndarray:
    """The next token is the second likeliest; head 0 looks at the context's begin, 2 at itself."""
    if tap == "next_rank":
        return np.ones(len(index), np.int32)
    if tap == "top_token_ids":
        return np.stack([np.full(len(index), 5), np.roll(index["token_id"], -1), index["pos"]], 1)
    if tap == "top_logprobs":
        return np.log(np.tile([0.5, 0.25, 0.125], (len(index), 1)))
    if tap.startswith("lens_top_ids"):
        return np.stack([np.roll(index["token_id"], -1), np.full(len(index), 5)], 1)
    if tap.startswith("lens_top_logprobs"):
        return np.log(np.tile([0.6, 0.3], (len(index), 1)))
    if tap.startswith("attn_top_keys"):
        first, own, none = np.zeros(len(index)), index["pos"], np.full(len(index), -1)
        before = np.where(own > 0, own - 1, -1)
        heads = [[first, own, none], [own, before, none]]
        return np.moveaxis(np.array(heads), 2, 0)
    if tap.startswith("attn_top_weights"):
        return np.tile(np.array([[0.75, 0.25, 0], [0.5, 0.25, 0]]), (len(index), 1, 1))
    return planted(tap, width, index)


@dataclass(frozen=True)
class Built:
    """A dataset whose units may be done one after another."""

    path: Path
    table: Table
    read: list[np.ndarray]  # of each unit the index of every token, kept or not
    index: list[np.ndarray]
    previews: list[list[str]]
    rows: Rows

    def commit(self, *units: int) -> None:
        objects = LocalObjects(self.path)
        for unit in units:
            index, entry = self.index[unit], self.table.units[unit]
            writer = UnitWriter(objects, unit, index, self.table.taps, 8 << 20)
            for tap, info in self.table.taps.items():
                values = self.rows(tap, info.width, index).astype(info.storage)
                writer.stats[tap] = stored.describe(values)
                writer.write(tap, values)
            docs = range(entry.first_doc, entry.first_doc + entry.num_docs)
            own = self.read[unit]["doc"] - entry.first_doc
            counts = np.bincount(own, minlength=len(docs)).tolist()
            kept = {name: [KEPT[name](doc) for doc in docs] for name in self.table.recipe.keep}
            table = encode_documents(
                docs=docs, tokens=counts, skipped=[None if n else "no tokens" for n in counts],
                previews=self.previews[unit], kept=kept, index=index,
            )  # fmt: skip
            done = writer.finish(
                table=table, fingerprint=self.table.fingerprint,
                made_from=Ledger(objects).made_from(self.table, unit) or "", tokens=len(index),
                documents=len(np.unique(index["doc"])), contexts=1, skipped={},
                text_digest="0123", made_by={"spile": "test"},
            )  # fmt: skip
            assert Ledger(objects).commit(done)
        Ledger(objects).complete(self.table)


def build(
    path: Path,
    units: Sequence[Sequence[np.ndarray]],
    previews: Sequence[Sequence[str]],
    *,
    taps: stored.Taps = TAPS,
    commit: Collection[int] | None = None,
    rows: Rows = planted,
    **recipe: Any,
) -> Built:
    """A dataset of these documents' tokens, unit by unit."""
    recipe = {"seq_len": 64, **recipe}
    lengths = [[len(ids) for ids in unit] for unit in units]
    table = stored.make_table(lengths, taps, **recipe)
    read = [
        np.concatenate([np.zeros(0, INDEX_DTYPE),
                        *(_entries(entry.first_doc + n, ids, recipe["seq_len"])
                          for n, ids in enumerate(unit))])
        for entry, unit in zip(table.units, units, strict=True)
    ]  # fmt: skip
    index = [stored.kept(table, each) for each in read]
    if table.recipe.pool:
        index = [pooled(each) for each in index]
    built = Built(path, table, read, index, [list(each) for each in previews], rows)
    Ledger(LocalObjects(path)).create_table(table)
    built.commit(*(range(len(units)) if commit is None else commit))
    return built


def _entries(doc: int, ids: np.ndarray, seq_len: int) -> np.ndarray:
    found = np.zeros(len(ids), INDEX_DTYPE)
    found["token_id"], found["doc"], found["offset"] = ids, doc, np.arange(len(ids))
    found["pos"] = np.arange(len(ids)) % seq_len
    found["flags"][ids == tiny.BOS] |= BOS
    found["flags"][found["pos"] == 0] |= FIRST
    found["flags"][found["pos"] == seq_len - 1] |= LAST
    found["flags"][-1:] |= LAST | END
    return found


def pooled(entries: np.ndarray) -> np.ndarray:
    """The index of two pooled rows for each document: of its first four tokens, and of the rest."""
    found: list[np.ndarray] = []
    for doc in np.unique(entries["doc"]):
        whole = entries[entries["doc"] == doc]
        for span, part in enumerate(filter(len, (whole[:4], whole[4:]))):
            row = np.zeros(1, POOLED_INDEX_DTYPE)
            for name in INDEX_DTYPE.names or ():
                row[name] = part[name][-1]
            row["span"], row["start"], row["count"] = span, part["offset"][0], len(part)
            found.append(row)
    return np.concatenate([np.zeros(0, POOLED_INDEX_DTYPE), *found])


def build_texts(path: Path, model: Path, documents: Sequence[str], **options: Any) -> Built:
    """A dataset of these texts, ten in a unit."""
    parts = [documents[at : at + 10] for at in range(0, len(documents), 10)]
    units = [[tokens(text) for text in part] for part in parts]
    previews = [[text[:200] for text in part] for part in parts]
    return build(path, units, previews, **{"model_source": str(model), **options})


def build_latents(path: Path, model: Path, documents: Sequence[str], **options: Any) -> Built:
    """The same with sparse latents."""
    encoded = {"taps": LATENT_TAPS, "rows": planted_latents, "encode": {"resid_post.1": "topk 40"}}
    return build_texts(path, model, documents, **{**encoded, **options})


def build_two_encoders(path: Path, model: Path, documents: Sequence[str]) -> Built:
    """Two encoded taps with the same latents, beside a dense tap."""
    more = {
        name.replace(".1", ".0"): info for name, info in LATENT_TAPS.items() if "latent" in name
    }
    encode = dict.fromkeys(("resid_post.0", "resid_post.1"), "topk 40")
    taps = {**LATENT_TAPS, **more}
    return build_latents(path, model, documents, taps=taps, encode=encode)


def build_beside(path: Path, model: Path, documents: Sequence[str], **options: Any) -> Built:
    """The same with next tokens and keys."""
    return build_texts(
        path, model, documents, **{"taps": BESIDE_TAPS, "rows": planted_beside, **options}
    )


def build_large(path: Path, rows: int = 1 << 20, documents: int = 2048) -> Built:
    """A million tokens, in eight units; of one tap, 8 of 16,384 latents."""
    rng = np.random.default_rng(0)
    length, each = rows // documents, documents // 8
    ids = rng.integers(0, 256, (8, each, length), dtype=np.int32)
    previews = [[f"text {unit * each + n}" for n in range(each)] for unit in range(8)]
    units = [[*part] for part in ids]
    taps: stored.Taps = {
        "resid_post.0": 32,
        "resid_post.1": 32,
        "mlp_out_latents.0": TapInfo((8,), "bfloat16", latents=1 << 14),
        "mlp_out_latent_ids.0": TapInfo((8,), "int16", latents=1 << 14),
    }

    def planted_rows(tap: str, width: int, index: np.ndarray) -> np.ndarray:
        if "latent" not in tap:
            return planted(tap, width, index)
        rng = np.random.default_rng(int(index["doc"][0]))
        ids = rng.integers(0, 1 << 11, (len(index), 8)) * 8 + np.arange(8)  # differ within a row
        return ids if "ids" in tap else -np.sort(-rng.exponential(3, (len(index), 8)))

    return build(
        path, units, previews, taps=taps, rows=planted_rows, dtype="bfloat16", seq_len=512,
        encode={"mlp_out.0": "topk 16384"},
    )  # fmt: skip


# -- the server ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def milliseconds(self) -> float:
        """The seconds that the server itself took."""
        return float(self.headers["Server-Timing"].partition("dur=")[2])


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str  # as it was printed
    process: "subprocess.Popen[str]"

    @property
    def base(self) -> str:
        return self.url.partition("/?")[0].rstrip("/")

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        data: bytes | None = None,
        tls: ssl.SSLContext | None = None,
        **headers: str,
    ) -> Answer:
        """Ask for a path; `headers` have _ for -, `tls` says which certificates to trust."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.base + path, data, named, method=method)
        opener = urllib.request.build_opener(_Still(), urllib.request.HTTPSHandler(context=tls))
        try:
            with opener.open(request, timeout=60) as found:
                return Answer(found.status, dict(found.headers), found.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, dict(error.headers), error.read())

    def api(self, name: str, **asked: object) -> Any:
        answer = self.ask(f"/api/{name}?{urllib.parse.urlencode(asked)}")
        assert answer.status == 200, answer.body
        return answer.json

    def wait(self, name: str, until: Callable[[Any], bool], **asked: object) -> Any:
        """Ask until the answer satisfies a condition; return it."""
        limit = time.monotonic() + 120
        while not until(found := self.api(name, **asked)):
            assert time.monotonic() < limit, found
            time.sleep(0.1)
        return found

    def hand_in(self, data: bytes, name: str = "mine.npy", **headers: str) -> Answer:
        sent: dict[str, Any] = {"Content_Type": "application/octet-stream", **headers}
        return self.ask(f"/api/directions?name={name}", method="POST", data=data, **sent)


class _Still(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any
    ) -> None:
        return None


_SERVE = """
import faulthandler
faulthandler.enable()
from spile.cli import main
main()
"""


@contextmanager
def served(out: Path | str, *arguments: str) -> Iterator[Served]:
    """`spile serve` on a port of its own; it must end by itself when asked to."""
    command = [sys.executable, "-c", _SERVE, "serve", str(out), "--port", "0", "--json"]
    with tempfile.TemporaryFile("w+") as errors:
        process = zygote.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True,
            env=tiny.environment(),
        )  # fmt: skip
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            errors.seek(0)
            assert line, errors.read()
            yield Served(json.loads(line)["url"], process)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # says where its threads are
                process.wait()
            errors.seek(0)
            said = errors.read()
            assert process.returncode == 0, said
            assert "Traceback" not in said, said
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def vector(width: int = 12) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(width) - 3.5)
    return stream.getvalue()


def read_all(server: Served) -> None:
    """Wait until the page has read all rows."""
    server.wait("dataset", lambda told: told["read"]["rows"] == told["read"]["all"])
