"""What a person sees: the progress line, tables, summaries. Text only; the command prints it."""

import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from spile.errors import printable
from spile.metrics import Counters

if TYPE_CHECKING:
    from spile.engine.compile import Compiled
    from spile.engine.estimate import Estimate
    from spile.engine.fetch import Fetched
    from spile.engine.local import Outcome
    from spile.engine.recheck import CheckReport
    from spile.engine.resolve import Job
    from spile.interop.export import Exported
    from spile.interop.push import Pushed
    from spile.monitor.status import Status
    from spile.store.compact import Compacted
    from spile.store.verify import Report

_PLAIN_SECONDS = 10.0  # between lines where there is no terminal
OnStart = Callable[["Job", "Estimate"], None]


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def _skipped(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


@contextmanager
def progress(counters: Counters, *, quiet: bool) -> Iterator[OnStart]:
    """Show a run's counters while it lasts; yields what to call when the work is known."""
    if quiet:
        yield lambda job, cost: None
        return
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def on_start(job: "Job", cost: "Estimate") -> None:
        show = _live if sys.stderr.isatty() else _plain
        left = cost.tokens * (cost.units - cost.units_done) // max(1, cost.units)
        thread = threading.Thread(target=show, args=(counters, left, stop), daemon=True)
        threads.append(thread)
        thread.start()

    try:
        yield on_start
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _line(counters: Counters, since: float) -> str:
    rate = counters["tokens"] / max(1e-9, time.monotonic() - since)
    return (
        f"{counters['tokens']:,.0f} tokens  {rate:,.0f} tok/s  "
        f"{counters['units']:.0f} units  {size(counters['bytes'])}"
    )


def _live(counters: Counters, total: int, stop: threading.Event) -> None:
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[line]}"), TimeRemainingColumn(),
    )  # fmt: skip
    began: float | None = None
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, line="loading and compiling")
        while not stop.wait(0.2):
            if counters["tokens"] and began is None:
                began = time.monotonic() - 1.0
            if began is not None:
                # The total is an estimate: the bar may reach its end a little early.
                seen = min(counters["tokens"], total)
                bar.update(task, completed=seen, line=_line(counters, began))


def _plain(counters: Counters, total: int, stop: threading.Event) -> None:
    began = time.monotonic()
    while not stop.wait(_PLAIN_SECONDS):
        share = min(1.0, counters["tokens"] / max(1, total))
        sys.stderr.write(f"spile: {share:4.0%}  {_line(counters, began)}\n")
        sys.stderr.flush()


