"""The rate of a run and its own prediction, from its counters."""

from types import SimpleNamespace
from typing import Any

import pytest

from spile.dataset.records.prediction import read_prediction
from spile.metrics import Counters
from spile.objects import MemoryObjects
from spile.run.pipeline import progress
from spile.run.pipeline.progress import Forecast, Meter


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that is set by hand."""
    hand = SimpleNamespace(at=100.0)
    clock = SimpleNamespace(monotonic=lambda: hand.at, time=lambda: 1e9 + hand.at)
    monkeypatch.setattr(progress, "time", clock)
    return hand


def test_a_run_that_has_not_begun_has_no_rate(now: SimpleNamespace) -> None:
    seen = Meter(Counters()).look()
    assert (seen.tokens, seen.rate, seen.average, seen.idle) == (0, None, None, None)


def test_now_covers_the_last_seconds_and_the_average_all_since_the_start(
    now: SimpleNamespace,
) -> None:
    counters = Counters()
    watching = Meter(counters)
    now.at += 60  # loading and compiling
    counters.add(tokens=500)
    watching.look()
    for _ in range(20):
        now.at += 1
        counters.add(tokens=100, device_busy=0.75, device_idle=0.25)
        watching.look()
    for _ in range(20):
        now.at += 1
        counters.add(tokens=300, device_busy=1.0)
        watching.look()
    seen = watching.look()
    assert seen.rate == pytest.approx(300)
    assert seen.average == pytest.approx((20 * 100 + 20 * 300) / 40)
    assert seen.idle == 0.0


def test_a_beat_says_when_it_was_made_and_nothing_that_is_unknown(now: SimpleNamespace) -> None:
    counters = Counters()
    watching = Meter(counters)
    now.at += 5
    counters.add(tokens=10, documents=2, units=1, bytes=640, durable=4736)
    assert watching.beat() == {
        "tokens": 10, "documents": 2, "units": 1, "bytes": 640, "durable": 4736,
        "started": 1e9 + 100, "updated": 1e9 + 105,
    }  # fmt: skip


COST: Any = SimpleNamespace(tokens=1000, rows=900, total_bytes=5000, mesh="data=2")


def test_it_is_made_once_of_the_first_steps() -> None:
    objects, counters = MemoryObjects("memory://forecast"), Counters()
    forecast = Forecast(objects, COST, counters, "cpu")
    forecast.look()
    counters.add(clocked=80, device_busy=0.5, device_idle=0.3, steps=3)
    forecast.look()
    assert read_prediction(objects) is None, "three steps are too few"
    counters.add(clocked=20, device_busy=0.2, steps=1)
    forecast.look()
    found = read_prediction(objects)
    assert found and (found.tokens, found.rows, found.bytes) == (1000, 900, 5000)
    assert found.seconds == pytest.approx(10.0) and (found.device, found.mesh) == ("cpu", "data=2")
    counters.add(clocked=900, device_busy=90.0, steps=9)
    forecast.look()
    forecast.close()
    assert read_prediction(objects) == found


def test_steps_of_a_long_run_are_timed_for_a_while() -> None:
    objects, counters = MemoryObjects("memory://long"), Counters()
    cost: Any = SimpleNamespace(**{**vars(COST), "tokens": 10**9})
    forecast = Forecast(objects, cost, counters, "x")
    counters.add(clocked=100, device_busy=1.0, steps=10)
    forecast.look()
    assert read_prediction(objects) is None
    counters.add(clocked=400, device_busy=4.0, steps=40)
    forecast.look()
    found = read_prediction(objects)
    assert found and found.seconds == pytest.approx(1e7)


def test_a_run_that_is_over_at_once_is_predicted_without_its_time() -> None:
    objects = MemoryObjects("memory://short")
    Forecast(objects, COST, Counters(), "cpu").close()
    found = read_prediction(objects)
    assert found and found.seconds is None
