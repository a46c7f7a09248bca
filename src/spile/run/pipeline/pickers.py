"""Choose the next unit: one that no live worker is doing, from one's own share first. No jax.

A worker looks at one group of units at a time: it lists the records of that group, and the
heartbeats of the workers there. It stays in a group until nothing in it is free, so a thousand
workers look at a thousand places. After a commit it looks at that group once more, and if the group
is done, creates its segment (`Ledger.seal`).
"""

import logging
import re
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spile.core.config import Runtime
from spile.core.errors import ConfigError
from spile.core.system import system
from spile.core.units import Unit
from spile.dataset.format import KeyLayout
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger
from spile.plan.estimate import Budget
from spile.plan.job import ExtractionJob
from spile.run.world.rank import Rank, find_rank

_log = logging.getLogger("spile.run")
# Seconds between looks for a unit that others hold. A fleet that waits for its last unit looks less
# and less often, and each time into one group only: others look into the rest.
_WAIT, _WAIT_MOST = 0.5, 10.0
_LOOKS = 3  # groups to look into before the first wait; afterwards one each time
_MACHINE, _MACHINES = "MACHINE_ID", "TOTAL_MACHINES"


@dataclass(frozen=True)
class UnitShare:
    """The units of one machine among several, counted from 0: no coordinator is needed.

    A share is a run of neighbouring units, so that a machine reads few files and each of them in
    order. A machine that has finished its own share helps the share with most units left, from the
    far end: the owner starts at the other end and arrives there last.
    """

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def next_of(self, free: Sequence[int], units: int) -> int | None:
        """Return the next of the free units, which are in order; `units`: the number in all."""
        own = [unit for unit in free if self._owner(unit, units) == self.index]
        if own or not free:
            return own[0] if own else None
        return self._to_help({unit: self._owner(unit, units) for unit in free})

    def groups(self, layout: KeyLayout, units: int) -> range:
        """Return the groups in which this share has units."""
        first, stop = (at * units // self.count for at in (self.index, self.index + 1))
        return range(layout.group(first), layout.group(stop - 1) + 1) if first < stop else range(0)

    def nearest(self, groups: Sequence[int], layout: KeyLayout, units: int) -> int:
        """Return the group to help in, of some outside this share: the busiest share's last."""
        firsts = {group: layout.units_of(group, units)[0] for group in groups}
        return self._to_help({group: self._owner(unit, units) for group, unit in firsts.items()})

    def _to_help(self, owners: Mapping[int, int]) -> int:
        """Return the last of some units or groups that belongs to the busiest share."""
        owned = Counter(owners.values())
        # Helpers of equally busy shares choose different ones.
        busiest = min(owned, key=lambda share: (-owned[share], (share - self.index) % self.count))
        return [each for each, owner in owners.items() if owner == busiest][-1]

    def _owner(self, unit: int, units: int) -> int:
        # Share i holds units from i * units // count up to those of the next.
        return ((unit + 1) * self.count - 1) // units


def find_share(runtime: Runtime, environ: Mapping[str, str]) -> UnitShare | None:
    """`--share i/n`, or `MACHINE_ID` of `TOTAL_MACHINES`; None if there are no shares.

    Raises:
        ConfigError: if the given values are not a share.
    """
    text, name = runtime.share, "--share"
    if text is None:
        machine, machines = environ.get(_MACHINE), environ.get(_MACHINES)
        if not machines:
            return None
        if not machine and machines != "1":
            raise ConfigError(
                f"{_MACHINES} is {machines!r}, but {_MACHINE} is not set: set it to this machine's "
                "number, from 0, or give --share"
            )
        text, name = f"{machine or 0}/{machines}", f"{_MACHINE}/{_MACHINES}"
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match is None:
        raise ConfigError(f"{name} must be I/N such as 3/32, counted from 0, got {text!r}")
    index, count = int(match[1]), int(match[2])
    if not index < count:
        raise ConfigError(
            f"{name} {text} is out of range: shares are numbered from 0/{count} to "
            f"{max(0, count - 1)}/{count}"
        )
    return UnitShare(index, count)


@dataclass(frozen=True)
class Place:
    """The part of a run that this process does: which process of a world, and which units."""

    rank: Rank | None = None
    share: UnitShare | None = None

    def __str__(self) -> str:
        share = [f"share {self.share}"] if self.share else []
        return ", ".join(share + ([str(self.rank)] if self.rank else []))


def find_place(runtime: Runtime, environ: Mapping[str, str]) -> Place:
    """Find this process's place, from flags and the environment; see `find_rank`, `find_share`."""
    return Place(find_rank(runtime, environ), find_share(runtime, environ))


class Picker(Protocol):
    """Gives a slice its units."""

    def take(self) -> tuple[Unit | None, bool]:
        """Return a unit to do, if there is one now; and whether another call may return one.

        May wait a little if there is none.
        """
        ...

    def done(self, unit: int) -> None:
        """Note that a unit that was taken is committed, by this slice or by another."""
        ...


class StorePicker:
    """Picks units by looking into the store: no coordinator."""

    def __init__(
        self,
        job: ExtractionJob,
        ledger: Ledger,
        presence: Presence,
        budget: Budget,
        stop: threading.Event,
        share: UnitShare | None = None,
    ) -> None:
        self._job, self._ledger, self._presence = job, ledger, presence
        self._budget, self._stop, self._share = budget, stop, share
        self._layout, self._count = job.table.layout, len(job.units)
        self._mine: set[int] = set()
        self._open = set(range(self._layout.groups(self._count))) - self._sealed()
        self._group: int | None = None  # where it works
        self._wait = 0.0
        self._there: Counter[int | None] | None = None  # workers by group, as this take sees them

    def take(self) -> tuple[Unit | None, bool]:
        self._seal_behind()
        busy: set[int] = set()  # groups whose units are all held
        waits_for, self._there = 0, None
        looks = 1 if self._wait else _LOOKS
        while len(busy) < looks and (group := self._choose_group(busy)) is not None:
            self._group = group
            last = self._ledger.looks_after_commit(group)
            done = self._ledger.done_in(group)
            units = self._layout.units_of(group, self._count)
            if done.issuperset(units):
                self._open.discard(group)
                if last:
                    self._ledger.seal(self._job.table, group)
                continue
            left = [unit for unit in units if unit not in done and unit not in self._mine]
            holders = self._presence.holders(group) if left else {}
            held = {unit for units in holders.values() for unit in units}
            unit = self._choose([unit for unit in left if unit not in held], holders)
            if unit is None:
                busy.add(group)
                waits_for += len(left)
                continue
            if not self._affordable(unit):
                if not self._budget.spent:
                    self._rest("waiting to see how much of --max-bytes the units in progress take")
                return None, not self._budget.spent
            if not self._presence.claim(unit):
                return None, True
            self._mine.add(unit)
            self._wait = 0.0
            return self._job.units[unit], True
        if not waits_for and busy.issuperset(self._open):
            return None, False
        self._rest("waiting for units that other workers hold")
        self._open -= self._sealed()
        return None, True

    def done(self, unit: int) -> None:
        self._presence.release(unit)

    def _sealed(self) -> set[int]:
        return self._ledger.sealed_groups(self._layout)

    def _seal_behind(self) -> None:
        """Look at the groups that were left while units of them were still in hand."""
        for group in self._ledger.committed_groups - {self._group}:
            self._ledger.looks_after_commit(group)
            if self._ledger.seal(self._job.table, group):
                self._open.discard(group)

    def _affordable(self, unit: int) -> bool:
        if not self._budget.limited:
            return True
        in_hand = self._presence.held_by_others() | self._mine
        return self._budget.allows(unit, self._ledger.done_units(), in_hand)

    def _choose(self, free: Sequence[int], holders: Collection[str]) -> int | None:
        if self._share:
            return self._share.next_of(free, self._count)
        if not free:
            return None
        # Workers of one group take different units, by the order of their names.
        return free[min(sum(name < self._presence.name for name in holders), len(free) - 1)]

    def _choose_group(self, busy: Collection[int]) -> int | None:
        """Return the group to look at: the current one, its neighbour, or one with few workers."""
        groups = sorted(self._open.difference(busy))
        if not groups:
            return None
        if self._group in groups and not self._wait:
            return self._group
        if self._group is not None and not self._wait and self._there is None:
            # Nobody works in groups that are finished: they would seem the best ones.
            self._open -= self._sealed()
            groups = [group for group in groups if group in self._open]
            if not groups:
                return None
        if self._share:
            own = [g for g in groups if g in self._share.groups(self._layout, self._count)]
            return own[0] if own else self._share.nearest(groups, self._layout, self._count)
        if len(groups) == 1:
            return groups[0]
        if self._wait:  # the workers there may be dead
            return groups[int(system().uniform(0, len(groups))) % len(groups)]
        there = self._there = self._presence.occupied() if self._there is None else self._there
        if self._group is not None and self._group + 1 in groups and not there[self._group + 1]:
            return self._group + 1  # files are read in order
        if not there:
            return groups[0]
        fewest = min(there[group] for group in groups)
        free = [group for group in groups if there[group] == fewest]
        return free[int(system().uniform(0, len(free))) % len(free)]

    def _rest(self, why: str) -> None:
        if not self._wait:
            _log.info(why)
        self._wait = min(_WAIT_MOST, 1.5 * self._wait) if self._wait else _WAIT
        self._stop.wait(self._wait)
