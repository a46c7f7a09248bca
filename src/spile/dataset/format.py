"""The layout of a dataset: every key, every record, and the format's version.

    units.json               the unit table: resolved recipe, taps, files
    units/DIGEST.safetensors the units of that table, as columns (`unit_table.py`)
    tokenizer/DIGEST/NAME    the files of the tokenizer
    model.json               full hashes of the weights, from the first worker's loading
    scales.json              int8 only: the scale of each channel, measured by the first worker
    attempts/GROUP/UNIT/ATTEMPT/
                             TAP.N.safetensors (or .zst: `compression.py`), index.safetensors,
                             statistics.safetensors, documents.safetensors (`documents.py`);
                             from other processes, TAP.PART.N.safetensors
    done/GROUP/UNIT.json     the done record: the unit exists, and these are its shards
    segments/GROUP.safetensors
                             the records of a group whose units are all done, as columns
                             (`segments.py`); derived
    manifest.json            names all segments; derived, once every unit is done
    manifest/DIGEST.safetensors
                             the rows of each unit, and the statistics of all rows; derived
    generations/NUMBER.json  units that were added to the table (`generations.py`)
    generations/NUMBER/units/DIGEST.safetensors
                             those units, as columns
    generations/NUMBER/segments/GROUP.safetensors, generations/NUMBER/manifest.json,
    generations/NUMBER/manifest/DIGEST.safetensors
                             as above, of the dataset with these units
    prediction.json          the estimates of the first worker, for people only
    check.json               the last comparison with HF transformers (`spile check`)
    signature-v2.sha256      SHA-256 of the table, the derived files and `digests/`
    signature-v2.sha256.sig  the signature of that list, by `spile sign`
    digests/GROUP-DIGEST.safetensors
                             SHA-256 of the records and files of a group, for the signature
    workers/GROUP/NAME.json  heartbeats; correctness does not need them. In a bucket the name shows
                             the units that the worker holds: NAME@UNIT@UNIT.json
    passes/NAME/             more taps of the same rows (`passes.py`): pass.json, and done/,
                             attempts/, segments/ … as in a dataset; dropped.json once dropped
    features/NAME/           what `spile features` counted of a tap's latents (`features.py`):
                             features.json, done/, parts/, summaries/, columns/, logits/;
                             dropped.json once dropped
    scratch/                 rows between two sweeps of `spile shuffle`, until it ends
    damaged/TOKEN/KEY        a record that `spile verify --repair` moved aside, until `gc`
    removing.json            the former units.json, while `spile rm` removes the rest

A group is 256 consecutive units, so that a worker lists the records of its own group only.

A record is canonical JSON with its own checksum, so that any changed byte is noticed. An attacker
can compute that too, so the contents of a record are checked as well: names must stay inside the
store, numbers must be within what could be stored, and nesting is limited.
"""

import contextlib
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import xxhash

from spile.core.bounded_json import JsonError, parse_json_object
from spile.core.errors import CorruptError, StoreError
from spile.core.tensors import DTYPES_BY_NAME
from spile.objects import Objects

FORMAT = 8
MOST_UNITS = 10**8  # their ids have eight digits
MOST_GENERATIONS = 10**5  # opening a dataset reads them all: some minutes for so many
GROUP_UNITS = 256  # one page of a bucket's listing holds their records, attempts or heartbeats

UNITS = "units.json"
REMOVING = "removing.json"
MODEL = "model.json"
SCALES = "scales.json"
MANIFEST = "manifest.json"
CHECK = "check.json"
PREDICTION = "prediction.json"
ATTEMPTS = "attempts/"
DONE = "done/"
UNIT_COLUMNS = "units/"
SEGMENTS = "segments/"
MANIFEST_COLUMNS = "manifest/"
TOKENIZER = "tokenizer/"
DIGESTS = "digests/"
WORKERS = "workers/"
SCRATCH = "scratch/"
DAMAGED = "damaged/"
PASSES = "passes/"
PASS = "pass.json"  # in the folder of a pass
DROPPED = "dropped.json"
GENERATIONS = "generations/"
FEATURES = "features/"
FEATURE_SET = "features.json"  # in the folder of one, as are the following
PARTS = "parts/"
SUMMARIES = "summaries/"
FEATURE_COLUMNS = "columns/"
LOGITS = "logits/"

