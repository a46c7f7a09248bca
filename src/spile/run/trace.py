"""What a trace says of the device: which operations took how long. No jax."""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spile.core.errors import DataError

_OPERATIONS = "XLA Ops"  # the line of a TPU's trace that has them, and nothing else
# What these hold may run elsewhere, and is counted by itself.
_AROUND = ("while", "call", "conditional")


@dataclass(frozen=True)
class Traced:
    """Seconds of each kind of operation, all devices together; and which steps were started."""

    steps: tuple[int, ...]
    seconds: Mapping[str, float]

    def top(self, count: int) -> list[tuple[str, float]]:
        return sorted(self.seconds.items(), key=lambda item: -item[1])[:count]


def read_trace(path: Path, step: str) -> Traced:
    """A trace in Chrome's format; `step`: what steps are called in it.

    Raises:
        DataError: if it is something else.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: no trace: {error}") from error
    steps = {int(event["args"]["step_num"]) for event in events if event.get("name") == step}
    seconds: dict[str, float] = {}
    for kind, spent in _operations(events):
        seconds[kind] = seconds.get(kind, 0.0) + spent
    return Traced(tuple(sorted(steps)), seconds)


def _operations(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Kinds, without the number of each (`fusion.17` is a `fusion`), and the seconds of one."""
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
    """Of each operation of a line, without those it holds."""
    around: list[list[Any]] = []  # end, kind, time of its own
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
