"""The places of a program: simulated buckets, and what is found in them.

Everything is looked at twice: by the plain reader (`support/plain_reader.py`), whose every row is
compared with the corpus, and by `spile.open`, which must read the same.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from simulator import documents
from simulator.contents import Content, found_in
from simulator.documents import Doc, Rules, TapRule
from simulator.store import Bucket
from spile.core.errors import CorruptError, SpileError
from spile.core.index import INDEX_DTYPE
from spile.core.system import System, using
from spile.dataset.maintain.verify import Report, verify
from spile.dataset.read.opening import open_dataset
from spile.objects import MemoryObjects
from support.plain_reader import Invalid, PageReader

HOST = "s3://simulated/"
_DAMAGED: Mapping[str, Callable[[str], bool]] = {
    "shard": lambda key: "attempts/" in key and key.endswith("00000.safetensors"),
    "index": lambda key: "attempts/" in key and key.endswith("index.safetensors"),
    "record": lambda key: "done/" in key,
    "segment": lambda key: "segments/" in key,
    "manifest": lambda key: key.endswith("manifest.json"),
    "pass": lambda key: key.endswith("pass.json"),
}
_true: set[Any] = set()  # units that were compared with the corpus, by the digests of their files

Same = Callable[[np.ndarray, tuple[Doc, ...], Rules, TapRule], bool]
Read = tuple[np.ndarray, dict[TapRule, np.ndarray]]


class Violation(AssertionError):
    """Something that must never be so. Its first word says of what kind."""


class _Now(System):
    """A system without threads, for looks at what is there."""

    def pool(self, threads: int, name: str = "") -> Any:
        return _NowPool()


class _NowPool:
    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, *_: object, **__: object) -> None:
        pass


class Places:
    """Buckets by name, each of which may hold a dataset."""

    def __init__(self, names: Sequence[str], grows: Path) -> None:
        """`grows`: the directory that gains files."""
        self.buckets = {name: Bucket(page=200) for name in names}
        self.looking = False  # whether stores are opened to be looked at, without requests
        self._grows = grows
        self._seen: dict[str, Mapping[str, Any]] = {name: {} for name in names}
        self._shown: dict[str, tuple[Doc, ...]] = dict.fromkeys(names, ())

    @contextmanager
    def look(self) -> Generator[None, None, None]:
        with using(_Now()):
            self.looking = True
            try:
                yield
            finally:
                self.looking = False

    def held(self, place: str) -> MemoryObjects:
        held = MemoryObjects(HOST + place)
        for key, (data, _) in self.buckets[place].objects.items():
            held.create(key, data)
        return held

    def has_changed(self, place: str) -> bool:
        objects = self.buckets[place].objects
        beside = ("workers/", "probes/")
        seen = {key: held for key, held in objects.items() if not key.startswith(beside)}
        changed = seen != self._seen[place]
        self._seen[place] = seen
        return changed

    def reader(self, place: str) -> PageReader | None:
        objects = {key: data for key, (data, _) in self.buckets[place].objects.items()}
        if "units.json" not in objects:
            return None
        try:
            return PageReader(objects)
        except Invalid as error:
            raise self._wrong(place, f"format: {place}: {error}") from error

    def is_wreck(self, place: str) -> bool:
        """Whether a place holds records of another dataset beside those of its own."""
        try:
            self.reader(place)
        except Violation as error:
            if "verify calls it sound" in str(error):
                raise
            return True
        with self.look():
            try:
                read(place)
            except CorruptError:
                return not self.audit(place, partial=True).ok
            except SpileError:
                return False
        return False

    def _wrong(self, place: str, why: str) -> Violation:
        """What is wrong at a place, and whether `spile verify` sees it."""
        try:
            sound = self.audit(place, partial=True).ok
        except SpileError:
            sound = False
        return Violation(f"{why}{'; and verify calls it sound' if sound else ''}")

    def found(self, place: str) -> Content | None:
        return found_in(self.reader(place), self._grows)

    def note_shown(self, place: str) -> None:
        """Documents that can be read now must stay readable."""
        content = self.found(place)
        docs = content.readable[0] if content else ()
        if docs[: len(self._shown[place])] != self._shown[place]:
            raise self._wrong(
                place,
                f"hidden: {place} had {len(self._shown[place])} readable documents, and now "
                f"{len(docs)}: {told(content)}",
            )
        self._shown[place] = docs

    def look_at(self, place: str, content: Content | None) -> None:
        """Compare all that a place contains with the corpus, and with what Spile reads."""
        reader = self.reader(place)
        if reader is None or content is None:
            return
        try:
            check(place, reader, content)
        except Violation as error:
            raise self._wrong(place, str(error)) from error
        self.note_shown(place)
        opened = -1 if reader.opened is None else reader.opened
        if opened != content.opened and not (opened == -1 and content.opened == 0):
            raise Violation(f"format: {place} opens at {opened}, not {content.opened}")
        docs, _ = content.readable
        with self.look():
            try:
                found = read(place)
            except SpileError as error:
                if docs:
                    raise Violation(f"open: {place}: {type(error).__name__}: {error}") from error
                return
        if not reads(found, content) or (reader.units and not _same_order(reader, found[0])):
            raise Violation(f"open: {place} reads otherwise than {told(content)}")

    def audit(self, place: str, *, partial: bool) -> Report:
        """What `spile verify` says."""
        with self.look():
            return verify(self.held(place), partial=partial)

    def damage(self, place: str, damage: str, seed: int) -> str | None:
        """Damage an object, of a kind and in a way, that the dataset there consists of."""
        held = self.buckets[place]
        kind, _, how = damage.partition(" ")
        reader = self.reader(place)
        assert reader
        named = {
            each.prefix + file["key"]
            for each in (reader, *reader.live)
            for record in each.done(range(len(reader.unit_rows))).values()
            for file in (*record["shards"], record["index"])
        }
        dropped = [key.removesuffix("dropped.json") for key in held.objects if "dropped" in key]
        keys = [
            key
            for key in sorted(held.objects)
            if _DAMAGED[kind](key)
            and (key in named or "attempts/" not in key)
            and "damaged/" not in key
            and not key.startswith(tuple(dropped))
        ]
        if not keys:
            return None
        key = keys[seed % len(keys)]
        data = held.objects[key][0]
        held.delete(key)
        if how == "flipped":
            at = len(data) - 1 - seed % min(len(data), 200)
            held.put(key, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], create=True)
        elif how == "cut":
            held.put(key, data[: len(data) // 2], create=True)
        return key


def _exactly(found: np.ndarray, docs: tuple[Doc, ...], rules: Rules, tap: TapRule) -> bool:
    """Whether rows are those that the stand-in for a model makes."""
    return np.array_equal(found.astype(np.float32), documents.rows_of(docs, rules, tap))


def check(place: str, reader: PageReader, content: Content, same: Same = _exactly) -> None:
    """Compare every row with the document, the tap and the recipe that are named for it.

    Args:
        same: whether rows, by document and in reading order, are those of some documents.

    Raises:
        Violation: if any is another's, or a document or a tap is there twice.
    """
    places = Counter((doc.file, doc.place) for doc in content.docs())
    double = [f"{file}{at}" for (file, at), count in places.items() if count > 1]
    if double or len({*content.files}) < len(content.files):
        raise Violation(
            f"twice: {place} has {len(content.docs())} documents, {len(places)} different: "
            f"{' '.join(double[:5])} of files {' '.join(content.files)}"
        )
    readable = [each for each in reader.live if each.has_manifest(content.opened)]
    names = [tap for each in (reader, *readable) for tap in each.table["taps"]]
    if len({*names}) < len(names):
        taps = ", ".join(sorted(tap for tap, n in Counter(names).items() if n > 1))
        raise Violation(f"taps: {place} has {taps} twice")
    units = content.units
    try:
        for part in (reader, *reader.live):
            done = part.done(range(len(units)))
            if not content.shuffled:
                for unit, record in done.items():
                    _check_rows(part, [record], content, units[unit], same)
            elif len(done) == len(units):  # (a part of a shuffle says nothing of its documents)
                _check_rows(part, [*done.values()], content, content.docs(), same)
    except Invalid as error:
        raise Violation(f"truth: {place}: {error}") from error


def _check_rows(
    part: PageReader, records: Sequence[Mapping[str, Any]], content: Content,
    docs: tuple[Doc, ...], same: Same,
) -> None:  # fmt: skip
    """Check that the rows of some units are those of some documents."""
    compute = part.table["recipe"]["compute_dtype"]
    rules = {n: TapRule(n, t["dtype"], compute) for n, t in part.table["taps"].items()}
    files = [file["digest"] for record in records for file in record["shards"]]
    files += [record["index"]["digest"] for record in records]
    known = (same, tuple(files), content.rules, docs, tuple(sorted(rules.values())))
    for record in records:  # (files that are known may have been damaged)
        for file in (record["index"], record["documents_table"], *record["shards"]):
            part.data(file)
    if known in _true:
        return
    where = f"{part.prefix}unit {records[0]['unit']}"
    columns = [part.unit_index(record) for record in records]
    index = np.empty(sum(len(each["doc"]) for each in columns), INDEX_DTYPE)
    for name in index.dtype.names or ():
        index[name] = np.concatenate([each[name] for each in columns])
    order = np.lexsort((index["offset"], index["doc"]))
    if index[order].tobytes() != documents.index_of(docs, content.rules.where).tobytes():
        raise Invalid(f"{where}: its index is not that of its documents {_short(docs)}")
    for name, rule in rules.items():
        rows = np.concatenate([part.unit_values(record, name) for record in records])
        if not same(rows[order], docs, content.rules, rule):
            raise Invalid(f"{where}: rows of {name} are not those of {_short(docs)}")
    named = [doc for record in records for doc in part.unit_documents(record, "doc")]
    if sorted(named) != sorted(doc.ordinal for doc in docs):
        raise Invalid(f"{where}: its documents file names others")
    _true.add(known)


def read(place: str) -> Read:
    """All that `spile.open` gives."""
    dataset = open_dataset(HOST + place)
    count = dataset.num_tokens
    rows = {
        TapRule(tap, dataset.stored_dtype(tap), dataset.recipe_of(tap).compute_dtype):
        np.asarray(dataset.read(tap, 0, count, dtype="stored"))
        for tap in dataset.taps
    }  # fmt: skip
    return dataset.index(0, count), rows


def reads(found: Read, content: Content) -> bool:
    """Whether what was read is what a dataset contains."""
    index, rows = found
    docs, taps = content.readable
    order = np.lexsort((index["offset"], index["doc"]))
    wanted = documents.index_of(docs, content.rules.where)
    return (
        {*rows} == taps
        and index[order].tobytes() == wanted.tobytes()
        and all(
            np.array_equal(
                values[order].astype(np.float32), documents.rows_of(docs, content.rules, tap)
            )
            for tap, values in rows.items()
        )
    )


def _same_order(reader: PageReader, index: np.ndarray) -> bool:
    """Whether the plain reader reads the same rows in the same order."""
    columns = reader.index()
    return all(np.array_equal(columns[name], index[name]) for name in columns)


def told(content: Content | None) -> str:
    return content.told() if content else "nothing"


def _short(docs: Sequence[Any]) -> str:
    return " ".join(f"{doc.ordinal}={doc.file}{doc.place}" for doc in docs)
