"""Operations on what is there, for the model of combinations: taps, repairs, gc."""

from collections.abc import Iterator
from dataclasses import dataclass

from protocol.operations import (
    BEGIN,
    DAMAGE,
    DROPPED,
    FILES_GONE,
    GROWING,
    MISSING,
    OTHER_RECORD,
    TAP_THERE,
    At,
    Step,
    World,
    commits,
    creates,
    creates_manifest,
    exits,
    manifest_of,
    reads_records,
    refused,
    writes,
)
from protocol.places import Attempt, Done, Store, Table

_NUMBERS = 2  # passes of a kind, one after the other: as many as are looked at

FUNCTIONS = (
    "spile.plan.passes:opened_for",
    "spile.dataset.records.passes:Pass.create_table",
    "spile.dataset.records.passes:Pass.refuse",
    "spile.dataset.records.passes:Pass.is_behind",
    "spile.dataset.records.passes:Pass.lacks_generation",
    "spile.dataset.records.passes:drop_taps",
    "spile.dataset.maintain.verify:verify",
    "spile.dataset.maintain.repair:Repair.condemn",
    "spile.dataset.maintain.repair:Repair.before_commit",
    "spile.dataset.maintain.repair:Repair.before_complete",
    "spile.dataset.maintain.gc:collect_garbage",
)


# -- taps ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drop:
    """`spile drop`, of the passes of a kind."""

    place: str
    kind: str

    @property
    def name(self) -> str:
        return f"drop {self.kind} of {self.place}"

    def step(self, world: World, at: At) -> Iterator[Step]:
        for name in world.stores[self.place].live_passes:
            if name.startswith(self.kind):
                write = (self.place, (name, "dropped"), True)
                yield Step(f"drops {name}", At(), write)


@dataclass(frozen=True)
class AddTaps:
    """`spile extract --add-taps`. All kinds have one tap, in different dtypes."""

    place: str
    kind: str

    @property
    def name(self) -> str:
        return f"add {self.kind} to {self.place}"

    def step(self, world: World, at: At) -> Iterator[Step]:
        store, table, name = world.stores[self.place], at.table, at.kept
        others = [other for other in store.live_passes if other != name]
        match at.step:
            case "begin":
                yield from self._begin(store)
            case "present" if others:
                yield refused(TAP_THERE)
            case "present":
                yield Step("finds no other with its tap", at._replace(step="create"))
            case "create":
                after = at._replace(step="others", unit=int((name, "pass") not in store))
                write = (self.place, (name, "pass"), self.kind)
                yield creates(name, after, store, write)
            case "others" if others and at.unit:  # it has created the record itself
                write = (self.place, (name, "dropped"), True)
                yield refused(TAP_THERE)._replace(said="gives way", write=write)
            case "others" if others:
                yield refused(TAP_THERE)
            case "others":
                yield Step("finds no other with its tap", At("look", table, kept=name))
            case "look":
                missing = store.lacks(table, name)
                if not missing:
                    yield Step("finds every unit done", At("seal", table, kept=name))
                elif (name, "dropped") in store:
                    yield refused(DROPPED)
                else:
                    said, after = f"takes unit {missing[0]}", at._replace(step="commit")
                    yield Step(said, after._replace(unit=missing[0]))
            case "commit":
                yield self._commit(store, at)
            case "seal" | "first":
                yield self._seal(world, store, at)
            case _:
                raise AssertionError(at.step)

    def _begin(self, store: Store) -> Iterator[Step]:
        table = store.table
        if table is None or ("", "manifest", table.newest) not in store:
            return
        names = [f"{self.kind}{number}" for number in range(_NUMBERS)]
        free = [name for name in names if (name, "dropped") not in store]
        if free:
            yield Step(f"will add {free[0]}", At("present", table, kept=free[0]))

    def _commit(self, store: Store, at: At) -> Step:
        row, base = at.table.rows[at.unit], store.done.get(at.unit)
        if base is None or base.attempt.row != row:
            return refused(OTHER_RECORD)
        write = (self.place, (at.kept, "done", at.unit), Done(self.kind, row, Attempt(row)))
        after = At("look", at.table, kept=at.kept)
        return creates(f"the record of unit {at.unit}", after, store, write)

    def _seal(self, world: World, store: Store, at: At) -> Step:
        table, name, newest = at.table, at.kept, store.table
        assert newest is not None
        rules, unsealed = world.rules, store.unsealed(table, name)
        new = {0, table.newest} <= {*unsealed}
        if new and at.step == "seal" and rules.passes_look_again:
            if newest == table:
                return Step("finds no later generation", at._replace(step="first"))
        elif unsealed:
            number = table.newest if new and rules.passes_newest_first else unsealed[0]
            dones = tuple(store.done_in(name).values())[: table.ends[number]]
            made = manifest_of(table._replace(recipe=self.kind), number, dones)
            write = (self.place, (name, "manifest", number), made)
            after = at._replace(step="seal")
            return creates(f"its manifest {number}", after, store, write)
        if newest == table or not rules.passes_look_again:
            return exits(self._broken(store, newest, name))
        if ("", "manifest", newest.newest) not in store:
            return refused(GROWING)
        return Step("finds that the dataset has grown", At("look", newest, kept=name))

    def _broken(self, store: Store, table: Table, name: str) -> str | None:
        """Return what exit 0 promises and is not so: that readers get the taps of every unit."""
        whole = max(n for n in range(table.newest + 1) if ("", "manifest", n) in store)
        kept = (name, "dropped") in store or (name, "manifest", whole) in store
        return None if kept else "exit 0 implies the taps of every unit"


