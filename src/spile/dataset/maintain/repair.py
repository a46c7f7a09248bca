"""Repair: a damaged unit is made again, and its new record replaces the old one.

It is made like any unit: files under an attempt of its own, durable, then a record. Only the commit
differs (`Repair`): the manifest, which names the old files, is moved aside, then the old
record, then the new one is created. A kill before that leaves the old record; a kill between the
two leaves a missing unit. In both cases the same command continues. No file is removed: those of
the old attempt become orphans, which `gc` deletes.

`gc` deletes other attempts at a unit that is done, since none of them can be committed. During a
repair one can. Therefore each record that will be replaced is first copied into `damaged/`, and
`gc` spares the attempts at a unit whose record has such a copy.

A repair never changes the data: the new unit must have the index that the old record, or the
segment, gives.
"""

import contextlib
import hashlib
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spile.core.errors import CorruptError, SpileError, StoreError
from spile.dataset import format as fmt
from spile.dataset.codec.columns import ColumnFile, column_file, columns_in
from spile.dataset.format import Done, KeyLayout
from spile.dataset.maintain.copy import COPIED, copy_check, copy_records
from spile.dataset.maintain.finished import open_finished
from spile.dataset.maintain.verify import Report
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import Pass
from spile.dataset.records.segments import Segment
from spile.dataset.records.table import Table
from spile.objects import Objects, exists

_log = logging.getLogger("spile.dataset")

# If these were made again, rows could become wrong: they must come from a copy.
_CANNOT_BE_MADE = {
    fmt.SCALES: "holds the scales that every int8 row was divided by; take it from a copy of the "
    "dataset, or extract it again",
}


@dataclass
class Repaired:
    """The units and records that were made again."""

    units: list[int] = field(default_factory=list[int])
    identical: list[int] = field(default_factory=list[int])  # with the very same rows
    records: list[str] = field(default_factory=list[str])  # beside the units
    restored: list[str] = field(default_factory=list[str])  # files of the tokenizer
    passes: "dict[str, Repaired]" = field(default_factory=dict[str, "Repaired"])  # by name


