"""Datasets made straight through the writer and the ledger, from random rows: no model, no jax."""

import copy
import dataclasses
import math
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

from spile.core.errors import CorruptError
from spile.core.expressions import RowFilter
from spile.core.identity import contents_digest
from spile.core.index import END, FIRST, INDEX_DTYPE, LAST
from spile.core.recipe import ResolvedRecipe
from spile.core.tensors import DTYPES_BY_NAME
from spile.core.units import Unit
from spile.dataset import format as fmt
from spile.dataset.codec.columns import columns_in, encode_columns, named_by_content
from spile.dataset.codec.documents import encode_documents
from spile.dataset.codec.statistics import TapStats, merged
from spile.dataset.format import Done, Shard, TapInfo
from spile.dataset.records.generations import Generation
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import Pass, pass_name
from spile.dataset.records.segments import columns_of
from spile.dataset.records.table import Table
from spile.dataset.records.unit_table import UnitColumns
from spile.dataset.write.unit_writer import UnitWriter
from spile.objects import LocalObjects, Objects, open_objects
from support import tiny

Taps = Mapping[str, int | TapInfo]  # an integer: so many values of the recipe's dtype

TAPS = {"resid_post.0": 6, "mlp_out.1": 3}
# Every kind of row: heads, a single number, integers, and more than one name for the same tap.
SHAPED: Taps = {
    "resid_post.0": TapInfo((6,), "float32", ("blocks.0.hook_resid_post", "hidden_states[1]")),
    "q.1": TapInfo((2, 3), "bfloat16", ("blocks.1.attn.hook_q", "blocks.1.attn.q.hook_out")),
    "expert_ids.1": TapInfo((2,), "int16", ("blocks.1.mlp.hook_expert_indices",)),
    "logprob": TapInfo((), "float32"),
}
# The same names, stored in eight bits where that is possible: scaled by row, and by channel.
SCALED: Taps = {
    "resid_post.0": TapInfo((6,), "float8_e4m3", ("blocks.0.hook_resid_post", "hidden_states[1]")),
    "q.1": TapInfo((2, 3), "int8", ("blocks.1.attn.hook_q", "blocks.1.attn.q.hook_out")),
    "v.1": TapInfo((2, 3), "float8_e4m3"),
    "expert_ids.1": TapInfo((2,), "int16", ("blocks.1.mlp.hook_expert_indices",)),
    "logprob": TapInfo((), "float32"),
}
# Lengths of documents, unit by unit; 0 is a document that was skipped. The third unit is empty.
UNITS = ((5, 21, 3), (40, 0, 2), (0, 0), (9,), (1, 30))
DTYPE_NAMES = ("bfloat16", "float16", "float32")
SCALED_NAMES = ("float8_e4m3", "int8")


@dataclass(frozen=True)
class Stored:
    """A dataset, and what went into it: index and rows of all units, done or not."""

    path: Path
    table: Table
    read: list[np.ndarray]  # of each unit the index of every token, kept or not
    index: np.ndarray  # of the rows
    rows: dict[str, np.ndarray]  # as stored; of eight bits, decoded
    starts: list[int]  # the first row of each unit, and the number of rows
    coded: dict[str, "Coded"] = field(default_factory=dict)  # of those that are scaled
    compress: bool = False

    @property
    def objects(self) -> LocalObjects:
        return LocalObjects(self.path)

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.objects)

    @cached_property
    def given(self) -> dict[str, np.ndarray]:
        """The rows as readers give them by default: in float32, ids as integers."""
        return {
            tap: rows if rows.dtype.kind == "i" else rows.astype(np.float32)
            for tap, rows in self.rows.items()
        }

    def listed(self, *prefixes: str) -> list[str]:
        found = sorted(self.objects.list())
        return [key for key in found if key.startswith(prefixes)] if prefixes else found

    def done(self, unit: int) -> Done:
        record = self.ledger.read_done(unit)
        assert record is not None
        return record

    def attempt(self, unit: int, *, shard_bytes: int = 60, **described: Any) -> Done:
        """Write a unit's files, durably, without committing them."""
        rows = slice(self.starts[unit], self.starts[unit + 1])
        values = {tap: array[rows] for tap, array in self.rows.items()}
        done, _ = write_unit(
            self.objects, self.table, unit, self.read[unit], values, shard_bytes,
            coded={tap: coded.part(rows) for tap, coded in self.coded.items()},
            compress=self.compress, **described,
        )  # fmt: skip
        return done


