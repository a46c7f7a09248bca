"""A fleet in simulated time: extractions, gc, compactions and readers of one dataset, and faults.

What runs is the shipped code: the pipeline with its picker, sink and heartbeat, the ledger, buckets
and their retries, gc, compact, verify and readers. Only the model and the corpus are stood in for.
Along the way the bucket is watched, and at the end all is looked at.
"""

import dataclasses
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import xxhash

from simulator.scheduler import Process, Scheduler
from simulator.store import Bucket, Faults, Store
from spile.core.config import Runtime
from spile.core.errors import CorruptError, Interrupted, SpileError
from spile.core.system import using
from spile.core.threads import cancelled_by
from spile.core.units import Unit
from spile.corpus.pack import PackedUnit
from spile.dataset import format as fmt
from spile.dataset.format import Done
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.verify import verify
from spile.dataset.read.opening import open_dataset
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger
from spile.metrics import Counters
from spile.objects import PROBES, bucket, check_creates_once
from spile.objects.bucket import BucketObjects
from spile.plan.estimate import Budget
from spile.run import extract as extraction
from spile.run.pipeline import worker as pipeline
from spile.run.pipeline.pickers import StorePicker, UnitShare
from spile.run.pipeline.worker import Worker
from spile.run.world.world import RunContext, SingleWorld
from support import stored

SOURCE, DEST = "s3://simulated/dataset", "s3://simulated/compacted"
LENGTHS = ((5, 3), (4,), (6, 2), (3, 0), (7,), (2, 2))  # of documents, unit by unit
_DAY = 86_400.0


class Violation(AssertionError):
    """Something that must never be so."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a seed stands for; chance draws the rest as it goes."""

    workers: int
    units: int
    faults: Faults
    kills: int  # of any process, while they run
    interrupts: int
    pauses: int
    collectors: int = 1
    readers: int = 1
    compactors: int = 1
    budget: bool = False
    shares: bool = False
    trouble: float = 300.0  # seconds in which those come
    finished: bool = False  # whether the dataset is there before anything begins

    @classmethod
    def drawn(cls, seed: int) -> "Plan":
        random = Scheduler(seed ^ 0x5EED).random
        severity = random.choice([0.0, 0.5, 1.0, 2.0])
        begins = random.uniform(0, 200)
        lasts = random.choice([0, 0, 0, 60, 400])
        return cls(
            workers=random.randint(2, 4),
            units=random.randint(1, len(LENGTHS)),
            faults=Faults(
                refused=0.05 * severity,
                lost=0.02 * severity,
                late=0.01 * severity,
                twice=0.01 * severity,
                echoed=0.01 * severity,
                denied=0.001 * severity,
                latency=random.choice([0.005, 0.03, 0.2]),
                outage=(begins, begins + lasts),
                cut=random.choice([0.0, 0.002, 0.01]),
            ),
            kills=random.randint(0, 4),
            interrupts=random.randint(0, 3),
            pauses=random.randint(0, 2),
            compactors=random.randint(0, 2),
            budget=random.random() < 0.15,
            shares=random.random() < 0.3,
            trouble=random.choice([20.0, 100.0, 300.0]),
        )


@functools.cache
def truth(units: int) -> stored.Stored:
    """The dataset that is to come of it."""
    folder = tempfile.TemporaryDirectory(prefix="spile-simulated-")
    _folders.append(folder)
    taps = stored.TAPS if units % 3 == 0 else {"resid_post.0": 3}
    return stored.build(Path(folder.name), LENGTHS[:units], taps=taps, commit=())


_folders: list[tempfile.TemporaryDirectory[str]] = []


@dataclasses.dataclass(frozen=True)
class _Packed(PackedUnit):
    unit: int = 0


