"""Corpora of a few short documents, and what a dataset must hold of them.

The model of the simulated programs is a hash: a row is a function of the weights, the splices, the
compute dtype, the tap, and the tokens of its context up to it. `HashStep` computes it from packed
batches, as a step of the pipeline does; `rows_of` from the documents. So a row that belongs to
another document, another model or another recipe is noticed. Every value is exact in every dtype.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import xxhash
from tokenizers import Tokenizer

from spile.core.identity import sampled_digests
from spile.core.index import INDEX_DTYPE
from spile.corpus.pack import Batch
from spile.run.assembly import Assembly
from support import stored, tiny

SEQ_LEN, WIDTH = 16, 8
MODELS = ("first", "second")  # by their weights
SPLICE, WHERE = "zero resid_post.0", "not bos"  # as a recipe has them
BOS, FIRST, LAST, END = 1, 8, 16, 32  # flags

# Lengths of the documents of each file. Two files of one shape have as many rows, and only what
# those hold tells them apart.
_SHAPES = {
    "a": (7, 20, 3), "b": (7, 20, 3), "c": (12, 5), "d": (12, 5), "e": (18, 4), "f": (9, 9, 2),
}  # fmt: skip
FILES = tuple(_SHAPES)
# What commands name as a corpus: a file, a directory, a glob. Some of them overlap.
SOURCES = {
    **{name: (name,) for name in FILES},
    "ab": ("a", "b"), "bc": ("b", "c"), "cd": ("c", "d"), "all/[ace]": ("a", "c", "e"),
}  # fmt: skip
GROWS, GROWS_FROM = "grows", ("e",)  # a directory that gains files while a program runs


class Doc(NamedTuple):
    """A document of a dataset."""

    ordinal: int
    file: str
    place: int


class Rules(NamedTuple):
    """What makes the rows of a dataset what they are, beside its documents and its taps."""

    weights: str = MODELS[0]
    splice: str | None = None
    where: str | None = None


class TapRule(NamedTuple):
    """A tap, and how its rows are computed and stored."""

    name: str
    store: str = "float32"
    compute: str = "float32"


# -- files ---------------------------------------------------------------------------------------


@cache
def home() -> Path:
    """The folder of the models and corpora; nothing in it changes."""
    folder = Path(tempfile.mkdtemp(prefix="spile-programs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for seed, name in enumerate(MODELS):
        tiny.write_model(
            folder / name, seed=seed, hidden_size=WIDTH, intermediate_size=8,
            num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2,
        )  # fmt: skip
    (folder / "all").mkdir()
    for name in FILES:
        lines = (json.dumps({"text": text}) + "\n" for text in _texts(name))
        (folder / "all" / f"{name}.jsonl").write_text("".join(lines))
    for source, names in SOURCES.items():
        if "/" not in source:
            (folder / source).mkdir()
            for name in names:
                (folder / source / f"{name}.jsonl").hardlink_to(folder / "all" / f"{name}.jsonl")
    return folder


def corpus(source: str, grows: Path) -> str:
    """What a command is given as a corpus; `grows`: the directory that gains files."""
    if source == GROWS:
        return str(grows)
    return str(home() / (f"{source}.jsonl" if "/" in source else source))


def source_of(path: str, grows: Path) -> str:
    """Which source a stored path names."""
    known = {corpus(source, grows): source for source in (*SOURCES, GROWS)}
    return known[path]


def grow(grows: Path, names: Sequence[str]) -> None:
    """Let files appear in the directory that gains some."""
    grows.mkdir(exist_ok=True)
    for name in names:
        path = grows / f"{name}.jsonl"
        if not path.exists():
            path.hardlink_to(home() / "all" / f"{name}.jsonl")


@cache
def file_of() -> dict[str, str]:
    """The files by the identities that a dataset stores."""
    paths = [home() / "all" / f"{name}.jsonl" for name in FILES]
    return dict(zip(sampled_digests(paths), FILES, strict=True))


@cache
def weights_of() -> dict[str, str]:
    """The models by the identities of their weights that a recipe has."""
    paths = [home() / name / "model.safetensors" for name in MODELS]
    return dict(zip(sampled_digests(paths), MODELS, strict=True))


def documents(names: Sequence[str], first: int = 0, most: int | None = None) -> tuple[Doc, ...]:
    """The documents of some files, numbered on from `first`."""
    found = [(name, place) for name in names for place in range(len(_SHAPES[name]))]
    return tuple(Doc(first + at, *each) for at, each in enumerate(found[:most]))


def _texts(name: str) -> list[str]:
    random = np.random.default_rng(FILES.index(name))
    return ["".join(random.choice(list("etaoinsh "), size)) for size in _SHAPES[name]]


# -- what a dataset must hold ----------------------------------------------------------------------


@cache
def _tokens(name: str, place: int) -> np.ndarray:
    tokenizer = Tokenizer.from_file(str(home() / MODELS[0] / "tokenizer.json"))
    return np.array(tokenizer.encode(_texts(name)[place]).ids, np.int32)


@cache
def _entries(name: str, place: int, where: str | None) -> np.ndarray:
    """The index entries of a document; its ordinal is 0."""
    tokens = _tokens(name, place)
    index = np.zeros(len(tokens), INDEX_DTYPE)
    index["token_id"], index["offset"] = tokens, np.arange(len(tokens))
    index["pos"] = index["offset"] % SEQ_LEN
    index["flags"] = np.where(index["pos"] == 0, FIRST, 0)
    index["flags"][0] |= BOS
    index["flags"][SEQ_LEN - 1 :: SEQ_LEN] |= LAST
    index["flags"][-1] |= END
    index["flags"][-1] |= LAST
    return index if where is None else index[1:]


@cache
def _values(name: str, place: int, rules: Rules, tap: str, compute: str) -> np.ndarray:
    tokens = _tokens(name, place)
    contexts = [tokens[at : at + SEQ_LEN] for at in range(0, len(tokens), SEQ_LEN)]
    sums = [_sums(part[None], np.arange(len(part))[None])[0] for part in contexts]
    rows = _hashed(np.concatenate(sums), rules.weights, rules.splice, tap, compute)
    return rows if rules.where is None else rows[1:]


@lru_cache(1 << 12)
def index_of(docs: tuple[Doc, ...], where: str | None) -> np.ndarray:
    """The index of documents: by ordinal, and each in reading order."""
    found = [np.zeros(0, INDEX_DTYPE)]
    for doc in sorted(docs):
        entries = _entries(doc.file, doc.place, where).copy()
        entries["doc"] = doc.ordinal
        found.append(entries)
    return np.concatenate(found)


@lru_cache(1 << 12)
def rows_of(docs: tuple[Doc, ...], rules: Rules, tap: TapRule) -> np.ndarray:
    """The rows of a tap, in the same order; as float32, which holds each of them exactly."""
    found = [_values(doc.file, doc.place, rules, tap.name, tap.compute) for doc in sorted(docs)]
    return np.concatenate([np.zeros((0, WIDTH), np.float32), *found])


# -- the model -----------------------------------------------------------------------------------

_POWERS = np.cumprod(np.full(SEQ_LEN, 0x9E3779B1, np.uint64))
_SHIFTS = np.arange(WIDTH, dtype=np.uint64) * np.uint64(7)


def _sums(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """For each token of [rows, columns], a number that all tokens of its context so far make."""
    each = (tokens.astype(np.uint64) + np.uint64(1)) * _POWERS[positions]
    summed = np.cumsum(each, axis=1)
    before = np.concatenate([np.zeros((len(each), 1), np.uint64), summed], axis=1)
    begins = np.arange(each.shape[1])[None] - positions
    return summed - np.take_along_axis(before, begins, axis=1)


def _hashed(sums: np.ndarray, weights: str, splice: str | None, tap: str, compute: str) -> Any:
    salt = xxhash.xxh3_64_intdigest(f"{weights} {splice} {tap} {compute}".encode())
    mixed = (sums ^ np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    values = (mixed[:, None] >> _SHIFTS) & np.uint64(127)
    return values.astype(np.float32) / 16 - 4


class HashStep:
    """The step of a run, in the place of a model's."""

    hashed = staticmethod(_hashed)

    def __init__(self, parts: Assembly) -> None:
        job = parts.job
        self._weights = job.checkpoint.directory.name
        self._splice = SPLICE if job.recipe.splice else None
        self._compute, self._taps = job.recipe.compute_dtype, job.table.taps
        digest = xxhash.xxh3_128_hexdigest(self._weights.encode())
        parts.context.ledger.check_weights({"model.layers": digest})

    def loaded(self, seconds: float) -> bool:
        return True

    def compile(self, batch: Batch) -> tuple[()]:
        return ()

    def check(self) -> None:
        """Its weights are a number, and the ledger has their hashes from the start."""

    def __call__(self, batch: Batch) -> Any:
        sums = _sums(batch.tokens, batch.positions)
        width = sums.shape[1]
        columns = np.broadcast_to(np.arange(width), sums.shape)
        columns = columns if batch.columns is None else batch.columns
        kept = np.arange(columns.shape[1])[None] < batch.counts[:, None]
        sums = np.take_along_axis(sums, columns, axis=1)[kept]
        rows = {
            tap: self.hashed(sums, self._weights, self._splice, tap, self._compute).astype(
                info.storage
            )
            for tap, info in self._taps.items()
        }
        return SimpleNamespace(
            tokens=int(batch.lengths.sum()),
            num_rows=len(sums),
            stats_of=lambda tap: [stored.describe(rows[tap])] if len(sums) else [],
            pieces_of=lambda tap: [(rows[tap], None)],
            copied_of=lambda tap: 0,
            started=0.0,
            finished=SimpleNamespace(block_until_ready=lambda: None),
        )