SIGNED = "signature-v2.sha256"  # the list of digests
SIGNATURE = f"{SIGNED}.sig"
SIGNATURES = (SIGNED, SIGNATURE)
DERIVED = (UNIT_COLUMNS, SEGMENTS, MANIFEST_COLUMNS, TOKENIZER, DIGESTS, GENERATIONS)  # prefixes
# A dataset consists of these records and of everything in these folders; a copy has all of it. (A
# pass is a folder with the same contents.)
RECORDS = (UNITS, PASS, MODEL, SCALES, MANIFEST, CHECK, PREDICTION, *SIGNATURES)
FOLDERS = (ATTEMPTS, DONE, *DERIVED, PASSES, FEATURES)
PASSING = (WORKERS, SCRATCH, DAMAGED)  # folders that serve a run or a repair, and go

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")  # as in a recipe's identity
COMPRESSED = ".zst"
SCALE_DTYPE = np.dtype(np.float32)
MADE_WHEN = ("finished_at", "seconds")  # in `made_by`, by the maker's clock, for charts only
BESIDE = ("index", "statistics", "documents_table")  # the files of a unit that are not shards
BESIDE_TAPS = ("index", "statistics", "documents")  # their names in place of a tap's

_OF_A_DATASET = re.compile(
    rf"(?:passes/[A-Za-z0-9][A-Za-z0-9_.-]*/)?(?:"
    rf"{'|'.join(map(re.escape, (*RECORDS, DROPPED, REMOVING)))}"
    r"|generations/\d{8}\.json|(?:generations/\d{8}/)?(?:manifest\.json|"
    r"(?:units|segments|manifest)/[^/]+\.safetensors)|digests/[^/]+\.safetensors"
    rf"|{FEATURES}[A-Za-z0-9][A-Za-z0-9_.-]*/(?:{re.escape(FEATURE_SET)}|{re.escape(DROPPED)}"
    rf"|(?:{PARTS}|{FEATURE_COLUMNS})[^/]+\.safetensors|(?:{DONE}|{SUMMARIES}|{LOGITS})\d{{8}}\.json)"
    r"|tokenizer/[^/]+/[^/]+|done/\d{6}/\d{8}\.json|workers/(?:\d{6}/)?[^/]+\.json"
    r"|attempts/\d{6}/\d{8}/[^/]+/[^/]+\.safetensors(?:\.zst)?|(?:scratch|damaged)/.+)"
)
DONE_NAME = re.compile(r"\d{8}\.json")  # of a done record in its folder
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,200}")
_WORKER_KEY = re.compile(rf"workers/(?:(\d{{6}})/)?({_NAME.pattern})((?:@\d{{8}})*)\.json")
_MOST_SHOWN = 32  # units in the key of a heartbeat
_OF_A_GENERATION = r"(?:generations/\d{8}/)?"
_MOST = 1 << 56  # rows, documents or bytes
_MOST_AMOUNT = 1e18  # seconds, tokens a second, sums
_MAX_AXES = 8
MAX_WIDTH = 1 << 28  # most values in one row: attention over a million tokens by 64 heads fits
_NOT_A_RECORD = {
    "syntax": "is not JSON (damaged or truncated)",
    "depth": "is nested too deeply for a record",
    "type": "is not a record",
}


