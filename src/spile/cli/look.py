"""Verbs that show a dataset: its progress, its files, and its rows in a browser."""

import argparse
import contextlib
import json
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from spile.cli.flags import Verbs, add_listening, count_of, listen_address
from spile.cli.style import skipped
from spile.core.errors import ConfigError
from spile.core.humanize import compared, lasting, plural, short, size
from spile.objects import open_objects

if TYPE_CHECKING:
    from spile.status.listing import Listing
    from spile.status.status import PassStatus, Progress, Status

_SHOWN_WORKERS = 40  # of a fleet; --json has them all
_ORDER = ("failed", "dead", "stale", "stopped", "starting", "running", "not started", "done")
# A wait without a timeout may miss a signal that arrives as it begins, or in another thread.
_LOOK_SECONDS = 0.5
_QUIT = (b"q", b"Q", b"\x1b")


def add_status(verbs: Verbs) -> None:
    sub = verbs.add("status", status, "progress of a dataset, and of the workers that make it")
    sub.place("out")
    sub.switch("--follow", "repeat until the dataset is complete; q quits")
    sub.number("--interval", "between two looks, with --follow [2]", unit="SECONDS")
    sub.number(
        "--stale-after",
        "with --follow: a worker without a new heartbeat for so long is stale [30]",
        unit="SECONDS",
    )


def status(arguments: argparse.Namespace) -> None:
    from spile.dataset.records.heartbeat import HeartbeatObserver
    from spile.status.status import read_status

    for name in ("interval", "stale_after"):
        flag, seconds = f"--{name.replace('_', '-')}", getattr(arguments, name)
        if seconds is not None and not arguments.follow:
            raise ConfigError(f"{flag} needs --follow")
        if seconds is not None and not 0 < seconds < 86400:
            raise ConfigError(f"{flag} must be more than 0 seconds, and less than a day")
    objects = open_objects(arguments.out)
    if not arguments.follow:
        print(_shown(arguments, read_status(objects)))
        return
    observer = HeartbeatObserver(arguments.stale_after or 30.0)
    with contextlib.suppress(KeyboardInterrupt):  # ends the display; nothing else is interrupted
        _follow(arguments, lambda: read_status(objects, observer), arguments.interval or 2.0)


def _shown(arguments: argparse.Namespace, status: "Status") -> str:
    return json.dumps(status.to_json()) if arguments.json else status_text(arguments.out, status)


def _follow(arguments: argparse.Namespace, look: Callable[[], "Status"], interval: float) -> None:
    """Show the status every `interval` seconds; `q` quits. Without a terminal, print blocks."""
    if arguments.json or not sys.stdout.isatty():
        while True:
            status = look()
            print(_shown(arguments, status), end="\n" if arguments.json else "\n\n", flush=True)
            if status.over:
                return
            time.sleep(interval)
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with _keys() as pressed, Live(console=Console(), auto_refresh=False, screen=False) as live:
        while True:
            status = look()
            text = _shown(arguments, status) + ("" if status.over else "\n(q quits)")
            live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            if status.over or pressed(interval):
                return