@dataclass(frozen=True)
class Coded:
    """Rows in eight bits."""

    codes: np.ndarray
    scale: np.ndarray  # of each row, or of each channel
    by_row: bool
    clipped: np.ndarray  # values of each row that the scale cannot hold

    @property
    def decoded(self) -> np.ndarray:
        shape = (-1, *[1] * (self.codes.ndim - 1)) if self.by_row else self.scale.shape
        return self.codes.astype(np.float32) * self.scale.reshape(shape)

    def part(self, rows: slice) -> "Coded":
        scale = self.scale[rows] if self.by_row else self.scale
        return Coded(self.codes[rows], scale, self.by_row, self.clipped[rows])


def code(values: np.ndarray, info: TapInfo) -> Coded:
    """Store float32 rows in eight bits by a plain formula; int8 clips the largest values."""
    none = np.zeros(len(values), np.int64)
    if info.dtype == "float8_e4m3":
        largest = np.array([np.abs(row).max() for row in values], np.float32)
        scale = np.where(largest > 0, largest / np.float32(448), np.float32(1))
        codes = [
            (row / s).astype(ml_dtypes.float8_e4m3fn) for row, s in zip(values, scale, strict=True)
        ]
        stacked = np.array(codes, ml_dtypes.float8_e4m3fn).reshape(values.shape)
        return Coded(stacked, scale, True, none)
    assert info.dtype == "int8"
    largest = np.abs(values).max(axis=0) if len(values) else np.ones(info.shape)
    scale = (0.8 * largest / 127).astype(np.float32)
    steps = np.rint(values / scale)
    beyond = (np.abs(steps) > 127).reshape(len(values), -1).sum(axis=1)
    return Coded(np.clip(steps, -127, 127).astype(np.int8), scale, False, none + beyond)


def make_table(
    units: Sequence[Sequence[int]] = UNITS,
    taps: Taps = TAPS,
    dtype: str = "float32",
    first_docs: Sequence[int] | None = None,
    **changes: Any,
) -> Table:
    recipe = ResolvedRecipe(
        **{
            "model_source": "/models/tiny",
            "lora_source": None,
            "corpus_source": "/corpora/tiny.jsonl",
            "model": {"config": "c0ffee", "weights": "f00d"},
            "corpus": ("12-ab",),
            "taps": tuple(dict.fromkeys(re.sub("_latents|_latent_ids", "", tap) for tap in taps)),
            "where": None,
            "every": None,
            "seq_len": 8,
            "pack": "ffd",
            "long_docs": "split",
            "special_tokens": "tokenizer",
            "text_column": None,
            "text_documents": "line",
            "max_docs": None,
            "max_tokens": None,
            "unit_tokens": 64,
            "compute_dtype": "float32",
            "store_dtype": dtype,
            **changes,
        }  # fmt: skip
    )
    if first_docs is None:  # (otherwise, as in a drawn order)
        first_docs = np.cumsum([0, *(len(lengths) for lengths in units)]).tolist()
    return Table(
        recipe=recipe,
        fingerprint=recipe.fingerprint(),
        taps={
            tap: TapInfo((info,), dtype) if isinstance(info, int) else info
            for tap, info in taps.items()
        },
        files=tuple({"path": recipe.corpus_source, "identity": file} for file in recipe.corpus),
        units=UnitColumns.of(
            [
                Unit(number, first_docs[number], len(lengths), max(1, sum(lengths)), ())
                for number, lengths in enumerate(units)
            ]
        ),
        kept=1.0,
    )


def replace_table(objects: Objects, table: Table) -> None:
    """Put another table in the place of a dataset's."""
    file, data = named_by_content(fmt.UNIT_COLUMNS, table.units.columns)
    objects.create(file.key, data)
    objects.replace(fmt.UNITS, fmt.encode_record("units", table.to_json(file)))


def make_index(
    rng: np.random.Generator, first_doc: int, lengths: Sequence[int], seq_len: int
) -> np.ndarray:
    """Cut documents into contexts, and place those in a random order."""
    contexts = [
        (doc, at, min(seq_len, length - at))
        for doc, length in enumerate(lengths, first_doc)
        for at in range(0, length, seq_len)
    ]
    pieces = [np.zeros(0, INDEX_DTYPE)]
    for item in rng.permutation(len(contexts)):
        doc, at, count = contexts[item]
        piece = np.zeros(count, INDEX_DTYPE)
        piece["token_id"] = rng.integers(0, 1000, count)
        piece["doc"] = doc
        piece["offset"] = np.arange(at, at + count)
        piece["pos"] = np.arange(count)
        piece["flags"][0] |= FIRST
        piece["flags"][-1] |= LAST
        piece["flags"][-1] |= END if at + count == lengths[doc - first_doc] else 0
        pieces.append(piece)
    return np.concatenate(pieces)


