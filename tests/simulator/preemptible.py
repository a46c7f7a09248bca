"""Preemptible workers on a bucket, in simulated time: how long a fleet takes, and what it asks for.

The ledger, the picker, the heartbeats and the client of the bucket are the shipped ones. A step
takes a drawn time instead of computing, and every unit has the same few tiny files. Unlike
`simulator.fleet`, which looks for lost units in fleets of a few workers, this one is made for
thousands of workers: it leaves out the stages of the pipeline, which look at their queues ten times
a second.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
from obstore import exceptions

from simulator.scheduler import Process, Scheduler
from simulator.store import Bucket, Faults, Store
from spile.core.config import Runtime
from spile.core.index import FIRST, INDEX_DTYPE, LAST
from spile.core.recipe import ResolvedRecipe
from spile.core.system import system, using
from spile.core.units import Span, Unit
from spile.dataset import format as fmt
from spile.dataset.codec.documents import encode_documents
from spile.dataset.format import CURRENT, Done, Shard, TapInfo
from spile.dataset.records import heartbeat
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table
from spile.dataset.records.unit_table import UnitColumns
from spile.dataset.write.unit_writer import Attempt, UnitWriter
from spile.objects.bucket import BucketObjects
from spile.objects.memory import MemoryObjects
from spile.plan.estimate import Budget
from spile.run.pipeline.pickers import StorePicker, UnitShare

URL, TAP, ROWS, WIDTH = "s3://simulated/dataset", "resid_post.0", 8, 4
_HELD = 2  # units of one worker: the one that computes and the next one, as in `run.pipeline`
_PAGE = 1000  # keys of one request of a listing, as S3 has it


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What is simulated."""

    workers: int = 100
    units: int = 2000
    unit_seconds: float = 80.0
    spread: float = 0.3  # a unit takes up to this share more or less
    lifetime: float = 7200.0  # mean seconds until a worker is preempted
    absent: tuple[float, float] = (30.0, 180.0)  # seconds until another takes its place
    arrive: float = 60.0  # seconds within which the first workers start
    stale_after: float = Runtime().stale_after
    shares: bool = False  # whether each worker has a share of the units
    faults: Faults = field(default_factory=lambda: Faults(refused=0.01, lost=0.001, latency=0.03))


@dataclass(frozen=True)
class Report:
    """What came of it. Times are simulated seconds."""

    fleet: Fleet
    seed: int
    makespan: float  # until the manifest exists
    ideal: float  # until the live workers could have computed every unit once
    committed: float  # until the last done record exists
    last_percent: float  # from 99% of the done records to the last
    preempted: int  # workers
    duplicated: float  # share of the computed seconds, of units that another had committed
    lost: float  # share of the computed seconds, of units that a preemption cut short
    requests: Counter[str]  # by kind and by the first part of the key
    longest_listing: int  # keys
    core_seconds: float
    steps: int

    @property
    def over_ideal(self) -> float:
        return self.makespan / self.ideal

    @property
    def within_target(self) -> bool:
        limit = 1.05 * self.ideal + self.fleet.unit_seconds
        return self.makespan <= limit and self.duplicated <= 0.01

    def per_unit(self, *kinds: str) -> float:
        """Requests for each unit, of all kinds or of some."""
        chosen = (n for name, n in self.requests.items() if not kinds or name.split()[0] in kinds)
        return sum(chosen) / self.fleet.units

    def __str__(self) -> str:
        fleet = self.fleet
        kinds = Counter[str]()
        for name, count in self.requests.items():
            kinds[name.split()[0]] += count
        told = ", ".join(f"{kind} {count / fleet.units:.2f}" for kind, count in kinds.most_common())
        most = ", ".join(
            f"{name} {n / fleet.units:.2f}" for name, n in self.requests.most_common(8)
        )
        return (
            f"{fleet.workers} workers x {fleet.units} units, seed {self.seed}: "
            f"makespan {self.makespan:.0f} s = {self.over_ideal:.4f} x ideal "
            f"{self.ideal:.0f} s ({'within' if self.within_target else 'OVER'} 1.05 x ideal + a "
            f"unit); last commit {self.committed:.0f} s, last 1% {self.last_percent:.0f} s\n"
            f"  {self.preempted} workers preempted; {self.lost:.2%} of the computed seconds lost "
            f"with them, {self.duplicated:.3%} duplicated\n"
            f"  {self.per_unit():.1f} requests a unit: {told}; longest listing "
            f"{self.longest_listing} keys\n  most: {most}\n"
            f"  simulated in {self.core_seconds:.0f} s of a core, {self.steps:,} events"
        )


