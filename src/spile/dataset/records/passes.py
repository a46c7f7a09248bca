"""Passes: more taps of the rows that a dataset has.

A pass is a folder of records like a dataset's own, so the code that commits, continues, seals and
audits a dataset does so here: a pass has a ledger that is rooted at the folder, and takes the units
from the dataset's table. Nothing of the dataset itself changes.

The name of a pass follows from its recipe. So two processes that add the same taps meet in one
folder, and the same command continues. A dropped pass keeps its `dropped.json`; the same taps,
added again, get the next number.
"""

import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.core.recipe import OF_A_PASS, ResolvedRecipe
from spile.dataset import format as fmt
from spile.dataset.format import Done, TapInfo
from spile.dataset.records.heartbeat import read_workers
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.manifest import Manifest
from spile.dataset.records.table import Table
from spile.objects import Objects, exists
from spile.objects.rooted import RootedObjects

_log = logging.getLogger("spile.dataset")

_SAME = ("rows", "tokens", "documents", "contexts", "text_digest")


class Pass:
    """One pass of a dataset: its record, and what it asks of its units."""

    def __init__(self, dataset: Ledger, name: str, planned: Table | None = None) -> None:
        """Args:
        planned: the table of a pass that may not exist yet.
        """
        self.dataset, self.name, self.planned = dataset, name, planned
        self.prefix = fmt.pass_prefix(name)
        self.objects: Objects = RootedObjects(dataset.objects, self.prefix)
        self.ledger = Ledger(self.objects, self)

    @property
    def is_dropped(self) -> bool:
        return exists(self.objects, fmt.DROPPED)

    @property
    def is_readable(self) -> bool:
        """Whether its own record is whole."""
        try:
            return self.read_table() is not None
        except CorruptError:
            return False

    def read_table(self) -> Table | None:
        """Return the dataset's table, with the taps and the recipe of the pass."""
        return self.table_over(self.dataset.table())

    def table_over(self, base: Table) -> Table | None:
        """Return a table of the dataset, with the taps and the recipe of the pass."""
        with named(self.name):
            body = fmt.read_record(self.objects, fmt.PASS, "pass")
        if body is None:
            return None
        key = self.prefix + fmt.PASS
        try:
            recipe = ResolvedRecipe.from_json(body["recipe"])
            taps = {n: TapInfo.from_json(info) for n, info in body["taps"].items()}
            sound = all(map(fmt.is_name, (body["fingerprint"], *taps))) and len(taps) > 0
            table = replace(
                base,
                recipe=recipe_of_pass(base.recipe, recipe),
                fingerprint=body["fingerprint"],
                taps=taps,
                kept=float(body["kept"]),
                tokenizer={},
            )
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise CorruptError(key, f"is not a pass ({fmt.shown(error)})") from error
        if not sound or set(table.recipe.stored_taps) != set(taps):
            raise CorruptError(key, "is not a pass (a name is invalid)")
        agrees = recipe.fingerprint() == table.recipe.fingerprint() == table.fingerprint
        if body["rows"] != base.fingerprint or not agrees:
            raise CorruptError(key, "belongs to another dataset, or to another recipe")
        return table

    def create_table(self, table: Table) -> None:
        """Store the record of the pass, unless it is there.

        Two passes with the same tap may be begun at the same moment. Every process that works on
        one looks for others once its record exists, so those of the later one find the earlier one,
        and give way. (Also those that did not create it, since the creator may be dead.)
        """
        body = {
            "recipe": table.recipe.to_json(),
            "fingerprint": table.fingerprint,
            "taps": {name: info.to_json() for name, info in table.taps.items()},
            "kept": table.kept,
            "rows": self.dataset.table().fingerprint,
        }
        created = self.objects.create(fmt.PASS, fmt.encode_record("pass", body))
        for other, found in readable_passes(self.dataset, self.dataset.table()):
            if other.name != self.name and (both := table.taps.keys() & found.taps):
                if created:
                    self.drop()
                raise ConfigError(
                    f"{self.dataset.url}: another process has begun to add {min(both)}; wait for "
                    "it, or leave it out of --add-taps"
                )

    def drop(self) -> None:
        """Record that the pass is dropped: nobody reads it from now on, and `gc` removes it."""
        self.objects.create(fmt.DROPPED, fmt.encode_record("dropped", {}))

    # -- its units --------------------------------------------------------------------------------

    def refuse(self, done: Done) -> None:
        """Raise if a unit must not be committed: its rows are not the dataset's, or it is late."""
        url = self.dataset.url
        if self.is_dropped:
            taps = ", ".join((self.planned or self.ledger.table()).taps)
            raise ConfigError(  # (which `supervise` does not answer by adding them again)
                f"{url}: {taps} were dropped while they were being added; run the same command "
                "again to add them once more"
            )
        differs = self.other_rows(done)
        if differs:
            raise StoreError(
                f"{url}: unit {done.unit} has other rows than in the dataset ({differs}); "
                "`spile verify` tells whether the dataset is damaged"
            )

    def other_rows(self, done: Done, base: Done | None = None) -> str | None:
        """Return how the rows of a unit differ from the dataset's; None if they do not.

        Args:
            base: the dataset's record of the unit; read if it is not given.
        """
        base = base or self.dataset.read_done(done.unit)
        if base is None:
            return "it has no such unit"
        made, wanted = _identity(done), _identity(base)
        return next((name for name in made if made[name] != wanted[name]), None)

    def lacks_generation(self, table: Table) -> bool:
        """Return whether the dataset has a later generation than a table, complete or not."""
        return exists(self.dataset.objects, fmt.generation_key(len(table.generations) + 1))

    @property
    def bytes(self) -> int:
        """The bytes of all its files, as they are listed."""
        return sum(entry.size for entry in self.objects.entries(fmt.ATTEMPTS))

    # -- what readers ask -------------------------------------------------------------------------

    def manifest_over(self, table: Table) -> Manifest | None:
        """Return the manifest, if the pass has every unit of the dataset."""
        manifest = self.ledger.derived.read_manifest(table.layout)
        whole = manifest is not None and manifest.totals.units == len(table.units)
        return manifest if whole else None

    def is_behind(self, base: Table) -> bool:
        """Return whether the pass was complete, and lacks units of a later generation."""
        with named(self.name):
            if not base.generations or self.manifest_over(base):
                return False
            # (What an unfinished pass has derived lies in few of the generations' folders.)
            names = (name for name in self.objects.folders(fmt.GENERATIONS) if name.isdecimal())
            numbers = (number for number in (0, *map(int, names)) if number < len(base.generations))
            return any(self.manifest_over(base.at(number)) for number in numbers)

    def finished(self, base: Table) -> Table | None:
        """Return the table of the pass, over that of the dataset, if it can be read."""
        with named(self.name):
            table = self.table_over(base)
            return table if table and self.manifest_over(table) else None


