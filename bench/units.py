"""How the cost of a dataset grows with its units: `python bench/units.py DIR --units 400000`.

`--flat 1000,10000,100000` measures the cost of one more unit in datasets of these sizes: all but
the last 512 units exist, and a worker does those as in a run, without the text and the step. The
datasets take turns of 32 units; the result is the median of a dataset's turns (and the quartiles).

`--bound 10,1000,10000` measures what it takes to bind a unit to what it is made from, and to
compare a record, in tables of so many units: of one run of documents each, and of documents from
everywhere.

The ledger's own code makes a dataset of real units (tiny rows). It is then multiplied: every
further unit is a hard link to the files of a real one, with its own record, segment and table
entry, written without fsync. Every figure comes from a fresh process.

    made            CPU milliseconds for each unit: its files, its record, its share of a segment
    open, status …  seconds, and the largest resident set in MB
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from spile.core.index import FIRST, INDEX_DTYPE, LAST
from spile.core.recipe import ResolvedRecipe
from spile.core.units import Span, Unit
from spile.dataset import format as fmt
from spile.dataset.codec.columns import encode_columns
from spile.dataset.codec.documents import encode_documents
from spile.dataset.codec.shard import statistics_tensors
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import CURRENT, Done, Shard, TapInfo
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.segments import columns_of, read_statistics
from spile.dataset.records.table import Table
from spile.dataset.records.unit_table import UnitColumns
from spile.dataset.write.unit_writer import Attempt, UnitWriter
from spile.objects import LocalObjects, LocalStream
from spile.plan.estimate import Budget
from spile.run.pipeline.pickers import StorePicker

ROWS, WIDTH, TAP = 256, 8, "resid_post.0"  # one block of rows for each unit
REAL = 4000
LAST_UNITS, TURN = 512, 32
SCATTERED, TENSORS = 100, 500  # documents of a unit of a permuted corpus; hashes of weights


def recipe() -> ResolvedRecipe:
    return ResolvedRecipe(
        model_source="/models/none", lora_source=None, corpus_source="/corpora/none.jsonl",
        model={"config": "c0"}, corpus=("12-ab",), taps=(TAP,), where=None, every=None,
        seq_len=ROWS, pack="ffd", long_docs="split", special_tokens="tokenizer", text_column=None,
        text_documents="line", max_docs=None, max_tokens=None, unit_tokens=ROWS,
        compute_dtype="float32", store_dtype="float32",
    )  # fmt: skip


def table_of(units: int, docs: int = 1) -> Table:
    """Return a table in which every document of a unit has a span of its own."""
    if docs == 1:
        entries = [Unit(n, n, 1, ROWS, (Span(0, n, 1, n, n + 1),)) for n in range(units)]
    else:
        entries = [Unit(n, n, docs, ROWS, scattered(n, units, docs)) for n in range(units)]
    made = recipe()
    return Table(
        recipe=made,
        fingerprint=made.fingerprint(),
        taps={TAP: TapInfo((WIDTH,), "float32")},
        files=({"path": "/corpora/none.jsonl", "identity": "12-ab"},),
        units=UnitColumns.of(entries),
        kept=1.0,
    )


def scattered(unit: int, units: int, docs: int) -> tuple[Span, ...]:
    """Return the spans of a unit whose documents are far apart in the corpus."""
    numbers = (unit + units * at for at in range(docs))
    return tuple(Span(0, n, 1, n, n + 1, doc=n) for n in numbers)


def write_unit(ledger: Ledger, table: Table, unit: int) -> Done:
    """Make one unit as a run does, but without a model."""
    index = np.zeros(ROWS, INDEX_DTYPE)
    index["token_id"], index["pos"] = np.arange(ROWS), np.arange(ROWS)
    index["offset"], index["doc"] = np.arange(ROWS), unit
    index["flags"][0], index["flags"][-1] = FIRST, LAST
    rows = np.full((ROWS, WIDTH), unit, np.float32)
    writer = UnitWriter(ledger.objects, unit, index, table.taps, 1 << 30)
    with Attempt(ledger, writer) as attempt:
        writer.write(TAP, rows)
        writer.stats[TAP].count = ROWS
        documents = encode_documents(
            docs=[unit], tokens=[ROWS], skipped=[None], previews=["…"], kept={}, index=index
        )
        done = writer.finish(
            table=documents,
            fingerprint=table.fingerprint,
            made_from=ledger.must_be_made_from(table, unit),
            tokens=ROWS,
            documents=1,
            contexts=1,
            skipped={},
            text_digest="00",
            made_by={"finished_at": time.time(), "seconds": 1.0},
        )
        attempt.commit(done)
    return done


def picker_of(ledger: Ledger, table: Table) -> StorePicker:
    """Return a worker's picker, with a job that has only units."""
    job: Any = SimpleNamespace(units=table.units, recipe=table.recipe, table=table)
    presence = Presence(ledger.objects, 30, ledger.layout)
    return StorePicker(job, ledger, presence, Budget(table, ledger, None), threading.Event())


