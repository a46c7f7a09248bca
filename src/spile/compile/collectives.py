"""Count the bytes that devices send each other, from the text of a compiled program. No jax.

An instruction inside a loop counts once per iteration.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

# Bytes that a device sends, per byte of the result, in a group of n devices.
_SENT: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: float(n - 1),
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(_SENT)})(-start)?\(")
_CALLED = re.compile(
    r"(body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count[^0-9]*"(\d+)"')
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED = re.compile(r"replica_groups=\[\d+,(\d+)\]")
# The axes of a mesh with their sizes, then the axes along which the groups lie.
_MESHED = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS_SIZE = re.compile(r"'(\w+)'=(\d+)")
_AXIS_USED = re.compile(r"'(\w+)'(?::\(\d+\)(\d+))?")  # for a split axis, with the size of a part


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in one step."""

    count: int
    sent: int  # bytes, by each device


def read_collectives(
    text: str, devices: int, *, trips: int = 1, narrow: bool = False
) -> dict[str, Collective]:
    """Count a program's collectives, by kind.

    Args:
        text: a compiled program, as XLA prints it.
        trips: the number of iterations of a loop that does not state it.
        narrow: count float32 as bfloat16, for a compiler that widens values before sending.
    """
    computations = dict(_computations(text))
    entry = next((name for name, (first, _) in computations.items() if first), None)
    counts: dict[str, int] = defaultdict(int)
    sent: dict[str, float] = defaultdict(float)

    def visit(name: str, times: int) -> None:
        for line in computations[name][1]:
            if match := _COLLECTIVE.search(line):
                kind = match[2]
                size = _result_bytes(match[1], kind, bool(match[3]), narrow)
                group = _group_size(line, devices)
                if group > 1:
                    counts[kind] += times
                    sent[kind] += times * size * _SENT[kind](group)
            for called, runs in _calls(line, trips):
                if called in computations:
                    visit(called, times * runs)

    if entry:
        visit(entry, 1)
    return {kind: Collective(counts[kind], round(sent[kind])) for kind in sorted(counts)}


def _computations(text: str) -> Iterator[tuple[str, tuple[bool, list[str]]]]:
    """Map each computation's name to its lines, and to whether it is the entry."""
    lines: list[str] = []
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            lines = []
            yield match[1], (line.startswith("ENTRY"), lines)
        else:
            lines.append(line)


def _calls(line: str, trips: int) -> Iterator[tuple[str, int]]:
    """Yield the computations that an instruction runs, and how often."""
    if "-done(" in line or "-update(" in line:  # its start was counted
        return
    for role, name in _CALLED.findall(line):
        found = _TRIPS.search(line)
        yield name, (int(found[1]) if found else trips) if role == "body" else 1
    if match := _BRANCHES.search(line):
        yield from ((name.strip().lstrip("%"), 1) for name in match[1].split(","))


def _result_bytes(shape: str, kind: str, starts: bool, narrow: bool) -> int:
    """Return the bytes of an instruction's result; a `-start` also lists its operand and flags."""
    sizes = [
        _bytes(dtype, dims, narrow) for dtype, dims in _SHAPE.findall(shape) if dims or not starts
    ]
    if starts and kind == "all-gather":
        return sum(sizes[len(sizes) // 2 :])
    if starts and kind == "collective-permute":
        return sizes[0]
    return sum(sizes)


def _bytes(dtype: str, dims: str, narrow: bool) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    if narrow and dtype == "f32":
        bits = 16
    values = math.prod(int(size) for size in dims.split(",") if size)
    return values * bits // 8


def _group_size(line: str, devices: int) -> int:
    if match := _COUNTED.search(line):
        return int(match[1])
    if match := _LISTED.search(line):
        return match[1].count(",") + 1
    if match := _MESHED.search(line):
        sizes = dict(_AXIS_SIZE.findall(match[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in _AXIS_USED.findall(match[2]))
    return devices


def sent_by_all(found: Mapping[str, Collective]) -> int:
    return sum(each.sent for each in found.values())


def added(one: Mapping[str, Collective], other: Mapping[str, Collective]) -> dict[str, Collective]:
    """Return the collectives of two programs together."""
    total = dict(one)
    for kind, each in other.items():
        before = total.get(kind, Collective(0, 0))
        total[kind] = Collective(before.count + each.count, before.sent + each.sent)
    return total
