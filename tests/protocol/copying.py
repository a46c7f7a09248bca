"""Operations that make a place from others, for the model of combinations: whole copies, merges."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from protocol.operations import (
    BEGIN,
    CHANGED,
    DAMAGED_SOURCE,
    FILES_GONE,
    HIDING,
    MISSING,
    NO_GENERATION,
    NO_TABLE,
    OTHER_DATASET,
    OTHER_PASS,
    OTHER_RECORD,
    TWO_PARTS,
    At,
    Step,
    World,
    creates,
    exits,
    looks_for_records,
    manifest_of,
    promised,
    refused,
)
from protocol.places import TABLE, WHOLE, Done, Key, Rules, Store, Table, belongs

FUNCTIONS = (
    "spile.dataset.maintain.replica:replicate",
    "spile.dataset.maintain.replica:_refuse_hiding",
    "spile.dataset.maintain.assemble:merge",
    "spile.dataset.maintain.assemble:copy_part",
    "spile.dataset.maintain.copy:FileCopier.copy",
    "spile.dataset.maintain.copy:NewDataset.units_there",
    "spile.dataset.maintain.copy:NewDataset.ours",
    "spile.dataset.maintain.copy:NewDataset.finish",
    "spile.dataset.maintain.finished:open_finished",
)

Item = tuple[Any, ...]


class _Left(NamedTuple):
    """What a whole copy has to do yet."""

    # ("compare",), ("put", key, value), ("look", *passes), ("hide", *manifests of passes),
    # ("units", folder), or ("unit", folder, number)
    plan: tuple[Item, ...]
    drops: tuple[str, ...]  # passes that were dropped in the source when it was read
    strays: bool  # whether there were records and no table
    known: frozenset[tuple[str, int]] = frozenset()  # units that are there


@dataclass(frozen=True)
class Copy:
    """`spile copy SOURCE DEST`: a whole copy, or more of one."""

    source: str
    place: str

    @property
    def name(self) -> str:
        return f"copy {self.source} {self.place}"

    def step(self, world: World, at: At) -> Iterator[Step]:
        source, store = world.stores[self.source], world.stores[self.place]
        match at.step:
            case "begin":
                if source.table is None:
                    return
                if store.get(TABLE, source[TABLE]) != source[TABLE]:
                    yield refused(OTHER_DATASET)
                    return
                look = world.rules.tables_look_first
                step = "list" if look else "beside"
                yield Step("reads the table", At(step, source.table, kept=(TABLE in store, False)))
            case "list":
                known = len(store.table.rows) if store.table else 0
                found = looks_for_records(store, known, at._replace(step="beside"))
                yield found._replace(at=found.at._replace(kept=(at.kept[0], found.at.kept)))
            case "beside":
                drops = tuple(sorted(key[0] for key in source if key[1] == "dropped"))
                begun, strays = at.kept
                plan = _plan(world.rules, source, at.table, drops, begun)
                left = _Left(plan, drops, strays)
                yield Step("reads what is beside the units", At("next", at.table, kept=left))
            case "next" if at.kept.plan:
                yield self._next(world, at)
            case "next":
                yield exits(_broken(store, at))
            case "file":
                yield self._file(world, at)
            case "record":
                yield self._record(store, at)
            case _:
                raise AssertionError(at.step)

    def _next(self, world: World, at: At) -> Step:
        source, left, table = world.stores[self.source], at.kept, at.table
        (kind, *what), rest = left.plan[0], left._replace(plan=left.plan[1:])
        if kind == "put":
            return self._put(world, at, *what)
        if kind == "compare":
            return self._compare(world, at)
        if kind == "look":
            if {*world.stores[self.place].live_passes} - {*what}:
                return refused(OTHER_PASS)
            return Step("finds no other pass with its tap", at._replace(kept=rest))
        if kind == "hide":
            if self._hides(world.stores[self.place], at, what):
                return refused(HIDING)
            return Step("finds that its taps lack no documents", at._replace(kept=rest))
        if kind == "units":  # a listing
            limit = len(table.rows) if world.rules.copies_known_units else None
            found = [unit for unit in source.done_in(what[0]) if limit is None or unit < limit]
            plan = (*(("unit", what[0], unit) for unit in found), *rest.plan)
            return Step(f"lists {len(found)} units", at._replace(kept=rest._replace(plan=plan)))
        folder, unit = what
        if (folder, unit) in left.known:
            return Step(f"comes to unit {unit}, which is there", at._replace(kept=rest))
        done = source.get((folder, "done", unit))
        if done is None:
            return Step(f"finds unit {unit} gone", at._replace(kept=rest))
        wanted = table._replace(recipe=folder[:-1]) if folder else table
        if world.rules.copies_compare and not belongs(wanted, unit, done, compares=True):
            return refused(OTHER_RECORD)
        step = "file" if world.files and not folder else "record"
        after = At(step, table, unit, None, (done, folder, rest))
        return Step(f"reads the record of unit {unit}", after)

    def _hides(self, store: Store, at: At, manifests: list[Key]) -> bool:
        """`_refuse_hiding`: whether taps lack documents that the copy has, or is being given."""
        there, through = store.table, dict[str, int]()
        if there is None or not there.generations:
            return False
        for name, _, number in manifests:
            through[name] = max(number, through.get(name, 0))
        kept = [each for each in store.live_passes if each not in at.kept.drops]
        opened = store.generation_with(kept) or 0
        if there.newest > at.table.newest:
            opened = there.newest
        return any(
            number < opened and not any(key[:2] == (name, "manifest") for key in store)
            for name, number in through.items()
        )

    def _compare(self, world: World, at: At) -> Step:
        """`_there`: all units that are there already, before the first write."""
        source, store = world.stores[self.source], world.stores[self.place]
        known = set[tuple[str, int]]()
        put = [item[1] for item in at.kept.plan if item[0] == "put"]
        if at.kept.strays and any(key[1] == "generation" and key not in store for key in put):
            return refused(NO_GENERATION)
        for folder in ("", *source.live_passes):
            there = store.done_in(folder)
            for unit, done in source.done_in(folder).items():
                if unit >= len(at.table.rows) or unit not in there:
                    continue
                if there[unit] != done:
                    return refused(OTHER_DATASET)
                lost = ("", "file", unit, done.attempt) not in store
                if world.files and not folder and lost:
                    return refused(FILES_GONE)
                known.add((folder, unit))
        left = at.kept._replace(plan=at.kept.plan[1:], known=frozenset(known))
        return Step(f"finds {len(known)} units there", at._replace(kept=left))

    def _put(self, world: World, at: At, key: Key, value: Any) -> Step:
        source, store = world.stores[self.source], world.stores[self.place]
        if key[1] == "manifest" and source.get(key) != value:  # by the digests of its segments
            return refused(CHANGED)
        if key[1] == "manifest" and world.rules.copies_whole_manifests:
            there = store.done_in(key[0])
            if any(there.get(unit) != done for unit, done in enumerate(value.dones)):
                return refused(CHANGED)
        if key[1] in ("table", "generation") and key not in store and at.kept.strays:
            return refused(NO_TABLE if key == TABLE else NO_GENERATION)
        if store.get(key, value) != value:
            return refused(OTHER_DATASET)
        after = at._replace(kept=at.kept._replace(plan=at.kept.plan[1:]))
        what = " ".join(map(str, filter(None, key)))
        return creates(what, after, store, (self.place, key, value))

    def _file(self, world: World, at: At) -> Step:
        source, store = world.stores[self.source], world.stores[self.place]
        key = ("", "file", at.unit, at.kept[0].attempt)
        if key in store:  # (judging by its size)
            return Step("finds its files there", at._replace(step="record"))
        if source.get(key) != WHOLE:
            return refused(DAMAGED_SOURCE)
        return Step("copies its files", at._replace(step="record"), (self.place, key, WHOLE))

    def _record(self, store: Store, at: At) -> Step:
        done, folder, rest = at.kept
        key = (folder, "done", at.unit)
        if store.get(key, done) != done:
            return refused(OTHER_DATASET)
        after = At("next", at.table, kept=rest)
        return creates(f"the record of unit {at.unit}", after, store, (self.place, key, done))


def _plan(
    rules: Rules, source: Store, table: Table, drops: tuple[str, ...], begun_there: bool
) -> tuple[Item, ...]:
    """`_passes`, `_beside_of`: what to copy, in order."""

    def those(*keys: Key) -> list[Item]:
        return [("put", key, source[key]) for key in keys if key in source]

    folders, numbers = ("", *source.live_passes), range(table.newest + 1)
    dropped = those(*((each, "dropped") for each in drops)) if rules.copies_drops else []
    begun = those(*((each, "pass") for each in source.live_passes))
    first = list[Item]()
    if begun and rules.copies_compare_passes:
        # (Those that it is about to drop are no others.)
        gone = drops if rules.copies_drops and rules.copies_drops_first else ()
        looks = ("look", *source.live_passes, *gone)
        first, begun = [looks], [*begun, looks]
    begun = [*dropped, *begun] if rules.copies_drops_first else begun
    last = [] if rules.copies_drops_first else dropped
    generations = those(*(("", "generation", number) for number in numbers))
    units = [("units", folder) for folder in folders]
    # Those of passes first.
    manifests = list[Item]()
    for each in reversed(folders):
        own = those(*((each, "manifest", n) for n in numbers))
        manifests += [*own[-1:], *own[:-1]] if each and rules.passes_newest_first else own
    if rules.copies_hide_nothing and (of_passes := [item[1] for item in manifests if item[1][0]]):
        hide = ("hide", *of_passes)
        first, manifests = [*first, hide], [hide, *manifests]
    if begun_there and rules.copies_table_first:
        first = [*first, ("compare",)]
    if rules.copies_table_first:
        return (*first, *those(TABLE), *generations, *begun, *units, *manifests, *last)
    return (*first, *units, *begun, *generations, *manifests, *those(TABLE), *last)


def _broken(store: Store, at: At) -> str | None:
    """Return what exit 0 promises and is not so: the state that was read, and nothing else."""
    there, read = store.table, at.table
    if there is None or there.rows[: len(read.rows)] != read.rows:
        return "a copy has the table that was read"
    if store.has_other_rows():
        return "a copy has the rows that its table names"
    for number in range(read.newest + 1):
        if ("", "manifest", number) in store and not store.follows(there, number):
            return "a copy has every unit that its manifest names"
    if {*store.live_passes} & {*at.kept.drops}:
        return "a copy has only taps that are live in its source"
    return None


@dataclass(frozen=True)
class Merge:
    """`spile merge SOURCES DEST`; of one source `spile copy --units`."""

    sources: tuple[str, ...]
    place: str
    units: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        verb = "merge" if self.units is None else f"copy units {self.units} of"
        return f"{verb} {' '.join((*self.sources, self.place))}"

    def step(self, world: World, at: At) -> Iterator[Step]:
        store, table = world.stores[self.place], at.table
        if at.step == BEGIN:
            yield from self._begin(world)
            return
        match at.step:
            case "unit" if at.unit == len(table.rows):
                yield Step("has come to the end", at._replace(step="manifest"))
            case "unit":
                yield self._unit(world, at)
            case "check":
                if ("", "file", at.unit, at.kept[at.unit][0].attempt) in store:
                    yield Step("its files are there", at._replace(step="commit"))
                else:
                    yield refused(FILES_GONE)
            case "commit":
                made, key = at.kept[at.unit][0], ("", "done", at.unit)
                if store.get(key, made) != made:  # NewDataset.ours
                    yield refused(OTHER_DATASET)
                    return
                after = at._replace(step="unit", unit=at.unit + 1)
                what = f"the record of unit {at.unit}"
                yield creates(what, after, store, (self.place, key, made))
            case "manifest":
                yield self._seal(world, at)
            case "table":
                if store.get(TABLE, table) != table:
                    yield refused(OTHER_DATASET)
                    return
                write = (self.place, TABLE, table)
                yield creates("the table", at._replace(step="last"), store, write)
            case "last":
                yield exits(promised(store, table))
            case _:
                raise AssertionError(at.step)

    def _begin(self, world: World) -> Iterator[Step]:
        """`open_finished` of each source, `_refuse_different`, `NewDataset.units_there`."""
        store, parts = world.stores[self.place], [world.stores[each] for each in self.sources]
        tables = [
            source.table
            for source in parts
            if source.table and source.table.newest in source.sealed
        ]
        if len(tables) < len(parts):  # one is not finished
            return
        files = [{*table.files} for table in tables]
        compared = len(files) if world.rules.merges_compare_every_pair else 1
        if any(files[n] & other for n in range(compared) for other in files[n + 1 :]):
            yield refused(TWO_PARTS)
            return
        recipe, shift = "".join(table.files for table in tables), 0
        made = list[tuple[Done, str, Key]]()
        for name, source, table in zip(self.sources, parts, tables, strict=True):
            for unit in self.units or range(len(table.rows)):
                done = source["", "manifest", table.newest].dones[unit]
                if source.done.get(unit) != done:
                    yield refused(DAMAGED_SOURCE)
                    return
                if not belongs(table, unit, done, world.rules.merges_compare):
                    yield refused(OTHER_RECORD)
                    return
                moved = done.attempt._replace(row=_moved(done.attempt.row, shift))
                row = _moved(table.rows[unit], shift)
                made.append((Done(recipe, row, moved), name, ("", "file", unit, done.attempt)))
            shift += len(table.files)
        new = Table(recipe, tuple(done.row for done, _, _ in made))
        if store.get(TABLE, new) != new or any(unit >= len(made) for unit in store.done):
            yield refused(OTHER_DATASET)
        else:
            yield Step("reads its sources", At("unit", new, 0, kept=tuple(made)))

    def _unit(self, world: World, at: At) -> Step:
        store, unit = world.stores[self.place], at.unit
        made, source, original = at.kept[unit]
        key = ("", "file", unit, made.attempt)
        if not world.files or unit in store.done:
            return Step(f"comes to unit {unit}", at._replace(step="commit"))
        if key in store:
            return Step(f"unit {unit}: finds its files there", at._replace(step="check"))
        if world.stores[source].get(original) != WHOLE:
            return refused(DAMAGED_SOURCE)
        after = at._replace(step="check")
        return Step(f"unit {unit}: copies its files", after, (self.place, key, WHOLE))

    def _seal(self, world: World, at: At) -> Step:
        """NewDataset.finish: Ledger.complete, before there is a table."""
        store, table, compares = world.stores[self.place], at.table, world.rules.seals_compare
        if store.lacks(table):
            return refused(MISSING)
        dones = tuple(store.done[unit] for unit in range(len(table.rows)))
        if not all(belongs(table, unit, done, compares) for unit, done in enumerate(dones)):
            return refused(OTHER_RECORD)
        write = (self.place, ("", "manifest", 0), manifest_of(table, 0, dones))
        return creates("the manifest", at._replace(step="table"), store, write)


def _moved(row: str, shift: int) -> str:
    """Return a row whose documents have other numbers."""
    return f"{row[:-1]}{int(row[-1]) + shift}"
