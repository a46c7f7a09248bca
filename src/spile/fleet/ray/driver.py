"""`--engine ray`: extract on slices of a Ray cluster. No activation passes through Ray.

The driver gives each slice a few units at a time, and gives the units of a lost slice to others.
Nodes that join get a slice; a slice that ends is replaced if there is room. A unit may be done
twice, if a node that was only cut off also finishes it, but only one commit of a unit succeeds.
"""

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import spile
from spile.core.config import RayOptions, Recipe, Runtime
from spile.core.errors import ConfigError, Interrupted, StoreError, WorldError, first_line
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table
from spile.fleet.ray.actor import RayHost
from spile.fleet.ray.placement import Placement, Placements, connect, lost
from spile.metrics import Counters
from spile.objects import open_objects
from spile.plan.estimate import Budget, Estimate
from spile.plan.passes import opened_for
from spile.run.extract import (
    Outcome,
    documents_were_added,
    has_grown,
    outcome_of,
    stop_on_signal,
)
from spile.run.world.rank import ABORTED

_log = logging.getLogger("spile.fleet")
_AHEAD = 3  # units that a slice has at a time: one is written, one computed, one read
_CALLS = 8 + _AHEAD  # concurrent calls of an actor
_LOOK_SECONDS = 1.0  # between checks for nodes that have joined
_POLL_SECONDS = 0.2
_DRAIN_SECONDS = 120.0
_MOST_LOSSES = 10  # slices lost while doing the same unit
_MOST_ERRORS = 3  # errors reported for the same unit: other slices would fail as well
_MOST_FAILURES = 10  # per slice, in a row, without any finished unit
_REST_SECONDS, _REST_MOST = 1.0, 60.0  # pause of a placement where a slice has just failed
_UNLIMITED = 1 << 16
_SLOW_SECONDS = 30.0  # without a slice, before a warning
_PASSED_ON = ("JAX_", "XLA_", "LIBTPU_")  # credentials are not passed on: each host has its own


@dataclass(eq=False)
class _Slice:
    """One world of hosts, as the driver sees it."""

    number: int
    placement: Placement
    hosts: list[Any]  # actor handles; the first leads
    nodes: list[str] = field(default_factory=list[str])  # their names, once they have said hello
    ready: bool = False
    units: list[int] = field(default_factory=list[int])  # assigned units, in order
    counted: dict[str, float] = field(default_factory=dict[str, float])

    def __str__(self) -> str:
        return f"slice {self.number} ({', '.join(self.nodes) or 'not placed yet'})"


@dataclass(frozen=True)
class _Call:
    """A pending call of a host."""

    slice: _Slice
    what: str  # hello | begun | run | do | counts
    host: int = 0
    unit: int = -1


