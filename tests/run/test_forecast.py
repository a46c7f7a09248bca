"""The prediction a run makes of itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from spile.dataset.prediction import read_prediction
from spile.metrics import Counters
from spile.objects import MemoryObjects
from spile.run.forecast import Forecast

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