def make(folder: Path, units: int) -> float:
    """Make real units as a worker does; return the CPU milliseconds that each took.

    This includes everything but the text and the step: choosing and claiming the unit, its files,
    its record, segments and the manifest.
    """
    ledger, table = Ledger(LocalObjects(folder)), table_of(units)
    ledger.create_table(table)
    ledger.check_weights({"embed": "aa"})
    before = time.process_time()
    picker = picker_of(ledger, table)
    while (unit := picker.take()[0]) is not None:
        write_unit(ledger, table, unit.id)
        picker.done(unit.id)
    ledger.complete(table)
    return 1000 * (time.process_time() - before) / units


class CountedObjects(LocalObjects):
    """A disk that counts requests like a bucket: one listing for each 1,000 keys.

    Requests for sizes do not count: a bucket does not need them.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return super().get(key)

    def create(self, key: str, data: bytes) -> bool:
        self.requests["create"] += 1
        return super().create(key, data)

    def replace(self, key: str, data: bytes) -> None:
        self.requests["replace"] += 1
        super().replace(key, data)

    def stream(self, key: str) -> LocalStream:
        self.requests["create"] += 1
        return super().stream(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        keys = [*super().list(prefix)]
        self.requests["list"] += 1 + len(keys) // 1000
        return iter(keys)


class Flat:
    """A dataset without its last units, and a worker that does them in turns."""

    def __init__(self, real: Path, folder: Path, units: int) -> None:
        last = (units - LAST_UNITS) // fmt.GROUP_UNITS * fmt.GROUP_UNITS
        self.units, self.rest = units, range(max(0, last), units)
        multiply(real, folder, units, self.rest.start)
        self.ledger = Ledger(CountedObjects(folder))
        self.table = self.ledger.table()
        began = time.process_time()
        self.picker = picker_of(self.ledger, self.table)
        self.joined = time.process_time() - began
        self.asked = -self._requests()
        self.turns: list[float] = []  # processor milliseconds for each unit

    def _requests(self) -> int:
        return sum(self.ledger.objects.requests.values())

    def turn(self) -> bool:
        """Do a turn of units; return whether there were enough."""
        began = time.process_time()
        for _ in range(TURN):
            unit = self.picker.take()[0]
            if unit is None:
                return False
            write_unit(self.ledger, self.table, unit.id)
            self.picker.done(unit.id)
        self.turns.append(1000 * (time.process_time() - began) / TURN)
        return True

    def report(self) -> str:
        told = self.ledger.objects.requests
        each = {kind: f"{n / len(self.rest):.2f}" for kind, n in sorted(told.items())}
        asked = (self.asked + self._requests()) / len(self.rest)
        began = time.process_time()
        self.ledger.complete(self.table)
        complete = 1000 * (time.process_time() - began) / self.units
        low, middle, high = np.quantile(self.turns, [0.25, 0.5, 0.75])
        return (
            f"{self.units} units: {middle:.2f} CPU ms ({low:.2f} to {high:.2f}) and {asked:.2f} "
            f"requests for each of the last {len(self.rest)} {each}; join "
            f"{1000 * self.joined:.0f} CPU ms; manifest {complete:.3f} CPU ms a unit"
        )


def flat(real: Path, folder: Path, counts: Sequence[int]) -> None:
    """Compare one more unit in datasets of several sizes, which take turns."""
    runs = [Flat(real, folder / f"flat-{count}", count) for count in counts]
    while all([run.turn() for run in runs]):
        pass
    for run in runs:
        while run.turn():
            pass
        print(run.report(), flush=True)


def bound(folder: Path, counts: Sequence[int]) -> None:
    """Measure how long units are bound and compared, in tables of several sizes."""
    for docs, count in itertools.product((1, SCATTERED), counts):
        ledger = Ledger(LocalObjects(folder / f"bound-{docs}-{count}"))
        ledger.create_table(table_of(count, docs))
        ledger.check_weights({f"layers.{n}": f"{n:032x}" for n in range(TENSORS)})
        table, done = ledger.table(), write_unit(ledger, ledger.table(), 0)
        assert len(table.units.columns)  # reads them
        numbers = range(0, count, max(1, count // 1000))
        records = [
            replace(done, unit=n, made_from=ledger.must_be_made_from(table, n)) for n in numbers
        ]
        ledger = Ledger(ledger.objects)
        first = cpu_ms(partial(ledger.made_from, table), [0])
        bind = cpu_ms(partial(ledger.must_be_made_from, table), numbers)
        compare = cpu_ms(partial(ledger.other_origin, table), records)
        assert ledger.other_origin(table, records[-1]) is None
        print(
            f"{count} units of {docs} spans: the first {first:.2f} CPU ms, to bind {bind:.3f}, "
            f"to compare {compare:.3f}",
            flush=True,
        )


def cpu_ms(call: Callable[[Any], object], of: Sequence[Any]) -> float:
    """Return the processor milliseconds of each call."""
    began = time.process_time()
    for each in of:
        call(each)
    return 1000 * (time.process_time() - began) / len(of)


def multiply(real: Path, folder: Path, units: int, stop: int | None = None) -> None:
    """Link the files of real units as those of many units, up to the group of unit `stop`."""
    source, ledger, table = (
        Ledger(LocalObjects(real)),
        Ledger(LocalObjects(folder)),
        table_of(units),
    )
    found = [source.read_done(unit) for unit in range(len(source.table().units))]
    records = [done for done in found if done]
    statistics = [read_statistics(source.objects, done, table.taps) for done in records]
    with patch("os.fsync", lambda descriptor: None):
        ledger.create_table(table)
        ledger.check_weights({"embed": "aa"})
        bound = partial(ledger.must_be_made_from, table)
        for group in range(CURRENT.groups(units if stop is None else stop)):
            numbers = CURRENT.units_of(group, units)
            linked = [
                link_unit(real, folder, records[n % len(records)], n, bound(n)) for n in numbers
            ]
            merged = TapStats.empty(WIDTH)
            for number in numbers:
                merged.merge(statistics[number % len(records)][TAP])
            segment = {**columns_of(linked), **statistics_tensors({TAP: merged})}
            ledger.objects.create(CURRENT.segment_key(group), encode_columns(segment))
        if stop is None:
            ledger.complete(table)


@contextmanager
def unfinished(folder: Path) -> Iterator[None]:
    """Remove the manifest, the last segment and the last records; restore them afterwards."""
    units = len(Ledger(LocalObjects(folder)).table().units)
    last = range(units - 10, units)
    groups = {CURRENT.group(unit) for unit in last}
    keys = [fmt.MANIFEST, *map(CURRENT.segment_key, groups), *map(CURRENT.done_key, last)]
    for key in keys:
        os.rename(folder / key, folder.parent / key.replace("/", "-"))
    try:
        yield
    finally:
        for key in keys:
            os.rename(folder.parent / key.replace("/", "-"), folder / key)


def link_unit(real: Path, folder: Path, done: Done, unit: int, made_from: str) -> Done:
    def moved(file: Shard) -> Shard:
        key = CURRENT.attempt_prefix(unit, done.attempt) + file.key.rpartition("/")[2]
        os.link(real / file.key, folder / key)
        return replace(file, key=key)

    (folder / CURRENT.attempt_prefix(unit, done.attempt)).mkdir(parents=True)
    copy = replace(
        done,
        unit=unit,
        made_from=made_from,
        shards=tuple(map(moved, done.shards)),
        index=moved(done.index),
        statistics=moved(done.statistics),
        documents_table=moved(done.documents_table),
    )
    record = fmt.encode_record("done", copy.to_json())
    path = folder / CURRENT.done_key(unit)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(record)
    return copy


# -- measurements, each in its own process ---------------------------------------------------------


def opened(out: str) -> Any:
    import spile

    return spile.open(out)


def measure_open(out: str) -> None:
    dataset = opened(out)
    assert dataset.num_tokens


def measure_batch(out: str) -> None:
    batch = next(iter(opened(out).batches(TAP, 4096, seed=1)))
    assert len(batch[TAP]) == 4096


def measure_read(out: str) -> None:
    dataset = opened(out)
    assert len(dataset.read(TAP, dataset.num_tokens // 2, dataset.num_tokens // 2 + 1000)) == 1000


def measure_statistics(out: str) -> None:
    assert opened(out).statistics(TAP).count


def measure_document(out: str) -> None:
    dataset = opened(out)
    assert dataset.about(17)["tokens"] == ROWS  # (links name the documents of real units)


def measure_status(out: str) -> None:
    from spile.status.status import read_status

    assert read_status(LocalObjects(Path(out))).units_done


measure_progress = measure_status


def measure_join(out: str) -> None:
    """Measure a worker before its first unit: the table, the done units, a group, a claim."""
    ledger = Ledger(LocalObjects(Path(out)))
    table = ledger.table()
    ledger.done_units()
    ledger.complete(table)
    picker = picker_of(ledger, table)
    unit, _ = picker.take()
    assert unit is not None
    for key in [*ledger.objects.list(fmt.WORKERS)]:
        ledger.objects.delete(key)


def measure_verify(out: str) -> None:
    from spile.dataset.maintain.verify import verify

    report = verify(LocalObjects(Path(out)), quick=True, partial=True)
    assert report.ok, report.faults[:3]


def measure_ls(out: str) -> None:
    from spile.cli import run

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        assert run(["ls", out]) == 0


def measure_ls_json(out: str) -> None:
    from spile.cli import run

    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        assert run(["ls", out, "--json"]) == 0


def measure_documents(out: str) -> None:
    dataset = opened(out)
    assert dataset.documents(["doc", "tokens"]).num_rows == dataset.num_units


def measure_serve(out: str) -> None:
    """Measure `spile serve` until it has answered: the run, a list of documents, a search."""
    from spile.serve.routes import Answers, plain

    answers = Answers(
        LocalObjects(Path(out)), partial(opened, out), tokenizer=None, most_bytes=1 << 20
    )
    told = plain(answers.routes["run"]({}))
    assert told["made"]
    assert plain(answers.routes["documents"]({"start": "5000", "count": "50"}))["documents"]
    assert plain(answers.routes["documents"]({"q": "nothing there"}))["next"]
    answers.close()


def measure_gc(out: str) -> None:
    from spile.dataset.maintain.gc import collect_garbage

    assert not collect_garbage(LocalObjects(Path(out)))


def measure_compact(out: str) -> None:
    from spile.dataset.maintain.compact import compact

    with TemporaryDirectory(prefix="compact-", dir=Path(out).parent) as dest:
        made = compact(LocalObjects(Path(out)), LocalObjects(Path(dest)))
    assert made.units < made.units_before


def measure_push(out: str) -> None:
    """Measure a push without the Hub and its client: every file is checked as before sending."""
    from spile.interop.hub import push

    class Nowhere(push._Repository):
        def prepare(self, *, private: bool) -> None: ...

        def listed(self, folder: str) -> tuple[dict[str, Any], list[str]]:
            return {}, []

        def commit(self, files: Any, message: str) -> None: ...

    with patch.object(push, "_Repository", Nowhere):
        assert push.push(out, "me/nowhere").files


MEASURES: dict[str, Callable[[str], None]] = {
    name.removeprefix("measure_"): function
    for name, function in globals().items()
    if name.startswith("measure_")
}


UNFINISHED = ("join", "progress")  # measured while ten units are left to do


def measured(name: str, out: Path) -> dict[str, float]:
    command = [sys.executable, __file__, str(out), "--measure", name]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(said)


def run_measure(name: str, out: str) -> None:
    import spile.dataset.read.dataset  # noqa: F401  (imports are not what is measured)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, cpu = time.perf_counter(), time.process_time()
    MEASURES[name](out)
    told = {
        "seconds": round(time.perf_counter() - began, 3),
        "cpu": round(time.process_time() - cpu, 3),
        "grown_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(told))


def sizes(text: str) -> Iterator[int]:
    return (int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--units", type=int, default=400_000)
    parser.add_argument("--real", default=f"1000,{REAL}", help="numbers of units made in full")
    parser.add_argument("--only", default=",".join(MEASURES))
    parser.add_argument("--flat", help="numbers of units between which to compare one more unit")
    parser.add_argument("--bound", help="numbers of units of tables in which to bind units")
    parser.add_argument("--measure", choices=MEASURES)
    arguments = parser.parse_args()
    if arguments.bound:
        bound(arguments.folder, [*sizes(arguments.bound)])
        return
    if arguments.measure:
        run_measure(arguments.measure, str(arguments.folder))
        return
    for count in sizes(arguments.real):
        real = arguments.folder / f"real-{count}"
        if not real.exists():
            print(f"made {count} units: {make(real, count):.2f} CPU ms each", flush=True)
    if arguments.flat:
        flat(real, arguments.folder, [*sizes(arguments.flat)])
        return
    many = arguments.folder / f"many-{arguments.units}"
    if not many.exists():
        began = time.perf_counter()
        multiply(real, many, arguments.units)
        print(f"multiplied to {arguments.units}: {time.perf_counter() - began:.0f} s", flush=True)
    for name in arguments.only.split(","):
        with unfinished(many) if name in UNFINISHED else nullcontext():
            print(name, measured(name, many), flush=True)


if __name__ == "__main__":
    main()