@contextmanager
def counted(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, plain lines elsewhere; yields what to call with (done, total)."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        said = [time.monotonic()]

        def say(done: int, total: int) -> None:
            if time.monotonic() - said[0] > _PLAIN_SECONDS:
                said[0] = time.monotonic()
                sys.stderr.write(f"spile: {done:,} of {total:,} {what}\n")
                sys.stderr.flush()

        yield say
        return
    columns = (
        SpinnerColumn(), BarColumn(), TextColumn(f"{{task.completed}} of {{task.total}} {what}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _program(name: str, path: str) -> str:
    """What to type for a program: its name, or its path where the name would not find it."""
    here = Path(path)
    found = shutil.which(name)
    if not here.is_file() or (found and Path(found).samefile(here)):
        return name
    return os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here)


def extract_summary(out: str, outcome: "Outcome", counters: Counters) -> str:
    """What was made, and how to look at it, verify it and read it."""
    # The script beside the interpreter: argv[0] is no program under `python -m spile.cli`.
    spile = _program("spile", str(Path(sys.executable).with_name("spile")))
    python = _program("python", sys.executable)
    quoted = shlex.quote(out)
    part = "" if outcome.complete else ", partial=True"
    read = (
        f"import spile; ds = spile.open({out!r}{part}); print(ds.taps, ds.read(ds.taps[0], 0, 4))"
    )
    lines = [
        f"{out}: {outcome.documents:,} documents, {outcome.rows:,} rows per tap"
        + (f" (of {outcome.tokens:,} tokens)" if outcome.rows < outcome.tokens else "")
        + ", "
        f"{size(outcome.bytes)} in {outcome.units} units"
    ]
    if not outcome.complete:
        lines.append(
            f"ended by --max-bytes with {outcome.units} of {outcome.units_total} units; the same "
            "command with more of them goes on"
        )
    if outcome.skipped:
        lines.append(f"left out: {_skipped(outcome.skipped)}")
    if span := counters["device_busy"] + counters["device_idle"]:
        lines.append(
            f"the device computed for {counters['device_busy'] / span:.1%} of {span:.1f} s"
        )
    lines += [
        f"  look    {spile} status {quoted}",
        f"  verify  {spile} verify {quoted}{'' if outcome.complete else ' --partial'}",
        f"  read    {python} -c {shlex.quote(read)}",
    ]
    return "\n".join(lines)


def plan_table(recipe: Mapping[str, Any], cost: "Estimate") -> None:
    """Print the plan as a table."""
    chosen = recipe["store_dtype"]
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = [
        ("documents", f"{cost.documents:,}"),
        ("tokens (estimated)", f"{cost.tokens:,}"),
        ("rows to keep", f"{cost.rows:,}"),
        ("units", f"{cost.units:,} ({cost.units_done:,} done)"),
        ("contexts of", f"{recipe['seq_len']:,} tokens, {cost.batch_rows} rows a step"),
        *((f"  {tap}", size(b)) for tap, b in cost.bytes_per_tap.items()),
        ("  index", size(cost.index_bytes)),
        ("  headers, statistics", size(cost.overhead_bytes)),
        ("to store", f"{size(cost.total_bytes)} as {recipe['store_dtype']}"),
        *((f"  as {d}", size(b)) for d, b in cost.bytes_by_dtype.items() if d != chosen),
        *_compressed(cost, chosen),
        *_priced(cost),
        ("mesh", cost.mesh if cost.mesh != "1" else "one device"),
        ("weights per device", f"{size(cost.weights_bytes)} in {recipe['compute_dtype']}"),
        ("memory per device", size(cost.device_bytes)),
        ("memory on the host", size(cost.host_bytes)),
    ]
    for name, value in rows:
        table.add_row(name, value)
    Console().print(table)
    for warning in cost.warnings:
        Console().print(f"note: {warning}", style="yellow", highlight=False)


def _priced(cost: "Estimate") -> list[tuple[str, str]]:
    """Room on a disk, or rent in a cloud."""
    if cost.monthly_dollars is not None:
        return [
            ("to keep it", f"${cost.monthly_dollars:,.2f} a month"),
            ("  as", str(cost.priced_as)),
        ]
    free = "unknown" if cost.free_bytes is None else size(cost.free_bytes)
    return [("free there", free)]


def _compressed(cost: "Estimate", dtype: str) -> list[tuple[str, str]]:
    """What --compress makes of normal noise; of real rows more or less."""
    shares = {"bfloat16": 0.70, "float16": 0.88, "float32": 0.85, "float8_e4m3": 0.90, "int8": 0.86}
    return [("  with --compress, about", size(int(cost.total_bytes * shares[dtype])))]


def taps_table(entries: Sequence[Mapping[str, Any]]) -> None:
    """Print taps, one line each: name, shape, bytes and other names."""
    table = Table(box=None, pad_edge=False)
    for title in ("tap", "shape", "bytes/token", "meaning", "also known as"):
        table.add_column(title, justify="right" if title == "bytes/token" else "left")
    for entry in entries:
        shape = "×".join(map(str, entry["shape"])) or "1"
        aliases = "\n".join(entry["aliases"])
        table.add_row(entry["name"], shape, f"{entry['bytes']:,}", entry["meaning"], aliases)
    # A pipe has no width, and cutting a name off would make it useless.
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)


def compile_text(found: Sequence["Compiled"]) -> str:
    """What a step needs and how fast it may be; of several meshes the first, then all of them."""
    best = found[0]
    held = best.weights + best.taps + (best.temporaries or best.estimated_temporaries)
    made = "does not fit" if best.temporaries is None else size(best.temporaries)
    chip = ""
    if best.on == "cpu":
        held = best.weights + best.taps + best.estimated_temporaries
        chip = f" (virtual CPUs'; the chip's about {size(best.estimated_temporaries)})"
    verdict = {True: "yes", False: "no", None: "unknown"}[best.fits]
    room = f", {size(held)} of {size(best.memory)}" if best.memory else ""
    lines = [
        f"{best.topology}: {best.devices} device{'s' * (best.devices > 1)} on {best.hosts} "
        f"host{'s' * (best.hosts > 1)}, mesh {best.mesh}; compiled on {best.on} in "
        f"{best.compiling:.1f} s",
        f"a step of {best.tokens:,} tokens in contexts of {best.seq_len:,}, "
        f"{best.compute_dtype}, stored as {best.store_dtype}; of each device:",
        f"  weights       {size(best.weights)}",
        f"  taps          {size(best.taps)}",
        f"  temporaries   {made}{chip}",
        f"  fits          {verdict}{room}",
        f"  arithmetic    {best.flops / 1e12:,.2f} TFLOP",
        f"  memory moves  {size(best.traffic)}",
    ]
    for kind, each in best.collectives.items():
        lines.append(f"  sends         {size(each.sent)} in {each.count:,} x {kind}")
    if best.seconds and best.tokens_per_second:
        times = ", ".join(f"{n.replace('_', ' ')} {s * 1e3:,.1f}"
                          for n, s in vars(best.seconds).items())  # fmt: skip
        cost = f"; ${best.dollars:,.2f} a billion tokens" if best.dollars else ""
        cost += f", ${best.dollars_spot:,.2f} spot" if best.dollars_spot else ""
        lines.append(f"  at least, ms  {times}")
        lines.append(
            f"at most {best.tokens_per_second:,.0f} tok/s, limited by "
            f"{best.seconds.limit.replace('_', ' ')}{cost}"
        )
    lines += [f"note: {note}" for note in best.notes]
    if len(found) > 1:
        lines.append(f"{'mesh':26} {'weights':>9} {'fits':>5} {'tok/s':>11}  limited by")
    for each in found if len(found) > 1 else ():
        rate = f"{each.tokens_per_second:,.0f}" if each.tokens_per_second else "?"
        limit = each.seconds.limit.replace("_", " ") if each.seconds else "?"
        fits = {True: "yes", False: "no", None: "?"}[each.fits]
        lines.append(f"{each.mesh:26} {size(each.weights):>9} {fits:>5} {rate:>11}  {limit}")
    return "\n".join(lines)


def check_text(out: str, report: "CheckReport") -> str:
    """How far each tap is from the reference, and the verdict."""
    width = max(map(len, report.taps))
    lines = [
        f"{'tap':{width}}  error     allowed   control   storing alone         cosine    "
        "(control: neighbouring layer or token; in brackets: a typical channel)"
    ]
    for name, tap in report.taps.items():
        verdict = "" if tap.ok else "  <- " + ("too far" if tap.error > tap.allowed else "unclear")
        lines.append(
            f"{name:{width}}  {tap.error:.2e}  {tap.allowed:.2e}  {tap.control:.2e}  "
            f"{tap.loss.relative_l2:.2e} ({tap.loss.typical_channel:.2e})  "
            f"{tap.loss.cosine:.6f}{verdict}"
        )
    far = sum(tap.error > tap.allowed for tap in report.taps.values())
    unclear = sum(not tap.ok for tap in report.taps.values()) - far
    verdict = [f"{far} taps disagree with the reference"] if far else []
    verdict += [f"{unclear} taps cannot be told from a neighbour"] if unclear else []
    lines.append(
        f"{out}: {', '.join(verdict) or 'every tap agrees with the reference'} "
        f"({report.documents} documents, {report.tokens:,} tokens, {report.reference})"
    )
    return "\n".join(lines)


def export_text(made: "Exported") -> str:
    """What was written, and what was not."""
    lines = [
        f"{made.dest}: {made.rows:,} rows of {len(made.taps)} taps as {made.format}, "
        f"{size(made.bytes)} in {made.files} files"
    ]
    if made.context_size:
        lines.append(f"sequences of {made.context_size:,} rows, cut from the stored order")
    if made.left_over:
        rows = f"{made.left_over:,} row{'s' * (made.left_over > 1)}"
        lines.append(f"left over: the last {rows}, too few for a sequence or a file")
    return "\n".join(lines)


def compact_text(made: "Compacted") -> str:
    """What became of how many files."""
    return (
        f"{made.dest}: {made.rows:,} rows in {made.units:,} unit{'s' * (made.units != 1)} "
        f"(of {made.units_before:,}), {made.shards:,} shards (of {made.shards_before:,}), "
        f"{size(made.bytes)} (of {size(made.bytes_before)})"
    )


def push_text(made: "Pushed") -> str:
    """What went where, and how to get it back."""
    lines = [f"{made.url}: {made.files:,} files sent, {made.files_there:,} were there already"]
    if not made.card_written:
        lines.append("its README.md was left as it is")
    return "\n".join([*lines, f"  load    {made.download}"])


def fetch_text(made: "Fetched") -> str:
    """What is here now, and how to use it."""
    flags = {"--model": made.model, "--corpus": made.corpus}
    use = " ".join(f"{flag} {shlex.quote(name)}" for flag, name in flags.items() if name)
    there = f" ({made.files_there:,} were there already)" if made.files_there else ""
    return f"{made.files:,} files{there}, {size(made.bytes)} fetched\n  use     {use}"


def status_text(out: str, status: "Status") -> str:
    lines = [
        f"{out}: {status.state}",
        f"  units      {status.units_done:,} of {status.units:,}",
        f"  documents  {status.documents:,} of {status.documents_total:,}"
        + (f" ({_skipped(status.skipped)} left out)" if status.skipped else ""),
        f"  tokens     {status.tokens:,} read (of about {status.tokens_estimated:,})",
        f"  rows       {status.rows:,} per tap",
        f"  bytes      {size(status.bytes)}",
        "  taps       " + ", ".join(f"{tap} {shape}" for tap, shape in status.taps.items()),
    ]
    for worker in status.workers:
        if worker["state"] == "done":
            continue
        detail = f": {worker['error']}" if worker.get("error") else ""
        held = f", holding {worker['units']}" if worker.get("units") else ""
        lines.append(f"  worker     {worker['name']} {worker['state']}{held}{detail}")
    return "\n".join(lines)


def verify_text(out: str, report: "Report") -> str:
    lines = [f"fault: {printable(fault)}" for fault in report.faults]
    lines += [f"orphan: {printable(key)}" for key in report.orphans]
    if report.orphans:
        lines.append(
            f"{len(report.orphans)} orphans are harmless; `spile gc {shlex.quote(out)}` removes "
            "those of finished units"
        )
    sound = "whole and sound" if report.units_done == report.units else "sound so far"
    verdict = sound if report.ok else f"{len(report.faults)} faults"
    how = "by size and etag" if report.quick else "read"
    if report.resumed:
        how += f", {report.resumed} units of them by the audit before"
    lines.append(
        f"{out}: {verdict} ({report.units_done} of {report.units} units, {report.rows:,} rows, "
        f"{size(report.bytes)} {how})"
    )
    return "\n".join(lines)
