"""A second reader of datasets, written from docs/format.md alone: what does a dataset contain?

It uses json, struct, base64, hashlib, numpy and xxhash, for compressed shards a zstd decoder, and
nothing of Spile's. `tests/dataset/test_format_page.py` compares the two, bit for bit; the simulator
of programs (`tests/simulator/programs.py`) asks this one what a dataset holds, and from where.

A dataset that is not what the page says raises `Invalid`. Parsed files are kept by their bytes, so
that reading a dataset again costs little.
"""

import base64
import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard

VERSION = 8
GROUP = 256  # units
PLAIN = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "I32": "<i4", "I64": "<i8",
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2", "F8_E4M3": "u1",
}  # fmt: skip
INDEX = {"token_id": "I32", "doc": "I64", "offset": "I32", "pos": "I32", "flags": "U16"}
Tensors = Mapping[str, tuple[str, np.ndarray]]


class Invalid(AssertionError):
    """A dataset is not what the page says."""


def require(so: object, otherwise: str) -> None:
    if not so:
        raise Invalid(otherwise)


class Document(NamedTuple):
    """A document of a unit: its ordinal, and the file and the place there that it comes from."""

    ordinal: int
    file: str  # its identity
    place: int


@dataclass(frozen=True)
class Span:
    """Documents that follow one another in a file."""

    file: str  # its identity
    first: int
    count: int
    doc: int  # the ordinal of the first one, if a run of documents begins there; or -1


class UnitRow(NamedTuple):
    """A unit as the table has it."""

    unit: int
    runs: tuple[tuple[int, int], ...]  # of its documents: the first ordinal of each, and how many
    spans: tuple[Span, ...]
    skip: tuple[int, ...]  # ordinals that are left out as duplicates

    @property
    def ordinals(self) -> list[int]:
        return [first + step for first, count in self.runs for step in range(count)]

    @property
    def documents(self) -> list[Document]:
        """Its documents in order, also those that are left out."""
        places = [(s.file, s.first + step) for s in self.spans for step in range(s.count)]
        require(len(places) == len(self.ordinals), f"unit {self.unit}: its spans hold others")
        both = zip(self.ordinals, places, strict=True)
        return [Document(ordinal, file, place) for ordinal, (file, place) in both]


