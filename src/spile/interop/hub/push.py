"""Upload a dataset to the Hugging Face Hub, file by file as stored: `spile push OUT REPO`.

A commit holds whole units, each with its done record. So the records alone tell which units a
repository has, and the same command sends the missing ones. The unit table and the card come in the
last commit: until then nobody can mistake the files for a dataset. A pass is sent if it is
complete; its record also comes in the last commit, as do features. Every file is checked against
its record before it is sent.
"""

import contextlib
import hashlib
import logging
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np
import xxhash

from spile.core.errors import ConfigError, CorruptError, SpileError, StoreError
from spile.core.libraries import import_library
from spile.core.retry import backoff
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.format import Shard, TapInfo
from spile.dataset.maintain.features import listed_records
from spile.dataset.maintain.finished import FinishedPart, finished_parts
from spile.dataset.maintain.signature import decode_list
from spile.dataset.read.checked_file import CheckedFile
from spile.dataset.records.features import live_sets, set_names
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.manifest import named_files
from spile.dataset.records.passes import pass_names
from spile.dataset.records.table import read_tokenizer, table_records
from spile.interop.hub.card import write_card
from spile.objects import Objects, exists, open_objects

T = TypeVar("T")

CARD = "README.md"
COMMIT_FILES = 200  # the Hub is slow with more at once
COMMIT_BYTES = 16 << 30  # also bounds the disk space for temporary copies of a bucket's files
_TRIES = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds
_NETWORK = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")
_ADVICE = {
    401: "no valid token; log in with `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there; create one that may, or choose your own repository",
    404: "no such repository or owner, or the token does not see it",
}

_log = logging.getLogger("spile.interop")


@dataclass(frozen=True)
class Pushed:
    """The result of a push."""

    url: str
    revision: str
    files: int
    files_there: int  # in the repository already
    bytes: int
    card_written: bool  # False if the repository had a card, which is never overwritten
    download: str  # the command that fetches it


def push(out: str, repo: str, *, private: bool = False, revision: str | None = None) -> Pushed:
    """Upload a finished dataset, or the part that the repository does not have yet.

    Args:
        repo: `owner/name`; created if it does not exist.
        private: create the repository as private; refuse an existing public one.
        revision: a branch; created if it does not exist.
    """
    hub = import_library("huggingface_hub", "push", "'spile[hub]'")
    source = _Source(open_objects(out))
    there = _Repository(hub, repo, revision or "main")
    there.prepare(private=private)
    files, folders = there.beside_units()
    rest = source.rest() | source.dropped(files)
    units = _UnitsThere(source, there, folders)
    _refuse_other(files, source, rest, repo)
    sent = sent_bytes = 0
    for batch in _batches(units.missing()):
        with tempfile.TemporaryDirectory(prefix="spile-push-") as folder:
            paths = {file.key: source.checked(file, folder) for u in batch for file in u.files}
            paths |= {unit.key: unit.record for unit in batch}
            there.commit(paths, f"units {batch[0].number} to {batch[-1].number}")
        sent += len(paths)
        sent_bytes += sum(file.bytes for unit in batch for file in unit.files)
    last: dict[str, Path | bytes] = {
        key: data for key, data in rest.items() if not _same(files.get(key), data)
    }
    card_written = CARD not in files
    if card_written:
        card = write_card(repo, source.table, source.taps, source.totals, there.download)
        last[CARD] = card.encode()
    beside = source.files(rest)
    with tempfile.TemporaryDirectory(prefix="spile-push-") as folder:
        for key in beside:
            if path := source.unlike(key, files.get(key), folder):
                last[key] = path
        if last:
            there.commit(last, f"{len(source.table.units)} units, whole")
    return Pushed(
        url=f"{there.endpoint}/datasets/{repo}",
        revision=there.revision,
        files=sent + len(last),
        files_there=units.files + len(rest) + len(beside) + 1 - len(last),
        bytes=sent_bytes,
        card_written=card_written,
        download=there.download,
    )


@dataclass(frozen=True)
class _Unit:
    """A unit of the dataset, or of one of its passes, with keys of the dataset."""

    number: int
    key: str  # of its done record
    record: bytes
    files: tuple[Shard, ...]

    @classmethod
    def of(cls, part: FinishedPart, number: int) -> "_Unit":
        done = part.read(number)
        return cls(
            number,
            part.prefix + part.table.layout.done_key(number),
            fmt.encode_record("done", done.to_json()),
            tuple(replace(file, key=part.prefix + file.key) for file in done.files()),
        )