def recipe_of_pass(base: ResolvedRecipe, own: ResolvedRecipe) -> ResolvedRecipe:
    """Return a dataset's recipe with the fields that a pass may set."""
    sources = [name for name in vars(own) if name.endswith("_source")]
    return replace(base, **{name: getattr(own, name) for name in (*OF_A_PASS, *sources)})


def _identity(done: Done) -> dict[str, Any]:
    """The fields that are equal in two records of a unit with the same rows."""
    return {**{name: getattr(done, name) for name in _SAME}, "index": done.index.digest}


def pass_name(fingerprint: str, number: int) -> str:
    return f"{fingerprint[:16]}-{number}"


def live_passes(dataset: Ledger) -> list[Pass]:
    """Return the passes of a dataset, complete or not, that are not dropped; by name."""
    found = map(partial(Pass, dataset), pass_names(dataset.objects))
    return [each for each in found if exists(each.objects, fmt.PASS) and not each.is_dropped]


def readable_passes(dataset: Ledger, base: Table) -> list[tuple[Pass, Table]]:
    """Return the live passes with their tables over `base`.

    A pass with a damaged record is left out, with a warning: the dataset reads without its taps.
    """
    found: list[tuple[Pass, Table]] = []
    for each in live_passes(dataset):
        try:
            table = each.table_over(base)
        except CorruptError as error:
            _log.warning(
                "%s: %s; its taps cannot be read: `spile verify --repair`, "
                "or `spile drop --taps %s`, drops them", dataset.url, error, each.name
            )  # fmt: skip
            continue
        found += [(each, table)] if table else []  # (None: it was dropped just now, and removed)
    return found