def kept(table: Table, read: np.ndarray) -> np.ndarray:
    """Return the entries of an index that the recipe's filter keeps."""
    return read[RowFilter(table.recipe.where, table.recipe.every).mask(read)]


# A tokenizer's files, and the identity of the model that has it.
TOKENIZER = {"tokenizer.json": b'{"model": {}}', "tokenizer_config.json": b"{}"}
WITH_TOKENIZER: dict[str, Any] = {
    "tokenizer": TOKENIZER,
    "model": {"config": "c0ffee", "tokenizer": contents_digest(TOKENIZER.values())},
}

# An encoded tap: each row keeps 4 of 40 latents.
LATENTS: Taps = {
    "mlp_out_latents.1": TapInfo((4,), "float32", latents=40),
    "mlp_out_latent_ids.1": TapInfo((4,), "int16", latents=40),
    "resid_post.0": TapInfo((6,), "float32", ("blocks.0.hook_resid_post",)),
}
ENCODED: dict[str, Any] = {"encode": {"mlp_out.1": "topk 40 1-ab"}}


def random_rows(rng: np.random.Generator, count: int, info: TapInfo) -> np.ndarray:
    if info.latents and info.dtype == "int16":
        ids = [rng.permutation(info.latents)[: info.width] for _ in range(count)]
        return np.array(ids, np.int16).reshape(count, info.width)
    if info.latents:  # of some rows, fewer are active
        found = np.maximum(rng.integers(-7, 9, (count, info.width)), 0)
        return -np.sort(-found, axis=1).astype(DTYPES_BY_NAME[info.dtype])
    values = rng.standard_normal((count, *info.shape)) * 3 + 1
    return (values * 100 if info.dtype == "int16" else values).astype(DTYPES_BY_NAME[info.dtype])


def outliers(info: TapInfo) -> np.ndarray:
    """A factor from 1 to 100 for each channel, so that no two scales are equal."""
    return np.geomspace(1, 100, info.width, dtype=np.float32).reshape(info.shape)


def describe(rows: np.ndarray) -> TapStats:
    """Statistics of rows by plain formulas; each value of a row is a channel."""
    wide = rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(np.float64)
    if not len(wide):
        return TapStats.empty(wide.shape[1])
    mean = wide.mean(axis=0)
    return TapStats(
        count=len(wide),
        mean=mean,
        m2=((wide - mean) ** 2).sum(axis=0),
        norm_sum=float(np.sqrt((wide**2).sum(axis=1)).sum()),
        max_abs=float(np.abs(wide).max()),
        nonfinite=int(np.count_nonzero(~np.isfinite(wide))),
    )


def describe_documents(table: Table, unit: int, read: np.ndarray) -> dict[str, np.ndarray]:
    """The documents table of a unit, with made-up values of whatever columns are kept: texts, but
    in `mixed` of every other unit numbers."""
    entry = table.units[unit]
    docs = range(entry.first_doc, entry.first_doc + entry.num_docs)
    tokens = [int(np.count_nonzero(read["doc"] == doc)) for doc in docs]
    return encode_documents(
        docs=docs,
        tokens=tokens,
        skipped=[None if count else "no tokens" for count in tokens],
        previews=[f"text of {doc}"[: table.recipe.preview] for doc in docs],
        kept={
            name: [doc if name == "mixed" and not unit % 2 else f"{name}-{doc}" for doc in docs]
            for name in table.recipe.keep
        },
        index=kept(table, read),
    )


