"""The unit table of a dataset: its recipe, taps and units, read and created."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
import xxhash

from spile.core.config import canonical_json
from spile.core.errors import CorruptError
from spile.core.identity import contents_digest
from spile.core.index import index_dtype
from spile.core.recipe import ResolvedRecipe
from spile.dataset import format as fmt
from spile.dataset.codec.columns import ColumnFile, column_file, named_by_content
from spile.dataset.format import KeyLayout, TapInfo
from spile.dataset.records.generations import Generation, read_generations
from spile.dataset.records.unit_table import UnitColumns, read_units
from spile.objects import Objects, exists

_SMALL_SHARD, _FEW_SHARDS = 64 << 20, 100_000


@dataclass(frozen=True)
class Table:
    """The unit table. `units` and `files` are JSON; corpus/ defines their meaning.

    Both are those of all generations; `recipe` and `fingerprint` are what the dataset began with.
    """

    recipe: ResolvedRecipe
    fingerprint: str
    taps: Mapping[str, TapInfo]
    files: tuple[Mapping[str, Any], ...]
    units: UnitColumns
    kept: float  # the share of tokens that become rows, estimated from a sample
    # For a shuffled dataset (`maintain/shuffle.py`), whose units no longer hold the rows of their
    # own documents: the seed, and the sum of all index entries (`maintain/scatter.py`).
    shuffled: Mapping[str, Any] | None = None
    tokenizer: Mapping[str, ColumnFile] = field(default_factory=dict[str, ColumnFile])
    # For a dataset made of units of others (`maintain/assemble.py`): each of those, and its units.
    made_of: tuple[Mapping[str, Any], ...] = ()
    generations: tuple[Generation, ...] = ()
    more_sources: tuple[str, ...] = ()  # of corpus files, beside the recipe's

    @cached_property
    def layout(self) -> KeyLayout:
        return KeyLayout(tuple(each.before for each in self.generations))

    @property
    def sources(self) -> tuple[str, ...]:
        """Where the files of the corpus were found."""
        first, more = self.recipe.corpus_source, [*self.more_sources]
        for each in self.generations:
            first = each.sources[0]
            more += each.sources[1:]
        return (first, *more)

    @property
    def whole_recipe(self) -> ResolvedRecipe:
        """The recipe with the files and the limits of all generations."""
        if not self.generations:
            return self.recipe
        newest = self.generations[-1]
        return replace(
            self.recipe,
            corpus_source=self.sources[0],
            corpus=tuple(file["identity"] for file in self.files),
            max_docs=newest.max_docs,
            max_tokens=newest.max_tokens,
        )

    def at(self, generation: int) -> "Table":
        """Return the table as it was at a generation; 0: before the first."""
        if generation == len(self.generations):
            return self
        earlier = replace(
            self,
            files=self.files[: self._files_at[generation]],
            units=self.units.part(0, self.generations[generation].before),
            generations=self.generations[:generation],
        )
        # (At less cost than from the beginning.)
        vars(earlier)["layout"] = KeyLayout(self.layout.grown[:generation])
        vars(earlier)["_identities"] = self._identities
        return earlier

    @cached_property
    def _files_at(self) -> list[int]:
        """How many files there were at each generation."""
        own = len(self.files) - sum(len(each.files) for each in self.generations)
        counts = (len(each.files) for each in self.generations)
        return [*itertools.accumulate(counts, initial=own)]

    def every_generation(self) -> "Sequence[Table]":
        """Return the table as it was at each generation, the first of them before any.

        Each is made when it is asked for: all of a thousand are large.
        """
        return _EveryGeneration(self)

    def grown(self, *generations: "tuple[Generation, UnitColumns]", parallel: int = 1) -> "Table":
        """Return the table with the units and files of generations after its own.

        Args:
            parallel: how many files with units are read at a time, when units are needed.
        """
        if not generations:
            return self
        added = [generation for generation, _ in generations]
        parts = [self.units, *(units for _, units in generations)]
        return replace(
            self,
            files=(*self.files, *(file for each in added for file in each.files)),
            units=UnitColumns.joined(parts, parallel),
            generations=(*self.generations, *added),
        )

    def flattened(self) -> "Table":
        """Return the same units as one table, for a dataset that is made from this one."""
        if not self.generations:
            return self
        recipe = self.whole_recipe
        return replace(
            self,
            recipe=recipe,
            fingerprint=recipe.fingerprint(),
            generations=(),
            more_sources=self.sources[1:],
        )

    def to_json(self, units: ColumnFile) -> dict[str, Any]:
        """Return the record's body; `units`: the file that holds the units."""
        body: dict[str, Any] = {
            "recipe": self.recipe.to_json(),
            "fingerprint": self.fingerprint,
            "taps": {name: info.to_json() for name, info in self.taps.items()},
            "files": list(self.files),
            "units": {**units.to_json(), "count": len(self.units)},
            "kept": self.kept,
            "tokenizer": {name: file.to_json() for name, file in self.tokenizer.items()},
        }
        if self.more_sources:
            body["sources"] = list(self.sources)
        if self.shuffled:
            body["shuffled"] = dict(self.shuffled)
        if self.made_of:
            body["made_of"] = [dict(source) for source in self.made_of]
        return body

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: every tap and the index together."""
        return sum(info.row_bytes for info in self.taps.values()) + self.index_dtype.itemsize

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """The columns of the index."""
        return index_dtype(pooled=self.recipe.pool is not None)

    def source_of(self, unit: int) -> dict[str, Any]:
        """Return what a unit is made from, as JSON: the recipe and its row, files by identity."""
        row = self.units[unit]  # (vars, not asdict: a unit may have thousands of spans)
        spans = [{**vars(s), "file": self.files[s.file]["identity"]} for s in row.spans]
        drawn = {"shuffled": self.shuffled["drawn"]} if self.shuffled else {}
        # Not its place, which a copy may change, nor the estimate of its tokens.
        told = {name: value for name, value in vars(row).items() if name not in ("id", "tokens")}
        return {"recipe": self.fingerprint, **told, "spans": spans, **drawn}

    def shard_limit(self, objects: Objects, wanted: int) -> int:
        """Return the largest size of a shard in a store.

        A bucket's client holds a shard until it is put whole. So shards are small there, and larger
        only where a dataset would otherwise have more than a hundred thousand of them.
        """
        if objects.most_streamed is None:
            return wanted
        expected = int(self.units.tokens.sum() * self.kept) * self.row_bytes
        return min(wanted, objects.most_streamed, max(_SMALL_SHARD, expected // _FEW_SHARDS))

    @property
    def order(self) -> str:
        """The identity of the units and their rows' order, which manifests and readers compare."""
        files, more = self._identities
        units = self.units if self.units.key.startswith(fmt.UNIT_COLUMNS) else self.units.stored()
        told = [canonical_json(self.fingerprint), files.first(len(self.files))]
        told += [canonical_json(units.key), more.first(len(self.generations))]
        told += [canonical_json(self.shuffled["drawn"])] if self.shuffled else []
        return xxhash.xxh3_128_hexdigest(b"[%b]" % b",".join(told))

    @cached_property
    def _identities(self) -> "tuple[_JsonList, _JsonList]":
        """The identities of all files, and of the units of all generations."""
        more = [each.columns and each.columns.digest for each in self.generations]
        return _JsonList([file["identity"] for file in self.files]), _JsonList(more)