class FleetError(AssertionError):
    """A unit was lost or doubled."""


def simulate(fleet: Fleet, seed: int, tell: Callable[[str], None] = lambda line: None) -> Report:
    """Simulate a fleet until every worker has ended.

    Args:
        tell: told of the progress, a few times.

    Raises:
        FleetError: if a unit was lost or doubled.
    """
    return _Simulation(fleet, seed, tell).run()


class _CountingStore(Store):
    """Counts requests; what refuses one is throttling."""

    requests: Counter[str]
    longest: list[int]

    def list(self, prefix: str | None = None, offset: str | None = None) -> Iterator[Any]:
        keys = 0
        for page in super().list(prefix, offset):
            keys += len(page)
            yield page
        self.longest[0] = max(self.longest[0], keys)

    def _ask(self, kind: str, key: str, do: Callable[[], Any]) -> Any:
        self.requests[f"{kind} {key.partition('/')[0]}"] += 1
        return super()._ask(kind, key, do)

    def _error(self, kind: str, fate: str) -> Exception:
        if fate == "refused":
            return exceptions.GenericError("status code: 503 Service Unavailable: SlowDown")
        return super()._error(kind, fate)


WEIGHTS = {"embed": "aa"}


@cache
def _bound() -> Ledger:
    """Return a ledger that knows the weights without a request."""
    ledger = Ledger(MemoryObjects())
    ledger.check_weights(WEIGHTS)
    return ledger


class MadeFiles:
    """The files of an attempt: those of a unit that was made once, under other keys."""

    def __init__(self, objects: BucketObjects, table: Table, unit: int, attempt: str) -> None:
        self._objects, self._table, self._unit, self._attempt = objects, table, unit, attempt
        self._put: list[str] = []

    def finish(self) -> Done:
        done, contents = _made()
        files = [self._upload(file, contents[file.key]) for file in done.files()]
        *shards, index, statistics, documents = files
        return replace(
            done, unit=self._unit, attempt=self._attempt, shards=tuple(shards), index=index,
            statistics=statistics, documents_table=documents,
            made_from=_bound().must_be_made_from(self._table, self._unit),
        )  # fmt: skip

    def discard(self) -> None:
        for key in self._put:
            self._objects.delete(key)

    def _upload(self, file: Shard, data: bytes) -> Shard:
        prefix = CURRENT.attempt_prefix(self._unit, self._attempt)
        key = prefix + file.key.rpartition("/")[2]
        self._put.append(key)
        return replace(file, key=key, etag=self._objects.upload(key, data))


