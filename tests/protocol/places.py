"""What a place holds, and what readers and `verify` make of it: for the model of combinations.

A place is a set of keys and values, like a store. A unit is named by its row of the table: the
files of its documents, and the number of the first one. So "b1" is made from file b, whose only
document is the second of the dataset. A done record says what its unit was made from (`row`), and
its attempt says which rows the files really hold. The two differ only if something has mixed them
up, and only the model can see that.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

Key = tuple[Any, ...]  # a folder ("", or the name of a pass), a kind, and for most kinds a number
Place = frozenset[tuple[Key, Any]]

TABLE: Key = ("", "table")
WHOLE, DAMAGED = "whole", "damaged"  # files

# What must be so.
FILES = "a record implies its files"
STRAY = "a record is that of a unit in the table"
TWICE = "no document comes twice"
ROWS = "every row is what the table names"
SOUND = "what verify calls sound is sound"
TWO_PASSES = "a tap is read from one pass"
HIDDEN = "readers keep the documents that they had"


class Attempt(NamedTuple):
    """The files that were written for a unit at once."""

    row: str  # what the rows in them are
    number: int = 0


class Done(NamedTuple):
    """A done record."""

    recipe: str
    row: str  # what it says that the unit was made from
    attempt: Attempt


class Manifest(NamedTuple):
    """The manifest of a table, or of a generation, or of a pass."""

    recipe: str
    rows: tuple[str, ...]  # the units that the table names
    dones: tuple[Done, ...]  # the records that it was derived from


class Generation(NamedTuple):
    source: str
    rows: tuple[str, ...]


class Table(NamedTuple):
    """A unit table with its generations."""

    recipe: str
    first: tuple[str, ...]  # the units of the table itself
    generations: tuple[Generation, ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        return sum((each.rows for each in self.generations), self.first)

    @property
    def ends(self) -> tuple[int, ...]:
        """The number of units at each generation, the first before any."""
        ends = [len(self.first)]
        for each in self.generations:
            ends.append(ends[-1] + len(each.rows))
        return tuple(ends)

    @property
    def files(self) -> str:
        return "".join(row[:-1] for row in self.rows)

    @property
    def newest(self) -> int:
        """The number of its last generation."""
        return len(self.generations)


@dataclass(frozen=True)
class Rules:
    """The rules for operations that meet. Each can be left out by itself."""

    # A record is bound to what its unit was made from, and everybody who uses it compares.
    adopts_compare: bool = True  # who finds a unit done, or reads an unfinished dataset
    seals_compare: bool = True
    copies_compare: bool = True
    merges_compare: bool = True
    verify_compares: bool = True  # and so does a repair
    manifests_compare: bool = True  # a manifest names its table, and who opens it compares
    # A table, or a generation, is created only where all records are of units already known.
    tables_look_first: bool = True
    generations_look_first: bool = True
    # A whole copy begins with the table and the generations, and has the units of those alone.
    copies_table_first: bool = True
    copies_known_units: bool = True
    copies_whole_manifests: bool = True  # a manifest follows the records that it names
    # A dropped pass is copied as its `dropped.json`, before other passes. Before and after these, a
    # copy looks for passes there that have one of their taps.
    copies_drops: bool = True
    copies_drops_first: bool = True
    copies_compare_passes: bool = True
    # A copy looks, before its first write and before its manifests, whether its taps lack documents
    # that the destination has, or is being given.
    copies_hide_nothing: bool = True
    # No document comes twice.
    merges_compare_every_pair: bool = True
    grows_by_identity: bool = True
    # Two complete passes with one tap are damage.
    verify_compares_passes: bool = True
    # Who adds taps reads the table once more in the end, and before the first manifest of the taps.
    passes_look_again: bool = True
    # Taps that are new to a grown dataset get its newest manifest first, in a copy, too.
    passes_newest_first: bool = True

    def without(self, *names: str) -> "Rules":
        return replace(self, **dict.fromkeys(names, False))

    @classmethod
    def old(cls) -> "Rules":
        """The protocol before records were bound to their units: none of these rules."""
        return cls(**{field.name: False for field in fields(cls)})


def belongs(table: Table, unit: int, done: Done, compares: bool) -> bool:
    """Return whether a record passes for that of a unit of a table."""
    if unit >= len(table.rows) or done.recipe != table.recipe:
        return False
    return not compares or done.row == table.rows[unit]


class Store(dict[Key, Any]):
    """What a place holds, by key; it does not change.

    Attributes:
        rules: those that readers and `verify` keep to.
        files: whether files are looked at.
    """

    def __init__(self, place: Place, rules: Rules, files: bool) -> None:
        super().__init__(place)
        self.rules, self.files = rules, files

    @cached_property
    def table(self) -> Table | None:
        """`read_table`: the unit table with all generations."""
        table: Table | None = self.get(TABLE)
        if table is None:
            return None
        generations: list[Generation] = []
        while more := self.get(("", "generation", len(generations) + 1)):
            generations.append(more)
        return table._replace(generations=tuple(generations))

    @cached_property
    def done(self) -> Mapping[int, Done]:
        """The units that have a record."""
        return self.done_in("")

    def done_in(self, folder: str) -> Mapping[int, Done]:
        """Return the units of the dataset, or of a pass, that have a record."""
        found = {key[2]: done for key, done in self.items() if key[:2] == (folder, "done")}
        return dict(sorted(found.items()))

    def lacks(self, table: Table, folder: str = "") -> list[int]:
        """Return the units of a table that have no record."""
        return [n for n in range(len(table.rows)) if (folder, "done", n) not in self]

    def unsealed(self, table: Table, folder: str = "") -> list[int]:
        """Return the generations of a table that have no manifest."""
        return [n for n in range(table.newest + 1) if (folder, "manifest", n) not in self]

    @cached_property
    def has_strays(self) -> bool:
        """Whether there are records of units that no table names."""
        count = len(self.table.rows) if self.table else 0
        return any(unit >= count for unit in self.done)

    # -- readers -----------------------------------------------------------------------------------

    def belongs(self, table: Table, number: int) -> bool:
        """Return whether a manifest passes for that of a generation of a table."""
        manifest: Manifest = self["", "manifest", number]
        same = manifest[:2] == (table.recipe, table.rows[: table.ends[number]])
        return len(manifest.dones) == table.ends[number] and (
            same or not self.rules.manifests_compare
        )

    @cached_property
    def sealed(self) -> list[int]:
        """The generations whose manifests can be opened."""
        numbers = range(self.table.newest + 1 if self.table else 0)
        there = [number for number in numbers if ("", "manifest", number) in self]
        return [number for number in there if self.table and self.belongs(self.table, number)]

    @cached_property
    def live_passes(self) -> list[str]:
        """`live_passes`: those that have begun and are not dropped."""
        names = sorted(key[0] for key in self if key[1] == "pass")
        return [name for name in names if (name, "dropped") not in self]

    def is_behind(self, name: str, generation: int) -> bool:
        """`Pass.is_behind`: whether it was complete earlier, and is not at a generation."""
        there = [(name, "manifest", number) in self for number in range(generation + 1)]
        return any(there[:-1]) and not there[-1]

    def generation_with(self, passes: Iterable[str]) -> int | None:
        """`whole_generation`: the newest that is complete; None if the dataset is unfinished."""
        for number in reversed(self.sealed):
            if not any(self.is_behind(each, number) for each in passes):
                return number
        return None

    @cached_property
    def read_generation(self) -> int | None:
        """The generation that readers open."""
        return self.generation_with(self.live_passes)

    def hides(self, key: Key, value: Any) -> bool:
        """Return whether readers lose documents once a pass has this manifest."""
        if key[1] != "manifest" or not key[0] or self.read_generation is None:
            return False
        after = Store(frozenset({**self, key: value}.items()), self.rules, self.files)
        return after.read_generation is None or after.read_generation < self.read_generation

    @cached_property
    def reads_whole(self) -> bool:
        """Whether readers get every unit that the table names."""
        return self.table is not None and self.read_generation == self.table.newest

    @cached_property
    def read_passes(self) -> list[str]:
        """`Pass.finished`: the passes that readers open."""
        number = self.read_generation
        return [each for each in self.live_passes if (each, "manifest", number) in self]

    # -- verify ------------------------------------------------------------------------------------

    @cached_property
    def damaged(self) -> dict[int, Done]:
        """The units that `verify` finds damaged, and those of no table, with their records."""
        table, found = self.table, dict[int, Done]()
        assert table is not None
        for unit, done in self.done.items():
            row = done.attempt.row
            file = self.get(("", "file", unit, done.attempt)) if self.files else WHOLE
            sound = file == WHOLE and belongs(table, unit, done, self.rules.verify_compares)
            # The audit of an index: it has the documents that the table counts.
            if not sound or (len(row), row[-1]) != (len(table.rows[unit]), table.rows[unit][-1]):
                found[unit] = done
        return found

    def follows(self, table: Table, generation: int) -> bool:
        """Return whether the manifest of a generation follows from the records."""
        units = range(table.ends[generation])
        dones = tuple(self.get(("", "done", unit)) for unit in units)
        found: Manifest | None = self.get(("", "manifest", generation))
        return found is not None and found.dones == dones and self.belongs(table, generation)

    @cached_property
    def is_sound(self) -> bool:
        """Whether `verify` calls a dataset whole and sound."""
        table = self.table
        if table is None or self.lacks(table) or self.damaged:
            return False
        sealed = [n for n in range(table.newest + 1) if ("", "manifest", n) in self]
        if table.newest not in sealed or not all(self.follows(table, n) for n in sealed):
            return False
        return len(self.read_passes) < 2 or not self.rules.verify_compares_passes

    # -- what must be so ---------------------------------------------------------------------------

    def named_files(self, *kinds: str) -> set[Key]:
        """Return the files that records (`done`) and manifests (`manifest`) name."""
        named = set[Key]()
        for (folder, kind, *number), value in self.items():
            if kind in kinds and not folder:
                dones = [(number[0], value)] if kind == "done" else enumerate(value.dones)
                named |= {("", "file", unit, done.attempt) for unit, done in dones}
        return named

    def has_other_rows(self) -> bool:
        """Return whether the rows of a unit are not those that the table names."""
        rows = self.table.rows if self.table else ()
        return any(
            unit < len(rows) and d.attempt.row != rows[unit] for unit, d in self.done.items()
        )

    @cached_property
    def faults(self) -> list[str]:
        """What is wrong here, and a user would not be told."""
        return [name for name, is_so in self._faults() if is_so]

    def _faults(self) -> Iterator[tuple[str, bool]]:
        yield FILES, self.files and not self.named_files("done") <= self.keys()
        yield STRAY, self.has_strays
        if (table := self.table) is None:
            return
        yield TWICE, len({*table.files}) < len(table.files)
        yield ROWS, self._shows_other_rows(table)
        yield TWO_PASSES, len(self.read_passes) > 1
        yield SOUND, self.is_sound and (len(self.read_passes) > 1 or self.has_other_rows())

    def _shows_other_rows(self, table: Table) -> bool:
        """Return whether a reader gets rows that are not those of their unit."""
        rows = table.rows
        for number in self.sealed:
            dones: tuple[Done, ...] = self["", "manifest", number].dones
            if any(done.attempt.row != rows[unit] for unit, done in enumerate(dones)):
                return True
        for folder in ("", *self.live_passes):
            for unit, done in self.done_in(folder).items():
                adopted = folder or belongs(table, unit, done, self.rules.adopts_compare)
                if adopted and unit < len(rows) and done.attempt.row != rows[unit]:
                    return True
        return False


# -- what places hold in the beginning -------------------------------------------------------------

NOTHING: Place = frozenset()


def dataset(*rows: str, grown: tuple[str, ...] = (), taps: str = "") -> Place:
    """Return a complete dataset.

    Args:
        grown: the unit of each generation.
        taps: the kind of a pass that is complete, too.
    """
    generations = tuple(Generation(row[:-1], (row,)) for row in grown)
    table = Table("".join(row[:-1] for row in rows), rows, generations)
    kept: dict[Key, Any] = {TABLE: table._replace(generations=())}
    kept |= {("", "generation", n): made for n, made in enumerate(generations, 1)}
    for folder, recipe in {"": table.recipe, f"{taps}0": taps}.items():
        if not recipe:
            continue
        dones = tuple(Done(recipe, row, Attempt(row)) for row in table.rows)
        kept |= {(folder, "done", unit): done for unit, done in enumerate(dones)}
        for number, end in enumerate(table.ends):
            kept[folder, "manifest", number] = Manifest(recipe, table.rows[:end], dones[:end])
    kept |= {("", "file", unit, Attempt(row)): WHOLE for unit, row in enumerate(table.rows)}
    return changed(frozenset(kept.items()), {(f"{taps}0", "pass"): taps} if taps else {})


def changed(place: Place, changes: Mapping[Key, Any]) -> Place:
    """Return a place with other values; None removes a key."""
    kept = {**dict(place), **changes}
    return frozenset((key, value) for key, value in kept.items() if value is not None)


def damaged(place: Place, unit: int) -> Place:
    """Return a dataset in which a file of a unit is damaged."""
    attempt = dict(place)["", "done", unit].attempt
    return changed(place, {("", "file", unit, attempt): DAMAGED})


def with_record(place: Place, unit: int, row: str) -> Place:
    """Return a dataset with a record that was made from `row`, whatever the table names."""
    done = Done(dict(place)[TABLE].recipe, row, Attempt(row))
    return changed(place, {("", "done", unit): done, ("", "file", unit, done.attempt): WHOLE})
