"""Verbs that show a dataset and its workers: once, repeatedly, or file by file."""

import argparse
import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spile.cli.flags import Verbs
from spile.cli.style import skipped
from spile.core.errors import ConfigError
from spile.core.humanize import compared, lasting, plural, short, size

if TYPE_CHECKING:
    from spile.status.listing import Listing
    from spile.status.status import PassStatus, Progress, Status

_SHOWN_WORKERS = 40  # of a fleet; --json has them all
_ORDER = ("failed", "dead", "stale", "stopped", "starting", "running", "not started", "done")
_LEAVE = (b"q", b"Q", b"\x1b")


def add_status(verbs: Verbs) -> None:
    sub = verbs.add("status", status, "where a dataset stands, and who is at work")
    sub.add_argument("out", metavar="OUT")


def status(arguments: argparse.Namespace) -> int:
    from spile.objects import open_objects
    from spile.status.status import read_status

    status = read_status(open_objects(arguments.out))
    print(json.dumps(status.to_json()) if arguments.json else status_text(arguments.out, status))
    return 0


def status_text(out: str, status: "Status") -> str:
    """Totals, then the workers; those that need attention come first."""
    lines = [
        f"{out}: {status.state}",
        f"  units      {status.units_done:,} of {status.units:,}"
        + (f" ({plural(status.generations, 'time')} added to)" if status.generations else ""),
        f"  documents  {status.documents:,} of {status.documents_total:,}"
        + (f" ({skipped(status.skipped)} left out)" if status.skipped else ""),
        f"  tokens     {status.tokens:,} read (of about {status.tokens_estimated:,})",
        f"  rows       {status.rows:,} per tap",
        f"  bytes      {size(status.bytes)}",
        f"  taps       {_taps(status)}",
    ]
    if status.rate is not None:
        lines.append(f"  rate       {_rate(status)}")
    if status.prediction:
        lines.append(f"  predicted  {_predicted(status, status.prediction)}")
    lines += _workers(status)
    for each in status.passes:
        lines += _pass(each)
    return "\n".join(lines)


def _taps(progress: "Progress") -> str:
    return ", ".join(f"{tap} {shape}" for tap, shape in progress.taps.items())


def _rate(progress: "Progress") -> str:
    left = f", about {lasting(progress.eta_seconds)} left" if progress.eta_seconds else ""
    return f"{progress.rate:,.0f} tok/s{left}"


def _pass(added: "PassStatus") -> Iterator[str]:
    """Taps that were added, and how far they are; the workers that are still adding them."""
    told = [f"{added.units_done:,} of {added.units:,} units", size(added.bytes), added.state]
    if added.rate is not None:
        told.append(_rate(added))
    complete = added.state == "complete"
    yield f"  {'added' if complete else 'adding':9}  {_taps(added)}: {', '.join(told)}"
    if not complete:
        yield from _workers(added)


def _predicted(status: "Status", predicted: Mapping[str, Any]) -> str:
    told = [f"{predicted['tokens']:,} tokens", size(predicted["bytes"])]
    if status.done:
        told[0] += f" ({compared(predicted['tokens'], status.tokens)} came)"
        told[1] += f" ({compared(predicted['bytes'], status.bytes)})"
    if predicted["seconds"] and predicted["tokens"]:
        expected = predicted["seconds"] * status.tokens / predicted["tokens"]
        told.append(f"{lasting(predicted['seconds'])} of one slice")
        if status.seconds:
            off = compared(expected, status.seconds)
            told[-1] += f" ({off} so far)" if not status.done else f" ({off})"
    return ", ".join(told)


def _workers(status: "Progress") -> Iterator[str]:
    order = {state: number for number, state in enumerate(_ORDER)}
    workers = sorted(status.workers, key=lambda w: (order.get(w["state"], 0), w["name"]))
    if not workers:
        return
    counts = {state: sum(w["state"] == state for w in workers) for state in _ORDER}
    yield "  workers    " + ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    for worker in workers[:_SHOWN_WORKERS]:
        yield f"    {_worker(worker, slowest=worker['name'] == status.slowest)}"
    if len(workers) > _SHOWN_WORKERS:
        yield f"    and {len(workers) - _SHOWN_WORKERS} more (--json has them all)"


def _worker(worker: Mapping[str, Any], *, slowest: bool) -> str:
    if worker["state"] == "not started":
        return f"{worker['name']}  not started"
    progress, world = worker["progress"], worker.get("world")
    who = [f"share {worker['share']}"] if worker.get("share") else []
    who += [f"process {world['process']}"] if world else []
    told = [worker["name"] + (f" ({', '.join(who)})" if who else ""), worker["state"]]
    if worker.get("units_done"):
        told.append(f"{worker['units_done']:,} units")
    if progress.get("tokens"):
        told.append(f"{short(progress['tokens'])} tok")
    if worker["state"] == "running" and "rate" in progress:
        told.append(f"{short(progress['rate'])}/s" + " (slowest)" * slowest)
        if "idle" in progress:
            told.append(f"idle {progress['idle']:.0%}")
    if worker.get("lag"):
        told.append(f"{short(worker['lag'])} tok behind")
    if worker.get("units"):
        told.append(f"holding {', '.join(map(str, worker['units']))}")
    told += _last_seen(worker)
    if worker.get("earlier"):
        told.append(f"started {worker['earlier'] + 1} times")
    if worker.get("error"):
        told.append(worker["error"])
    return "  ".join(told)