def write_unit(
    objects: Objects,
    table: Table,
    unit: int,
    read: np.ndarray,
    rows: Mapping[str, np.ndarray],
    shard_bytes: int,
    *,
    coded: Mapping[str, Coded] | None = None,
    compress: bool = False,
    **described: Any,
) -> tuple[Done, UnitWriter]:
    """One attempt, its rows arriving in pieces of seven. Statistics are of rows as read."""
    index = kept(table, read)
    writer = UnitWriter(objects, unit, index, table.taps, shard_bytes, compress=compress)
    for tap, values in rows.items():
        pieces = [slice(at, at + 7) for at in range(0, len(values), 7)]
        parts = (describe(values[piece]) for piece in pieces)
        writer.stats[tap] = merged(parts, table.taps[tap].width)
        scaled = (coded or {}).get(tap)
        if scaled is not None:
            writer.stats[tap].clipped = int(scaled.clipped.sum())
        for piece in pieces:
            if scaled is None:
                writer.write(tap, values[piece])
            else:
                part = scaled.part(piece)
                writer.write(tap, part.codes, part.scale if part.by_row else None)
    documents = len(np.unique(read["doc"]))
    missing = table.units[unit].num_docs - documents
    done = writer.finish(
        **{
            "table": describe_documents(table, unit, read),
            "fingerprint": table.fingerprint,
            "made_from": Ledger(objects).made_from(table, unit) or "",
            "tokens": len(read),
            "documents": documents,
            "contexts": int(np.count_nonzero(read["flags"] & FIRST)),
            "skipped": {"no tokens": missing} if missing else {},
            "text_digest": "0123",
            "made_by": {"spile": "test"},
            **described,
        }
    )
    return done, writer


def build(
    path: Path,
    units: Sequence[Sequence[int]] = UNITS,
    *,
    taps: Taps = TAPS,
    dtype: str = "float32",
    shard_bytes: int = 60,
    seed: int = 0,
    commit: Collection[int] | None = None,
    compress: bool = False,
    tokenizer: Mapping[str, bytes] | None = None,
    grown: Sequence[int] = (),
    scales_of: Stored | None = None,
    rows_of: "Callable[[np.random.Generator, int, TapInfo], np.ndarray] | None" = None,
    **changes: Any,
) -> Stored:
    """Make a dataset of random rows.

    `first_docs`: the first document of each unit, if the corpus was read in a drawn order. `commit`
    names the units to do, all if not given; `changes` go into the recipe; `tokenizer` are
    the tokenizer's files. The scales of int8 are stored in any case. `grown`: for each generation
    that adds to the table, how many units there are before it; each is finished before the next.
    `scales_of`: another dataset, whose scales of int8 this one has, as if they were its own.
    `rows_of` makes the rows of a tap, instead of `random_rows`.
    """
    rng = np.random.default_rng(seed)
    table = make_table(units, taps, dtype, **changes)
    seq_len = table.recipe.seq_len
    read = [
        make_index(rng, entry.first_doc, lengths, seq_len)
        for entry, lengths in zip(table.units, units, strict=True)
    ]
    indices = [kept(table, part) for part in read]
    index = np.concatenate(indices)
    table = dataclasses.replace(table, kept=len(index) / max(1, sum(map(len, read))))
    rows: dict[str, np.ndarray] = {}
    coded: dict[str, Coded] = {}
    for tap, info in table.taps.items():
        if info.dtype in SCALED_NAMES:
            wide = random_rows(rng, len(index), TapInfo(info.shape, "float32"))
            coded[tap] = code(wide * outliers(info), info)
            rows[tap] = coded[tap].decoded
        else:
            rows[tap] = (rows_of or random_rows)(rng, len(index), info)
    starts = np.cumsum([0, *(len(part) for part in indices)]).tolist()
    stored = Stored(path, table, read, index, rows, starts, coded, compress)
    ledger = stored.ledger
    every, ends = table.units, [*grown, len(units)]
    base = dataclasses.replace(table, units=every.part(0, ends[0]) if grown else every)
    named = ledger.create_table(base, tokenizer).tokenizer
    table = dataclasses.replace(base, tokenizer=named)
    stored = dataclasses.replace(stored, table=table)
    ledger.check_weights({"embed": "aa", "blocks": "bb"})
    measured = coded if scales_of is None else scales_of.coded
    by_channel = {tap: part.scale for tap, part in measured.items() if not part.by_row}
    if by_channel:
        ledger.create_scales(table, by_channel)
    wanted = [*range(len(units))] if commit is None else [*commit]
    for first, stop in zip([0, *grown], ends, strict=True):
        if first:
            table = ledger.create_generation(more_units(table, every.part(first, stop)))
            stored = dataclasses.replace(stored, table=table)
        for unit in (unit for unit in wanted if first <= unit < stop):
            assert ledger.commit(stored.attempt(unit, shard_bytes=shard_bytes))
        ledger.complete(table)
    return stored