def whole_generation(
    dataset: Ledger, newest: Table, passes: Sequence[Pass]
) -> tuple[Table, Manifest | None]:
    """Return the newest generation that is complete, with its manifest; `newest` if none has one.

    A pass that was complete must have the units of a later generation as well. Until then, the
    dataset reads as it was, with the taps of the pass.

    Args:
        newest: the table with all its generations.
        passes: those whose taps are wanted.
    """
    for table in reversed(newest.every_generation()):
        manifest = dataset.derived.read_manifest(table.layout)
        if manifest is not None and not any(each.is_behind(table) for each in passes):
            return table, manifest
    return newest, None


def pass_names(objects: Objects) -> list[str]:
    """Return the names of all passes, dropped ones included."""
    # A web server lists no folders, so nobody sees passes there.
    with contextlib.suppress(ConfigError):
        names = sorted(objects.folders(fmt.PASSES))
        return [name for name in names if fmt.split_pass_key(fmt.pass_prefix(name))[0]]
    return []


def every_worker(dataset: Ledger) -> dict[str, dict[str, Any]]:
    """Return the last heartbeats of a dataset's workers and of those that add taps to it.

    `folder` of each says where: it is that of a pass, or empty.
    """
    places = {"": dataset.objects}
    places |= {each.prefix: each.objects for each in live_passes(dataset)}
    return {
        name: {**record, "folder": folder}
        for folder, objects in places.items()
        for name, record in read_workers(objects).items()
    }


def every_done(dataset: Ledger) -> set[tuple[str, int]]:
    """Return the units that exist in a dataset and in its passes, each with its folder."""
    done = {("", unit) for unit in dataset.done_units()}
    for each in live_passes(dataset):
        done |= {(each.prefix, unit) for unit in each.ledger.done_units()}
    return done


@contextlib.contextmanager
def named(name: str) -> Generator[None, None, None]:
    """Let errors about an object of a pass say where it lies in the dataset."""
    prefix = fmt.pass_prefix(name)
    try:
        yield
    except CorruptError as error:
        if error.key.startswith(prefix):
            raise
        why = str(error).removeprefix(f"{error.key}: ")
        raise CorruptError(prefix + error.key, why) from error


def drop_taps(dataset: Ledger, asked: Sequence[str]) -> dict[str, int]:
    """Drop the passes that hold these taps; return the taps that are gone, and the bytes of each.

    The record is all that is written. `gc` removes the files.

    Args:
        asked: names of taps, as the dataset or another tool has them; or the name of a pass, which
            drops it even if its record is damaged or missing.

    Raises:
        ConfigError: if a tap is not that of a pass, or a pass has others, too.
    """
    base = dataset.table()
    passes = dict(readable_passes(dataset, base))
    by_name = {name: Pass(dataset, name) for name in pass_names(dataset.objects)}
    chosen: dict[Pass, set[str]] = {}
    gone: dict[str, int] = {}
    for name in asked:
        if name in by_name and not by_name[name].is_dropped:
            gone[name] = by_name[name].bytes
            by_name[name].drop()
            continue
        found = next(((p, tap) for p, t in passes.items() if (tap := _tap_named(t, name))), None)
        if found is not None:
            chosen.setdefault(found[0], set()).add(found[1])
        elif _tap_named(base, name):
            raise ConfigError(
                f"{dataset.url} was made with {name}; only taps that --add-taps has added can be "
                "dropped"
            )
        else:
            added = ",".join(tap for table in passes.values() for tap in table.recipe.taps)
            there = f"these can be dropped: {added}" if added else "no taps were added to it"
            raise ConfigError(f"no tap {name!r} was added to {dataset.url}; {there}")
    for each, taps in chosen.items():
        together = passes[each].recipe.taps
        if len(taps) < len(together):
            raise ConfigError(
                f"{', '.join(together)} were added together, so drop them together: "
                f"--taps {','.join(together)}"
            )
    for each in chosen:
        units = each.ledger.catalog_so_far(passes[each])
        gone |= {tap: units.bytes_of(tap.__eq__) for tap in passes[each].taps}
        each.drop()
    return gone


def _tap_named(table: Table, name: str) -> str | None:
    """Return the tap of a recipe by any of its names: its own, a stored one, another tool's."""
    name = name.replace(":", ".", 1)
    for tap in table.recipe.taps:
        stored = table.recipe.stored_of(tap)
        aliases = (alias for each in stored for alias in table.taps[each].aliases)
        if name in (tap, *stored, *aliases):
            return tap
    return None
