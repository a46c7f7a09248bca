"""Which unit is next: one that nobody who seems alive is doing, a share's own first. No jax."""

import logging
import threading
from typing import Protocol

from spile.corpus.units import Unit
from spile.dataset.heartbeat import Presence
from spile.dataset.ledger import Ledger
from spile.plan.budget import Budget
from spile.plan.resolve import Job
from spile.run.share import Share

_log = logging.getLogger("spile")
# Between looks for a unit that others hold. A fleet that waits for its last unit asks less and
# less often: each look reads the sign of life of every worker.
_WAIT, _WAIT_MOST = 0.5, 5.0


class Picker(Protocol):
    """Gives a slice its units."""

    def take(self) -> tuple[Unit | None, bool]:
        """A unit to do, if there is one now; and whether another call may give one.

        May wait a little where there is none.
        """
        ...

    def done(self, unit: int) -> None:
        """A unit that was taken is committed, by this slice or by another."""
        ...


class StorePicker:
    """Looks into the store: no coordinator."""

    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        presence: Presence,
        budget: Budget,
        stop: threading.Event,
        share: Share | None = None,
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
            return None, False
        if unit and self._presence.claim(unit.id):
            self._mine.add(unit.id)
            self._wait = 0.0
            return unit, True
        if left and unit is None:
            self._rest(len(left))
        return None, bool(left) and not self._budget.spent

    def done(self, unit: int) -> None:
        self._presence.release(unit)

    def _choose(self, free: list[Unit]) -> Unit | None:
        if self._share:
            return self._share.next_of(free, len(self._job.units))
        return free[0] if free else None

    def _rest(self, left: int) -> None:
        if not self._wait:
            _log.info("waiting for %d units that other workers hold", left)
        self._wait = min(_WAIT_MOST, 1.5 * self._wait) if self._wait else _WAIT
        self._stop.wait(self._wait)