def more_units(table: Table, units: UnitColumns) -> Table:
    """A table with a generation that adds units, and a file."""
    number = len(table.generations) + 1
    file = {"path": f"/corpora/more-{number}.jsonl", "identity": f"{number}-cd"}
    return table.grown((Generation(len(table.units), (file,), ("/corpora",)), units))


_folder = tempfile.TemporaryDirectory(prefix="spile-stored-", ignore_cleanup_errors=True)
_made: dict[str, Stored] = {}


def copied(path: Path, units: Sequence[Sequence[int]] = UNITS, **options: Any) -> Stored:
    """Like `build`, but made once in a process and then copied, so that a test may damage it."""
    asked = repr((units, sorted(options.items())))
    if asked not in _made:
        _made[asked] = build(Path(_folder.name) / str(len(_made)), units, **options)
    made = copy.deepcopy(_made[asked])
    shutil.copytree(made.path, path)
    return dataclasses.replace(made, path=path)


class CountedObjects(LocalObjects):
    """A disk that counts how often each done record is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        if fmt.parse_done_key(fmt.split_pass_key(key)[1]) is not None:
            self.reads[key] += 1
        return super().get(key)


def record_keys(made: Stored, *passes: Pass) -> list[str]:
    """The keys of all done records of a dataset and of its passes."""
    places = ("", *(each.prefix for each in passes))
    units = range(len(made.table.units))
    return [place + made.table.layout.done_key(unit) for place in places for unit in units]


class HeldRecords:
    """Counts how many of a dataset's done records are in memory, and the most at a time.

    (A record that is derived from one shares its `made_by`, and is counted with it.)
    """

    class _MadeBy(dict[str, Any]):
        """A dictionary that weak references can refer to."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        self._lock = threading.RLock()  # (a record may be released within a call)
        read = Ledger.read_done

        def read_done(ledger: Ledger, unit: int) -> Done | None:
            done = read(ledger, unit)
            if done is None or ledger.url != url:
                return done
            made_by = self._MadeBy(done.made_by)
            self._add(1)
            weakref.finalize(made_by, self._add, -1)
            return dataclasses.replace(done, made_by=made_by)

        monkeypatch.setattr(Ledger, "read_done", read_done)

    def _add(self, count: int) -> None:
        with self._lock:
            self.now += count
            self.most = max(self.most, self.now)


@contextmanager
def changed(stored: Stored, *keys: str) -> Iterator[dict[str, Path]]:
    """Objects that a test damages, and that are restored afterwards."""
    paths = {key: stored.path / key for key in keys}
    before = {key: path.read_bytes() for key, path in paths.items()}
    try:
        yield paths
    finally:
        for key, path in paths.items():
            path.write_bytes(before[key])


def flip(path: Path, position: int, mask: int = 1) -> None:
    """Change one byte in place; doing it again undoes it."""
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        value = file.read(1)[0] ^ mask
        file.seek(position)
        file.write(bytes([value]))


def reseal(stored: Stored, unit: int, **changes: Any) -> None:
    """Update record and manifest to a unit's present files, so that checksums find no fault."""
    objects, ledger, done = stored.objects, stored.ledger, stored.done(unit)

    def refreshed(file: Shard) -> Shard:
        data = objects.get(file.key)
        return dataclasses.replace(file, bytes=len(data), digest=xxhash.xxh3_128_hexdigest(data))

    parts = {
        "shards": tuple(refreshed(shard) for shard in done.shards),
        "index": refreshed(done.index),
        "statistics": refreshed(done.statistics),
        "documents_table": refreshed(done.documents_table),
    }
    forged = dataclasses.replace(done, **{**parts, **changes})
    objects.delete(fmt.CURRENT.done_key(unit))
    objects.delete(fmt.MANIFEST)
    objects.delete(fmt.CURRENT.segment_key(0))
    assert ledger.commit(forged)
    with suppress(CorruptError):  # statistics that are none: nothing follows from them
        assert ledger.complete(stored.table)


@contextmanager
def forged_units(stored: Stored, records: Sequence[Done]) -> Iterator[None]:
    """Replace segment and manifest by ones of these records; restore the originals afterwards."""
    key = fmt.CURRENT.segment_key(0)
    with changed(stored, key, fmt.MANIFEST):
        statistics = columns_in(key, stored.objects.get(key))
        (stored.path / key).write_bytes(encode_columns({**statistics, **columns_of(records)}))
        stored.objects.delete(fmt.MANIFEST)
        assert stored.ledger.complete(stored.table)
        yield


