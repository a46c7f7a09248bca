"""The records of features: what `spile features` has counted of a tap's latents, or of directions.

A set of features is a folder of the dataset, `features/NAME/`. Consecutive units of the dataset
have a part there, with a small create-only record. A summary merges the parts of all units up to a
number, in their order, so its bytes do not depend on who counted which unit. When a dataset grows,
the next summary is the last one and the parts of the new units.

Files are named by their content, so that two processes which count the same unit write one file.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from spile.core.config import canonical_json
from spile.core.errors import ConfigError, CorruptError
from spile.core.recipe import latent_names
from spile.dataset import format as fmt
from spile.dataset.codec.columns import ColumnFile, Columns, named_by_content
from spile.dataset.format import Done
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import Pass, live_passes, pass_names
from spile.objects import Objects, exists
from spile.objects.rooted import RootedObjects

_NUMBERED = re.compile(r"(\d{8})\.json")
_MOST_LATENTS = 1 << 28


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """What a set of features holds of each latent.

    Attributes:
        examples: the rows in which it is largest.
        drawn: a random sample of the rows in which it is active; quantiles follow from it.
        rows: rows of the dataset that are drawn to find neighbours.
        neighbours: the latents that are active with it most often.
        logits: the tokens that it raises most, and those that it lowers most.
    """

    examples: int = 10
    drawn: int = 120
    rows: int = 32_768
    neighbours: int = 10
    logits: int = 10


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """What a set of features is of.

    Attributes:
        tap: the encoded tap by its name in the model, or the dense tap that directions are of.
        of: the folder of the pass that holds the tap; empty: the dataset itself.
        latents: how many there are; or the number of directions.
        names: those of the directions; none of latents.
        bounds: where ranges of latents begin and end: each has a file of its own.
        stride: the units of a part.
        vectors: the directions, [directions, width] in float32.
    """

    tap: str
    of: str
    latents: int
    names: tuple[str, ...]
    bounds: tuple[int, ...]
    stride: int
    options: FeatureOptions
    vectors: ColumnFile | None = None

    @property
    def stored(self) -> tuple[str, ...]:
        """The taps of the dataset that it is made from."""
        return (self.tap,) if self.names else latent_names(self.tap)

    def parts(self, ends: Iterable[int]) -> list[range]:
        """Return the units of each part, of a dataset whose generations end after these units."""
        found: list[range] = []
        first = 0
        for end in ends:
            found += [range(a, min(a + self.stride, end)) for a in range(first, end, self.stride)]
            first = end
        return found

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "names": [*self.names], "bounds": [*self.bounds]}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "FeatureSpec":
        options = FeatureOptions(**body["options"])
        vectors = body["vectors"]
        found = cls(
            tap=body["tap"],
            of=body["of"],
            latents=body["latents"],
            names=tuple(body["names"]),
            bounds=tuple(body["bounds"]),
            stride=body["stride"],
            options=options,
            vectors=vectors and ColumnFile.from_json(vectors, fmt.FEATURE_COLUMNS),
        )
        counts = (found.latents, found.stride, *vars(options).values(), *found.bounds)
        bounds = [*found.bounds]
        whole = len(bounds) > 1 and bounds == sorted({0, *bounds}) and found.stride > 0
        whole = whole and bounds[-1] == found.latents
        sound = all(map(fmt.is_count, counts)) and found.latents <= _MOST_LATENTS and whole
        sound = sound and all(map(fmt.is_name, (found.tap, found.of, *found.names)))
        if not sound or (found.names and len(found.names) != found.latents):
            raise ValueError("a count or a name is invalid")
        return found


@dataclass(frozen=True)
class FeatureFiles:
    """A part or a summary: what was counted of some units.

    Attributes:
        first: the first unit; 0 for a summary.
        units: how many units, from the first on.
        made_from: which rows, as a digest.
        files: one for each range of latents.
        sampled: the drawn rows.
        neighbours: of a summary, those of each latent.
    """

    first: int
    units: int
    rows: int
    made_from: str
    files: tuple[ColumnFile, ...]
    sampled: ColumnFile
    neighbours: ColumnFile | None = None

    def named(self) -> Iterator[ColumnFile]:
        yield from (*self.files, self.sampled)
        if self.neighbours:
            yield self.neighbours

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any], folder: str) -> "FeatureFiles":
        neighbours = body["neighbours"]
        found = cls(
            body["first"],
            body["units"],
            body["rows"],
            body["made_from"],
            tuple(ColumnFile.from_json(each, folder) for each in body["files"]),
            ColumnFile.from_json(body["sampled"], folder),
            neighbours and ColumnFile.from_json(neighbours, folder),
        )
        if not all(map(fmt.is_count, (found.first, found.units, found.rows))):
            raise ValueError("a count is invalid")
        if not fmt.is_name(found.made_from):
            raise ValueError("a name is invalid")
        return found


class FeatureSet:
    """One folder of features: its records."""

    def __init__(self, dataset: Objects, name: str) -> None:
        self.name, self.prefix = name, fmt.feature_prefix(name)
        self.objects: Objects = RootedObjects(dataset, self.prefix)

    @property
    def is_dropped(self) -> bool:
        return exists(self.objects, fmt.DROPPED)

    def drop(self) -> None:
        """Record that nobody reads it from now on; `gc` removes it."""
        self.objects.create(fmt.DROPPED, fmt.encode_record("dropped", {}))

    @property
    def bytes(self) -> int:
        """The size of everything in its folder, as it is listed."""
        return sum(entry.size for entry in self.objects.entries())

    def spec(self) -> FeatureSpec:
        """Return what it is of.

        Raises:
            CorruptError: if its record is missing or damaged.
        """
        body = self._read(fmt.FEATURE_SET, "features")
        if body is None:
            raise CorruptError(self.prefix + fmt.FEATURE_SET, "is missing")
        return self._parsed(fmt.FEATURE_SET, lambda: FeatureSpec.from_json(body))

    def create(self, spec: FeatureSpec) -> FeatureSpec:
        """Store what it is of, unless another process came first; return what is stored."""
        self.objects.create(fmt.FEATURE_SET, fmt.encode_record("features", spec.to_json()))
        return self.spec()

    def store(self, folder: str, columns: Columns) -> ColumnFile:
        """Store columns under a name that follows from them."""
        file, data = named_by_content(folder, columns)
        self.objects.create(file.key, data)
        return file

    # -- parts, summaries and logits ---------------------------------------------------------------

    def part(self, first: int) -> FeatureFiles | None:
        """Return the part that begins with a unit, or None."""
        return self._files(fmt.numbered(fmt.DONE, first), "features-part", fmt.PARTS)

    def parts(self) -> set[int]:
        """Return the first unit of every part, from a listing."""
        return {*self._numbers(fmt.DONE)}

    def create_part(self, part: FeatureFiles) -> None:
        """Store a part, unless it is there."""
        data = fmt.encode_record("features-part", part.to_json())
        self.objects.create(fmt.numbered(fmt.DONE, part.first), data)

    def summary(self, units: int) -> FeatureFiles | None:
        """Return the summary of so many units, or None."""
        key = fmt.numbered(fmt.SUMMARIES, units)
        return self._files(key, "features-summary", fmt.FEATURE_COLUMNS)

    def summaries(self) -> list[int]:
        """Return the numbers of units that have a summary, ascending."""
        return sorted(self._numbers(fmt.SUMMARIES))

    def newest(self, units: int) -> FeatureFiles | None:
        """Return the newest summary of at most so many units, or None."""
        there = [count for count in self.summaries() if count <= units]
        return self.summary(there[-1]) if there else None

    def create_summary(self, made: FeatureFiles) -> None:
        """Store a summary, unless there is one."""
        data = fmt.encode_record("features-summary", made.to_json())
        self.objects.create(fmt.numbered(fmt.SUMMARIES, made.units), data)

    def logits(self, block: int) -> ColumnFile | None:
        """Return the file of the logits of a block of latents, or None."""
        key = fmt.numbered(fmt.LOGITS, block)
        body = self._read(key, "features-logits")
        if body is None:
            return None
        return self._parsed(key, lambda: ColumnFile.from_json(body["file"], fmt.FEATURE_COLUMNS))

    def create_logits(self, block: int, file: ColumnFile) -> None:
        """Store the record of a block of logits, unless there is one."""
        data = fmt.encode_record("features-logits", {"file": file.to_json()})
        self.objects.create(fmt.numbered(fmt.LOGITS, block), data)

    def blocks(self) -> list[int]:
        """Return the blocks of latents whose logits are there."""
        return sorted(self._numbers(fmt.LOGITS))

    def files(self) -> Iterator[tuple[str, ColumnFile]]:
        """Yield every file that a record names, with the record's key in the dataset."""
        vectors = self.spec().vectors
        if vectors:
            yield self.prefix + fmt.FEATURE_SET, vectors
        for folder, read in ((fmt.DONE, self.part), (fmt.SUMMARIES, self.summary)):
            for number in sorted(self._numbers(folder)):
                found = read(number)
                for file in found.named() if found else ():
                    yield self.prefix + fmt.numbered(folder, number), file
        for block in self.blocks():
            file = self.logits(block)
            if file:
                yield self.prefix + fmt.numbered(fmt.LOGITS, block), file

    def _numbers(self, folder: str) -> Iterator[int]:
        for key in self.objects.list(folder):
            match = _NUMBERED.fullmatch(key[len(folder) :])
            if match:
                yield int(match[1])

    def _files(self, key: str, kind: str, folder: str) -> FeatureFiles | None:
        body = self._read(key, kind)
        if body is None:
            return None
        return self._parsed(key, lambda: FeatureFiles.from_json(body, folder))

    def _read(self, key: str, kind: str) -> dict[str, Any] | None:
        try:
            return fmt.read_record(self.objects, key, kind)
        except CorruptError as error:
            why = str(error).removeprefix(f"{error.key}: ")
            raise CorruptError(self.prefix + key, why) from error

    def _parsed(self, key: str, parse: Any) -> Any:
        try:
            return parse()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"is not a record of features ({fmt.shown(error)})"
            raise CorruptError(self.prefix + key, why) from error