class _Model:
    """Computes the rows of a unit: takes a while, and gives what they are to be."""

    def __init__(self, simulation: "Simulation") -> None:
        self._simulation, self._truth = simulation, simulation.truth

    def prepared(self, unit: Unit, attempt: str) -> Any:
        dataset = self._truth
        read = dataset.read[unit.id]
        index = stored.kept(dataset.table, read)
        count = np.array([len(index)])
        blank = np.zeros((1, len(index)), np.int32)
        docs, counts = np.unique(read["doc"], return_counts=True)
        packed = _Packed(
            blank, blank, blank, count, None, count, index,
            dict(zip(docs.tolist(), counts.tolist(), strict=True)), 1, len(read), unit=unit.id,
        )  # fmt: skip
        missing = unit.num_docs - len(docs)
        return SimpleNamespace(
            packed=packed,
            skipped={"no tokens": missing} if missing else {},
            digest="0123",
            unit=unit.id,
            attempt=attempt,
            documents=stored.describe_documents(dataset.table, unit.id, read),
        )

    def batches(self, packed: _Packed) -> Iterator[Any]:
        first, last = self._truth.starts[packed.unit : packed.unit + 2]
        middle = (first + last) // 2
        for start, stop in ((first, middle), (middle, last)):
            rows = {tap: values[start:stop] for tap, values in self._truth.rows.items()}
            yield SimpleNamespace(tokens=np.zeros((1, stop - start)), rows=rows)

    def loaded(self, seconds: float) -> bool:
        return True

    def check(self) -> None:
        pass

    def compile(self, batch: Any) -> None:
        pass

    def __call__(self, batch: Any) -> Any:
        scheduler = self._simulation.scheduler
        scheduler.sleep(scheduler.uniform(0.05, 3.0))
        count = batch.tokens.size
        return SimpleNamespace(
            tokens=count,
            num_rows=count,
            stats_of=lambda tap: [stored.describe(batch.rows[tap])] if count else [],
            pieces_of=lambda tap: [(batch.rows[tap], None)],
            copied_of=lambda tap: 0,
            started=0.0,
            finished=SimpleNamespace(block_until_ready=lambda: None),
        )


