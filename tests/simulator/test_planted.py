"""Each fault that Spile had before its rules for combinations, planted in today's code, is found.

`make chaos-rest` also draws programs until one finds it; `--junitxml` says which.
"""

import re
from collections.abc import Callable, Sequence

import pytest

from simulator.contents import Op
from simulator.planted import FAULTS, planted
from simulator.programs import Program
from simulator.test_programs import GIVEN, GROWS, MORE, OTHERWISE, extract

DRAWN = 1000  # seeds; each fault takes fewer


def test_a_fault_is_planted_only_for_a_moment() -> None:
    for fault, patches in FAULTS.items():
        before = [getattr(owner, name) for owner, name, _ in patches]
        with planted(fault):
            assert all(getattr(o, n) is not b for (o, n, _), b in zip(patches, before, strict=True))
        assert [getattr(owner, name) for owner, name, _ in patches] == before


def copied_and_grown(kill: int) -> list[Op]:
    """A copy that grows after the second copy to it was killed."""
    copy = Op("copy", "p2", ("p0",))
    killed = Op("copy", "p2", ("p0",), kill=kill, again=False)
    return [copy, GROWS, killed, Op("add-corpus", "p2", source="d")]


def part_and_extract(kill: int) -> list[Op]:
    """A copy of the second unit, killed, and `extract` of the same recipe in its place."""
    part = Op("part", "p2", ("p0",), units=(1, None, None), kill=kill, again=False)
    return [part, extract("p2", "ab")]


TO_P2 = Op("copy", "p2", ("p0",))
DROPPED = [
    Op("add-taps", "p0", taps=MORE), TO_P2, Op("drop", "p0", taps=MORE),
    Op("add-taps", "p0", taps=OTHERWISE), TO_P2,
]  # fmt: skip
BESIDE = Op("add-corpus", "p0", source="c")
RESUMED = [TO_P2, GROWS, Op("add-corpus", "p2", source="d"), Op("take", "p0"), Op("resume", "p2")]


TOGETHER = Op("add-taps", "p0", taps=MORE, beside=BESIDE)
BOTH = (extract("p0", "ab"),)

# The number of a finding, the commands that led to it, and what is said of them.
FOUND: dict[str, tuple[int, Sequence[Sequence[Op]], str]] = {
    "one part merged twice": (1, [[Op("merge", "p2", ("p0", "p1", "p1"))]], "twice: p2 has 9 doc"),
    "a file added twice": (2, [[Op("add-corpus", "p0", source="ab")]], "twice: p0 has 9 doc"),
    "a killed copy that grows": (
        3, [copied_and_grown(kill) for kill in range(80, 105, 4)], "truth: p2: .* is not that of",
    ),
    "extract after a killed part": (
        3, [part_and_extract(kill) for kill in range(50, 75, 3)], "truth: p2: .* is not that of",
    ),
    "a drop that a copy misses": (5, [DROPPED], r"taps: p2 has resid_post\.1 twice"),
    "taps added beside growth": (7, [[TOGETHER]], "hidden: p0 had 5 readable documents, and now 3"),
    "a state of another growth": (13, [RESUMED], "state: p2 accepts a state of p0 and continues"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_commands_that_led_to_a_finding_show_it(name: str) -> None:
    """The moment of a kill is a number of requests, which may change: one of several is enough."""
    fault, programs, said = FOUND[name]
    for ops in programs:
        given = BOTH if ops[-1].source == "ab" and fault == 3 else GIVEN
        with planted(fault):
            found = Program(1, ops, given).violation()
        if found and re.match(said, found):
            return
    raise AssertionError(f"not found: {said}")


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
def test_programs_that_are_drawn_find_it(
    fault: int, record_property: Callable[[str, object], None]
) -> None:
    for seed in range(DRAWN):
        with planted(fault):
            found = Program(seed).violation()
        if found and not Program(seed).violation():
            record_property(f"seed {seed}", found)
            return
    raise AssertionError(f"not found by {DRAWN} seeds")