class _JsonList:
    """A list in canonical JSON, of which each beginning is to be encoded."""

    def __init__(self, values: Sequence[Any]) -> None:
        encoded = [canonical_json(value) for value in values]
        self._ends = [0, *itertools.accumulate(len(each) + 1 for each in encoded)]
        self._data = b",".join((*encoded, b""))

    def first(self, count: int) -> bytes:
        """Return the first values as a list."""
        return b"[%b]" % self._data[: max(0, self._ends[count] - 1)]


class _EveryGeneration(Sequence[Table]):
    """A table as it was at each of its generations."""

    def __init__(self, newest: Table) -> None:
        self._newest = newest

    def __len__(self) -> int:
        return len(self._newest.generations) + 1

    @overload
    def __getitem__(self, at: int) -> Table: ...
    @overload
    def __getitem__(self, at: slice) -> list[Table]: ...
    def __getitem__(self, at: int | slice) -> Table | list[Table]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        return self._newest.at(range(len(self))[at])


def read_table(objects: Objects) -> Table | None:
    """Return the unit table with all its generations, finished or not."""
    table = _read_first(objects)
    if table is None:
        return None
    found = read_generations(objects, table.fingerprint, len(table.units))
    return table.grown(*found, parallel=objects.parallel)


def _read_first(objects: Objects) -> Table | None:
    """Return the unit table without its generations."""
    body = fmt.read_record(objects, fmt.UNITS, "units")
    if body is None:
        return None
    try:
        table = Table(
            recipe=ResolvedRecipe.from_json(body["recipe"]),
            fingerprint=body["fingerprint"],
            taps={n: TapInfo.from_json(info) for n, info in body["taps"].items()},
            files=tuple(body["files"]),
            units=read_units(objects, body["units"], fmt.UNIT_COLUMNS),
            kept=float(body["kept"]),
            shuffled=body.get("shuffled"),
            tokenizer=_tokenizer_of(body.get("tokenizer", {})),
            made_of=tuple(body.get("made_of", ())),
            more_sources=tuple(body.get("sources", ())[1:]),
        )
        _audit(table)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CorruptError(fmt.UNITS, f"is not a unit table ({fmt.shown(error)})") from error
    return table


