"""How far work is: a line that moves, on a terminal or below a notebook's cell; plain or JSON lines
elsewhere. No jax."""

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
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from spile.core.humanize import FIELDS, clock, short, size
from spile.metrics import Counters
from spile.run.pipeline.progress import Meter, MeterReading

if TYPE_CHECKING:
    from spile.plan.estimate import Estimate

_log = logging.getLogger("spile.progress")
_SILENT_SECONDS = 10.0  # at most: also between lines if there is no terminal
_LIVE_SECONDS = 0.25
_CELL_SECONDS = 1.0
_CELL_WIDTH = 100  # characters
_QUEUES = ("text", "device", "write", "commit")
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
OnStart = Callable[[object, "Estimate"], None]


class ShownLine(Protocol):
    """How far some work is."""

    def line(self, width: int) -> str:
        """In at most `width` characters."""
        ...

    def fields(self) -> dict[str, Any]:
        """As fields of a JSON line."""
        ...


@contextmanager
def progress(
    counters: Counters, *, quiet: bool, as_json: bool = False
) -> Generator[OnStart, None, None]:
    """Show a run's counters while it lasts; yield the function to call when the work is known."""
    shown = _Shown(ElapsedLine("reading the model and the corpus"))

    def on_start(job: object, cost: "Estimate") -> None:
        shown.now = ProgressLine(counters, cost.remaining_tokens)

    with _showing(shown, quiet=quiet, as_json=as_json):
        yield on_start


@contextmanager
def counted(what: str, *, quiet: bool) -> Generator[Callable[[int, int], None] | None, None, None]:
    """Show how many things are done; yield the function to call with (done, total)."""
    if quiet:
        yield None
        return
    shown = CountedLine(what)
    with _showing(_Shown(shown), quiet=False):
        yield shown.tell


@contextmanager
def waiting(what: str, *, quiet: bool = False, late: bool = False) -> Generator[None, None, None]:
    """Show how long some work has taken, which does not tell how far it is.

    Args:
        late: show nothing for ten seconds, on a terminal too: for functions, most calls of which
            take less.
    """
    with _showing(_Shown(ElapsedLine(what)), quiet=quiet, late=late):
        yield


class _Shown:
    """The line to show now: it may be replaced while it is shown."""

    def __init__(self, now: ShownLine) -> None:
        self.now = now


@contextmanager
def _showing(
    shown: _Shown, *, quiet: bool, as_json: bool = False, late: bool = False
) -> Generator[None, None, None]:
    """Show a line while the block lasts, so that nothing is silent for more than ten seconds."""
    if quiet:
        yield
        return
    show = _live if sys.stderr.isatty() and not as_json else _plain
    if in_notebook():
        show = _in_cell
    over = threading.Event()

    def run() -> None:
        if not (late and show is not _plain and over.wait(_SILENT_SECONDS)):
            show(shown, over)

    thread = threading.Thread(target=run, name="spile-display", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class ElapsedLine:
    """Work that does not tell how far it is: the time since it began."""

    def __init__(self, what: str) -> None:
        self._what, self._begun = what, time.monotonic()

    def line(self, width: int) -> str:
        return f"{self._what}  {clock(self.seconds)}"[:width]

    def fields(self) -> dict[str, Any]:
        return {"waiting": {"for": self._what, "seconds": round(self.seconds, 3)}}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun


class CountedLine:
    """Things of which a known number is to be done, and the time since the first was begun."""

    def __init__(self, what: str) -> None:
        self._what, self._elapsed = what, ElapsedLine(what)
        self._done = self._total = 0

    def tell(self, done: int, total: int) -> None:
        self._done, self._total = done, total

    def line(self, width: int) -> str:
        done, total, seconds = self._done, self._total, self._elapsed.seconds
        told = f"{done:,} of {total:,} " if total else ""
        left = f"  ETA {clock(seconds * (total - done) / done)}" if done else ""
        return f"{told}{self._elapsed.line(width)}{left}"[:width]

    def fields(self) -> dict[str, Any]:
        return {"counted": {"what": self._what, "done": self._done, "total": self._total}}


class ProgressLine:
    """A run's progress, as a line of at most a given width."""

    def __init__(self, counters: Counters, total: int) -> None:
        self._counters, self._total, self._meter = counters, max(1, total), Meter(counters)
        self._loading = ElapsedLine("loading and compiling")

    def fields(self) -> dict[str, Any]:
        """All the values, as numbers."""
        seen = self._meter.look()
        queues = {name: int(self._counters[f"queue_{name}"]) for name in _QUEUES}
        told = {
            **asdict(seen),
            "tokens_total": self._total,
            "share": self._share(seen),
            "eta_seconds": self._eta(seen),
            "queues": queues,
        }
        return {"progress": told}

    def line(self, width: int) -> str:
        """As many parts as fit in `width`; less important ones are left out first."""
        seen = self._meter.look()
        if not seen.tokens:
            return self._loading.line(width)
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


def _live(shown: _Shown, over: threading.Event) -> None:
    console = Console(stderr=True)
    with Live(
        Text(),  # rich puts messages above the line by what it has shown before
        console=console,
        transient=True,
        auto_refresh=False,
        redirect_stdout=sys.stdout.isatty(),  # else what is printed there would come here
    ) as live:
        for turn in _turns(over, _LIVE_SECONDS):
            width = console.width - 3
            line = f"{_SPINNER[turn % len(_SPINNER)]} {shown.now.line(width)}"
            live.update(Text(line, no_wrap=True, overflow="crop"), refresh=True)


def _in_cell(shown: _Shown, over: threading.Event) -> None:
    """Show one changing line below the cell. (rich would need ipywidgets for that.)"""
    display: Any = importlib.import_module("IPython.display").display
    handle = display({"text/plain": shown.now.line(_CELL_WIDTH)}, raw=True, display_id=True)
    for _ in _turns(over, _CELL_SECONDS):
        handle.update({"text/plain": shown.now.line(_CELL_WIDTH)}, raw=True)
    handle.update({"text/plain": shown.now.line(_CELL_WIDTH)}, raw=True)


def in_notebook() -> bool:
    """Whether this process runs a notebook."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    # (By name: IPython need not be installed. The shell of Colab derives from Jupyter's.)
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in type(shell).__mro__)


def _plain(shown: _Shown, over: threading.Event) -> None:
    # (If standard error is not a terminal, COLUMNS may still set the width of lines.)
    width = shutil.get_terminal_size((160, 24)).columns if os.environ.get("COLUMNS") else 160
    for _ in _turns(over, _SILENT_SECONDS):
        if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
            _log.info("%s", shown.now.line(width), extra={FIELDS: shown.now.fields()})
        else:  # a script, which has not asked for such messages of loggers
            sys.stderr.write(f"spile: {shown.now.line(width)}\n")
            sys.stderr.flush()


def _turns(over: threading.Event, seconds: float) -> Iterator[int]:
    turn = 0
    while not over.wait(seconds):
        yield turn
        turn += 1