class Repair:
    """Replaces records of a dataset, or of a pass, through its ledger; those units are not done."""

    def __init__(self, report: Report, ledger: Ledger) -> None:
        self.ledger, self.objects, self.layout = ledger, ledger.objects, ledger.layout
        self.table = ledger.table()
        self.condemned = dict(report.damaged)
        self.unsound = {*report.damaged, *report.missing}
        self.beside = list(report.beside)
        self.repaired = Repaired()
        self._expected = self._described(sorted(self.unsound))
        self._marks: dict[int, str] = {}  # copies of records that will be replaced
        ledger.repair = self

    def refuse_impossible(self) -> None:
        """Refuse a repair that is impossible, before anything is changed."""
        for key, why in _CANNOT_BE_MADE.items():
            if key in self.beside:
                raise StoreError(f"{self.objects.url}/{key}: cannot be repaired; it {why}")

    @property
    def tokenizer(self) -> dict[str, ColumnFile]:
        """The tokenizer's files that are damaged or missing, by name."""
        files = self.table.tokenizer
        return {name: file for name, file in files.items() if file.key in self.beside}

    def restore_tokenizer(self, place: str, files: Mapping[str, bytes]) -> None:
        """Put back damaged and missing files of the tokenizer.

        Args:
            place: where `files` were found.
            files: a tokenizer's, by name.

        Raises:
            StoreError: if they are not the same files; then nothing is changed.
        """
        damaged = self.tokenizer
        for name, file in damaged.items():
            if name not in files or column_file(file.key, files[name]) != file:
                raise StoreError(
                    f"{self.objects.url}/{file.key}: cannot be repaired; {place} does not have the "
                    f"same {name}; name a model that has it with --model, or take the file from a "
                    "copy of the dataset"
                )
        for name, file in damaged.items():
            self.objects.delete(file.key)
            self.objects.create(file.key, files[name])
            self.beside.remove(file.key)
            self.repaired.restored.append(file.key)

    @property
    def units(self) -> list[int]:
        """The units to make."""
        done = self.ledger.done_units()
        return [unit for unit in range(len(self.table.units)) if unit not in done]

    def condemn(self) -> None:
        """Mark for `gc` the records to be replaced, before any file of their units is written."""
        for unit in sorted(self.condemned):
            key = self.layout.done_key(unit)
            self._marks[unit] = f"{fmt.DAMAGED}{secrets.token_hex(6)}/{key}"
            with contextlib.suppress(OSError):  # `gc` deletes nothing if it cannot read a record
                self.objects.create(self._marks[unit], self.objects.get(key))

    def pardon(self) -> None:
        """Remove the marks of `condemn` from units that were not made after all."""
        for unit in self.condemned.keys() & self._marks.keys():
            self.objects.delete(self._marks.pop(unit))

    # -- what its ledger asks ----------------------------------------------------------------------

    def before_weights(self, digests: Mapping[str, str]) -> None:
        """Move damaged hashes of the weights aside: the ledger records new ones.

        Raises:
            StoreError: if the dataset's units were made from other weights.
        """
        if fmt.MODEL in self.beside:
            for unit in sorted(self.ledger.done_units())[:1]:
                done = self.ledger.read_done(unit)
                if done and done.made_from != self.ledger.made_from(self.table, unit, digests):
                    raise StoreError(
                        f"{self.objects.url}/{fmt.MODEL}: cannot be repaired; unit {unit} was made "
                        "from other weights than these; name the model that it was made with by "
                        "--model"
                    )
            self._set_aside(fmt.MODEL)
            self.beside.remove(fmt.MODEL)
            self.repaired.records.append(fmt.MODEL)

    def before_commit(self, done: Done) -> None:
        """Move aside the record that a new one replaces, and everything derived from it.

        Raises:
            StoreError: if the unit is not the same as before; then nothing is changed.
        """
        known = self._expected.get(done.unit)
        if known is not None:
            self._compare(done, known)
        self._set_derived_aside(done.unit)
        if done.unit in self.condemned:
            self._withdraw(done.unit)

    def after_commit(self, done: Done, committed: bool) -> None:
        self.condemned.pop(done.unit, None)
        if committed:
            self.repaired.units.append(done.unit)
            known = self._expected.get(done.unit)
            if known is not None and _rows(done) == _rows(known):
                self.repaired.identical.append(done.unit)

    def before_complete(self, table: Table) -> bool:
        """Move aside manifests that do not follow from the records, once every unit is done."""
        there = self.ledger.done_units()
        if fmt.MODEL in self.beside or not there.issuperset(range(len(table.units))):
            return False
        self.unsound.clear()
        self._check_manifests()
        return True

    # -- replacing records -----------------------------------------------------------------------

    def _set_derived_aside(self, unit: int) -> None:
        """Move aside what was derived from the record of a unit, before the record changes."""
        for layout in self._layouts_of(unit):
            self._set_aside(layout.manifest_key)
            self._set_aside(layout.segment_key(layout.group(unit)))

    def _layouts_of(self, unit: int) -> list[KeyLayout]:
        """Return the layouts of all generations that have a unit, the newest first."""
        every = reversed(self.table.every_generation())
        return [table.layout for table in every if unit < len(table.units)]

    def _withdraw(self, unit: int) -> None:
        """Move a damaged record aside; do nothing if it has been replaced since."""
        key, judged = self.layout.done_key(unit), self.condemned[unit]
        found = self._digest(key)
        if found != judged:
            if judged == "":
                raise StoreError(
                    f"{self.objects.url}/{key}: could not be read before, and can be now; run the "
                    "same command again"
                )
            return  # another repair came first: keep its record
        aside = self._set_aside(key)
        if aside and judged and self._digest(aside) != judged:  # it was replaced in between
            self.objects.create(key, self.objects.get(aside))
            self.objects.delete(aside)

    def _set_aside(self, key: str) -> str | None:
        aside = f"{fmt.DAMAGED}{secrets.token_hex(6)}/{key}"
        try:
            self.objects.move(key, aside)
        except FileNotFoundError:
            return None
        return aside

    def _digest(self, key: str) -> str | None:
        """Return the SHA-256 of a record; empty if it cannot be read, None if there is none."""
        try:
            return hashlib.sha256(self.objects.get(key)).hexdigest()
        except FileNotFoundError:
            return None
        except (CorruptError, OSError):
            return ""

    def withdraw(self) -> None:
        """Move all damaged records aside, so that the next extraction makes their units again."""
        for unit in sorted(self.condemned):
            self._set_derived_aside(unit)
            self._withdraw(unit)
            self.repaired.units.append(unit)
        self.condemned.clear()

    def set_aside_beside(self) -> None:
        """Move aside damaged records that no row depends on; they are made again, or never."""
        for key in [k for k in self.beside if k in (fmt.CHECK, fmt.PREDICTION)]:
            self._set_aside(key)
            self.beside.remove(key)
            self.repaired.records.append(key)
        for key in [k for k in self.beside if fmt.parse_done_key(k) is not None]:
            self._set_aside(key)  # of a unit that does not exist
            self.beside.remove(key)
            self.repaired.records.append(key)
        for key in [k for k in self.beside if fmt.parse_worker_key(k)]:
            self.objects.delete(key)  # as `gc` does
            self.beside.remove(key)

    def _check_manifests(self) -> None:
        """Set aside manifests, and segments, that do not follow from the done records."""
        keys = [fmt.manifest_key(number) for number in range(len(self.table.generations) + 1)]
        wrong = [key for key in self.beside if fmt.parse_segment_key(key) is not None]
        unfounded = {*keys}
        if not wrong:
            with contextlib.suppress(SpileError):  # (a record cannot be read)
                must_be_done = partial(self.ledger.must_be_done, self.table)
                unfounded = self.ledger.derived.unfounded(self.table, must_be_done)
        # They are created in order, so the later ones are made again with the first.
        first = next((n for n, key in enumerate(keys) if key in unfounded), len(keys))
        self.repaired.records += [key for key in keys[:first] if not exists(self.objects, key)]
        self.repaired.records += keys[first:]
        for key in reversed(keys[first:]):
            self._set_aside(key)
        for key in wrong:
            self._set_aside(key)
            self.beside.remove(key)

    def copy_beside(self, source: Objects) -> None:
        """Copy damaged records that a copy shares with its source from that source."""
        wanted = [key for key in self.beside if key in COPIED]
        for key in wanted:
            self._set_aside(key)
        _, records = open_finished(source, self.table.recipe.stored_taps)
        copy_check(source, self.objects)
        if not copy_records(source, records, self.objects):
            raise StoreError(f"{self.objects.url}: its records are not those of {source.url}")
        for key in wanted:
            self.beside.remove(key)
            self.repaired.records.append(key)

    # -- comparing with the old units --------------------------------------------------------------

    def _described(self, units: list[int]) -> dict[int, dict[str, Any]]:
        """Return the descriptions of units to make, from their records or segments.

        An interrupted repair may have moved those aside.
        """
        found: dict[int, dict[str, Any]] = {}
        if units:
            # (Done records first: what is derived does not say how a unit was made.)
            aside = sorted(self.objects.list(fmt.DAMAGED), key=lambda key: fmt.DONE not in key)
            layouts = [(unit, layout) for unit in units for layout in self._layouts_of(unit)]
            segments = {layout.segment_key(layout.group(unit)) for unit, layout in layouts}
            keys = [*map(self.layout.done_key, units), *sorted(segments), *aside]
            for told in (told for key in keys for told in self._told_by(key)):
                if told.get("unit") in units:
                    found.setdefault(told["unit"], told)
        return found

    def _told_by(self, key: str) -> list[dict[str, Any]]:
        """Return the units that a record describes; none if it is damaged or of another dataset."""
        original = fmt.parse_damaged_key(key) or key
        try:
            if fmt.parse_segment_key(original) is not None:
                columns = columns_in(key, self.objects.get(key))
                segment = Segment(key, columns, self.layout)
                # (About how a unit was made, it holds only the times.)
                found = [segment.done(at) for at in range(len(segment))]
                return [{**each.to_json(), "made_by": {}} for each in found if self._is_ours(each)]
            if fmt.parse_done_key(original) is None:
                return []
            body = fmt.decode_record(key, self.objects.get(key), "done")
            done = Done.from_json(original, body, self.layout)
            return [done.to_json()] if self._is_ours(done) else []
        except (SpileError, OSError, KeyError, TypeError):
            return []

    def _is_ours(self, done: Done) -> bool:
        known = done.unit < len(self.table.units)
        return known and self.ledger.other_origin(self.table, done) is None

    def _compare(self, done: Done, known: Mapping[str, Any]) -> None:
        """Refuse a unit that differs from the old one: packed differently, or from other texts."""
        names = ("rows", "tokens", "documents", "contexts", "text_digest")
        made = {**{name: getattr(done, name) for name in names}, "index": done.index.digest}
        was = {**{name: known[name] for name in names}, "index": known["index"]["digest"]}
        for name in made:
            if made[name] != was[name]:
                raise StoreError(
                    f"{self.objects.url}: unit {done.unit}, made again, is not the same "
                    f"({name} {fmt.shown(made[name])}, {fmt.shown(was[name])} before); "
                    "its old record stays"
                )

    def made_by(self) -> Mapping[str, Any]:
        """Return how the units to make were made; if unknown, how the others were."""
        for unit in self.units:
            if made := self._expected.get(unit, {}).get("made_by"):
                return made
        for unit in sorted(self.ledger.done_units()):
            if (done := self.ledger.read_done(unit)) is not None:
                return done.made_by
        return {}

    def compressed(self) -> bool:
        """Return whether the dataset's shards are compressed, judging by one unit."""
        for unit in (*self._expected, *sorted(self.ledger.done_units())):
            if unit in self._expected:
                keys = [shard["key"] for shard in self._expected[unit]["shards"]]
            else:
                done = self.ledger.read_done(unit)
                keys = [shard.key for shard in done.shards] if done else []
            if keys:
                return keys[0].endswith(fmt.COMPRESSED)
        return False


def drop_damaged(damaged: Pass) -> Repaired:
    """Drop a pass whose own record is damaged: nobody knows by which recipe its rows were made."""
    damaged.objects.move(fmt.PASS, f"{fmt.DAMAGED}{secrets.token_hex(6)}/{fmt.PASS}")
    damaged.drop()
    _log.warning(
        "%s was damaged, so its taps are dropped: add them again by --add-taps",
        damaged.prefix + fmt.PASS,
    )
    return Repaired(records=[fmt.PASS])


def _rows(unit: Done | Mapping[str, Any]) -> dict[tuple[str, int, int], str]:
    """Return the digests of a unit's shards; equal if the rows are, provided they are cut alike."""
    shards = unit.to_json()["shards"] if isinstance(unit, Done) else unit["shards"]
    return {(s["tap"], s["first"], s["count"]): s["digest"] for s in shards}