def create_table(
    objects: Objects, table: Table, tokenizer: Mapping[str, bytes] | None = None
) -> None:
    """Store a table, unless one is there.

    The files that it names are created before it. Their names follow from their content, so the
    next try uses those of an interrupted one, or `gc` removes them.

    Args:
        tokenizer: the tokenizer's files by name; by default, those that the table names, which must
            exist.
    """
    if exists(objects, fmt.UNITS):
        return
    if tokenizer:
        named = {name: _tokenizer_file(name, data) for name, data in tokenizer.items()}
        for name, data in tokenizer.items():
            objects.create(named[name].key, data)
        table = replace(table, tokenizer=named)
    file, data = named_by_content(fmt.UNIT_COLUMNS, table.units.columns)
    objects.create(file.key, data)
    objects.create(fmt.UNITS, fmt.encode_record("units", table.to_json(file)))


def table_records(table: Table) -> dict[str, str]:
    """Return the keys of the records that a table and its generations have, and their kinds.

    A manifest need not exist.
    """
    numbers = range(len(table.generations) + 1)
    generations = {fmt.generation_key(number): "generation" for number in numbers[1:]}
    manifests = {fmt.manifest_key(number): "manifest" for number in numbers}
    return {fmt.UNITS: "units", **generations, **manifests}


def _audit(table: Table) -> None:
    if not all(isinstance(part, dict) for part in table.files):
        raise ValueError("a file is not an object")
    if not all(fmt.is_name(part["identity"]) for part in table.files):
        raise ValueError("a file has no identity")
    if not all(
        map(fmt.is_name, (table.fingerprint, *table.taps, *table.tokenizer, *table.sources))
    ):
        raise ValueError("a name is not a text")
    for source in table.made_of:
        runs = source["units"]
        numbers = [number for first, last in runs for number in (first, last)]
        if not all(map(fmt.is_count, (*numbers, source["first_doc"]))) or not all(
            map(fmt.is_name, (source["url"], source["fingerprint"]))
        ):
            raise ValueError("what it was made of is invalid")
    if table.shuffled is not None:
        told: dict[str, Any] = {**table.shuffled}
        if not fmt.is_count(told["seed"]) or not all(
            map(fmt.is_name, (told["entries"], told["drawn"]))
        ):
            raise ValueError("the order of its rows is invalid")


# -- the tokenizer -------------------------------------------------------------------------------


def read_tokenizer(objects: Objects, table: Table) -> dict[str, bytes]:
    """Return the tokenizer's files by name; none if the dataset holds none.

    Raises:
        CorruptError: if a file is missing or damaged, or they are not the recipe's.
    """
    files = {name: tokenizer_data(objects, name, file) for name, file in table.tokenizer.items()}
    wanted = table.recipe.model.get("tokenizer")
    known = [files[name] for name in fmt.TOKENIZER_FILES if name in files]
    if files and wanted is not None and contents_digest(known) != wanted:
        raise CorruptError(fmt.UNITS, "names another tokenizer than that of its recipe")
    return files


def tokenizer_data(objects: Objects, name: str, file: ColumnFile) -> bytes:
    """Return one of the tokenizer's files; raise CorruptError if it is missing or damaged."""
    advice = f"`spile verify --repair` restores it from the model's {name}"
    try:
        data = objects.get(file.key)
    except FileNotFoundError:
        raise CorruptError(file.key, f"is missing; {advice}") from None
    if column_file(file.key, data) != file:
        raise CorruptError(file.key, f"checksum does not match (damaged); {advice}")
    return data


def _tokenizer_file(name: str, data: bytes) -> ColumnFile:
    digest = xxhash.xxh3_128_hexdigest(data)
    return ColumnFile(fmt.tokenizer_key(digest, name), len(data), digest)


def _tokenizer_of(told: Mapping[str, Any]) -> dict[str, ColumnFile]:
    files = {name: ColumnFile.from_json(file, fmt.TOKENIZER) for name, file in told.items()}
    for name, file in files.items():
        if file.key != fmt.tokenizer_key(file.digest, name):
            raise ValueError(f"not a file of a tokenizer: {file.key!r}")
    return files
