"""A whole copy of a dataset: the same records and files, byte for byte, in another place.

Every byte is hashed as it passes and compared with the record that names its file, so damage is
never copied. The table and the generations that were read come first, so that every record in the
copy belongs to a table there; then the units of that table, each after its files; then what is
derived from them. Until all units are there, the copy is an unfinished dataset. The same command
continues an interrupted copy, or one of a dataset that has grown or lost taps since: files that are
there are not copied again.
"""

import hashlib
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import xxhash

from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.core.system import system
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.format import Done, Shard
from spile.dataset.maintain.copy import (
    FileCopier,
    UnitCopy,
    copy_units,
    refuse_nested,
    refuse_strangers,
)
from spile.dataset.maintain.features import copy_features
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.manifest import Manifest, manifest_of, named_by
from spile.dataset.records.passes import (
    Pass,
    named,
    pass_names,
    readable_passes,
    whole_generation,
)
from spile.dataset.records.table import Table
from spile.objects import Objects, check_creates_once, exists
from spile.objects.local import settle

_NAMED = re.compile(r"(?:.*/)?(?:units|manifest|tokenizer)/([0-9a-f]{32})(?:\.safetensors|/[^/]+)")
_SIGNED = re.compile(r"(?:.*/)?digests/\d{6}-([0-9a-f]{32})\.safetensors")
_REPLACED = (
    fmt.CHECK,
    fmt.PREDICTION,
    *fmt.SIGNATURES,
)  # rewritten by every check, and every signature
_BEFORE_UNITS = re.compile(
    r"(?:.*/)?(?:units\.json|pass\.json|model\.json|scales\.json|generations/\d{8}\.json"
    r"|units/[^/]+|tokenizer/.+)"
)
_SEGMENT = re.compile(r"(?:.*/)?segments/\d{6}\.safetensors")


@dataclass(frozen=True)
class Copied:
    """The result of a copy."""

    dest: str
    units: int  # in the copy now
    units_total: int  # in the table
    units_there: int  # in the copy before
    files: int  # copied, including records
    bytes: int  # copied


class _Count:
    """Counts of copied files, shared by several threads."""

    def __init__(self) -> None:
        self.units = self.there = self.files = self.bytes = 0
        self.seen = defaultdict[str, set[int]](set)  # units that are in the copy, by place
        self._lock = system().lock()

    def add(self, size: int) -> None:
        """Count one file."""
        with self._lock:
            self.files, self.bytes = self.files + 1, self.bytes + size


@dataclass
class _Beside:
    """The records and files of a dataset or pass that belong to no unit."""

    records: dict[str, bytes] = field(default_factory=dict[str, bytes])
    files: list[str] = field(default_factory=list[str])
    manifests: dict[str, Manifest] = field(default_factory=dict[str, Manifest])
    digests: dict[str, str] = field(default_factory=dict[str, str])  # digests of segments, by key

    @property
    def before_units(self) -> "_Beside":
        """What units are made from: tables, generations, tokenizer, hashes of weights, scales."""
        return self._part(_BEFORE_UNITS.fullmatch)

    @property
    def after_units(self) -> "_Beside":
        return self._part(lambda key: not _BEFORE_UNITS.fullmatch(key))

    def refuse_missing(self, copied: Collection[int]) -> None:
        """Refuse a manifest if a unit that it names was not copied: a repair has moved it aside."""
        for key, manifest in self.manifests.items():
            units = range(manifest.totals.units)
            missing = next((unit for unit in units if unit not in copied), None)
            if missing is not None:
                raise StoreError(
                    f"{key}: unit {missing}, which it names, was not there to be copied; a "
                    "repair may be at work: run the same command again after it"
                )

    def _part(self, wanted: Callable[[str], object]) -> "_Beside":
        records = {key: data for key, data in self.records.items() if wanted(key)}
        files = [key for key in self.files if wanted(key)]
        return _Beside(records, files, self.manifests, self.digests)