# -- repairs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repair:
    """`spile verify --repair`."""

    place: str

    @property
    def name(self) -> str:
        return f"repair {self.place}"

    def step(self, world: World, at: At) -> Iterator[Step]:
        store = world.stores[self.place]
        if at.step == BEGIN:
            yield from self._begin(store)
            return
        match at.step:
            case "condemn":
                left = [each for each in at.kept if ("", "mark", *each) not in store]
                if left:
                    write = (self.place, ("", "mark", *left[0]), True)
                    yield Step(f"marks unit {left[0][0]} for gc", at, write)
                else:
                    yield Step("has marked them", at._replace(step="take"))
            case "take":
                yield self._take(world, at)
            case "write":
                yield writes(world, self.place, at, "check")
            case "check":
                if ("", "file", at.unit, at.attempt) in store:
                    yield Step("its files are there", at._replace(step="aside"))
                elif at.unit in store.done:
                    yield Step("its files are gone, a record is there", self._on(at))
                else:
                    yield refused(FILES_GONE)
            case "aside":
                yield self._set_derived_aside(store, at)
            case "withdraw":
                yield self._withdraw(store, at)
            case "commit":
                yield commits(world, self.place, at, self._on(at))
            case "complete":
                yield self._complete(world, at)
            case "manifest":
                yield creates_manifest(world, self.place, at, "complete")
            case _:
                raise AssertionError(at.step)

    def _begin(self, store: Store) -> Iterator[Step]:
        if store.table is None:
            return
        damaged = tuple(store.damaged.items())
        if store.is_sound:
            yield exits()
        elif damaged:
            after = At("condemn", store.table, kept=damaged)
            yield Step(f"finds {len(damaged)} units damaged", after)
        else:
            yield Step("finds units or manifests missing", At("take", store.table))

    def _on(self, at: At) -> At:
        """Leave a unit."""
        return At("take", at.table, kept=tuple(each for each in at.kept if each[0] != at.unit))

    def _take(self, world: World, at: At) -> Step:
        store, table = world.stores[self.place], at.table
        condemned = [unit for unit, _ in at.kept]
        units = sorted({*condemned, *store.lacks(table)})
        if not units:
            return Step("has made every unit", At("complete", table))
        made = world.files and units[0] < len(table.rows)  # (else its record is only moved aside)
        after = at._replace(step="write" if made else "aside", unit=units[0])
        return Step(f"takes unit {units[0]}", after)

    def _set_derived_aside(self, store: Store, at: At) -> Step:
        """`_set_derived_aside`: the manifests that name a unit, the newest first."""
        numbers = [n for n, end in enumerate(at.table.ends) if at.unit < end]
        found = [n for n in reversed(numbers) if ("", "manifest", n) in store]
        if not found:
            return Step("no manifest names it", at._replace(step="withdraw"))
        write = (self.place, ("", "manifest", found[0]), None)
        return Step(f"moves manifest {found[0]} aside", at, write)

    def _withdraw(self, store: Store, at: At) -> Step:
        """`_withdraw`: the record that was judged, and no other."""
        judged = dict(at.kept).get(at.unit)
        is_there = judged is not None and store.done.get(at.unit) == judged
        write = (self.place, ("", "done", at.unit), None) if is_there else None
        said = "moves its record aside" if is_there else "leaves the record that is there, if any"
        stray = at.unit >= len(at.table.rows)
        return Step(said, self._on(at) if stray else at._replace(step="commit"), write)

    def _complete(self, world: World, at: At) -> Step:
        """`before_complete`, `Ledger.complete`, and `verify` once more."""
        store, table = world.stores[self.place], at.table
        if store.lacks(table):
            return refused(MISSING)
        for number in range(table.newest + 1):
            key = ("", "manifest", number)
            if key in store and not store.follows(table, number):
                said = f"moves manifest {number} aside, which does not follow"
                return Step(said, at, (self.place, key, None))
        if store.unsealed(table):
            return reads_records(world, self.place, at)
        return exits() if store.is_sound else refused(DAMAGE)


# -- gc --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CollectGarbage:
    """`spile gc`, again and again."""

    place: str

    @property
    def name(self) -> str:
        return f"gc {self.place}"

    def step(self, world: World, at: At) -> Iterator[Step]:
        store = world.stores[self.place]
        match at.step:
            case "begin" if store.table is not None:  # without one it is refused
                # Readers open what a manifest names, even if a unit was made again since.
                spared = frozenset(store.named_files("manifest"))
                yield Step("reads the manifests", At("list", kept=spared))
            case "list":
                found = frozenset(key for key in store if key[1] == "file") - at.kept
                yield Step(f"lists {len(found)} files more", At("marks", kept=found))
            case "marks":
                # _condemned: units whose record is missing, or has not been replaced.
                marks = [key[2:] for key in store if key[1] == "mark"]
                condemned = {unit for unit, done in marks if store.done.get(unit, done) == done}
                left = frozenset(key for key in at.kept if key[2] not in condemned)
                yield Step("reads what repairs have marked", At("records", kept=left))
            case "records":
                named = store.named_files("done")
                doomed = {key for key in at.kept if key[2] in store.done and key not in named}
                dropped = {key[0] for key in store if key[1] == "dropped"}
                doomed |= {key for key in store if key[0] in dropped and key[1] != "dropped"}
                yield Step("reads the records", At("remove", kept=frozenset(doomed)))
            case "remove":
                for key in at.kept:
                    after = At("remove", kept=at.kept - {key})
                    write = (self.place, key, None)
                    yield Step(f"removes {key[1]} {key[0] or key[2]}", after, write)
                if not at.kept:
                    yield Step("ends", At())
            case _:
                return