class _Source:
    """A finished dataset with its passes, and its files in the form that the Hub's client takes."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.parts = finished_parts(objects)
        sent = {part.prefix for part in self.parts}
        live = [each for each, spec in live_sets(Ledger(objects)) if spec.of in sent]
        # (Listed once: `spile features` may be at work, and a record must not go without files.)
        self.features = {each.prefix: listed_records(each) for each in live}
        self.table = self.parts[0].table
        self.totals = self.parts[0].catalog.totals()
        self.totals.bytes += sum(part.catalog.totals().bytes for part in self.parts[1:])

    def units(self, part: FinishedPart, numbers: Iterable[int]) -> Iterator[_Unit]:
        """Yield some units of a part, read one after another."""
        return mapped(partial(_Unit.of, part), numbers, self._objects.parallel)

    @property
    def taps(self) -> dict[str, TapInfo]:
        """The taps of the dataset and of its passes, in the order of their recipes."""
        return {
            tap: part.table.taps[tap]
            for part in self.parts
            for tap in part.table.recipe.stored_taps
        }

    def rest(self) -> dict[str, bytes]:
        """Return the records that belong to no unit, and the signature."""
        found: dict[str, bytes] = {}
        for part in self.parts:
            found |= {part.prefix + key: data for key, data in self._beside(part).items()}
        for prefix, records in self.features.items():
            keys = [prefix + key for key in records.own_keys()]
            found |= {key: self._objects.get(key) for key in keys}
        with contextlib.suppress(FileNotFoundError):  # not every dataset is signed
            keys = [*fmt.SIGNATURES]
            signed = {key: self._objects.get(key) for key in keys}
            if all(exists(self._objects, key) for key in self._digests(signed)):
                found |= signed
        return found

    def files(self, rest: Mapping[str, bytes]) -> list[str]:
        """Return the keys of the files that these records name."""
        found: list[str] = []
        for part in self.parts:
            # (The units of a pass are in the dataset's own files.)
            known = named_files(part.table) if part.prefix else set[str]()
            named = named_files(part.table, *part.ledger.derived.manifests(part.table)) - known
            found += [part.prefix + key for key in sorted(named)]
        found += sorted(self._columns)
        return found + self._digests(rest)

    @cached_property
    def _columns(self) -> dict[str, str]:
        """The files of features by key, each with its digest."""
        every = self.features.items()
        return {
            prefix + file.key: file.digest for prefix, records in every for file in records.files()
        }

    def _digests(self, rest: Mapping[str, bytes]) -> list[str]:
        """Return the keys of the digests that the signature covers."""
        signed = rest.get(fmt.SIGNED)
        listed = decode_list(signed)[1] if signed is not None else {}
        return [key for key in listed if key.startswith(fmt.DIGESTS)]

    def _beside(self, part: FinishedPart) -> dict[str, bytes]:
        ledger, table = part.ledger, part.table
        kinds = {fmt.PASS: "pass", fmt.MODEL: "model", fmt.SCALES: "scales", fmt.CHECK: "check"}
        found: dict[str, bytes] = {}
        for key, kind in {**table_records(table), **kinds}.items():
            try:
                found[key] = ledger.objects.get(key)
            except FileNotFoundError:
                continue  # not every dataset has scales or was checked; a pass has no table
            fmt.decode_record(key, found[key], kind)
        read_tokenizer(ledger.objects, table)  # (refuses damage)
        return found

    def dropped(self, files: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the records of dropped passes and features that the repository still holds."""
        held = {fmt.pass_prefix(name): fmt.PASS for name in pass_names(self._objects)}
        held |= {fmt.feature_prefix(name): fmt.FEATURE_SET for name in set_names(self._objects)}
        return {
            prefix + fmt.DROPPED: self._objects.get(prefix + fmt.DROPPED)
            for prefix, record in held.items()
            if prefix + record in files and exists(self._objects, prefix + fmt.DROPPED)
        }

    def checked(self, file: Shard, folder: str) -> Path:
        """Return a path to the file's content, checked against its record."""
        path = self._objects.local_path(file.key)
        if path is None:
            return _copied(file.key, CheckedFile(self._objects, file).pieces(), folder)
        CheckedFile(self._objects, file).check()
        return path

    def unlike(self, key: str, entry: Any, folder: str) -> Path | None:
        """Return a path to a file's content; None if the repository has the same content."""
        data = self._objects.get(key)
        digest = self._columns.get(key)
        if digest is not None and xxhash.xxh3_128_hexdigest(data) != digest:
            raise CorruptError(key, "checksum does not match (damaged)")
        if _same(entry, data):
            return None
        return self._objects.local_path(key) or _copied(key, [data], folder)