def replicate(
    source: Objects, dest: Objects, *, progress: Callable[[int, int], None] | None = None
) -> Copied:
    """Copy all finished units of a dataset, or those that an earlier copy lacks.

    Args:
        progress: called with the number of units so far, and in all.
    """
    refuse_nested(source, dest)
    own = Ledger(source)
    table = own.table()
    begun = _refuse_other(dest, fmt.UNITS, source.get(fmt.UNITS))
    if not begun:
        refuse_strangers(dest, [fmt.SCRATCH])
        Ledger(dest).refuse_strays(0, fmt.UNITS)
    check_creates_once(dest)
    count, copier = _Count(), FileCopier(dest)
    dropped, places = _passes(own)
    # (What the destination has dropped stays dropped, and what it has left of it does not matter.)
    places = [each for each in places if not exists(dest, each.prefix + fmt.DROPPED)]
    # Read these before the units: a manifest that is written later may name units not copied.
    beside = {ledger.prefix: _beside_of(source, ledger, table) for ledger in places}
    copied = Ledger(dest)
    for number, made in enumerate(table.generations, 1):
        copied.refuse_strays(made.before, fmt.generation_key(number))
    live = [ledger.of_pass for ledger in places if ledger.of_pass]
    _refuse_same_taps(copied, table, live, beside, dropped)
    _refuse_hiding(copied, table, live, beside, dropped)
    # Compare all that is there before the first write: a copy that is refused changes nothing.
    known = {
        key
        for ledger in (places if begun else ())
        for key in _there(source, dest, ledger, table, beside[ledger.prefix].before_units.records)
    }
    # The table and its generations first: if the destination has just grown by other documents, the
    # copy ends here, before it has dropped or added a tap there.
    _copy_beside(source, dest, own, beside[own.prefix].before_units, count)
    for key in dropped:
        _create(dest, key, source.get(key), count)
    for ledger in places[1:]:
        _copy_beside(source, dest, ledger, beside[ledger.prefix].before_units, count)
    _refuse_same_taps(copied, table, live, beside, dropped)  # (another process may have begun one)
    started = [each for each in places if _had_begun(each, table, beside[each.prefix])]
    groups = [(each, group) for each in started for group in _groups(source, each.prefix)]
    units = (
        unit
        for ledger, group in groups
        for unit in _units(source, dest, copier, count, ledger, group, table, known)
    )
    for was_there in copy_units(units, source, dest):
        count.units, count.there = count.units + 1, count.there + was_there
        if progress:
            progress(count.units, len(table.units) * len(places))
    for ledger in places:
        beside[ledger.prefix].refuse_missing(count.seen[ledger.prefix])
    _refuse_hiding(copied, table, live, beside, dropped)  # (it may have grown)
    there = count.units if len(places) == 1 else len(Ledger(dest).done_units())
    for ledger in reversed(places):
        _copy_beside(source, dest, ledger, beside[ledger.prefix].after_units, count)
    copy_features(own, dest, count.add)
    copier.clean()
    return Copied(
        dest=dest.url,
        units=there,
        units_total=len(table.units),
        units_there=count.there,
        files=count.files,
        bytes=count.bytes,
    )


# -- the source ------------------------------------------------------------------------------


def _passes(own: Ledger) -> tuple[list[str], list[Ledger]]:
    """Return the records of dropped passes, and the ledgers of the dataset and its other passes."""
    every = [Pass(own, name) for name in pass_names(own.objects)]
    dropped = [each.prefix + fmt.DROPPED for each in every if each.is_dropped]
    live = [each.ledger for each in every if exists(each.objects, fmt.PASS) and not each.is_dropped]
    return dropped, [own, *live]


