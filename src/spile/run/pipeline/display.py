"""The progress of a run: a line that moves, on a terminal or below a notebook's cell; plain or
JSON lines elsewhere. No jax."""

import builtins
import importlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from spile.core.humanize import FIELDS, clock, short, size
from spile.metrics import Counters
from spile.run.pipeline.progress import Meter, MeterReading

if TYPE_CHECKING:
    from spile.plan.estimate import Estimate

_log = logging.getLogger("spile.progress")
_PLAIN_SECONDS = 10.0  # between lines if there is no terminal
_LIVE_SECONDS = 0.25
_CELL_SECONDS = 1.0
_CELL_WIDTH = 100  # characters
_QUEUES = ("text", "device", "write", "commit")
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
OnStart = Callable[[object, "Estimate"], None]


@contextmanager
def progress(
    counters: Counters, *, quiet: bool, as_json: bool = False
) -> Generator[OnStart, None, None]:
    """Show a run's counters while it lasts; yield the function to call when the work is known."""
    if quiet:
        yield lambda job, cost: None
        return
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def on_start(job: object, cost: "Estimate") -> None:
        show = _live if sys.stderr.isatty() and not as_json else _plain
        if in_notebook():
            show = _in_cell
        shown = ProgressLine(counters, cost.remaining_tokens)
        thread = threading.Thread(target=show, args=(shown, stop), daemon=True)
        threads.append(thread)
        thread.start()

    try:
        yield on_start
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class ProgressLine:
    """A run's progress, as a line of at most a given width."""

    def __init__(self, counters: Counters, total: int) -> None:
        self._counters, self._total, self._meter = counters, max(1, total), Meter(counters)

    def fields(self) -> dict[str, Any]:
        """All the values, as numbers."""
        seen = self._meter.look()
        queues = {name: int(self._counters[f"queue_{name}"]) for name in _QUEUES}
        return {
            **asdict(seen),
            "tokens_total": self._total,
            "share": self._share(seen),
            "eta_seconds": self._eta(seen),
            "queues": queues,
        }

    def line(self, width: int) -> str:
        """As many parts as fit in `width`; less important ones are left out first."""
        seen = self._meter.look()
        if not seen.tokens:
            return "loading and compiling"[:width]
        parts = self._parts(seen)
        # In order of importance: later ones are left out first, wherever they stand in the line.
        order = (
            "share",
            "tokens",
            "rate",
            "eta",
            "bytes",
            "average",
            "idle",
            "documents",
            "queues",
        )
        chosen = [name for name in order if name in parts]
        while len(chosen) > 1 and len(_joined(parts, chosen)) > width:
            chosen.pop()
        return _joined(parts, chosen)[:width]

    def _parts(self, seen: MeterReading) -> dict[str, str]:
        """The parts of the line, by name, in the order in which they are shown."""
        parts = {
            "share": f"{self._share(seen):4.0%}",
            "documents": f"{short(seen.documents)} docs",
            "tokens": f"{short(seen.tokens)} tok",
        }
        if seen.rate is not None:
            parts["rate"] = f"{short(seen.rate)}/s"
        if seen.average is not None:
            parts["average"] = f"avg {short(seen.average)}/s"
        eta = self._eta(seen)
        if eta is not None:
            parts["eta"] = f"ETA {clock(eta)}"
        if seen.idle is not None:
            parts["idle"] = f"idle {seen.idle:.0%}"
        depths = "·".join(str(int(self._counters[f"queue_{name}"])) for name in _QUEUES)
        parts["queues"] = f"q {depths}"
        parts["bytes"] = f"{size(seen.bytes)} ({size(seen.durable)} safe)"
        return parts

    def _share(self, seen: MeterReading) -> float:
        # The total is an estimate: the run may process a little more.
        return min(1.0, seen.tokens / self._total)

    def _eta(self, seen: MeterReading) -> float | None:
        rate = seen.average or seen.rate
        return max(0, self._total - seen.tokens) / rate if rate else None


def _joined(parts: dict[str, str], chosen: list[str]) -> str:
    return "  ".join(text for name, text in parts.items() if name in chosen)


def _live(shown: ProgressLine, stop: threading.Event) -> None:
    console = Console(stderr=True)
    with Live(console=console, transient=True, auto_refresh=False) as live:
        for turn in _turns(stop, _LIVE_SECONDS):
            width = console.width - 3
            line = f"{_SPINNER[turn % len(_SPINNER)]} {shown.line(width)}"
            live.update(Text(line, no_wrap=True, overflow="crop"), refresh=True)


def _in_cell(shown: ProgressLine, stop: threading.Event) -> None:
    """Show one changing line below the cell. (rich would need ipywidgets for that.)"""
    display: Any = importlib.import_module("IPython.display").display
    handle = display({"text/plain": shown.line(_CELL_WIDTH)}, raw=True, display_id=True)
    for _ in _turns(stop, _CELL_SECONDS):
        handle.update({"text/plain": shown.line(_CELL_WIDTH)}, raw=True)
    handle.update({"text/plain": shown.line(_CELL_WIDTH)}, raw=True)


def in_notebook() -> bool:
    """Whether this process runs a notebook."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    # (By name: IPython need not be installed. The shell of Colab derives from Jupyter's.)
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


def _plain(shown: ProgressLine, stop: threading.Event) -> None:
    # (If standard error is not a terminal, COLUMNS may still set the width of lines.)
    width = shutil.get_terminal_size((160, 24)).columns if os.environ.get("COLUMNS") else 160
    for _ in _turns(stop, _PLAIN_SECONDS):
        if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
            _log.info("%s", shown.line(width), extra={FIELDS: {"progress": shown.fields()}})
        else:  # a script, which has not asked for such messages of loggers
            _tell(shown.line(width))


def _tell(line: str) -> None:
    sys.stderr.write(f"spile: {line}\n")
    sys.stderr.flush()


def _turns(stop: threading.Event, seconds: float) -> Iterator[int]:
    turn = 0
    while not stop.wait(seconds):
        yield turn
        turn += 1


@contextmanager
def counted(what: str, *, quiet: bool) -> Generator[Callable[[int, int], None] | None, None, None]:
    """Show a bar on a terminal, lines elsewhere; yield the function to call with (done, total)."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        said = [time.monotonic()]

        def say(done: int, total: int) -> None:
            if time.monotonic() - said[0] > _PLAIN_SECONDS:
                said[0] = time.monotonic()
                _tell(f"{done:,} of {total:,} {what}")

        yield say
        return
    columns = (
        SpinnerColumn(),
        BarColumn(),
        TextColumn(f"{{task.completed}} of {{task.total}} {what}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