@contextlib.contextmanager
def _keys() -> Generator[Callable[[float], bool], None, None]:
    """Yield a function that waits up to some seconds, and returns whether a key says to quit."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield _rest
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _quits
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _rest(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _quits(seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while (left := limit - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], left)
        if ready and os.read(sys.stdin.fileno(), 1) in (b"", *_QUIT):
            return True
    return False


def status_text(out: str, status: "Status") -> str:
    """Format the totals, then the workers, with those that need attention first."""
    lines = [
        f"{out}: {status.state}",
        f"  units      {status.units_done:,} of {status.units:,}"
        + (f" ({plural(status.generations, 'time')} added to)" if status.generations else ""),
        f"  documents  {status.documents:,} of {status.documents_total:,}"
        + (f" ({skipped(status.skipped)} skipped)" if status.skipped else ""),
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
    for found in status.features:
        more = f", {plural(found.parts, 'part')} counted since" if found.parts else ""
        lines.append(
            f"  features   {found.name}: {plural(found.latents, 'latent')}, {found.units:,} of "
            f"{status.units:,} units{more}, {size(found.bytes)}"
        )
    return "\n".join(lines)


def _taps(progress: "Progress") -> str:
    return ", ".join(f"{tap} {shape}" for tap, shape in progress.taps.items())


def _rate(progress: "Progress") -> str:
    left = f", about {lasting(progress.eta_seconds)} left" if progress.eta_seconds else ""
    return f"{progress.rate:,.0f} tok/s{left}"


def _pass(added: "PassStatus") -> Iterator[str]:
    """Format the progress of added taps, and the workers that are still adding them."""
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
        told.append(plural(worker["units_done"], "unit"))
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


def add_ls(verbs: Verbs) -> None:
    sub = verbs.add("ls", ls, "list every file of a dataset: tap, rows, bytes, digest")
    sub.place("out")
    sub.number("--unit", "list only this unit")
    sub.add("--tap", "list only this tap, or index, statistics, documents", "T")


def ls(arguments: argparse.Namespace) -> None:
    from spile.status.listing import json_pieces, list_files

    files = list_files(open_objects(arguments.out), arguments.unit, arguments.tap)
    if arguments.json:
        for piece in json_pieces(files):
            print(piece, end="")
        print()
    else:
        for line in listing_lines(arguments.out, files):
            print(line)


def listing_lines(out: str, files: "Listing") -> Iterator[str]:
    """Yield a summary of each tap, then every file."""
    yield f"{out}: {plural(files.units, 'unit')}, {plural(len(files), 'file')}, {size(files.bytes)}"
    width = max((len(tap) for tap in files.taps), default=0)
    for tap, of_tap in files.taps.items():
        yield (
            f"  {tap:{width}}  {files.dtype(tap) or '':13} {of_tap.files:>7,} files "
            f"{of_tap.rows:>15,} rows  {size(of_tap.bytes):>10}"
        )
    for file in files:
        run = f"{file.first:,}+{file.rows:,}"
        yield f"{file.key}  {file.tap:{width}}  {run:>19}  {file.bytes:>13,}  {file.digest}"


def add_serve(verbs: Verbs) -> None:
    sub = verbs.add("serve", serve, "show a dataset, finished or not, in a browser")
    sub.place("out")
    add_listening(sub, 8770)
    sub.add("--token", "[a random one, where needed]", "X")
    sub.add("--tokenizer", "the model's directory, if it has moved", "DIR")
    sub.add(
        "--read",
        "most bytes of rows to read for plots of the whole dataset [16GiB]",
        "SIZE",
        default="16GiB",
    )
    sub.add("--cache", "directory that keeps what was read from a bucket", "DIR")


def serve(arguments: argparse.Namespace) -> None:
    from spile.dataset.read.dataset import Dataset
    from spile.dataset.read.opening import finished_taps, open_dataset
    from spile.serve.routes import Answers
    from spile.serve.server import Server

    most_bytes = count_of("--read", arguments.read, "a size such as 16GiB")
    if arguments.token is not None and not re.fullmatch(r"[A-Za-z0-9_-]{16,}", arguments.token):
        raise ConfigError(
            "--token must be 16 letters, digits, - or _, or more; without it one is made"
        )
    address = listen_address(arguments, arguments.token)
    objects = open_objects(arguments.out)

    def opened() -> Dataset:
        # (A partial dataset has only the units that hold all its taps: leave unfinished taps out.)
        taps = finished_taps(objects)
        return open_dataset(arguments.out, partial=True, taps=taps, cache=arguments.cache)

    answers = Answers(
        objects,
        opened,
        tokenizer=arguments.tokenizer,
        most_bytes=most_bytes,
    )
    server = Server(address, answers)
    answers.start()
    thread = threading.Thread(target=server.serve_forever, name="serving", daemon=True)
    thread.start()
    url = server.url
    said = f"{arguments.out}: {url}"
    if address.is_anywhere:
        said += f"\n(listening on every address of this machine, {address.in_url}; this is one)"
    try:  # begins before the line is printed: whoever reads it may interrupt us at once
        print(json.dumps({"url": url}) if arguments.json else said, flush=True)
        while not arguments.stop.wait(_LOOK_SECONDS):
            continue
    except KeyboardInterrupt:
        pass  # the normal way to end it
    finally:
        server.shutdown()
        server.server_close()
        answers.close()
