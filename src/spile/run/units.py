"""Choose the next unit: one that no live worker is doing, from one's own share first. No jax."""

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from spile.core.config import Runtime
from spile.core.errors import ConfigError
from spile.corpus.units import Unit
from spile.dataset.heartbeat import Presence
from spile.dataset.ledger import Ledger
from spile.plan.estimate import Budget
from spile.plan.job import ExtractionJob

_log = logging.getLogger("spile")
# Seconds between looks for a unit that others hold. A fleet that waits for its last unit looks less
# and less often: each look reads the heartbeat of every worker.
_WAIT, _WAIT_MOST = 0.5, 5.0
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

    def next_of(self, free: Sequence[Unit], units: int) -> Unit | None:
        """The next of the free units, which are in order; `units`: how many there are in all."""
        owned: dict[int, list[Unit]] = {}
        for unit in free:
            owned.setdefault(self._owner(unit.id, units), []).append(unit)
        if self.index in owned:
            return owned[self.index][0]
        if not owned:
            return None
        # Helpers of equally busy shares choose different ones.
        _, _, busiest = min((-len(u), (o - self.index) % self.count, o) for o, u in owned.items())
        return owned[busiest][-1]

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
                f"{_MACHINES} is {machines!r}, but which of them is this? set {_MACHINE}, from 0, "
                "or give --share"
            )
        text, name = f"{machine or 0}/{machines}", f"{_MACHINE}/{_MACHINES}"
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match is None:
        raise ConfigError(f"{name} must be I/N such as 3/32, counted from 0, got {text!r}")
    index, count = int(match[1]), int(match[2])
    if not index < count:
        raise ConfigError(
            f"{name} {text} is out of range: shares are counted from 0, of {count} the last is "
            f"{max(0, count - 1)}/{count}"
        )
    return UnitShare(index, count)


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
        self._mine: set[int] = set()
        self._wait = 0.0

    def take(self) -> tuple[Unit | None, bool]:
        done = self._ledger.done_units()
        left = [u for u in self._job.units if u.id not in done and u.id not in self._mine]
        held = self._presence.held_by_others() if left else set[int]()
        unit = self._choose([u for u in left if u.id not in held])
        if unit and not self._budget.allows(unit.id, done, held | self._mine):
            if not self._budget.spent:
                self._rest("waiting to see how much of --max-bytes the units in hand take")
            return None, not self._budget.spent
        if unit and self._presence.claim(unit.id):
            self._mine.add(unit.id)
            self._wait = 0.0
            return unit, True
        if left and unit is None:
            self._rest(f"waiting for {len(left)} units that other workers hold")
        return None, bool(left)

    def done(self, unit: int) -> None:
        self._presence.release(unit)

    def _choose(self, free: list[Unit]) -> Unit | None:
        if self._share:
            return self._share.next_of(free, len(self._job.units))
        return free[0] if free else None

    def _rest(self, why: str) -> None:
        if not self._wait:
            _log.info(why)
        self._wait = min(_WAIT_MOST, 1.5 * self._wait) if self._wait else _WAIT
        self._stop.wait(self._wait)