def set_names(objects: Objects) -> list[str]:
    """Return the names of all sets of features, dropped ones included."""
    names: list[str] = []
    with contextlib.suppress(ConfigError):  # a web server lists no folders
        names = sorted(objects.folders(fmt.FEATURES))
    return [name for name in names if fmt.belongs(f"{fmt.feature_prefix(name)}{fmt.FEATURE_SET}")]


def live_sets(ledger: Ledger) -> list[tuple[FeatureSet, FeatureSpec]]:
    """Return the sets of features that are not dropped, and whose taps are not; by name."""
    sets = [FeatureSet(ledger.objects, name) for name in set_names(ledger.objects)]
    sets = [each for each in sets if exists(each.objects, fmt.FEATURE_SET) and not each.is_dropped]
    if not sets:
        return []
    passes = {"", *(each.prefix for each in live_passes(ledger))}
    found = [(each, each.spec()) for each in sets]
    return [(each, spec) for each, spec in found if spec.of in passes]


def dead_sets(ledger: Ledger) -> list[FeatureSet]:
    """Return the sets that were dropped, or whose taps were.

    A damaged record does not say which taps it is of: its set is not among them.
    """
    passes = [Pass(ledger, name) for name in pass_names(ledger.objects)]
    dropped = {each.prefix for each in passes if each.is_dropped}
    found: list[FeatureSet] = []
    for name in set_names(ledger.objects):
        each = FeatureSet(ledger.objects, name)
        is_dead = each.is_dropped
        if not is_dead and dropped and exists(each.objects, fmt.FEATURE_SET):
            with contextlib.suppress(CorruptError):
                is_dead = each.spec().of in dropped
        found += [each] if is_dead else []
    return found


def set_name(tap: str, number: int) -> str:
    """Return the name of the n-th set of a tap."""
    return f"{tap}-{number}"


def rows_digest(done: Done, taps: Iterable[str]) -> str:
    """Return a digest of the rows of taps in a unit."""
    wanted = {*taps}
    files = [[s.tap, s.count, s.digest] for s in done.shards if s.tap in wanted]
    return xxhash.xxh3_128_hexdigest(canonical_json(files))


def digest_of_units(units: Iterable[Done], taps: Iterable[str], before: str = "") -> str:
    """Return a digest of the rows of taps in consecutive units.

    Args:
        before: that of the units before them.
    """
    for done in units:
        before = xxhash.xxh3_128_hexdigest((before + rows_digest(done, taps)).encode())
    return before
