"""`--profile steps=10:15`: a trace of some steps, for TensorBoard, XProf and Perfetto."""

import gzip
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from spile.core.errors import ConfigError, DataError
from spile.corpus.pack import Batch
from spile.run.step.output import StepOutput
from spile.run.step.step import StagePrograms, Step

_DIRECTORY = "spile-profile"
_STEP = "spile_step"  # name of a step in a trace
# By default all tracers of jax but the one of Python calls, which would crowd out everything else.
_LEVELS = {"host": 2, "device": 1, "python": 0}
# Stages of a run, as `Counters.timed` names them, and their names in a trace.
SPANS = {
    "reading": "read",
    "tokenizing": "tokenize",
    "packing": "pack",
    "waited_at_first": "wait",
    "waited_for_model": "wait",
    "waited_for_text": "wait",
    "waited_for_writing": "wait",
    "copying": "copy",
    "writing": "write",
    "committing": "commit",
}
# Traces are read in Chrome's format. `jax.profiler.ProfileData` reads the .xplane.pb beside it, but
# its events have no display name (a TPU's operations then have their whole HLO text as name), and
# the API may differ between the jax versions that Spile supports.
_OPERATIONS = "XLA Ops"  # the line of a TPU's trace that holds operations, and nothing else
# The operations inside these may run elsewhere, and are counted by themselves.
_AROUND = ("while", "call", "conditional")

_log = logging.getLogger("spile.run")


@dataclass(frozen=True)
class Profile:
    """The steps to trace, counted from 0 over a run, and the directory of the trace."""

    first: int
    end: int
    directory: Path
    levels: Mapping[str, int] = field(default_factory=lambda: dict(_LEVELS))  # by tracer

    @classmethod
    def parse(cls, text: str) -> "Profile":
        """Parse `steps=10:15,dir=DIR,host=2,device=1,python=0`.

        Raises:
            ConfigError: if the text has another form.
        """
        given = {name: value for name, _, value in (p.partition("=") for p in text.split(","))}
        steps = re.fullmatch(r"(\d{1,9}):(\d{1,9})", given.pop("steps", ""), re.ASCII)
        directory = given.pop("dir", _DIRECTORY)
        levels = {name: given.pop(name, str(level)) for name, level in _LEVELS.items()}
        known = all(level in ("0", "1", "2", "3") for level in levels.values())
        if given or not known or not directory or not steps or int(steps[1]) >= int(steps[2]):
            raise ConfigError(
                f"--profile {text}: choose e.g. steps=10:15 (the eleventh step to the fifteenth), "
                "or steps=10:15,dir=DIR; more or less is traced with host=0 to 3, device=0 to 1, "
                "python=0 to 1"
            )
        by_tracer = {name: int(level) for name, level in levels.items()}
        return cls(int(steps[1]), int(steps[2]), Path(directory), by_tracer)

    def newest(self) -> Path | None:
        """The newest trace, in the form that Perfetto opens."""
        found = self.directory.glob("plugins/profile/*/perfetto_trace.json.gz")
        return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


def host_span(stage: str) -> AbstractContextManager[object]:
    """Show a stage of the run in the trace, on the line of the thread that runs it."""
    name = SPANS.get(stage)
    return jax.profiler.TraceAnnotation(f"spile_{name}") if name else nullcontext()


class ProfiledStep:
    """A step that traces the steps chosen by a profile. A failure to trace never stops a run."""

    def __init__(self, step: Step, profile: Profile) -> None:
        self._step, self._profile = step, profile
        self._count = 0
        self._tracing = False

    def loaded(self, seconds: float) -> bool:
        return self._step.loaded(seconds)

    def check(self) -> None:
        self._step.check()

    def compile(self, batch: Batch) -> Sequence[StagePrograms]:
        return self._step.compile(batch)

    def __call__(self, batch: Batch) -> StepOutput:
        number, self._count = self._count, self._count + 1
        if number == self._profile.first:
            self._start()
        with jax.profiler.StepTraceAnnotation(_STEP, step_num=number):
            output = self._step(batch)
        if number == self._profile.end - 1:
            output.finished.block_until_ready()  # the call above only started it
            self.close()
        return output

    def _start(self) -> None:
        profiler: Any = jax.profiler
        options = profiler.ProfileOptions()
        options.host_tracer_level = self._profile.levels["host"]
        options.device_tracer_level = self._profile.levels["device"]
        options.python_tracer_level = self._profile.levels["python"]
        try:
            profiler.start_trace(
                self._profile.directory, create_perfetto_trace=True, profiler_options=options
            )
        except Exception as error:
            _log.warning("--profile: %s; the run continues without a trace", error)
        else:
            self._tracing = True

    def close(self) -> None:
        """Write the trace, if one is being taken."""
        if self._tracing:
            self._tracing = False
            try:
                jax.profiler.stop_trace()
            except Exception as error:
                _log.warning("--profile: %s; the run continues without a trace", error)
        elif self._count <= self._profile.first:
            _log.warning("--profile: there were only %d steps; nothing was traced", self._count)


@dataclass(frozen=True)
class Traced:
    """Seconds of each kind of operation, summed over devices; and the steps that were started."""

    steps: tuple[int, ...]
    seconds: Mapping[str, float]

    def top(self, count: int) -> list[tuple[str, float]]:
        return sorted(self.seconds.items(), key=lambda item: -item[1])[:count]


def read_trace(path: Path) -> Traced:
    """Read a trace in Chrome's format.

    Raises:
        DataError: if the file is not a trace.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no trace: {error}") from error
    steps = {int(event["args"]["step_num"]) for event in events if event.get("name") == _STEP}
    seconds: dict[str, float] = {}
    for kind, spent in _operations(events):
        seconds[kind] = seconds.get(kind, 0.0) + spent
    return Traced(tuple(sorted(steps)), seconds)


def _operations(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Kinds of operations, without number (`fusion.17` is a `fusion`), and the seconds of each."""
    lines = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
    by_line: dict[Any, list[tuple[float, float, str]]] = {}
    for event in events:
        if event.get("ph") != "X":
            continue
        line = event["pid"], event["tid"]
        name = event.get("args", {}).get("hlo_op")
        if name is None and lines.get(line) == _OPERATIONS:
            name = event["name"]
        if name is not None:
            entry = event["ts"], -event.get("dur", 0.0), _kind(name)
            by_line.setdefault(line, []).append(entry)
    for found in by_line.values():
        yield from ((kind, own / 1e6) for kind, own in _own_times(sorted(found)))


def _own_times(entries: list[tuple[float, float, str]]) -> Iterator[tuple[str, float]]:
    """The time of each operation of a line, without the operations inside it."""
    around: list[list[Any]] = []  # end, kind, own time
    for begin, less, kind in entries:
        while around and around[-1][0] <= begin:
            yield from _told(around.pop())
        if around:
            around[-1][2] += less
        around.append([begin - less, kind, -less])
    for entry in reversed(around):
        yield from _told(entry)


def _told(entry: list[Any]) -> Iterator[tuple[str, float]]:
    if entry[1] not in _AROUND:
        yield entry[1], max(0.0, entry[2])


def _kind(name: str) -> str:
    return name.rstrip("0123456789").rstrip(".") if "." in name else name