class _Simulation:
    def __init__(self, fleet: Fleet, seed: int, tell: Callable[[str], None]) -> None:
        self._fleet, self._seed, self._tell = fleet, seed, tell
        self._scheduler = Scheduler(seed)
        drawn = Random(f"units {seed}")
        low, high = (fleet.unit_seconds * (1 + sign * fleet.spread) for sign in (-1, 1))
        self._seconds = [drawn.uniform(low, high) for _ in range(fleet.units)]
        self._bucket = Bucket(self._created, page=_PAGE)
        self._requests, self._longest = Counter[str](), [0]
        self._population: list[tuple[float, int]] = []  # when workers came and went
        self._commits: list[float] = []
        self._computing: dict[Process, float] = {}  # since when
        self._computed, self._lost, self._duplicated = 0.0, 0.0, 0.0
        self._manifest_at: float | None = None
        self._names, self._preempted = 0, 0

    def run(self) -> Report:
        began = time.process_time()
        _made()  # outside simulated time
        scheduler, fleet = self._scheduler, self._fleet
        with ExitStack() as stack:
            stack.enter_context(using(scheduler))
            # Each worker has a machine of its own.
            stack.enter_context(mock.patch.object(heartbeat, "process_ended", lambda _: False))
            stack.callback(scheduler.close)
            scheduler.start("first", self._create)
            scheduler.run()
            start = scheduler.now
            for number in range(fleet.workers):
                share = UnitShare(number, fleet.workers) if fleet.shares else None
                delay = scheduler.uniform(0, fleet.arrive)
                scheduler.at(delay, partial(self._join, share))
            scheduler.run()
            self._check()
        assert self._manifest_at is not None
        return Report(
            fleet=fleet,
            seed=self._seed,
            makespan=self._manifest_at - start,
            ideal=self._ideal() - start,
            committed=self._commits[-1] - start,
            last_percent=self._commits[-1] - self._commits[-1 - fleet.units // 100],
            preempted=self._preempted,
            duplicated=self._duplicated / self._computed,
            lost=self._lost / self._computed,
            requests=self._requests,
            longest_listing=self._longest[0],
            core_seconds=time.process_time() - began,
            steps=scheduler.steps,
        )

    # -- workers ------------------------------------------------------------------------------

    def _create(self) -> None:
        ledger = Ledger(self._open())
        ledger.create_table(table_of(self._fleet.units))
        ledger.check_weights(WEIGHTS)

    def _open(self) -> BucketObjects:
        store = _CountingStore(self._scheduler, self._bucket, self._fleet.faults)
        store.requests, store.longest = self._requests, self._longest
        return BucketObjects(URL, store)

    def _join(self, share: UnitShare | None) -> None:
        """Let a worker begin, and draw when it is preempted."""
        scheduler = self._scheduler
        self._names += 1
        name = f"worker-{scheduler.token(4)}-{self._names}"
        process = scheduler.start(name, lambda: self._work(process, share))
        self._population.append((scheduler.now, 1))
        after = scheduler.random.expovariate(1 / self._fleet.lifetime)
        scheduler.at(after, partial(self._preempt, process, share))

    def _preempt(self, process: Process, share: UnitShare | None) -> None:
        if process.main is None or process.main.ended:
            return
        process.alive = False
        self._preempted += 1
        self._population.append((self._scheduler.now, -1))
        since = self._computing.pop(process, None)
        if since is not None:
            self._computed += self._scheduler.now - since
            self._lost += self._scheduler.now - since
        absent = self._scheduler.uniform(*self._fleet.absent)
        self._scheduler.at(absent, partial(self._join, share))

    def _work(self, process: Process, share: UnitShare | None) -> None:
        """Do units as `run.extract` does: one is chosen while another computes."""
        ledger, stop = Ledger(self._open()), system().event()
        presence = Presence(ledger.objects, self._fleet.stale_after, ledger.layout)
        presence.name = process.name
        presence.start()
        # The units of a table are columns, which a thousand workers on one machine have to share.
        table = replace(ledger.table(), units=table_of(self._fleet.units).units)
        if not ledger.complete(table):
            job: Any = SimpleNamespace(units=UnitIds(len(table.units)), table=table)
            budget = Budget(table, ledger, None)
            picker = StorePicker(job, ledger, presence, budget, stop, share)
            room = system().semaphore(_HELD)
            ready, written = system().queue(1), system().queue(0)
            feed = system().thread(partial(_feed, picker, room, ready), "feed")
            sink = system().thread(partial(self._sink, ledger, picker, written), "sink")
            feed.start()
            sink.start()
            presence.tell(state="running")
            while (unit := ready.get()) is not None:
                self._compute(process, unit)
                room.release()
                written.put(unit)
            written.put(None)
            sink.join()
            ledger.complete(table, patient=True)
        presence.close("done")
        self._population.append((self._scheduler.now, -1))

    def _compute(self, process: Process, unit: int) -> None:
        self._computing[process] = self._scheduler.now
        system().sleep(self._seconds[unit])
        del self._computing[process]
        self._computed += self._seconds[unit]

    def _sink(self, ledger: Ledger, picker: StorePicker, written: Any) -> None:
        """Write and commit what was computed, while the next unit computes."""
        while (unit := written.get()) is not None:
            objects = cast(BucketObjects, ledger.objects)
            files = MadeFiles(objects, table_of(self._fleet.units), unit, system().token(8))
            with Attempt(ledger, cast(UnitWriter, files)) as attempt:
                if not attempt.commit(files.finish()):
                    self._duplicated += self._seconds[unit]
            picker.done(unit)

    # -- what came of it ----------------------------------------------------------------------

    def _created(self, key: str, data: bytes) -> None:
        if key.startswith(fmt.DONE):
            self._commits.append(self._scheduler.now)
            if len(self._commits) % max(1, self._fleet.units // 20) == 0:
                self._tell(f"{len(self._commits)} units at {self._scheduler.now:.0f} s")
        elif key == fmt.MANIFEST:
            self._manifest_at = self._scheduler.now

    def _ideal(self) -> float:
        """Return when the workers that were alive could have computed every unit once."""
        left, now, alive = sum(self._seconds), 0.0, 0
        for when, change in sorted(self._population):
            if alive and left <= alive * (when - now):
                return now + left / alive
            left, now, alive = left - alive * (when - now), when, alive + change
        raise FleetError("the fleet ended before it can have computed every unit")

    def _check(self) -> None:
        """Compare what a reader is given with the done records."""
        units = self._fleet.units
        if len(self._commits) != units:
            raise FleetError(f"{len(self._commits)} done records of {units} units")

        def read() -> None:
            ledger = Ledger(self._open())
            table = ledger.table()
            manifest = ledger.derived.read_manifest(ledger.layout)
            if manifest is None or manifest.totals.units != units:
                raise FleetError("there is no manifest of all units")
            if manifest.totals.rows != units * ROWS:
                raise FleetError(f"the manifest counts {manifest.totals.rows} rows")
            for unit, listed in enumerate(ledger.derived.catalog(table, manifest)):
                data, _ = self._bucket.objects[CURRENT.done_key(unit)]
                if f'"{listed.attempt}"'.encode() not in data or listed.unit != unit:
                    raise FleetError(f"the manifest names another attempt of unit {unit}")
                if any(file.key not in self._bucket.objects for file in listed.files()):
                    raise FleetError(f"files of unit {unit} are missing")

        self._scheduler.start("reader", read)
        self._scheduler.run()


class UnitIds:
    """The units of a job; the picker needs their ids alone."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, unit: int) -> Any:
        return SimpleNamespace(id=unit)


def _feed(picker: StorePicker, room: Any, ready: Any) -> None:
    """Choose units as long as there are any."""
    more = True
    while more:
        room.acquire()
        unit, more = picker.take()
        if unit is None:
            room.release()
        else:
            ready.put(unit.id)
    ready.put(None)


@cache
def _made() -> tuple[Done, dict[str, bytes]]:
    """Return one unit, made as a run makes it, and the contents of its files."""
    objects, table = MemoryObjects(), table_of(1)
    index = np.zeros(ROWS, INDEX_DTYPE)
    index["pos"] = index["offset"] = np.arange(ROWS)
    index["flags"][0], index["flags"][-1] = FIRST, LAST
    writer = UnitWriter(objects, 0, index, table.taps, 1 << 20)
    writer.write(TAP, np.ones((ROWS, WIDTH), np.float32))
    writer.stats[TAP].count = ROWS
    done = writer.finish(
        table=encode_documents(
            docs=[0], tokens=[ROWS], skipped=[None], previews=["…"], kept={}, index=index
        ),
        fingerprint=table.fingerprint, made_from="", tokens=ROWS, documents=1, contexts=1,
        skipped={}, text_digest="00", made_by={"finished_at": 0.0, "seconds": 1.0},
    )  # fmt: skip
    return done, {file.key: objects.get(file.key) for file in done.files()}


@cache
def table_of(units: int) -> Table:
    """Return a table of units with one document each."""
    recipe = ResolvedRecipe(
        model_source="/models/none", lora_source=None, corpus_source="/corpora/none.jsonl",
        model={"config": "c0"}, corpus=("12-ab",), taps=(TAP,), where=None, every=None,
        seq_len=ROWS, pack="ffd", long_docs="split", special_tokens="tokenizer", text_column=None,
        text_documents="line", max_docs=None, max_tokens=None, unit_tokens=ROWS,
        compute_dtype="float32", store_dtype="float32",
    )  # fmt: skip
    entries = [Unit(n, n, 1, ROWS, (Span(0, n, 1, n, n + 1),)) for n in range(units)]
    return Table(
        recipe=recipe,
        fingerprint=recipe.fingerprint(),
        taps={TAP: TapInfo((WIDTH,), "float32")},
        files=({"path": "/corpora/none.jsonl", "identity": "12-ab"},),
        units=UnitColumns.of(entries),
        kept=1.0,
    )