def _copied(key: str, pieces: Iterable[bytes | memoryview], folder: str) -> Path:
    """Write a file into a folder, since the client takes paths."""
    copy = Path(folder, key.replace("/", "-"))
    try:
        with copy.open("wb") as target:
            for piece in pieces:
                target.write(piece)
    except OSError as error:
        raise StoreError(f"{copy}: {error.strerror or error}; see TMPDIR") from error
    return copy


class _Repository:
    """A dataset repository. Temporary errors are retried, others reported in one line."""

    def __init__(self, hub: Any, repo: str, revision: str) -> None:
        self._hub, self._api = hub, hub.HfApi(library_name="spile")
        self.repo, self.revision = repo, revision
        self.endpoint: str = self._api.endpoint
        self._where: dict[str, Any] = {"repo_id": repo, "repo_type": "dataset"}
        options = "" if revision == "main" else f" --revision {shlex.quote(revision)}"
        name = PurePath(repo).name
        self.download = f"hf download {repo} --repo-type dataset --local-dir {name}{options}"

    def prepare(self, *, private: bool) -> None:
        """Create the repository and the branch if they do not exist."""
        api = self._api
        self._call(lambda: api.create_repo(**self._where, private=private or None, exist_ok=True))
        if private and not self._call(lambda: api.repo_info(**self._where)).private:
            raise ConfigError(
                f"{self.repo} is public, and --private was given; choose another repository"
            )
        if self.revision != "main":
            self._call(
                lambda: api.create_branch(**self._where, branch=self.revision, exist_ok=True)
            )

    def beside_units(self) -> tuple[dict[str, Any], list[str]]:
        """Return the files that belong to no unit, by path, and the folders of done records."""
        found: dict[str, Any] = {}
        done: list[str] = []
        waiting = [""]
        while waiting:
            files, folders = self.listed(waiting.pop())
            found |= files
            for folder in folders:
                inside = fmt.split_pass_key(f"{folder}/")[1]
                if inside == fmt.DONE:
                    done.append(folder)
                elif inside != fmt.ATTEMPTS:  # (which a record tells about)
                    waiting.append(folder)
        return found, sorted(done)

    def listed(self, folder: str) -> tuple[dict[str, Any], list[str]]:
        """Return the files in a folder by path, and its subfolders.

        A file's entry holds its git hash, and for a large file the hash of its content.
        """

        def entries() -> list[Any]:
            where = {**self._where, "path_in_repo": folder or None}
            return list(self._api.list_repo_tree(**where, revision=self.revision))

        files: dict[str, Any] = {}
        folders: list[str] = []
        for entry in self._call(entries):
            if isinstance(entry, self._hub.RepoFile):
                files[entry.path] = entry
            else:
                folders.append(entry.path)
        return files, folders

    def commit(self, files: Mapping[str, Path | bytes], message: str) -> None:
        def send() -> None:
            # New operations for each attempt: they remember the Hub's answers.
            operations = [
                self._hub.CommitOperationAdd(
                    path_in_repo=key, path_or_fileobj=data if isinstance(data, bytes) else str(data)
                )
                for key, data in files.items()
            ]
            self._api.create_commit(
                **self._where,
                operations=operations,
                commit_message=message,
                revision=self.revision,
            )

        self._call(send)
        _log.info("%s: %d files committed (%s)", self.repo, len(files), message)

    def _call(self, request: Callable[[], T]) -> T:
        for attempt in range(_TRIES):
            try:
                return request()
            except Exception as error:
                explained, passing = self._explain(error)
                if explained is None:
                    raise
                if not passing or attempt == _TRIES - 1:
                    raise explained from error
                time.sleep(backoff(attempt + 1, _FIRST_PAUSE, _LONGEST_PAUSE))
        raise AssertionError

    def _explain(self, error: Exception) -> tuple[SpileError | None, bool]:
        """Return an error in one line (None if it is not the Hub's), and whether to retry."""
        where = f"{self.endpoint}/datasets/{self.repo}"
        for cause in _causes(error):
            response = getattr(cause, "response", None)
            status = getattr(response, "status_code", None)
            if status in _ADVICE:
                return ConfigError(f"{where}: {_ADVICE[status]} (the Hub answered {status})"), False
            if status is not None:
                said = getattr(cause, "server_message", None) or ""
                line = " ".join(str(said).split())[:200]
                answer = f"{where}: the Hub answered {status}" + (f" ({line})" if line else "")
                passing = status == 429 or status >= 500
                return StoreError(f"{answer}; run the same command again"), passing
        for cause in _causes(error):
            if isinstance(cause, self._hub.errors.OfflineModeIsEnabled):
                return ConfigError(f"{where}: HF_HUB_OFFLINE is set; unset it to push"), False
            if isinstance(cause, self._hub.errors.HFValidationError):
                return ConfigError(f"{self.repo!r} is not owner/name of a repository"), False
            network = type(cause).__module__.partition(".")[0] in _NETWORK
            if network or isinstance(cause, ConnectionError | TimeoutError):
                said = " ".join(str(cause).split())[:200]
                return StoreError(f"{where}: cannot reach the Hub ({said})"), True
        return None, False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes: the client wraps errors of its threads."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _batches(missing: Iterable[_Unit]) -> Iterator[list[_Unit]]:
    """Group units into commits; each has at least one unit, however large."""
    batch: list[_Unit] = []
    count = size = 0
    for unit in missing:
        files, more = len(unit.files) + 1, sum(file.bytes for file in unit.files)
        if batch and (count + files > COMMIT_FILES or size + more > COMMIT_BYTES):
            yield batch
            batch, count, size = [], 0, 0
        batch.append(unit)
        count, size = count + files, size + more
    if batch:
        yield batch


