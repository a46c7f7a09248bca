"""The history of a run that is read repeatedly."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spile.core.errors import StoreError
from spile.serve import run_history
from spile.serve.run_history import RunHistory
from support import stored, web_page


def waited(until: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not until():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_history, "_SECONDS", 0.05)
    monkeypatch.setattr(run_history, "_PATIENCE", 0)


def test_units_that_are_done_are_noticed(tmp_path: Path, model: Path) -> None:
    built = web_page.build_texts(tmp_path / "out", model, web_page.texts(), commit=(0,))
    grown: list[int] = []
    objects = stored.LocalObjects(built.path)
    watching = RunHistory(objects, lambda: grown.append(watching.status.units_done))
    watching.start()
    try:
        told = watching.told()
        assert (told["state"], told["units_done"], told["made"]) == ("unfinished", 1, [])
        built.commit(2)
        waited(lambda: grown == [2])
        waited(lambda: (watching.told()["rate"] or 0) > 0)
        assert watching.told()["eta"] > 0
        built.commit(1)
        waited(lambda: watching.told()["state"] == "complete")
        assert watching.told()["eta"] is None
        tokens = [each["tokens"] for each in watching.told()["seen"]]
        assert tokens == sorted(tokens)
        assert tokens[-1] == sum(map(len, built.index))
        waited(lambda: len(grown) >= 2)
    finally:
        watching.close()


def test_done_records_that_say_when_give_the_rate_of_the_past(tmp_path: Path) -> None:
    written = stored.build(tmp_path / "out", commit=())
    for unit, when in ((0, 1000.5), (1, 1010.5), (3, 1050.0)):
        done = written.attempt(unit, made_by={"finished_at": when})
        assert written.ledger.commit(done)
    made = RunHistory(written.objects, lambda: None).told()["made"]
    assert [each["at"] for each in made] == [1000500, 1010500, 1050000]
    counts = [written.starts[u + 1] - written.starts[u] for u in (0, 1, 3)]
    assert [each["tokens"] for each in made] == [sum(counts[: n + 1]) for n in range(3)]


@pytest.mark.parametrize("when", [10**400, float("1e308"), -5, "never", [1]])
def test_a_time_that_is_none_is_left_out(tmp_path: Path, when: object) -> None:
    written = stored.build(tmp_path / "out", commit=())
    assert written.ledger.commit(written.attempt(0, made_by={"finished_at": when}))
    assert RunHistory(written.objects, lambda: None).told()["made"] == []


def test_a_worker_whose_counter_moves_is_not_silent(tmp_path: Path) -> None:
    written = stored.build(tmp_path / "out", commit=(0,))
    with stored.worker_process(written.path, 1) as (name, process):
        watching = RunHistory(written.objects, lambda: None)
        watching.start()
        try:
            (worker,) = watching.told()["workers"]
            assert worker["name"] == name
            first = worker["counter"]
            waited(lambda: watching.told()["workers"][0]["counter"] > first)
            process.kill()
            process.wait()
            waited(lambda: watching.told()["workers"][0]["state"] == "dead")
            waited(lambda: watching.told()["workers"][0]["silent"] > 0.5)
        finally:
            watching.close()


def test_a_store_that_goes_away_is_said_and_comes_back(tmp_path: Path) -> None:
    written = stored.build(tmp_path / "out")
    watching = RunHistory(written.objects, lambda: None)
    watching.start()
    try:
        written.path.rename(tmp_path / "elsewhere")
        waited(lambda: "no dataset" in (watching.told()["error"] or ""))
        (tmp_path / "elsewhere").rename(written.path)
        waited(lambda: watching.told()["error"] is None)
        assert watching.told()["state"] == "complete"
    finally:
        watching.close()


def test_samples_are_thinned_and_never_many(tmp_path: Path) -> None:
    written = stored.build(tmp_path / "out")
    watching = RunHistory(written.objects, lambda: None)
    for _ in range(3000):
        watching._note(watching.status)
    seen = watching.told()["seen"]
    assert 300 < len(seen) <= 720
    assert [each["at"] for each in seen] == sorted(each["at"] for each in seen)


def test_no_dataset_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no dataset"):
        RunHistory(stored.LocalObjects(tmp_path / "nowhere"), lambda: None)