_WORKER = """
import sys
from pathlib import Path
from spile.objects import LocalObjects
from spile.dataset.records.heartbeat import Presence
presence = Presence(LocalObjects(Path(sys.argv[1])), 30)
presence.start()
presence.tell(state="running", tokens=12)
presence.hold(int(sys.argv[2]))
print(presence.name, flush=True)
sys.stdin.read()
"""


@contextmanager
def worker_process(path: Path, unit: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a process that holds a unit until it is killed; return its worker's name."""
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER, str(path), str(unit)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=tiny.environment(),
    ) as process:
        try:
            assert process.stdout
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def unit_files(out: Path) -> dict[tuple[int, str], bytes]:
    """Return the files of units by unit and name, since names of attempts are random."""
    objects = open_objects(str(out))
    found: dict[tuple[int, str], bytes] = {}
    for key in objects.list(fmt.ATTEMPTS):
        attempt = fmt.parse_attempt_key(key)
        assert attempt
        found[attempt[0], key.rpartition("/")[2]] = objects.get(key)
    return found


def add_pass(
    made: Stored,
    taps: Taps,
    *,
    dtype: str = "float32",
    commit: Collection[int] | None = None,
    seed: int = 1,
    number: int = 0,
    **changes: Any,
) -> tuple[Pass, dict[str, np.ndarray]]:
    """Add taps of random rows to a dataset; return the pass, and its rows as read.

    `commit` names the units to do, all if not given; `changes` go into the recipe of the pass.
    """
    rng = np.random.default_rng(seed)
    like = make_table(taps=taps, dtype=dtype)
    of_taps = {name: getattr(like.recipe, name) for name in ("taps", "store_dtype")}
    recipe = dataclasses.replace(made.table.recipe, **{"encode": {}, **of_taps, **changes})
    fingerprint = recipe.fingerprint()
    table = dataclasses.replace(
        made.table, recipe=recipe, fingerprint=fingerprint, taps=like.taps, tokenizer={}
    )
    added = Pass(made.ledger, pass_name(fingerprint, number), table)
    ledger = added.ledger
    ledger.create_table(table)
    ledger.check_weights({"embed": "aa", "blocks": "bb"})
    rows, coded = dict[str, np.ndarray](), dict[str, Coded]()
    for tap, info in table.taps.items():
        if info.dtype in SCALED_NAMES:
            wide = random_rows(rng, len(made.index), TapInfo(info.shape, "float32"))
            coded[tap] = code(wide * outliers(info), info)
            rows[tap] = coded[tap].decoded
        else:
            rows[tap] = random_rows(rng, len(made.index), info)
    by_channel = {tap: part.scale for tap, part in coded.items() if not part.by_row}
    if by_channel:
        ledger.create_scales(table, by_channel)
    for unit in range(len(table.units)) if commit is None else commit:
        done = write_added(made, added, unit, rows, coded)
        assert ledger.commit(done)
    ledger.complete(table)
    return added, rows


def complete_before_growth(added: Pass) -> None:
    """Create the manifest of a pass as if its dataset had not grown yet."""
    dataset, key = added.dataset.objects, fmt.generation_key(1)
    record = dataset.get(key)
    dataset.delete(key)
    assert added.ledger.complete(added.ledger.table())
    dataset.create(key, record)


def write_added(
    made: Stored,
    added: Pass,
    unit: int,
    rows: Mapping[str, np.ndarray],
    coded: Mapping[str, Coded] | None = None,
) -> Done:
    """Write the files of a unit of a pass; return its record, which is not committed."""
    part = slice(made.starts[unit], made.starts[unit + 1])
    done, _ = write_unit(
        added.objects, added.ledger.table(), unit, made.read[unit],
        {tap: values[part] for tap, values in rows.items()}, 60,
        coded={tap: each.part(part) for tap, each in (coded or {}).items()},
    )  # fmt: skip
    return done


class Stopped(BaseException):
    """Stands for a kill: no code catches it."""


class Stopping(LocalObjects):
    """A store that ends the process at its n-th change."""

    def __init__(self, root: Path, changes: int) -> None:
        super().__init__(root)
        self.left = changes

    def _change(self, do: Callable[..., Any], *arguments: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise Stopped
        return do(*arguments)

    def create(self, key: str, data: bytes) -> bool:
        return self._change(super().create, key, data)

    def move(self, key: str, to: str) -> None:
        return self._change(super().move, key, to)