class Simulation:
    """One seed's run."""

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        self.seed, self.plan = seed, plan or Plan.drawn(seed)
        self.truth = truth(self.plan.units)
        self.scheduler = Scheduler(seed)
        self.trace: list[str] = []
        self.exits: list[tuple[str, int]] = []
        self.kinds: dict[str, int] = {}  # of faults that were met, how many
        self.buckets = {SOURCE: self._bucket(SOURCE), DEST: self._bucket(DEST)}
        self._reachable: dict[str, set[str]] = {SOURCE: set(), DEST: set()}
        self._running: dict[Process, Callable[[], None]] = {}
        self._stops: dict[Process, Any] = {}
        if self.plan.budget:  # what is not finished cannot be compacted
            self.plan = dataclasses.replace(self.plan, compactors=0)
        self._left = self.plan.workers + self.plan.compactors
        self._faults = dataclasses.replace(self.plan.faults)
        # So that some units fit, and the last does not.
        budget = self.plan.budget and self.plan.units > 2
        self._max_bytes = _stored_bytes(self.plan.units) * 2 // 3 if budget else None

    # -- from outside ------------------------------------------------------------------------

    def run(self) -> "Simulation":
        """Let it all happen, and look at what came of it.

        Raises:
            Violation: with the seed, and the last that happened before.
        """
        with ExitStack() as stack:
            stack.enter_context(using(self.scheduler))
            stack.enter_context(mock.patch.object(bucket, "open_bucket", self._open))
            stack.enter_context(
                mock.patch.object(
                    pipeline,
                    "prepare_unit",
                    lambda job, reader, unit, attempt, **_: job.model.prepared(unit, attempt),
                )
            )
            stack.callback(self.scheduler.close)
            try:
                self._begin()
                self.scheduler.run(self.scheduler.now + _DAY)
                self._expect(not self._left, "extract or compact never came to an end")
                self._finish()
            except BaseException as error:
                last = "\n".join(self.trace[-40:])
                error.add_note(f"seed {self.seed}, {self.plan}; what happened last:\n{last}")
                raise
        return self

    def digest(self) -> str:
        """Of everything that happened, and when. (Workers' names hold this process's number.)"""
        told = "\n".join(self.trace).replace(f"-{os.getpid()}-", "-PID-")
        return hashlib.sha256(told.encode()).hexdigest()

    # -- processes ---------------------------------------------------------------------------

    def _begin(self) -> None:
        plan, random = self.plan, self.scheduler.random
        if plan.finished:
            self._faults = Faults()
            self.scheduler.start("first", lambda: self._extract(None))
            self.scheduler.run(_DAY)
            self._faults = dataclasses.replace(plan.faults)
        for number in range(plan.workers):
            share = UnitShare(number, plan.workers) if plan.shares else None
            self._keep(f"extract-{number}", functools.partial(self._extract, share))
        for number in range(plan.compactors):
            self._keep(f"compact-{number}", self._compact)
        for number in range(plan.collectors):
            self._repeat(f"gc-{number}", self._collect, 20.0)
        for number in range(plan.readers):
            self._repeat(f"reader-{number}", self._read, 10.0)
        troubles = (self._kill, self._interrupt, self._pause)
        counts = (plan.kills, plan.interrupts, plan.pauses)
        for trouble, count in zip(troubles, counts, strict=True):
            for _ in range(count):
                self.scheduler.at(random.uniform(0, plan.trouble), trouble)

    def _keep(self, name: str, command: Callable[[], None]) -> None:
        """Run a command until it has exited with 0: as `supervise` does."""

        def life() -> None:
            code = _exit_code(command)
            process = next(p for p in self._running if p.name == name)
            self._ended(process, code)
            if code == 0:
                self._left -= 1
            else:
                self._expect(code in (3, 130), f"{name} exited with {code}")
                self._again(name, life)

        self._start(name, life)

    def _repeat(self, name: str, command: Callable[[], None], every: float) -> None:
        """Run a command from time to time, as long as others work."""

        def once() -> None:
            self.scheduler.sleep(self.scheduler.uniform(0, every))
            command()

        def life() -> None:
            while self._left:
                code = _exit_code(once)
                self._say(f"{name} exit {code}")
            self._ended(next(p for p in self._running if p.name == name), None)

        self._start(name, life)

    def _start(self, name: str, life: Callable[[], None]) -> None:
        self._say(f"{name} starts")
        self._running[self.scheduler.start(name, life)] = life

    def _again(self, name: str, life: Callable[[], None]) -> None:
        self.scheduler.at(self.scheduler.uniform(0.1, 20), lambda: self._start(name, life))

    def _ended(self, process: Process, code: int | None) -> None:
        del self._running[process]
        self._stops.pop(process, None)
        if code is not None:
            self._say(f"{process.name} exit {code}")
            self.exits.append((process.name.partition("-")[0], code))

    def _cut(self, process: Process) -> None:
        """In the middle of a request."""
        if self.scheduler.now < self.plan.trouble:
            self.scheduler.random.choice([self._kill, self._interrupt])(process)

    def _kill(self, chosen: Process | None = None) -> None:
        process = self._any(chosen)
        if process:
            life = self._running[process]
            process.alive = False
            self._say(f"{process.name} is killed")
            self._ended(process, None)
            self.kinds["killed"] = self.kinds.get("killed", 0) + 1
            self._again(process.name, life)

    def _any(self, chosen: Process | None) -> Process | None:
        running = [process for process in self._running if chosen in (None, process)]
        return self.scheduler.random.choice(running) if running else None

    def _interrupt(self, chosen: Process | None = None) -> None:
        """SIGINT: extract stops at the end of a unit, at once if it comes twice; others at once."""
        process = self._any(chosen)
        if process:
            self._say(f"{process.name} is interrupted")
            self.kinds["interrupted"] = self.kinds.get("interrupted", 0) + 1
            stop = self._stops.get(process)
            if stop is not None and not stop.is_set():
                stop.set()
                if self.scheduler.random.random() < 0.5:
                    self.scheduler.at(self.scheduler.uniform(1, 3), lambda: self._twice(process))
            else:
                self.scheduler.interrupt(process, KeyboardInterrupt())

    def _twice(self, process: Process) -> None:
        if process in self._running:
            self.scheduler.interrupt(process, KeyboardInterrupt())

    def _pause(self) -> None:
        """As a machine that is suspended: others take its units for abandoned."""
        process = self._any(None)
        if process:
            process.paused_until = self.scheduler.now + self.scheduler.uniform(1, 120)
            self.kinds["paused"] = self.kinds.get("paused", 0) + 1
            self._say(f"{process.name} is paused until {process.paused_until:.3f}")

    # -- commands ----------------------------------------------------------------------------

    def _open(self, url: str, spool: object = None, prefix: str = "") -> BucketObjects:
        store = Store(self.scheduler, self.buckets[url], self._faults, self._say, self._cut)
        return BucketObjects(url, store)

    def _extract(self, share: UnitShare | None) -> None:
        """As `spile.run.extract.extract` and `Extraction.extract` do, but for model and corpus."""
        scheduler, objects = self.scheduler, self._open(SOURCE)
        runtime = Runtime(stale_after=30, max_bytes=self._max_bytes)
        ledger, presence = Ledger(objects), Presence(objects, runtime.stale_after)
        stop = scheduler.event()
        assert scheduler.task
        self._stops[scheduler.task.process] = stop
        model = _Model(self)
        units = [*self.truth.table.units]
        try:
            if ledger.read_table() is None:
                check_creates_once(objects)
            table = ledger.create_table(self.truth.table)
            if not ledger.complete(table):
                job = cast(Any, SimpleNamespace(
                    table=table, units=units, model=model, compares=False,
                    reader=lambda *_: SimpleNamespace(close=lambda: None),
                ))  # fmt: skip
                ledger.check_weights({"embed": "aa", "blocks": "bb"})
                budget = Budget(table, ledger, runtime.max_bytes)
                picker = StorePicker(job, ledger, presence, budget, stop, share)
                context = RunContext(ledger, runtime, SingleWorld(), presence, Counters())
                presence.start()
                with cancelled_by(stop):
                    Worker(context, job, cast(Any, model), model.batches, picker).run()  # type: ignore[arg-type]
                ledger.complete(table, patient=True)
            outcome = extraction.outcome_of(ledger, table, cast(Any, None), runtime)
        except BaseException as error:
            state = "stopped" if isinstance(error, Interrupted) else "failed"
            presence.close(state, error=f"{type(error).__name__}: {error}")
            raise
        presence.close("done")
        there = self._done(SOURCE)
        self._expect(outcome.units <= len(there), "an outcome counts units that are not there")
        complete = len(there) == len(units)
        self._expect(
            complete or self._max_bytes is not None,
            f"exit 0, and {len(units) - len(there)} units are missing",
        )

    def _compact(self) -> None:
        source, dest = self._open(SOURCE), self._open(DEST)
        compact(source, dest, unit_bytes=1 << 12, shard_bytes=1 << 10)

    def _collect(self) -> None:
        collect_garbage(self._open(SOURCE))

    def _read(self) -> None:
        """Whatever is there must be whole, and what it is to be."""
        dataset = open_dataset(SOURCE, partial=True, verify=True)
        starts, here = self.truth.starts, dataset.unit_starts
        try:
            for place, unit in enumerate(dataset.units):
                first, last = here[place : place + 2]
                rows = slice(*starts[unit : unit + 2])
                index = dataset.index(first, last)
                self._expect(
                    index.tobytes() == self.truth.index[rows].tobytes(), f"index of unit {unit}"
                )
                for tap in dataset.taps:
                    found = np.asarray(dataset.read(tap, first, last, dtype="stored"))
                    same = found.tobytes() == self.truth.rows[tap][rows].tobytes()
                    self._expect(same, f"a reader found other rows of {tap} in unit {unit}")
        except CorruptError as error:
            raise Violation(f"a reader found a unit that is not whole: {error}") from error

    # -- what must be so ---------------------------------------------------------------------

    def _bucket(self, url: str) -> Bucket:
        return Bucket(functools.partial(self._created, url), functools.partial(self._deleted, url))

    def _created(self, url: str, key: str, data: bytes) -> None:
        unit = fmt.parse_done_key(key)
        if unit is None:
            return
        objects = self.buckets[url].objects
        done = Done.from_json(key, fmt.decode_record(key, data, "done"))
        for file in done.files():
            held = objects.get(file.key)
            whole = held and xxhash.xxh3_128_hexdigest(held[0]) == file.digest
            self._expect(bool(whole), f"{key} was created before {file.key}")
        self._expect(key not in self._reachable[url], f"{key} was created twice")
        self._reachable[url] |= {key, *(file.key for file in done.files())}

    def _deleted(self, url: str, key: str) -> None:
        self._expect(key not in self._reachable[url], f"{key} was removed, which a record names")

    def _done(self, url: str) -> set[int]:
        found = {fmt.parse_done_key(key) for key in self.buckets[url].objects}
        return {unit for unit in found if unit is not None}

    def _finish(self) -> None:
        """Everything has ended, and every late request has arrived."""
        self.kinds |= {"steps": self.scheduler.steps, "requests": len(self.trace)}
        for name in ("refused", "lost", "late", "twice", "echoed", "denied", "cut", "latency"):
            setattr(self._faults, name, 0.001 if name == "latency" else 0.0)
        self._faults.outage = 0.0, 0.0

        def last() -> None:
            self._extract(None)
            self._collect()
            self._read()
            for url in (SOURCE, DEST) if self.plan.compactors else (SOURCE,):
                report = verify(self._open(url), partial=bool(self._max_bytes))
                self._expect(report.ok, f"verify {url}: {report.faults[:3]}")
                left = [k for k in report.orphans if url == SOURCE and not k.startswith(PROBES)]
                if not self._max_bytes:
                    self._expect(not left, f"gc left {left[:3]}")
                    self._expect(report.units == report.units_done, "units are missing")

        process = self.scheduler.start("last", last)
        self._running[process] = last
        self.scheduler.run(self.scheduler.now + _DAY)
        self._expect(bool(process.main and process.main.ended), "the last look never ended")

    def _expect(self, so: bool, otherwise: str) -> None:
        if not so:
            raise Violation(otherwise)

    def _say(self, line: str) -> None:
        self.trace.append(f"{self.scheduler.now:.4f} {line}" if not line[0].isdigit() else line)


def _exit_code(command: Callable[[], None]) -> int:
    """As the command line ends: `cli/__main__.py`."""
    try:
        command()
    except SpileError as error:
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


@functools.cache
def _stored_bytes(units: int) -> int:
    made = [truth(units).attempt(unit, shard_bytes=1 << 20) for unit in range(units)]
    return sum(file.bytes for done in made for file in done.files())
