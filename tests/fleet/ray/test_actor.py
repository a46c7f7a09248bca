"""One host of a slice, as Ray's actor runs it, but without Ray: units are given by number."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chaos.harness import Work, check_sound
from spile.fleet.ray.actor import RayHost


@pytest.fixture
def work(model: Path, corpus: Path) -> Work:
    work = Work(model, corpus)
    work.options["taps"] = "embed"
    return work


class Running:
    """A host at work in a thread, like a call of its actor."""

    def __init__(self, work: Work, out: Path, **changes: Any) -> None:
        self.host = RayHost()
        options = {"model": str(work.model), "corpus": str(work.corpus), **work.options, **changes}
        given = (options, str(out), "/nonexistent", {})
        pool = ThreadPoolExecutor(1)
        self._answer = pool.submit(self.host.run, *given)
        pool.shutdown(wait=False)

    def ended(self) -> dict[str, Any]:
        return self._answer.result(60)


def done(out: Path) -> set[int]:
    return {int(path.stem) for path in out.glob("done/*/*.json")}


def test_it_does_what_it_is_told_and_answers_when_it_is_committed(
    work: Work, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    running = Running(work, out)
    cost = running.host.begun()
    assert cost and cost["units"] > 5
    assert not done(out)  # nothing by itself
    last = cost["units"] - 1
    assert running.host.do(last)
    assert done(out) == {last}
    counted: dict[str, float] | None = None
    for unit in range(last):
        counted = running.host.do(unit)
    assert counted and counted["units"] == cost["units"]
    running.host.finish()
    assert running.ended() == {}
    check_sound(out)


def test_an_error_is_told_by_its_text_and_code(work: Work, tmp_path: Path) -> None:
    running = Running(work, tmp_path / "out", corpus=str(tmp_path / "absent.jsonl"))
    answer = running.ended()
    assert (answer["code"], answer["stopped"]) == (2, False)
    assert "absent.jsonl" in answer["failed"]
    assert running.host.begun() is None
    assert running.host.do(0) is None


def test_a_unit_that_fails_is_answered_by_none_and_the_rest_by_the_error(
    infinite: Path, work: Work, tmp_path: Path
) -> None:
    running = Running(work, tmp_path / "out", model=str(infinite), taps="embed")
    assert running.host.begun()
    assert running.host.do(0) is None
    answer = running.ended()
    assert answer["code"] == 3
    assert "NaN or infinity in unit 0" in answer["failed"]


def test_a_stop_is_told_as_one(work: Work, tmp_path: Path) -> None:
    running = Running(work, tmp_path / "out")
    assert running.host.begun()
    assert running.host.do(0)
    running.host.stop()
    assert running.ended()["stopped"]
    assert done(tmp_path / "out") == {0}