def _refuse_same_taps(
    copied: Ledger,
    table: Table,
    live: Sequence[Pass],
    beside: Mapping[str, _Beside],
    dropped: Collection[str],
) -> None:
    """Refuse a copy whose taps the destination has in another pass than the source.

    The source may have the same pass, only begun: then both have taps that readers get.

    Args:
        beside: by the prefix of each pass, what its folder holds beside the units.
        dropped: the records of passes that the source has dropped; the copy drops them, too.
    """
    gone = {key.removesuffix(fmt.DROPPED) for key in dropped}
    known = {each.prefix for each in live} | gone
    mine = [(each, own.taps.keys()) for each in live if (own := each.table_over(table))]
    for other, found in readable_passes(copied, table):
        if other.prefix in gone:
            continue
        is_whole = bool(other.ledger.derived.manifest_keys())
        for each, taps in mine:
            clashes = other.prefix not in known or (is_whole and beside[each.prefix].manifests)
            if other.prefix != each.prefix and clashes and (both := taps & found.taps.keys()):
                raise ConfigError(
                    f"{copied.url} has {min(both)} from another pass ({other.name}); drop it there "
                    f"by `spile drop {copied.url} --taps {other.name}`, then copy again"
                )


def _refuse_hiding(
    copied: Ledger,
    source: Table,
    live: Sequence[Pass],
    beside: Mapping[str, _Beside],
    dropped: Collection[str],
) -> None:
    """Refuse taps that lack documents which readers of the destination get: those would be hidden.

    Documents that are being added to the destination alone count, too: their last unit may be done
    before the manifest of the taps is copied.

    Args:
        beside: by the prefix of each pass, what its folder holds beside the units.
        dropped: the records of passes that the copy drops; readers get more documents without them.
    """
    newest = copied.read_table()
    if newest is None or not newest.generations:
        return
    there = (each for each, _ in readable_passes(copied, newest))
    passes = [each for each in there if each.prefix + fmt.DROPPED not in dropped]
    table, manifest = whole_generation(copied, newest, passes)
    opened = len(table.generations) if manifest else 0
    if len(newest.generations) > len(source.generations):
        opened = len(newest.generations)
    for each in live:
        manifests = beside[each.prefix].manifests
        through = [fmt.parse_generation(key[len(each.prefix) :]) for key in manifests]
        copy = Pass(copied, each.name).ledger
        if through and max(through) < opened and not copy.derived.manifest_keys():
            taps = ",".join(each.ledger.table().recipe.taps)
            raise ConfigError(
                f"{copied.url} has documents that {taps} of {each.dataset.url} lack, and readers "
                f"would lose those; add the same documents to {each.dataset.url} and finish "
                f"--add-taps there, or add the taps to {copied.url} itself"
            )


def _had_begun(ledger: Ledger, base: Table, beside: _Beside) -> bool:
    """Return whether units may have been done when the records beside them were read.

    The hashes of the weights, and scales, are recorded before the first unit is. If they were not
    there, the units that are there now are left for the next copy, which finds both.
    """
    table = _table_of(ledger, base)
    scaled = table and any(info.scaled_by == "channel" for info in table.taps.values())
    wanted = [fmt.MODEL, fmt.SCALES] if scaled else [fmt.MODEL]
    there = all(ledger.prefix + name in beside.records for name in wanted)
    return there or bool(beside.manifests)  # (of a whole dataset they are damaged)


def _groups(source: Objects, place: str) -> list[str]:
    """Return the folders that hold the done records of a place."""
    names = sorted(source.folders(place + fmt.DONE))
    return [f"{place}{fmt.DONE}{name}/" for name in names]


