"""Operations on datasets, for the model of combinations: what all share, and those that make rows.

An operation yields the steps that are possible where it stands. A step reads what it needs and
writes at most once, and other operations may come between any two steps. `model.py` looks at how a
unit is committed, with all the answers that may be lost; here that takes three steps: its files, a
look at them, and its record.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from protocol.places import (
    TABLE,
    WHOLE,
    Attempt,
    Done,
    Generation,
    Key,
    Manifest,
    Rules,
    Store,
    Table,
    belongs,
)

BEGIN = "begin"  # it is not running: it has not begun, was killed, or has come to its end

# Why an operation ends with an error.
OTHER_DATASET = "there is another dataset"
NO_TABLE = "there are records and no table"
NO_GENERATION = "there are records and no generation"
OTHER_GROWTH = "other documents were added meanwhile"
OTHER_RECORD = "a record is of something else"
MISSING = "units are missing"
FILES_GONE = "files are gone"
DAMAGED_SOURCE = "the source is damaged"
CHANGED = "the source has changed"
TWO_PARTS = "two parts have one file"
TAP_THERE = "the tap is there"
OTHER_PASS = "another pass there has the tap"
HIDING = "taps lack documents that are there"
DROPPED = "its taps were dropped"
GROWING = "the dataset is growing"
DAMAGE = "there is damage"

FUNCTIONS = (
    "spile.run.extract:extract",
    "spile.run.extract:outcome_of",
    "spile.plan.resolve:resolve",
    "spile.plan.resolve:store_table",
    "spile.plan.growth:Growth.grown",
    "spile.plan.growth:refuse_other_growth",
    "spile.dataset.records.table:create_table",
    "spile.dataset.records.generations:create_generation",
    "spile.dataset.records.ledger:Ledger.commit",
    "spile.dataset.records.ledger:Ledger.seal",
    "spile.dataset.records.ledger:Ledger.complete",
    "spile.dataset.read.opening:open_dataset",
)

Write = tuple[str, Key, Any]  # a place, a key, and its value; None removes it


class At(NamedTuple):
    """Where a process stands, and what it remembers."""

    step: str = BEGIN
    table: Table = Table("", ())  # as it has read it
    unit: int = -1
    attempt: Attempt | None = None
    kept: Any = ()


class Step(NamedTuple):
    """One thing that a process may do."""

    said: str
    at: At
    write: Write | None = None
    refused: str | None = None  # it ends with an error, which says this
    broken: str | None = None  # what exit 0 promises, and is not so


class World(NamedTuple):
    """What an operation sees."""

    stores: Mapping[str, Store]
    rules: Rules
    files: bool  # whether files are written apart from records
    used: frozenset[Attempt]  # what anything refers to

    def attempt(self, row: str) -> Attempt:
        """Return an attempt of a name that nobody uses."""
        numbers = itertools.count()
        return next(a for number in numbers if (a := Attempt(row, number)) not in self.used)


class Operation(Protocol):
    @property
    def place(self) -> str: ...

    @property
    def name(self) -> str: ...

    def step(self, world: World, at: At) -> Iterator[Step]:
        """Yield the steps that are possible; none while it cannot begin."""
        ...


def refused(why: str) -> Step:
    return Step(f"ends: {why}", At(), refused=why)


def exits(broken: str | None = None) -> Step:
    return Step("exits 0", At(), broken=broken)


def creates(what: str, at: At, store: Store, write: Write) -> Step:
    """A request that creates an object; whoever finds it there goes on as if it had."""
    is_there = write[1] in store
    return Step(f"{'finds' if is_there else 'creates'} {what}", at, None if is_there else write)


def looks_for_records(store: Store, first: int, at: At) -> Step:
    """`Ledger.refuse_strays`: are there records of units from `first` on?"""
    found = any(unit >= first for unit in store.done)
    said = f"lists: {'records are' if found else 'no record is'} there"
    return Step(said, at._replace(kept=found))


def promised(store: Store, table: Table) -> str | None:
    """Return what exit 0 promises and is not so: that readers get the rows of a table."""
    there = store.table
    manifest: Manifest | None = store.get(("", "manifest", table.newest))
    kept = there is not None and there.rows[: len(table.rows)] == table.rows
    rows = tuple(done.attempt.row for done in manifest.dones) if manifest else ()
    kept = kept and rows == table.rows
    return None if kept else "exit 0 implies the rows of the table"


# -- the units of a dataset ------------------------------------------------------------------------


def does_units(world: World, place: str, at: At) -> Iterator[Step]:
    """Extraction.extract: do the units of a table, and create the manifests."""
    store, table = world.stores[place], at.table
    match at.step:
        case "look":
            missing = store.lacks(table)
            if not missing:
                yield Step("finds every unit done", At("seal", table))
            for unit in missing:
                step = "write" if world.files else "commit"
                yield Step(f"takes unit {unit}", At(step, table, unit))
        case "write":
            yield writes(world, place, at, "check")
        case "check":
            if ("", "file", at.unit, at.attempt) in store:
                yield Step("its files are there", at._replace(step="commit"))
            elif at.unit in store.done:
                yield Step("its files are gone, a record is there", At("look", table))
            else:
                yield refused(FILES_GONE)
        case "commit":
            yield commits(world, place, at, At("look", table))
        case "seal" | "manifest":
            yield from seals(world, place, at)
        case _:
            raise AssertionError(at.step)


def writes(world: World, place: str, at: At, then: str) -> Step:
    """UnitWriter: the files of a unit, under an attempt of its own."""
    attempt = world.attempt(at.table.rows[at.unit])
    after = at._replace(step=then, attempt=attempt)
    write = (place, ("", "file", at.unit, attempt), WHOLE)
    return Step(f"unit {at.unit}: its files are durable", after, write)


def commits(world: World, place: str, at: At, then: At) -> Step:
    """Ledger.commit: create the record of a unit, or compare the one that came first."""
    row, there = at.table.rows[at.unit], world.stores[place].done.get(at.unit)
    if there is None:
        made = Done(at.table.recipe, row, at.attempt or Attempt(row))
        write = (place, ("", "done", at.unit), made)
        return Step(f"creates the record of unit {at.unit}", then, write)
    if not belongs(at.table, at.unit, there, world.rules.adopts_compare):
        return refused(OTHER_RECORD)
    return Step("finds that another attempt came first", then)


def seals(world: World, place: str, at: At) -> Iterator[Step]:
    """Ledger.complete: the manifests that a table lacks, one after the other; then exit 0."""
    store, table = world.stores[place], at.table
    if at.step == "manifest":
        yield creates_manifest(world, place, at, "seal")
        return
    if ("", "manifest", table.newest) in store:
        belonging = store.belongs(table, table.newest)
        yield exits(promised(store, table)) if belonging else refused(OTHER_RECORD)
    elif store.lacks(table):
        yield refused(MISSING)
    else:
        yield reads_records(world, place, at)


def reads_records(world: World, place: str, at: At) -> Step:
    """Ledger.seal: the records of the first generation that has no manifest."""
    store, table, compares = world.stores[place], at.table, world.rules.seals_compare
    number = store.unsealed(table)[0]
    dones = tuple(store.done[unit] for unit in range(table.ends[number]))
    if all(belongs(table, unit, done, compares) for unit, done in enumerate(dones)):
        return Step("reads the records", At("manifest", table, number, kept=dones))
    return refused(OTHER_RECORD)


def creates_manifest(world: World, place: str, at: At, then: str) -> Step:
    """Ledger.complete: the manifest that follows from the records that it has read."""
    made = manifest_of(at.table, at.unit, at.kept)
    write = (place, ("", "manifest", at.unit), made)
    return creates(f"manifest {at.unit}", At(then, at.table), world.stores[place], write)


def manifest_of(table: Table, number: int, dones: tuple[Done, ...]) -> Manifest:
    return Manifest(table.recipe, table.rows[: table.ends[number]], dones)


# -- extract ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extract:
    """`spile extract`, of a corpus that is cut into `rows`."""

    place: str
    rows: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"extract {'+'.join(self.rows)} at {self.place}"

    def step(self, world: World, at: At) -> Iterator[Step]:
        store = world.stores[self.place]
        wanted = Table("".join(row[:-1] for row in self.rows), self.rows)
        match at.step:
            case "begin" | "create" if store.table is not None:
                if wanted.recipe in (store.table.recipe, store.table.files):
                    yield Step("reads the table", At("look", store.table))
                else:
                    yield refused(OTHER_DATASET)
            case "begin":
                step = "list" if world.rules.tables_look_first else "create"
                yield Step("finds no table", At(step))
            case "list":
                yield looks_for_records(store, 0, At("create"))
            case "create" if at.kept:
                yield refused(NO_TABLE)
            case "create":
                yield Step("creates the table", At("look", wanted), (self.place, TABLE, wanted))
            case _:
                yield from does_units(world, self.place, at)


@dataclass(frozen=True)
class Grow:
    """`spile extract --add-corpus`, of a source that has these files."""

    place: str
    files: str
    source: str = ""

    @property
    def name(self) -> str:
        return f"grow {self.place} by {self.files}"

    def step(self, world: World, at: At) -> Iterator[Step]:
        store = world.stores[self.place]
        match at.step:
            case "begin":
                if (table := store.table) is None:
                    return
                new = self._new(world.rules, table)
                if not new:
                    yield Step("finds nothing to add", At("look", table))
                    return
                generations = (*table.generations, Generation(self.source or self.files, new))
                step = "list" if world.rules.generations_look_first else "create"
                grown = At(step, table._replace(generations=generations))
                yield Step(f"will add {', '.join(new)}", grown)
            case "list":
                before = at.table.ends[-2]
                yield looks_for_records(store, before, at._replace(step="create"))
            case "create":
                yield self._create(store, at)
            case _:
                yield from does_units(world, self.place, at)

    def _create(self, store: Store, at: At) -> Step:
        number, made = at.table.newest, at.table.generations[-1]
        there = store.get(("", "generation", number))
        if there is not None and there.rows != made.rows:
            return refused(OTHER_GROWTH)
        if there is None and at.kept:
            return refused(NO_GENERATION)
        write = (self.place, ("", "generation", number), made)
        return creates(f"generation {number}", At("look", at.table), store, write)

    def _new(self, rules: Rules, table: Table) -> tuple[str, ...]:
        """`resolve`, `Growth.grown`: the units that it adds."""
        if rules.grows_by_identity:
            files = [file for file in self.files if file not in table.files]
        else:
            known = {table.recipe, *(each.source for each in table.generations)}
            files = [] if (self.source or self.files) in known else [*self.files]
        return tuple(f"{file}{n}" for n, file in enumerate(files, len(table.files)))