class Folder(Mapping[str, bytes]):
    """The files of a directory, by key."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, key: str) -> bytes:
        try:
            return (self.path / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(key) from None

    def __contains__(self, key: object) -> bool:
        return (self.path / str(key)).is_file()

    def __iter__(self) -> Iterator[str]:
        found = sorted(self.path.rglob("*"))
        return (str(path.relative_to(self.path)) for path in found if path.is_file())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class PageReader:
    """A dataset in a directory, or in a mapping of keys to bytes, read as the page says.

    Attributes:
        table: the record of the unit table.
        generations: the records of those that follow it.
        passes: those that are read with it, by name.
        live: all passes that are not dropped, finished or not.
        opened: the generation whose manifest is read; None if there is no such manifest.
        units: the records of the units that are read, in stored order.
    """

    def __init__(self, objects: Path | Mapping[str, bytes]) -> None:
        self.objects = Folder(objects) if isinstance(objects, Path) else objects
        self.prefix = ""
        self.table = self.record("units.json", "units")
        recipe = self.table["recipe"]
        identity = {k: v for k, v in recipe.items() if not k.endswith("_source")}
        plain = json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()
        fingerprint = hashlib.sha256(plain).hexdigest()
        require(fingerprint == self.table["fingerprint"], "units.json: another fingerprint")
        self.generations: list[dict[str, Any]] = []
        self.counts = [self.table["units"]["count"]]  # of units at each generation
        while (key := f"{self.folder(len(self.counts))[:-1]}.json") in self.objects:
            more = self.record(key, "generation")
            told = more["fingerprint"], more["before"]
            require(told == (fingerprint, self.counts[-1]), f"{key}: does not follow")
            require(more["units"]["count"] > 0, f"{key}: adds no unit")
            require(more["units"]["key"].startswith(f"{key[:-5]}/units/"), f"{key}: other units")
            self.generations.append(more)
            self.counts.append(self.counts[-1] + more["units"]["count"])
        self._check_documents()
        names = sorted({key.split("/")[1] for key in self.objects if key.startswith("passes/")})
        places = [f"passes/{name}/" for name in names]
        self.live = [
            PagePass(self.objects, place, self.table)
            for place in places
            if f"{place}pass.json" in self.objects and f"{place}dropped.json" not in self.objects
        ]
        whole = [
            number
            for number in range(len(self.counts))
            if self.has_manifest(number) and not any(each.lacks(number) for each in self.live)
        ]
        self.opened = whole[-1] if whole else None
        self.passes = [each for each in self.live if whole and each.has_manifest(whole[-1])]
        if self.opened is None:
            self.units = [*self.done(range(self.counts[0])).values()]
        else:
            self.read_units(self.opened, self.counts[self.opened])
        for each in self.passes:
            assert self.opened is not None
            each.read_units(self.opened, self.counts[self.opened])
            each.check_rows(self.units)

    # -- what there is ----------------------------------------------------------------------------

    @cached_property
    def files(self) -> list[str]:
        """The identities of the corpus files of all generations."""
        return [
            file["identity"] for told in (self.table, *self.generations) for file in told["files"]
        ]

    @cached_property
    def unit_rows(self) -> list[UnitRow]:
        """The units of the table and of all generations."""
        tables = [self.table["units"], *(more["units"] for more in self.generations)]
        before = [0, *self.counts]
        return [
            unit
            for start, told in zip(before, tables, strict=False)
            for unit in self._units_of(told, start)
        ]

    def done(self, units: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The done records of those of some units that have one, whatever names them."""
        found: dict[int, dict[str, Any]] = {}
        for unit in units:
            key = f"done/{unit // GROUP:06d}/{unit:08d}.json"
            if self.prefix + key in self.objects:
                found[unit] = self.record(key, "done")
                self._check_done(unit, found[unit])
        return found

    def has_manifest(self, generation: int) -> bool:
        return f"{self.prefix}{self.folder(generation)}manifest.json" in self.objects

    @staticmethod
    def folder(generation: int) -> str:
        return f"generations/{generation:08d}/" if generation else ""

    def all_rows(self) -> dict[str, np.ndarray]:
        """Every tap that is read; of two passes with one tap, that of the first, by name."""
        found: dict[str, np.ndarray] = {}
        for part in (self, *self.passes):
            for tap in part.table["taps"]:
                if tap not in found:
                    found[tap] = part.rows(tap)
        return found

    def tokenizer(self) -> dict[str, bytes]:
        files = {}
        for name, file in self.table["tokenizer"].items():
            files[name] = self.data(file)
            require(file["key"] == f"tokenizer/{file['digest']}/{name}", "another tokenizer's key")
        return files

    def index(self) -> dict[str, np.ndarray]:
        files = [self.unit_index(unit) for unit in self.units]
        empty = {name: np.zeros(0, PLAIN[kind]) for name, kind in INDEX.items()}
        return {name: np.concatenate([part[name] for part in (empty, *files)]) for name in INDEX}

    def rows(self, tap: str) -> np.ndarray:
        none = np.zeros((0, *self.table["taps"][tap]["shape"]), np.float32)
        return np.concatenate([none, *(self.unit_values(unit, tap) for unit in self.units)])

    def documents(self, name: str) -> Iterator[Any]:
        for unit in self.units:
            yield from self.unit_documents(unit, name)

    def statistics(self, tap: str) -> tuple[int, np.ndarray, np.ndarray]:
        count, mean, m2 = 0, np.zeros(1), np.zeros(1)
        for unit in self.units:
            told = arrays(self.tensors(unit["statistics"]))
            more = int(told[f"{tap}/count"][0])
            if more:
                apart = told[f"{tap}/mean"] - mean
                mean = mean + apart * (more / (count + more))
                m2 = m2 + told[f"{tap}/m2"] + apart**2 * (count * more / (count + more))
                count += more
        if hasattr(self, "merged"):  # (of one segment: merged unit by unit)
            same = self.merged[f"{tap}/mean"].tobytes() == mean.tobytes()
            same = same and self.merged[f"{tap}/m2"].tobytes() == m2.tobytes()
            require(same and self.merged[f"{tap}/count"].tolist() == [count], f"{tap}: other sums")
        return count, mean, m2

    # -- one unit ---------------------------------------------------------------------------------

    def unit_index(self, unit: Mapping[str, Any]) -> dict[str, np.ndarray]:
        tensors = self.tensors(unit["index"])
        kinds = {name: kind for name, (kind, _) in tensors.items()}
        require(kinds == INDEX, f"{unit['index']['key']}: is no index")
        found = arrays(tensors)
        require({*map(len, found.values())} == {unit["rows"]}, "an index of another length")
        return found

    def unit_values(self, unit: Mapping[str, Any], tap: str) -> np.ndarray:
        pieces: list[np.ndarray] = []
        reached = 0
        for file in (file for file in unit["shards"] if file["tap"] == tap):
            require(file["first"] == reached, f"{file['key']}: rows overlap, or are missing")
            reached += file["count"]
            pieces.append(self.values(tap, self.tensors(file)))
            shape = [file["count"], *self.table["taps"][tap]["shape"]]
            require([*pieces[-1].shape] == shape, f"{file['key']}: has another shape")
        require(reached == unit["rows"], f"unit {unit['unit']}: rows of {tap} are missing")
        none = np.zeros((0, *self.table["taps"][tap]["shape"]), np.float32)
        return np.concatenate(pieces) if pieces else none

    def unit_documents(self, unit: Mapping[str, Any], name: str) -> Iterator[Any]:
        """A column of the documents file."""
        told = arrays(self.tensors(unit["documents_table"]))
        valid = told.get(f"valid/{name}", np.ones(len(told["doc"])))
        values = told[name].tolist()
        if f"ends/{name}" in told:
            values = texts(told, name)
        return (v if ok else None for v, ok in zip(values, valid, strict=True))

    # -- parts of it ------------------------------------------------------------------------------

    def read_units(self, generation: int, count: int) -> None:
        """Read the units that a manifest lists."""
        key = f"{self.folder(generation)}manifest.json"
        manifest = self.record(key, "manifest")
        self.units = [u for file in manifest["segments"] for u in self.segment(file)]
        self.merged = arrays(self.tensors(manifest["columns"]))
        fingerprint = self.table["fingerprint"]
        require(manifest["fingerprint"] == fingerprint, f"{key}: of another dataset")
        require(manifest["units"] == count, f"{key}: of {manifest['units']} units, not {count}")
        require([unit["unit"] for unit in self.units] == [*range(count)], f"{key}: other units")
        rows = [unit["rows"] for unit in self.units]
        require(rows == self.merged["rows"].tolist(), f"{key}: other rows")
        for name in ("rows", "tokens", "documents"):
            require(manifest[name] == sum(u[name] for u in self.units), f"{key}: other {name}")
        records = self.done(range(count))
        for unit in self.units:
            self._check_done(unit["unit"], unit)
            record = records.get(unit["unit"], {})
            told = {name: value for name, value in unit.items() if record.get(name) != value}
            require(not told, f"{key}: unit {unit['unit']} has another record, in {[*told]}")

    def segment(self, file: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The records that a segment holds."""
        return _segment(self.data(file))

    def record(self, key: str, kind: str) -> dict[str, Any]:
        try:
            return _record(self.objects[self.prefix + key], kind)
        except KeyError:
            raise Invalid(f"{self.prefix}{key}: is missing") from None
        except Invalid as error:
            raise Invalid(f"{self.prefix}{key}: {error}") from None

    def data(self, file: Mapping[str, Any]) -> bytes:
        """The bytes of a file that a record names."""
        key = self.prefix + file["key"]
        require(key in self.objects, f"{key}: is missing")
        data = self.objects[key]
        require(len(data) == file["bytes"], f"{key}: has {len(data)} bytes, not {file['bytes']}")
        require(xxhash.xxh3_128_hexdigest(data) == file["digest"], f"{key}: is damaged")
        return data

    def tensors(self, file: Mapping[str, Any]) -> Tensors:
        return _tensors(self.data(file), file["key"].endswith(".zst"))

    def values(self, tap: str, tensors: Tensors) -> np.ndarray:
        kind, codes = tensors[tap]
        if kind == "BF16":
            return (codes.astype(np.uint32) << 16).view(np.float32)
        if kind == "F8_E4M3":
            scale = tensors[f"{tap}/scale"][1]
            return float8(codes) * scale.reshape(-1, *[1] * (codes.ndim - 1))
        if self.table["taps"][tap]["dtype"] == "int8":
            beyond = np.abs(codes.astype(np.int32)).max(initial=0) > 127
            require(not beyond, f"{tap}: a code beyond 127")
            return codes.astype(np.float32) * self.scales()[tap]
        return codes

    def scales(self) -> dict[str, np.ndarray]:
        taps, record = self.table["taps"], self.record("scales.json", "scales")
        own = {name for name, tap in taps.items() if tap["dtype"] == "int8"}
        require({*record} == own, "scales.json: of other taps")
        return {name: scales_of(text, taps[name]["shape"]) for name, text in record.items()}

    def _check_done(self, unit: int, record: Mapping[str, Any]) -> None:
        """Check what a record says of its unit, without its files."""
        where = f"{self.prefix}unit {unit}"
        require(record["unit"] == unit, f"{where}: has the record of {record['unit']}")
        of_table = record["fingerprint"] == self.table["fingerprint"]
        require(of_table, f"{where}: belongs to another recipe")
        folder = f"attempts/{unit // GROUP:06d}/{unit:08d}/{record['attempt']}/"
        files = [*record["shards"], *(record[name] for name in _BESIDE)]
        for file in files:
            require(file["key"].startswith(folder), f"{where}: names {file['key']}")
        taps = {file["tap"] for file in record["shards"]}
        require(taps == {*self.table["taps"]} or not record["rows"], f"{where}: has other taps")

    def _check_documents(self) -> None:
        """Check the ordinals of documents: none twice, and without gaps if nothing left any out."""
        ordinals = [ordinal for unit in self.unit_rows for ordinal in unit.ordinals]
        require(len({*ordinals}) == len(ordinals), "an ordinal is that of two documents")
        if not self.table.get("made_of") and self.table["recipe"]["shuffle_docs"] is None:
            require(ordinals == [*range(len(ordinals))], "documents do not follow one another")
        reached = 0  # of generations before
        for count, end in zip((0, *self.counts), self.counts, strict=False):
            docs = [ordinal for unit in self.unit_rows[count:end] for ordinal in unit.ordinals]
            require(min(docs, default=reached) >= reached, "a generation's documents come earlier")
            if count:
                require(min(docs) == reached, "a generation's documents do not follow the last")
            reached = max(docs, default=reached - 1) + 1

    def _units_of(self, told: Mapping[str, Any], before: int) -> Iterator[UnitRow]:
        columns = arrays(self.tensors(told))
        first, number = columns["first_doc"].tolist(), columns["num_docs"].tolist()
        require(len(first) == len(number) == told["count"], f"{told['key']}: other units")
        names = ("span/file", "span/first", "span/count", "span/doc")
        spans = [*zip(*(columns[name].tolist() for name in names), strict=True)]
        skip = columns["skip"].tolist()
        of_spans, of_skip = (runs(columns, name) for name in ("spans", "skip"))
        for at in range(told["count"]):
            mine: list[Span] = []
            found = [[first[at], 0]]
            for file, place, count, doc in spans[of_spans[at]]:
                require(0 <= file < len(self.files), f"{told['key']}: names file {file}")
                mine.append(Span(self.files[file], place, count, doc))
                if doc != -1:
                    found.append([doc, 0])
                found[-1][1] += count
            if len(found) == 1:
                found = [[first[at], number[at]]]
            held = sum(count for _, count in found)
            require(held == number[at], f"{told['key']}: a unit has other documents")
            runs_of = tuple((doc, count) for doc, count in found if count)
            yield UnitRow(before + at, runs_of, tuple(mine), tuple(skip[of_skip[at]]))


class PagePass(PageReader):
    """A pass: keys in its records are relative to its folder."""

    def __init__(self, objects: Mapping[str, bytes], prefix: str, table: Mapping[str, Any]) -> None:
        self.objects, self.prefix, self.passes = objects, prefix, []
        self.table = self.record("pass.json", "pass")
        require(self.table["rows"] == table["fingerprint"], f"{prefix}: of other rows")
        own = {"taps", "encode", "latents", "compute_dtype", "store_dtype"}
        mine, theirs = self.table["recipe"], table["recipe"]
        differ = {key for key in mine if mine[key] != theirs[key] and not key.endswith("_source")}
        require(differ <= own, f"{prefix}: differs from the dataset in {differ - own}")

    @property
    def name(self) -> str:
        return self.prefix.split("/")[1]

    def lacks(self, generation: int) -> bool:
        """Whether it has an earlier generation, and not this one."""
        earlier = any(self.has_manifest(number) for number in range(generation))
        return earlier and not self.has_manifest(generation)

    def check_rows(self, units: Sequence[Mapping[str, Any]]) -> None:
        """Check that its rows are those of a dataset's units."""
        same = ("unit", "rows", "tokens", "documents", "contexts", "text_digest")
        for mine, theirs in zip(units, self.units, strict=True):
            agrees = [mine[name] == theirs[name] for name in same]
            agrees.append(mine["index"]["digest"] == theirs["index"]["digest"])
            require(all(agrees), f"{self.prefix}: unit {mine['unit']} has other rows")


_BESIDE = ("index", "statistics", "documents_table")


@lru_cache(1 << 12)
def _record(data: bytes, kind: str) -> dict[str, Any]:
    try:
        record = json.loads(data)
    except ValueError:
        raise Invalid("is not JSON") from None
    require(isinstance(record, dict) and spelled(record) == data, "is spelled otherwise")
    checksum = record.pop("checksum")
    require(xxhash.xxh3_128_hexdigest(spelled(record)) == checksum, "has another checksum")
    told = record.pop("format"), record.pop("kind")
    require(told == (VERSION, kind), f"is of format {told[0]} and kind {told[1]}")
    return record


def spelled(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return (text + "\n").encode()


@lru_cache(1 << 12)
def _segment(data: bytes) -> list[dict[str, Any]]:
    columns = arrays(_tensors(data, False))
    parts = zip(
        *(texts(columns, f"file/{name}") for name in ("tap", "name", "digest", "etag")),
        *(columns[f"file/{name}"].tolist() for name in ("first", "count", "bytes")),
        strict=True,
    )
    names = ("tap", "name", "digest", "etag", "first", "count", "bytes")
    files: list[dict[str, Any]] = [dict(zip(names, part, strict=True)) for part in parts]
    counted = texts(columns, "skipped/reason"), columns["skipped/count"].tolist()
    reasons = list(zip(*counted, strict=True))
    units: list[dict[str, Any]] = []
    counts = ("unit", "rows", "tokens", "documents", "contexts")
    of_units = zip(runs(columns, "files"), runs(columns, "skipped"), strict=True)
    words = {n: texts(columns, n) for n in ("attempt", "made_from", "text_digest")}
    (fingerprint,) = texts(columns, "fingerprint")
    for at, (of_files, of_reasons) in enumerate(of_units):
        unit: dict[str, Any] = {name: int(columns[name][at]) for name in counts}
        unit |= {name: words[name][at] for name in words}
        unit["fingerprint"] = fingerprint
        folder = f"attempts/{unit['unit'] // GROUP:06d}/{unit['unit']:08d}/{unit['attempt']}/"
        for each in files[of_files]:
            each["key"] = folder + each.pop("name")
        *unit["shards"], unit["index"], unit["statistics"], unit["documents_table"] = files[
            of_files
        ]
        units.append({**unit, "skipped": dict(reasons[of_reasons])})
    return units


# -- tensors -------------------------------------------------------------------------------------


def arrays(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: array for name, (_, array) in tensors.items()}


def runs(columns: Mapping[str, np.ndarray], name: str) -> list[slice]:
    ends = [0, *columns[f"ends/{name}"].tolist()]
    return [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def texts(columns: Mapping[str, np.ndarray], name: str) -> list[str]:
    held = columns[name].tobytes()
    return [held[run].decode() for run in runs(columns, name)]


@lru_cache(1 << 12)
def _tensors(data: bytes, compressed: bool) -> Tensors:
    if compressed:
        return from_planes(data)
    (length,) = struct.unpack("<Q", data[:8])
    require((8 + length) % 4096 == 0, "tensors begin elsewhere")
    return parsed(json.loads(data[8 : 8 + length]), lambda a, b, _: data[8 + length :][a:b])


def scales_of(text: str, shape: list[int]) -> np.ndarray:
    found = np.frombuffer(base64.b64decode(text, validate=True), "<f4").reshape(shape)
    require((np.isfinite(found) & (found > 0)).all(), "a scale is not positive")
    return found


def parsed(header: Mapping[str, Any], at: Callable[[int, int, int], bytes]) -> Tensors:
    found: dict[str, tuple[str, np.ndarray]] = {}
    for name, entry in header.items():
        dtype = np.dtype(PLAIN[entry["dtype"]])
        start, stop = entry["data_offsets"]
        data = at(start, stop, dtype.itemsize)
        found[name] = entry["dtype"], np.frombuffer(data, dtype).reshape(entry["shape"])
    return found


def from_planes(data: bytes) -> Tensors:
    frames, kind, magic = struct.unpack("<IBI", data[-9:])
    require((kind, magic) == (0x80, 0x8F92EAB1), "no seek table")
    at = len(data) - 9 - 12 * frames
    told = struct.unpack("<II", data[at - 8 : at])
    require(told == (0x184D2A5E, 12 * frames + 9), "no seek table")
    table = [struct.unpack("<III", data[at + 12 * n : at + 12 * n + 12]) for n in range(frames)]
    blocks: list[tuple[int, bytes]] = []  # where each begins, decompressed
    packed = plain = 0
    for size, length, checksum in table:
        block = zstandard.decompress(data[packed : packed + size], max_output_size=length)
        require(len(block) == length, "a frame of another length")
        require(xxhash.xxh64_intdigest(block) & 0xFFFFFFFF == checksum, "a damaged frame")
        blocks.append((plain, block))
        packed, plain = packed + size, plain + length

    def part(start: int, stop: int, itemsize: int) -> bytes:
        inside = [block for begin, block in blocks if start <= begin < stop]
        planes = (np.frombuffer(block, np.uint8).reshape(itemsize, -1) for block in inside)
        return b"".join(plane.T.tobytes() for plane in planes)

    (length,) = struct.unpack("<Q", blocks[0][1][:8])
    base = 8 + length
    header = json.loads(part(0, base, 1)[8:])
    return parsed(header, lambda a, b, itemsize: part(base + a, base + b, itemsize))


def float8(codes: np.ndarray) -> np.ndarray:
    wide = codes.astype(np.int32)
    exponent, mantissa = (wide >> 3) & 15, (wide & 7) / 8
    size = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - 7), mantissa * 2.0**-6)
    size[(wide & 0x7F) == 0x7F] = np.nan
    return np.where(wide & 0x80, -size, size).astype(np.float32)