def _beside_of(source: Objects, ledger: Ledger, table: Table) -> _Beside:
    """Read and check the records beside the units of a table, and list the files."""
    found, place = _Beside(), ledger.prefix
    keys = [place + name for name in fmt.RECORDS]
    folders = [place + folder for folder in fmt.DERIVED]
    for listed in mapped(lambda folder: list(source.list(folder)), folders, source.parallel):
        for key in listed:
            generation = fmt.parse_generation(key[len(place) :])
            if source.leftover_of(key) is None and generation <= len(table.generations):
                (
                    keys if key.endswith(".json") and fmt.TOKENIZER not in key else found.files
                ).append(key)

    def read(key: str) -> bytes | None:
        try:
            return source.get(key)
        except FileNotFoundError:
            return None

    for key, data in zip(keys, mapped(read, keys, source.parallel), strict=True):
        if data is None:
            continue
        found.records[key] = data
        if not key.endswith(fmt.SIGNATURES):  # (only their ssh key can check these)
            body = fmt.check_record(key, data)
            if key.endswith(fmt.MANIFEST):
                generation = fmt.parse_generation(key[len(place) :])
                with named(ledger.of_pass.name) if ledger.of_pass else nullcontext():
                    found.manifests[key] = manifest_of(body, table.at(generation).layout)
                for segment in found.manifests[key].segments:
                    found.digests[place + segment.file.key] = segment.file.digest
    # Leave out segments that no manifest names yet: they are derived from the done records. Add
    # files that were created, with their manifest, after the listing.
    named_there = {place + key for each in found.manifests.values() for key in named_by(each)}
    listed = {key for key in found.files if not _SEGMENT.fullmatch(key)}
    found.files = sorted(listed | named_there)
    return found


# -- units -----------------------------------------------------------------------------------


def _there(
    source: Objects, dest: Objects, ledger: Ledger, base: Table, records: Mapping[str, bytes]
) -> Iterator[str]:
    """Yield the keys of the units that the copy has; refuse one whose units or records differ.

    Args:
        base: the dataset's table that was read.
        records: those beside the units, which are not replaced.
    """
    parallel = max(source.parallel, dest.parallel)
    refuse = partial(_refuse_other, dest)
    deque(mapped(lambda record: refuse(*record), records.items(), parallel), maxlen=0)
    for group in _groups(dest, ledger.prefix):
        keys = sorted({*dest.list(group)}.intersection(_keys(source, ledger, group, base)))
        sizes, table = _sizes(dest, ledger, group), _table_of(ledger, base)

        def compare(
            key: str, sizes: Mapping[str, int] = sizes, table: Table | None = table
        ) -> None:
            data, files = _read(source, ledger, table, key)
            refuse(key, data)
            missing = next((file for file in files if sizes.get(file.key) != file.bytes), None)
            if missing is not None:
                raise CorruptError(
                    missing.key, f"is missing in {dest.url}, or cut short, though its unit was "
                    f"copied; `spile verify {dest.url} --repair` makes it again, or remove "
                    f"{dest.url} and copy again",
                )  # fmt: skip

        deque(mapped(compare, keys, parallel), maxlen=0)
        yield from keys


def _units(
    source: Objects,
    dest: Objects,
    copier: FileCopier,
    count: _Count,
    ledger: Ledger,
    group: str,
    base: Table,
    known: Collection[str],
) -> Iterator[UnitCopy[bool]]:
    """Yield the units of a group with their missing files; each returns whether it was there.

    Args:
        base: the dataset's table that was read; units that were added since are left out.
        known: units that were there.
    """
    place, table = ledger.prefix, _table_of(ledger, base)
    keys = _keys(source, ledger, group, base)
    sizes = _sizes(dest, ledger, group)

    def read(key: str) -> tuple[str, tuple[bytes, list[Shard]] | None]:
        return key, None if key in known else _read(source, ledger, table, key)

    def copy(file: Shard) -> Shard:
        copied = copier.copy(source, file, file.key)
        count.add(copied.bytes)
        return copied

    def note(key: str) -> None:
        count.seen[place].add(fmt.parse_done_key(key[len(place) :]) or 0)

    def was_there(key: str, _: Sequence[Shard]) -> bool:
        note(key)
        return True

    def finish(key: str, data: bytes, files: Sequence[Shard], _: Sequence[Shard]) -> bool:
        note(key)
        settle(dest, *(file.key for file in files))
        _create(dest, key, data, count)
        return False

    for key, found in mapped(read, keys, max(source.parallel, dest.parallel)):
        if found is None:
            yield UnitCopy([], partial(was_there, key))
            continue
        data, files = found
        missing = [file for file in files if sizes.get(file.key) != file.bytes]
        yield UnitCopy([partial(copy, file) for file in missing], partial(finish, key, data, files))