def _last_seen(worker: Mapping[str, Any]) -> list[str]:
    """The age of the last heartbeat, for workers that may still be alive."""
    if worker["state"] not in ("running", "starting", "stale"):
        return []
    if "unmoved_seconds" in worker:
        return [f"last beat {lasting(worker['unmoved_seconds'])} ago"]
    if "beat_age_seconds" in worker:
        return [f"last beat about {lasting(worker['beat_age_seconds'])} ago, by its clock"]
    return []


def add_watch(verbs: Verbs) -> None:
    sub = verbs.add("watch", watch, "the same, drawn again until it is complete; q leaves")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--interval", metavar="SECONDS", type=float, default=2.0, help="[2]")
    sub.add_argument(
        "--stale-after",
        metavar="SECONDS",
        type=float,
        default=30.0,
        help="without a sign of life, seen from here [30]",
    )


def watch(arguments: argparse.Namespace) -> int:
    from spile.dataset.records.heartbeat import HeartbeatObserver
    from spile.objects import open_objects
    from spile.status.status import read_status

    for name in ("interval", "stale_after"):
        if not 0 < getattr(arguments, name) < 86400:
            raise ConfigError(f"--{name.replace('_', '-')} must be more than 0 seconds")
    objects = open_objects(arguments.out)
    observer = HeartbeatObserver(arguments.stale_after)
    with contextlib.suppress(KeyboardInterrupt):  # ends the display; nothing else is interrupted
        _watch(
            arguments.out,
            lambda: read_status(objects, observer),
            interval=arguments.interval,
            as_json=arguments.json,
        )
    return 0


def _watch(
    out: str, look: Callable[[], "Status"], *, interval: float, as_json: bool = False
) -> None:
    """Show the status every `interval` seconds; `q` leaves. Without a terminal, print blocks."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    if as_json or not sys.stdout.isatty():
        _blocks(out, look, interval, as_json)
        return
    with _keys() as pressed, Live(console=Console(), auto_refresh=False, screen=False) as live:
        while True:
            status = look()
            text = status_text(out, status)
            ends = "" if status.over else "\n(q leaves)"
            live.update(Text(text + ends, no_wrap=True, overflow="ellipsis"), refresh=True)
            if not ends or pressed(interval):
                return


def _blocks(out: str, look: Callable[[], "Status"], interval: float, as_json: bool) -> None:
    while True:
        status = look()
        shown = json.dumps(status.to_json()) if as_json else status_text(out, status) + "\n"
        sys.stdout.write(shown + "\n")
        sys.stdout.flush()
        if status.over:
            return
        time.sleep(interval)


@contextlib.contextmanager
def _keys() -> Generator[Callable[[float], bool], None, None]:
    """Yield a function that waits for a key that leaves; it returns whether one came."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield _rest
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _leaves
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _rest(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _leaves(seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while (left := limit - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], left)
        if ready and os.read(sys.stdin.fileno(), 1) in (b"", *_LEAVE):
            return True
    return False


def add_ls(verbs: Verbs) -> None:
    sub = verbs.add("ls", ls, "every file of a dataset: tap, rows, bytes, digest")
    sub.add_argument("out", metavar="OUT")
    sub.add_argument("--unit", metavar="N", type=int, help="of one unit")
    sub.add_argument("--tap", metavar="T", help="of one tap, or index, statistics, documents")


def ls(arguments: argparse.Namespace) -> int:
    from spile.objects import open_objects
    from spile.status.listing import json_pieces, list_files

    files = list_files(open_objects(arguments.out), arguments.unit, arguments.tap)
    if arguments.json:
        for piece in json_pieces(files):
            print(piece, end="")
        print()
    else:
        for line in listing_lines(arguments.out, files):
            print(line)
    return 0


def listing_lines(out: str, files: "Listing") -> Iterator[str]:
    """A summary of each tap, then every file."""
    yield f"{out}: {files.units:,} units, {len(files):,} files, {size(files.bytes)}"
    width = max((len(tap) for tap in files.taps), default=0)
    for tap, of_tap in files.taps.items():
        yield (
            f"  {tap:{width}}  {files.dtype(tap) or '':13} {of_tap.files:>7,} files "
            f"{of_tap.rows:>15,} rows  {size(of_tap.bytes):>10}"
        )
    for file in files:
        run = f"{file.first:,}+{file.rows:,}"
        yield f"{file.key}  {file.tap:{width}}  {run:>19}  {file.bytes:>13,}  {file.digest}"