class _UnitsThere:
    """The units that the repository has. Raises if one belongs to another dataset."""

    def __init__(self, source: _Source, there: _Repository, folders: Iterable[str]) -> None:
        """`folders`: the folders of done records."""
        self._source, self._repo = source, there.repo
        self._found = [np.zeros(len(part.table.units), np.bool_) for part in source.parts]
        self.files = 0  # of these units
        places = {part.prefix: number for number, part in enumerate(source.parts)}
        for folder in folders:
            place = places.get(fmt.split_pass_key(f"{folder}/")[0])
            if place is not None:
                for group in sorted(there.listed(folder)[1]):
                    self._compare(place, there.listed(group)[0])

    def _compare(self, place: int, files: Mapping[str, Any]) -> None:
        part, found = self._source.parts[place], self._found[place]
        numbers = {key: fmt.parse_done_key(fmt.split_pass_key(key)[1]) for key in sorted(files)}
        records = {key: number for key, number in numbers.items() if number is not None}
        ours = {
            key: number
            for key, number in records.items()
            if number < len(found) and key == part.prefix + part.table.layout.done_key(number)
        }
        for unit in self._source.units(part, ours.values()):
            if not _same(files[unit.key], unit.record):
                raise _other_dataset_error(self._repo, unit.key)
            found[unit.number] = True
            self.files += len(unit.files) + 1
        if len(ours) < len(records):
            raise _other_dataset_error(self._repo, min(records.keys() - ours.keys()))

    def missing(self) -> Iterator[_Unit]:
        """Yield the units that the repository does not have."""
        for part, found in zip(self._source.parts, self._found, strict=True):
            yield from self._source.units(part, map(int, np.flatnonzero(~found)))


def _refuse_other(
    files: Mapping[str, Any], source: _Source, rest: Mapping[str, bytes], repo: str
) -> None:
    """Refuse a repository that holds another dataset's table, or another pass."""
    ours = [part.prefix + key for part in source.parts for key in (fmt.UNITS, fmt.PASS)]
    ours += [prefix + fmt.FEATURE_SET for prefix in source.features]
    for key in ours:
        if key in files and not (key in rest and _same(files[key], rest[key])):
            raise _other_dataset_error(repo, key)


def _other_dataset_error(repo: str, key: str) -> ConfigError:
    return ConfigError(
        f"{repo} holds another dataset ({key} differs); choose another repository or another "
        "--revision"
    )


def _same(entry: Any, data: bytes) -> bool:
    """Return whether a file of the repository has this content, by its hash."""
    if entry is None:
        return False
    if entry.lfs is not None:
        return entry.lfs.sha256 == hashlib.sha256(data).hexdigest()
    return entry.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