def _keys(source: Objects, ledger: Ledger, group: str, base: Table) -> list[str]:
    """Return the keys of a group's done records that belong to units of a table."""
    names = ((key, fmt.parse_done_key(key[len(ledger.prefix) :])) for key in source.list(group))
    return sorted(key for key, unit in names if unit is not None and unit < len(base.units))


def _sizes(dest: Objects, ledger: Ledger, group: str) -> dict[str, int]:
    """Return the sizes of the files of a group's units."""
    attempts = ledger.prefix + fmt.ATTEMPTS + group[len(ledger.prefix + fmt.DONE) :]
    return {entry.key: entry.size for entry in dest.entries(attempts)}


def _table_of(ledger: Ledger, base: Table) -> Table | None:
    return base if ledger.of_pass is None else ledger.of_pass.table_over(base)


def _read(
    source: Objects, ledger: Ledger, table: Table | None, key: str
) -> tuple[bytes, list[Shard]]:
    """Return a done record and the files that it names; refuse one of another unit."""
    data = source.get(key)
    done = Done.from_json(key, fmt.decode_record(key, data, "done"))
    if table is not None and (why := ledger.other_origin(table, done)):
        raise CorruptError(key, why)
    return data, [replace(file, key=ledger.prefix + file.key) for file in done.files()]


# -- the rest ----------------------------------------------------------------------------------


def _copy_beside(
    source: Objects, dest: Objects, ledger: Ledger, beside: _Beside, count: _Count
) -> None:
    """Copy files first, then the records that name them, in the order in which they are made."""
    place = ledger.prefix
    parallel = max(source.parallel, dest.parallel)

    def copy(key: str) -> None:
        data = source.get(key)
        _check_file(key, data, beside.digests.get(key))
        _create(dest, key, data, count)

    def write(key: str) -> None:
        if key.endswith(_REPLACED) and exists(dest, key) and dest.get(key) != beside.records[key]:
            dest.delete(key)
        _create(dest, key, beside.records[key], count)

    deque(mapped(copy, beside.files, parallel), maxlen=0)
    # The table before its generations, those by number; manifests and signatures after the rest.
    first = [place + name for name in (fmt.UNITS, fmt.PASS)]
    numbers = {key: fmt.parse_generation(key[len(place) :]) for key in sorted(beside.records)}
    manifests = sorted((k for k in numbers if k.endswith(fmt.MANIFEST)), key=numbers.__getitem__)
    generations = [key for key, n in numbers.items() if n and key not in manifests]
    if ledger.of_pass:
        # With only an earlier manifest of new taps, readers would lose the documents since then.
        manifests = [*manifests[-1:], *manifests[:-1]]
    last = [*manifests, *(place + name for name in fmt.SIGNATURES)]
    ordered = [*first, *generations, *last]
    deque(mapped(write, [key for key in beside.records if key not in ordered], parallel), maxlen=0)
    for key in ordered:
        if key in beside.records:
            write(key)


def _check_file(key: str, data: bytes, digest: str | None) -> None:
    """Compare a file with the digest in its key, or in the record that names it."""
    named, signed = _NAMED.fullmatch(key), _SIGNED.fullmatch(key)
    if named is not None or digest is not None:
        sound = xxhash.xxh3_128_hexdigest(data) == (digest or (named and named[1]))
    else:
        sound = signed is not None and hashlib.sha256(data).hexdigest().startswith(signed[1])
    if not sound:
        raise CorruptError(key, "checksum does not match (damaged, or another file in its place)")


def _create(dest: Objects, key: str, data: bytes, count: _Count) -> None:
    if dest.create(key, data):
        count.add(len(data))
    else:
        _refuse_other(dest, key, data)


def _refuse_other(dest: Objects, key: str, data: bytes) -> bool:
    """Refuse a place that holds another object under a key; return whether it holds this one."""
    try:
        same = dest.get(key) == data
    except FileNotFoundError:
        return False
    if not same:
        raise ConfigError(
            f"{dest.url} holds another dataset, or an older state of this one ({key} differs); "
            "choose an empty place"
        )
    return True