def extract(
    recipe: Recipe,
    out: str,
    runtime: Runtime,
    options: RayOptions,
    *,
    counters: Counters | None = None,
    on_start: Callable[[object, Estimate], None] | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Make or continue the dataset on a Ray cluster; like `run.extract.extract` otherwise."""
    given = [
        n
        for n in ("share", "coordinator", "num_processes", "process_id", "bind_address")
        if getattr(runtime, n) is not None
    ]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise ConfigError(f"{flag} conflicts with --engine ray, which assigns the work itself")
    ray = connect(options.ray_address)
    try:
        with stop_on_signal(stop or threading.Event()) as stop:
            pool = _Pool(ray, recipe, out, runtime, options, counters or Counters(), stop)
            return pool.run(on_start)
    finally:
        ray.shutdown()


class _Pool:
    def __init__(
        self,
        ray: Any,
        recipe: Recipe,
        out: str,
        runtime: Runtime,
        options: RayOptions,
        counters: Counters,
        stop: threading.Event,
    ) -> None:
        self._ray, self._recipe, self._out, self._runtime = ray, recipe, out, runtime
        self._counters, self._stop = counters, stop
        _, self._ledger = opened_for(recipe, Ledger(open_objects(out)))
        self._placements = Placements(ray, options)
        self._host = ray.remote(RayHost)
        self._most = options.ray_slices
        self._slices: list[_Slice] = []
        self._calls: dict[Any, _Call] = {}
        self._numbers = itertools.count()
        self._table: Table | None = None
        self._budget: Budget | None = None
        self._cost: Estimate | None = None
        self._left: deque[int] = deque()  # units that no slice has
        self._done: set[int] = set()
        # Unit (-1: none) -> slices lost while doing it, and how many of them reported an error.
        self._losses: dict[int, tuple[int, int]] = {}
        self._failures = 0
        self._resting: dict[str, float] = {}  # placement -> until when
        self._looked = 0.0
        self._idle_since = time.monotonic()

    def run(self, on_start: Callable[[object, Estimate], None] | None) -> Outcome:
        try:
            while not self._finished():
                if self._stop.is_set():
                    self._drain()
                    raise Interrupted
                self._look()
                self._give()
                self._hear(_POLL_SECONDS)
                if on_start and self._cost:
                    on_start(None, self._cost)
                    on_start = None
            self._end()
        finally:
            for slice in list(self._slices):
                self._drop(slice)
            self._placements.close()
        assert self._table and self._cost
        self._ledger.complete(self._table)
        outcome = outcome_of(self._ledger, self._table, self._cost, self._runtime)
        if has_grown(self._ledger, outcome):
            raise documents_were_added(self._ledger)
        return outcome

    def _finished(self) -> bool:
        if self._table is None or self._cost is None:
            return False
        busy = any(slice.units for slice in self._slices)
        return not busy and (not self._left or (self._budget is not None and self._budget.spent))

    # -- slices ------------------------------------------------------------------------------

    def _look(self) -> None:
        """Start slices where there is room, and ask the others for their counters."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        most = self._most or _UNLIMITED
        if self._table is None:
            most = 1  # the first makes the unit table; others would read the corpus once more each
        elif not self._left:
            most = 0
        resting = {placement for placement, until in self._resting.items() if until > now}
        for placement in self._placements.free(most - len(self._slices), resting):
            options = self._placements.options(placement)
            hosts = [
                self._host.options(max_concurrency=_CALLS, **each).remote() for each in options
            ]
            slice = _Slice(next(self._numbers), placement, hosts)
            self._slices.append(slice)
            for number in range(len(hosts)):
                self._ask(slice, "hello", host=number)
        if self._slices or not self._left and self._table:
            self._idle_since = now
        elif now - self._idle_since > _SLOW_SECONDS:
            _log.warning("waiting for room on the cluster: %s", self._placements.described())
            self._idle_since = now
        for slice in self._slices:
            if slice.ready and not any(
                c.what == "counts" and c.slice is slice for c in self._calls.values()
            ):
                self._ask(slice, "counts")

    def _ask(self, slice: _Slice, what: str, *given: Any, host: int = 0, unit: int = -1) -> None:
        reference = getattr(slice.hosts[host], what).remote(*given)
        self._calls[reference] = _Call(slice, what, host, unit)

    def _start(self, slice: _Slice, hellos: list[Mapping[str, Any]]) -> None:
        """Tell all hosts of a slice their ranks, once all have answered."""
        for said in hellos:
            if said["spile"] != spile.__version__:
                raise ConfigError(
                    f"{said['node']} has spile {said['spile']}, the driver {spile.__version__}; "
                    "install the same version on every node"
                )
        # Each host of a TPU pod has its own number, which may differ from its place in the group.
        workers = [said["worker"] for said in hellos]
        if None not in workers and len({*workers}) == len(workers):
            order = sorted(range(len(workers)), key=lambda n: workers[n])
            slice.hosts = [slice.hosts[n] for n in order]
            hellos = [hellos[n] for n in order]
        slice.nodes = [f"{said['node']}, process {said['pid']}" for said in hellos]
        environment = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
        for number in range(len(hellos)):
            runtime = replace(self._runtime, world="host")
            if len(hellos) > 1:
                runtime = replace(
                    self._runtime,
                    world="slice",
                    coordinator=str(hellos[0]["address"]),
                    num_processes=len(hellos),
                    process_id=number,
                )
            options = {**asdict(self._recipe), **asdict(runtime)}
            given = (options, self._out, os.getcwd(), environment)
            self._ask(slice, "run", *given, host=number)
        self._ask(slice, "begun")

    def _drop(self, slice: _Slice) -> None:
        """Remove a slice that has ended or must end."""
        if slice not in self._slices:
            return
        self._slices.remove(slice)
        self._calls = {ref: call for ref, call in self._calls.items() if call.slice is not slice}
        for host in slice.hosts:
            with suppress(Exception):  # it, and its node, may already be gone
                self._ray.kill(host)
        self._placements.give_back(slice.placement)
        for unit in reversed(slice.units):
            if unit not in self._done:
                self._left.appendleft(unit)

    def _lose(self, slice: _Slice, why: str, code: int | None = None) -> None:
        """Give up a slice that failed (with a code) or vanished; reassign its units."""
        at_work = slice.units[0] if slice.units else -1
        named = f"{slice}: {why}"
        self._drop(slice)
        self._take_stock()
        self._failures += 1
        rest = min(_REST_MOST, _REST_SECONDS * 2.0 ** min(self._failures - 1, 60))
        if self._failures > 1:
            self._resting[slice.placement.name] = time.monotonic() + rest
        _log.warning("%s is lost: %s; its units are reassigned", slice, why)
        lost, errors = self._losses.get(at_work, (0, 0))
        lost, errors = self._losses[at_work] = (lost + 1, errors + (code is not None))
        if code is not None and errors >= _MOST_ERRORS:
            raise WorldError(0, named, code)
        if at_work >= 0 and lost >= _MOST_LOSSES:
            raise StoreError(f"unit {at_work} was lost with {lost} slices in a row; {named}")
        if self._failures >= _MOST_FAILURES * max(1, len(self._slices)):
            raise StoreError(f"{self._failures} slices failed without finishing a unit; {named}")

    # -- units -------------------------------------------------------------------------------

    def _give(self) -> None:
        """Give slices their next units, starting with those that have the fewest."""
        ready = [slice for slice in self._slices if slice.ready]
        while self._left and ready:
            slice = min(ready, key=lambda s: len(s.units))
            if len(slice.units) >= _AHEAD:
                return
            # Towards the end, leave units to slices that would begin them sooner.
            if slice.units and len(self._left) < len(ready):
                waiting = [s for s in self._slices if not s.ready or not s.units]
                if waiting:
                    return
            unit = self._left[0]
            in_hand = {u for s in self._slices for u in s.units}
            if self._budget and not self._budget.allows(unit, self._done, in_hand):
                return
            self._left.popleft()
            slice.units.append(unit)
            self._ask(slice, "do", unit, unit=unit)

    def _hear(self, seconds: float) -> None:
        """Wait for an answer, and handle all that have arrived."""
        if not self._calls:
            self._stop.wait(seconds)
            return
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=seconds)
        if ready:
            more, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
            ready = more or ready
        for reference in ready:
            call = self._calls.pop(reference, None)
            if call is None:  # from a slice that was just dropped
                continue
            try:
                answer = self._ray.get(reference)
            except Exception as error:
                if not lost(self._ray, error):
                    raise
                self._lose(call.slice, first_line(error))
                continue
            self._answered(call, answer)

    def _answered(self, call: _Call, answer: Any) -> None:
        slice = call.slice
        if call.what == "hello":
            slice.placement.hellos[call.host] = answer
            if len(slice.placement.hellos) == len(slice.hosts):
                self._start(slice, [slice.placement.hellos[n] for n in range(len(slice.hosts))])
        elif answer is None:
            pass  # the answer of `run` has the reason
        elif call.what == "begun":
            self._begin(slice, answer)
        elif call.what == "run":
            self._ended(slice, call.host, answer)
        elif call.what == "counts":
            self._count(slice, answer)
        else:
            self._count(slice, answer)
            self._commit(slice, call.unit)

    def _begin(self, slice: _Slice, cost: Mapping[str, Any]) -> None:
        if self._table is None:
            self._table = table = self._ledger.read_table()
            if table is None:
                raise StoreError(
                    f"{self._out}: {slice} writes there, but the driver does not see its files; "
                    "every node must share --out: use a bucket, or a common file system"
                )
            self._done = self._ledger.done_units()
            self._left.extend(u for u in range(len(table.units)) if u not in self._done)
            self._budget = Budget(table, self._ledger, self._runtime.max_bytes)
            self._looked = 0.0  # now the others may start
        told: dict[str, Any] = {**cost, "warnings": tuple(cost["warnings"])}
        self._cost = self._cost or Estimate(**told)
        slice.ready = True
        _log.info("%s is at work; %d slices", slice, sum(s.ready for s in self._slices))

    def _commit(self, slice: _Slice, unit: int) -> None:
        slice.units.remove(unit)
        self._done.add(unit)
        self._failures = 0
        self._losses.pop(-1, None)

    def _take_stock(self) -> None:
        """Find units that were committed by slices that ended before they reported them."""
        if self._table is not None:
            self._done |= self._ledger.done_units()
            self._left = deque(unit for unit in self._left if unit not in self._done)

    def _count(self, slice: _Slice, counted: Mapping[str, float]) -> None:
        grown = {name: value - slice.counted.get(name, 0.0) for name, value in counted.items()}
        self._counters.add(**{name: amount for name, amount in grown.items() if amount > 0})
        slice.counted = {**counted}

    def _ended(self, slice: _Slice, host: int, answer: Mapping[str, Any]) -> None:
        """Handle the end of a host's run: it failed, or no units were left."""
        if not answer:
            if host == 0:
                self._drop(slice)
                self._take_stock()
            return
        code = int(answer["code"])
        # Only the leader's error counts: another host may merely have lost the leader.
        if code == ConfigError.exit_code and host == 0:
            raise WorldError(0, f"{slice}: {answer['failed']}", code)
        passing = answer["stopped"] or code == ABORTED
        self._lose(slice, str(answer["failed"]), None if passing else code)

    # -- the end -----------------------------------------------------------------------------

    def _end(self) -> None:
        """Tell the slices that all is done, and wait for them."""
        for slice in self._slices:
            slice.hosts[0].finish.remote()
        self._await_runs(10.0)

    def _drain(self) -> None:
        """Stop the slices; they commit fully computed units."""
        for slice in self._slices:
            for host in slice.hosts:
                host.stop.remote()
        self._await_runs(_DRAIN_SECONDS)

    def _await_runs(self, seconds: float) -> None:
        runs = [ref for ref, call in self._calls.items() if call.what == "run"]
        limit = time.monotonic() + seconds
        while runs and time.monotonic() < limit:
            try:
                _, runs = self._ray.wait(runs, num_returns=len(runs), timeout=_POLL_SECONDS)
            except Exception as error:
                _log.warning("not waiting for the slices' runs: %s", first_line(error))
                return