@dataclass(frozen=True)
class KeyLayout:
    """Where a dataset keeps the records and files of its units.

    What is derived from all units is stored with the generation for which it was derived.

    Attributes:
        grown: for each generation, how many units there were before it.
    """

    grown: tuple[int, ...] = ()

    @property
    def generation(self) -> int:
        """The number of the newest generation; 0 is the table alone."""
        return len(self.grown)

    def segment_key(self, group: int) -> str:
        """Return the key of a group's segment.

        It lies with the generation that last added units to the group: what was derived before
        never changes.
        """
        last = self.generations_of(group)[-1]
        return f"{generation_folder(last)}{SEGMENTS}{group:06d}.safetensors"

    def generations_of(self, group: int) -> range:
        """Return the generations that added units to a group: each has a segment of it."""
        first, stop = group * GROUP_UNITS, (group + 1) * GROUP_UNITS
        return range(bisect_right(self.grown, first), bisect_left(self.grown, stop) + 1)

    @property
    def segment_folders(self) -> list[str]:
        """The prefixes under which the newest segment of each group lies."""
        groups = range(self.group(self.grown[-1]) + 1 if self.grown else 1)
        last = {self.generations_of(group)[-1] for group in groups}
        return [f"{generation_folder(number)}{SEGMENTS}" for number in sorted(last)]

    @property
    def manifest_key(self) -> str:
        return manifest_key(self.generation)

    @property
    def manifest_columns(self) -> str:
        """The prefix of the file that holds the manifest's columns."""
        return f"{generation_folder(self.generation)}{MANIFEST_COLUMNS}"

    def group(self, unit: int) -> int:
        return unit // GROUP_UNITS

    def groups(self, units: int) -> int:
        """Return the number of groups of a table of so many units."""
        return -(-units // GROUP_UNITS)

    def units_of(self, group: int, units: int) -> range:
        """Return the units of a group, in a table of so many."""
        return range(group * GROUP_UNITS, min((group + 1) * GROUP_UNITS, units))

    def done_key(self, unit: int) -> str:
        return f"{DONE}{self._path(unit)}.json"

    def done_prefix(self, group: int) -> str:
        return f"{DONE}{self._folder(group)}"

    def attempts_prefix(self, group: int) -> str:
        return f"{ATTEMPTS}{self._folder(group)}"

    def attempt_prefix(self, unit: int, attempt: str) -> str:
        return f"{ATTEMPTS}{self._path(unit)}/{attempt}/"

    def shard_key(
        self,
        unit: int,
        attempt: str,
        tap: str,
        number: int,
        *,
        part: int = 0,
        compressed: bool = False,
    ) -> str:
        """Return the key of a shard; `part`: the process, if several write the unit."""
        label = f"{part}.{number:05d}" if part else f"{number:05d}"
        name = f"{self.attempt_prefix(unit, attempt)}{tap}.{label}.safetensors"
        return name + COMPRESSED if compressed else name

    def worker_key(self, name: str, group: int, units: Collection[int] = ()) -> str:
        """Return the key of a heartbeat; `units`: those that a listing is to show, if few."""
        shown = units if len(units) <= _MOST_SHOWN else ()
        held = "".join(f"@{unit:08d}" for unit in shown)
        return f"{self.workers_prefix(group)}{name}{held}.json"

    def workers_prefix(self, group: int) -> str:
        return f"{WORKERS}{self._folder(group)}"

    def _path(self, unit: int) -> str:
        return f"{self._folder(unit // GROUP_UNITS)}{unit:08d}"

    def _folder(self, group: int) -> str:
        return f"{group:06d}/"


CURRENT = KeyLayout()  # of new datasets


def generation_key(number: int) -> str:
    """Return the key of the record that adds units."""
    return f"{GENERATIONS}{number:08d}.json"


def manifest_key(generation: int) -> str:
    """Return the key of the manifest of a generation; 0: that of the table alone."""
    return f"{generation_folder(generation)}{MANIFEST}"


def generation_folder(number: int) -> str:
    """Return the prefix of what follows from a generation; empty for the table alone."""
    return f"{GENERATIONS}{number:08d}/" if number else ""


def pass_prefix(name: str) -> str:
    """Return the folder of a pass."""
    return f"{PASSES}{name}/"


def feature_prefix(name: str) -> str:
    """Return the folder of a set of features."""
    return f"{FEATURES}{name}/"


def numbered(folder: str, number: int) -> str:
    """Return the key of a record of a set of features: of a unit, a summary, a block of logits."""
    return f"{folder}{number:08d}.json"


def split_pass_key(key: str) -> tuple[str, str]:
    """Return the folder of the pass that holds an object, or "", and the key within it."""
    match = re.match(rf"{PASSES}{_NAME.pattern}/", key)
    return (match[0], key[match.end() :]) if match else ("", key)


def tokenizer_key(digest: str, name: str) -> str:
    return f"{TOKENIZER}{digest}/{name}"


def scale_name(tap: str) -> str:
    """Return the name of the tensor that holds the scale of each of a tap's rows."""
    return f"{tap}/scale"


def idle_worker_key(name: str) -> str:
    """Return the key of the heartbeat of a worker that holds no unit."""
    return f"{WORKERS}{name}.json"


class WorkerKey(NamedTuple):
    """What the key of a heartbeat says."""

    name: str  # of the worker
    group: int | None  # in which it holds units; None: it holds none
    units: tuple[int, ...]  # that it holds there; empty: only the record says


def parse_worker_key(key: str) -> WorkerKey | None:
    match = _WORKER_KEY.fullmatch(key)
    if match is None:
        return None
    units = tuple(map(int, match[3].split("@")[1:]))
    return WorkerKey(match[2], int(match[1]) if match[1] else None, units)


def is_count(value: object) -> bool:
    """Return whether a JSON value can be a number of rows, bytes or the like."""
    return type(value) is int and 0 <= value < _MOST


def is_amount(value: object) -> bool:
    """Return whether a JSON value can be a time, a rate or a sum."""
    number = value if isinstance(value, float | int) and not isinstance(value, bool) else math.nan
    return 0 <= number < _MOST_AMOUNT


def is_name(value: object) -> bool:
    """Return whether a JSON value is printable text, without line ends or terminal codes."""
    return type(value) is str and value.isprintable()


def shown(value: object) -> str:
    """Format untrusted text, or an error about it, as part of a line."""
    text = str(value)
    return (text if text.isprintable() else ascii(text)[1:-1])[:200]


def parse_done_key(key: str) -> int | None:
    match = re.fullmatch(r"done/\d{6}/(\d{8})\.json", key)
    return int(match[1]) if match else None


def parse_segment_key(key: str) -> int | None:
    """Return the group of a segment."""
    match = re.fullmatch(rf"{_OF_A_GENERATION}segments/(\d{{6}})\.safetensors", key)
    return int(match[1]) if match else None


def belongs(key: str) -> bool:
    """Return whether a key is one that a dataset gives to its records and files."""
    return _OF_A_DATASET.fullmatch(key) is not None


def parse_generation(key: str) -> int:
    """Return the number of the generation that an object belongs to; 0 for the table."""
    match = re.match(rf"{GENERATIONS}(\d{{8}})[./]", key)
    return int(match[1]) if match else 0


def parse_attempt_key(key: str) -> tuple[int, str] | None:
    """Return the unit and attempt of an object under `attempts/`."""
    match = re.fullmatch(r"attempts/\d{6}/(\d{8})/([^/]+)/[^/]+", key)
    return (int(match[1]), match[2]) if match else None


def parse_damaged_key(key: str) -> str | None:
    """Return the original key of a record that was moved to this one."""
    derived = rf"{_OF_A_GENERATION}(?:segments/\d{{6}}\.safetensors|[a-z]+\.json)"
    match = re.fullmatch(rf"damaged/[^/]+/(done/\d{{6}}/\d{{8}}\.json|{derived})", key)
    return match[1] if match else None


@dataclass(frozen=True)
class TapInfo:
    """The stored form of a tap's rows."""

    shape: tuple[int, ...]  # empty: a single number
    dtype: str
    aliases: tuple[str, ...] = ()  # its names in other tools
    latents: int = 0  # size of the encoder whose latents or ids the row holds; see `latents.py`
    # If a row holds means and then the upper triangle of their covariance: the shape of the means.
    covariance_of: tuple[int, ...] | None = None
    # If it holds a number of prompts and then a mean Jacobian: how many values each side has.
    jacobian_of: tuple[int, ...] | None = None

    @property
    def width(self) -> int:
        """Values in a row."""
        return math.prod(self.shape)

    @property
    def channels(self) -> int:
        """Values of a row that statistics describe: of a covariance, its means alone.

        Of a Jacobian it is the number of prompts.
        """
        if self.jacobian_of is not None:
            return 1
        return self.width if self.covariance_of is None else math.prod(self.covariance_of)

    @property
    def storage(self) -> np.dtype[Any]:
        """The dtype of the values in a shard."""
        return DTYPES_BY_NAME[self.dtype]

    @property
    def scaled_by(self) -> Literal["row", "channel"] | None:
        """The scale to multiply stored values by: that of the row, of the channel, or none."""
        return {"float8_e4m3": "row", "int8": "channel"}.get(self.dtype)  # type: ignore[return-value]

    @property
    def row_bytes(self) -> int:
        scale = SCALE_DTYPE.itemsize if self.scaled_by == "row" else 0
        return self.width * self.storage.itemsize + scale

    def to_json(self) -> dict[str, Any]:
        value = vars(self).copy()
        for name in ("covariance_of", "jacobian_of"):  # (as before there were any)
            if value[name] is None:
                del value[name]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "TapInfo":
        shape, dtype, aliases = value["shape"], value["dtype"], value["aliases"]
        latents = value["latents"]
        lists = isinstance(shape, list) and isinstance(aliases, list)
        if not lists or type(dtype) is not str or dtype not in DTYPES_BY_NAME:
            raise ValueError(f"not a tap: {value!r}")
        sizes, names = cast(list[Any], shape), cast(list[Any], aliases)
        possible = len(sizes) <= _MAX_AXES and all(n and is_count(n) for n in sizes)
        possible = possible and is_count(latents) and (not latents or len(sizes) == 1)
        if not possible or math.prod(sizes) > MAX_WIDTH or not all(map(is_name, names)):
            raise ValueError(f"not a tap: {value!r}")
        covariance, jacobian = (_sizes(value, name) for name in ("covariance_of", "jacobian_of"))
        info = cls(tuple(sizes), dtype, tuple(names), latents, covariance, jacobian)
        wanted: int | None = None
        if jacobian is not None:
            wanted = jacobian_width(jacobian) if len(jacobian) == 2 and not covariance else 0
        elif covariance is not None:
            wanted = covariance_width(info.channels)
        if wanted is not None and info.shape != (wanted,):
            raise ValueError(f"not a tap: {value!r}")
        return info


def _sizes(value: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    sizes: Any = value.get(name)
    if sizes is None:
        return None
    if not isinstance(sizes, list) or not all(n and is_count(n) for n in cast(list[Any], sizes)):
        raise ValueError(f"not a tap: {value!r}")
    return tuple(cast(list[int], sizes))


def covariance_width(channels: int) -> int:
    """Return the values of a row that holds means, and the upper triangle of their covariance."""
    return channels * (channels + 3) // 2


def jacobian_width(sizes: tuple[int, ...]) -> int:
    """Return the values of a row that holds a number of prompts, and their mean Jacobian."""
    return 1 + math.prod(sizes)


@dataclass(frozen=True)
class Shard:
    """One file of a unit: rows of a tap or of the index, statistics, or the documents table."""

    tap: str
    key: str
    first: int
    count: int
    bytes: int
    digest: str
    etag: str = ""  # from the bucket: a listing shows whether the object is still the same


@dataclass(frozen=True)
class Done:
    """A done record: everything a reader needs to know about one unit."""

    unit: int
    attempt: str
    fingerprint: str
    made_from: str  # digest of what the unit was made from: `Ledger.made_from`
    rows: int
    tokens: int  # read by the model; rows are the chosen ones of them
    documents: int
    contexts: int
    skipped: Mapping[str, int]
    text_digest: str
    shards: tuple[Shard, ...]
    index: Shard
    statistics: Shard
    documents_table: Shard
    made_by: Mapping[str, Any]

    @property
    def text_hash(self) -> int:
        """The sum of the hashes of the documents that were read."""
        return int(self.text_digest or "0", 16)

    def files(self) -> tuple[Shard, ...]:
        return (*self.shards, *(getattr(self, name) for name in BESIDE))

    def to_json(self) -> dict[str, Any]:
        # (`asdict` copies every value, and takes longer than all the rest of a commit.)
        return {
            **vars(self),
            "shards": [vars(shard) for shard in self.shards],
            **{name: vars(getattr(self, name)) for name in BESIDE},
        }

    @classmethod
    def from_json(cls, key: str, body: Mapping[str, Any], layout: KeyLayout = CURRENT) -> "Done":
        """Rebuild and check a record."""
        try:
            parts: dict[str, Any] = {**body}
            parts["shards"] = tuple(Shard(**shard) for shard in parts["shards"])
            for name in BESIDE:
                parts[name] = Shard(**parts[name])
            done = cls(**parts)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(key, f"is not a done record ({shown(error)})") from error
        return done.checked(key, layout)

    def checked(self, key: str, layout: KeyLayout) -> "Done":
        """Check an untrusted record: names stay inside the attempt, runs tile each tap's rows."""
        try:
            _audit_types(self)
            prefix, files = layout.attempt_prefix(self.unit, self.attempt), self.files()
            for file in files:
                if not file.key.startswith(prefix) or not _NAME.fullmatch(file.key[len(prefix) :]):
                    raise CorruptError(key, f"names {file.key!r}, which is not of its attempt")
            if any(getattr(self, name).key.endswith(COMPRESSED) for name in BESIDE):
                raise CorruptError(key, "names a compressed index, statistics or documents")
            if len({file.key for file in files}) != len(files):
                raise CorruptError(key, "names a file twice")
            reached: dict[str, int] = {}
            for shard in self.shards:
                if shard.first != reached.get(shard.tap, 0) or shard.count < 1:
                    raise CorruptError(key, f"rows of {shard.tap} overlap or leave a gap")
                reached[shard.tap] = shard.first + shard.count
            if any(stop != self.rows for stop in reached.values()) or self.index.count != self.rows:
                raise CorruptError(key, "its shards do not add up to its rows")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(key, f"is not a done record ({shown(error)})") from error
        return self


def _audit_types(done: Done) -> None:
    counts: list[Any] = [done.unit, done.rows, done.tokens, done.documents, done.contexts]
    counts += done.skipped.values()
    texts: list[Any] = [done.attempt, done.fingerprint, done.made_from, done.text_digest]
    texts += [*done.made_by.keys(), *done.skipped.keys()]
    for file in done.files():
        counts += [file.first, file.count, file.bytes]
        texts += [file.tap, file.digest, file.etag]
    if not all(map(is_count, counts)):
        raise ValueError("a count is not a number")
    if not re.fullmatch(r"[0-9a-f]{0,32}", done.text_digest):
        raise ValueError("the hash of its texts is not one")
    if not all(map(is_name, texts)) or not _NAME.fullmatch(done.attempt):
        raise ValueError("a name is not a text")


def encode_record(kind: str, body: Mapping[str, Any]) -> bytes:
    """Encode a record as canonical JSON with its own checksum."""
    record = {"format": FORMAT, "kind": kind, **body}
    record["checksum"] = _checksum(record)
    data = _canonical(record)
    if not data:
        raise ValueError(f"a {kind} record holds what JSON cannot: {record!r}")
    return data


def check_record(key: str, data: bytes) -> dict[str, Any]:
    """Check a record of any kind, and return its body, as `decode_record`."""
    with contextlib.suppress(JsonError):
        kind = parse_json_object(data, max_bytes=len(data)).get("kind")
        if type(kind) is str:
            return decode_record(key, data, kind)
    raise CorruptError(key, _NOT_A_RECORD["type"])


def decode_record(key: str, data: bytes, kind: str) -> dict[str, Any]:
    """Decode and check a record; return its body.

    Raises:
        StoreError: if it was written in another format.
        CorruptError: if any byte differs from what was written.
    """
    try:
        record = parse_json_object(data, max_bytes=len(data))
    except JsonError as error:
        raise CorruptError(key, _NOT_A_RECORD[error.problem]) from error
    version, checksum = record.get("format"), record.get("checksum")
    # (Formats before 7 had indented records, and a checksum over those.)
    whole = checksum == _checksum(record) or data.startswith(b"{\n")
    if type(version) is int and version != FORMAT and whole:
        raise StoreError(
            f"{key}: written in format {shown(version)}, but this version of spile reads format "
            f"{FORMAT}; use the version that wrote it, or another --out"
        )
    if checksum != _checksum(record) or _canonical(record) != data:
        raise CorruptError(key, "checksum does not match (damaged or edited)")
    if record.get("kind") != kind:
        found = shown(repr(record.get("kind")))
        raise CorruptError(key, f"holds a {found} record, expected {kind!r}")
    return {k: v for k, v in record.items() if k not in ("format", "kind", "checksum")}


def read_record(objects: Objects, key: str, kind: str) -> dict[str, Any] | None:
    """Return the body of a stored record, as `decode_record`; None if there is none."""
    try:
        data = objects.get(key)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{objects.url}/{key}: {error.strerror or error}") from error
    return decode_record(key, data, kind)


def _canonical(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(record, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return b""
    return f"{text}\n".encode()


def _checksum(record: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(
        _canonical({k: v for k, v in record.items() if k != "checksum"})
    )
