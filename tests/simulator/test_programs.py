"""Random programs of commands, with kills and faults: every dataset contains what it should.

A seed that fails prints its program. `Program(SEED).run()` repeats it, step for step, and
`print(Program(SEED).shrunk())` shows the few commands that it takes.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from simulator import documents, places, running
from simulator.contents import Op
from simulator.documents import TapRule
from simulator.places import Violation
from simulator.programs import Program
from spile.dataset.maintain.verify import Report

SUITE = 20  # seeds
FULL, CHUNK = int(os.environ.get("SPILE_PROGRAMS", "10000")), 100


@functools.cache
def ran(seed: int) -> tuple[Counter[tuple[str, str]], Sequence[str]]:
    """How the commands of a program ended, and what happened; raises what it finds."""
    done = Program(seed).run()
    return done.outcomes, done.trace


@pytest.mark.parametrize("seed", range(SUITE))
def test_every_place_contains_what_commands_made(seed: int) -> None:
    ran(seed)


@pytest.mark.full
@pytest.mark.parametrize("first", range(SUITE, FULL, CHUNK))
def test_places_contain_what_thousands_of_programs_made(first: int) -> None:
    for seed in range(first, min(first + CHUNK, FULL)):
        Program(seed).run()


def test_a_program_repeats_itself_step_for_step() -> None:
    _, trace = ran(0)
    assert Program(0).run().trace == trace
    assert len(trace) > 24


# -- the programs are not idle ---------------------------------------------------------------------


def test_the_programs_of_the_suite_kill_and_try_all() -> None:
    programs = [Program(seed) for seed in range(SUITE)]
    for program in programs:
        every = [each for op in program.ops for each in (op, op.beside) if each]
        assert len(program.ops) >= 12
        assert len({op.place for op in every}) >= 3
        assert sum(op.kill is not None for op in every) >= 2
    kinds = Counter(op.kind for program in programs for op in program.ops)
    assert {*kinds} == {
        "extract", "more", "add-corpus", "add-taps", "drop", "copy", "part", "merge", "compact",
        "shuffle", "like", "gc", "repair", "read", "verify", "take", "resume",
    }  # fmt: skip


def test_most_commands_of_the_suite_succeed() -> None:
    found = sum((ran(seed)[0] for seed in range(SUITE)), Counter[tuple[str, str]]())
    for kind in ("extract", "add-corpus", "add-taps", "drop", "copy", "part", "merge", "compact",
                 "gc", "repair", "take", "resume"):  # fmt: skip
        assert found[kind, "ok"], kind
    done = Counter(outcome for _, outcome in found.elements())
    assert done["ok"] > done["refused"] + done["failed"]
    assert done["killed"] > SUITE


# -- what was found, in as few commands as it takes ------------------------------------------------

OWN = frozenset({TapRule("resid_post.0")})
MORE = frozenset({TapRule("resid_post.1")})
OTHERWISE = frozenset({TapRule("resid_post.1", "bfloat16")})


def extract(place: str, source: str) -> Op:
    return Op("extract", place, source=source, taps=OWN)


GIVEN = (extract("p0", "a"), extract("p1", "b"))
GROWS = Op("add-corpus", "p0", source="c")


def run(*ops: Op, given: Sequence[Op] = GIVEN, seed: int = 1) -> running.Run:
    return Program(seed, ops, given).run()


def test_a_dataset_is_not_merged_with_itself() -> None:
    run(Op("merge", "p2", ("p0", "p1", "p1")))


def test_a_file_that_is_there_is_not_added_again() -> None:
    done = run(Op("add-corpus", "p0", source="ab"), Op("merge", "p2", ("p0", "p1")))
    assert done.outcomes["add-corpus", "ok"] == 1
    assert done.outcomes["merge", "ok"] == 0  # (both have b by now)


@pytest.mark.parametrize("kill", range(32, 72, 9))
def test_a_killed_copy_leaves_no_unit_that_another_growth_takes(kill: int) -> None:
    run(
        Op("copy", "p2", ("p0",)), GROWS, Op("copy", "p2", ("p0",), kill=kill, again=False),
        Op("add-corpus", "p2", source="d"),
    )  # fmt: skip


@pytest.mark.parametrize("kill", range(36, 72, 9))
def test_a_killed_copy_of_units_is_not_taken_for_others(kill: int) -> None:
    part = Op("part", "p2", ("p0",), units=(1, None, None), kill=kill, again=False)
    run(part, extract("p2", "ab"), given=(extract("p0", "ab"),))


def test_a_copy_drops_what_its_source_has_dropped() -> None:
    run(
        Op("add-taps", "p0", taps=MORE), Op("copy", "p2", ("p0",)), Op("drop", "p0", taps=MORE),
        Op("add-taps", "p0", taps=OTHERWISE), Op("copy", "p2", ("p0",)),
    )  # fmt: skip


@pytest.mark.parametrize("had", [False, True])
def test_taps_that_lack_documents_of_a_copy_hide_none(had: bool) -> None:
    again = [Op("drop", "p0", taps=MORE), Op("add-taps", "p0", taps=MORE)] if had else []
    copy, add = Op("copy", "p2", ("p0",)), Op("add-taps", "p0", taps=MORE)
    begun = [add, copy] if had else [copy, add]
    done = run(*begun, *again, Op("add-corpus", "p2", source="c"), copy)
    assert done.outcomes["copy", "refused"] == 1


def test_taps_added_to_a_compacted_dataset_are_repaired_by_the_model() -> None:
    done = run(
        Op("compact", "p2", ("p0",)), Op("add-taps", "p2", taps=MORE),
        Op("repair", "p2", damage="record gone", seed=1),
    )  # fmt: skip
    assert any("passes/" in line and "damaged" in line for line in done.trace)
    assert done.outcomes["repair", "ok"] == 1


def test_no_tap_is_there_twice_after_a_copy() -> None:
    run(
        Op("copy", "p2", ("p0",)), Op("add-taps", "p0", taps=MORE),
        Op("add-taps", "p2", taps=OTHERWISE), Op("copy", "p2", ("p0",)),
    )  # fmt: skip


@pytest.mark.parametrize("delay", (0.0, 0.2, 0.4))
def test_taps_added_beside_growth_hide_no_document(delay: float) -> None:
    beside = Op("add-corpus", "p0", source="c", delay=delay)
    run(Op("add-taps", "p0", taps=MORE, beside=beside))


def test_a_state_does_not_fit_a_copy_that_grew_otherwise() -> None:
    done = run(
        Op("copy", "p2", ("p0",)), GROWS, Op("add-corpus", "p2", source="d"), Op("take", "p0"),
        Op("resume", "p0"), Op("resume", "p2"),
    )  # fmt: skip
    assert done.outcomes["resume", "ok"] == 1


# -- what is planted is found ----------------------------------------------------------------------


def _shifted(sums: np.ndarray, *told: Any) -> np.ndarray:
    """Rows of the tokens before."""
    return np.roll(_HASHED(sums, *told), 1, axis=0)


_HASHED: Callable[..., np.ndarray] = documents._hashed


@pytest.mark.parametrize(
    ("owner", "name", "stub", "ops", "kind"),
    [
        pytest.param(
            running, "drop_taps", lambda *_: {},
            [Op("add-taps", "p0", taps=MORE), Op("drop", "p0", taps=MORE)], "model",
            id="a drop that drops nothing",
        ),
        pytest.param(
            running, "replicate", lambda *_: None, [Op("copy", "p2", ("p0",))], "model",
            id="a copy of nothing",
        ),
        pytest.param(
            places.Places, "audit", lambda *_, **__: Report(),
            [Op("repair", "p0", damage="shard flipped")], "verify",
            id="an audit that finds nothing",
        ),
        pytest.param(
            running, "collect_garbage",
            lambda objects: [objects.delete(key) for key in [*objects.list("attempts/")][:1]],
            [Op("gc", "p0")], "truth", id="gc of a file that a record names",
        ),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found(
    owner: Any, name: str, stub: Any, ops: list[Op], kind: str
) -> None:
    run()  # (what is given is made before)
    with mock.patch.object(owner, name, stub), pytest.raises(Violation, match=f"^{kind}: "):
        run(*ops)


def test_rows_of_another_token_are_found() -> None:
    with (
        mock.patch.object(documents.HashStep, "hashed", staticmethod(_shifted)),
        pytest.raises(Violation, match=r"^truth: .* rows of resid_post\.0 are not those"),
    ):
        run(extract("p2", "cd"))


def test_a_shrunk_program_finds_the_same_in_fewer_commands() -> None:
    ops = [
        Op("gc", "p1"), Op("copy", "p2", ("p0",), kill=9, rough=1.0, beside=Op("verify", "p0")),
        Op("verify", "p1"),
    ]  # fmt: skip
    with mock.patch.object(running, "replicate", lambda *_: None):
        shrunk = Program(1, ops, GIVEN).shrunk()
    assert str(shrunk).endswith("corpus=b taps=resid_post.0:float32/float32\n  0 copy p0 -> p2")
