"""What a run says of itself while it lasts: how it goes, and what to expect. No jax.

The prediction is that of its plan, and of its own first steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spile.dataset.heartbeat import Presence
from spile.dataset.prediction import Prediction, create_prediction, read_prediction
from spile.metrics import Counters
from spile.objects import Objects
from spile.plan.estimate import Estimate
from spile.run.meter import Meter

# The first steps say how fast all will be: so many, and so long or such a part of the whole.
_STEPS = 4
_SECONDS = 5.0
_SHARE = 0.1


@contextmanager
def reporting(
    presence: Presence, counters: Counters, cost: Estimate, predicts_for: str | None
) -> Iterator[None]:
    """Signs of life say how it goes.

    `predicts_for`: the device, in the process that makes the prediction.
    """
    meter = Meter(counters)
    forecast = Forecast(presence.objects, cost, counters, predicts_for) if predicts_for else None

    def progress() -> dict[str, Any]:
        if forecast:
            forecast.look()
        return meter.beat()

    presence.report(progress)
    presence.start()
    yield
    if forecast:
        forecast.close()


class Forecast:
    """Written once, by whoever comes first."""

    def __init__(self, objects: Objects, cost: Estimate, counters: Counters, device: str) -> None:
        self._objects, self._cost, self._counters, self._device = objects, cost, counters, device
        self._made = read_prediction(objects) is not None

    def look(self) -> None:
        """Make it, if there is enough to make it of."""
        counters, rate = self._counters, self._counters.pace()
        if self._made or not rate or counters["steps"] < _STEPS:
            return
        seconds = counters["clocked"] / rate
        if seconds >= _SECONDS or counters["clocked"] >= _SHARE * self._cost.tokens:
            self._make(self._cost.tokens / rate)

    def close(self) -> None:
        """What is over before it could be timed is predicted without."""
        if not self._made:
            self._make(None)

    def _make(self, seconds: float | None) -> None:
        self._made = True
        cost = self._cost
        create_prediction(
            self._objects,
            Prediction(cost.tokens, cost.rows, cost.total_bytes, seconds, self._device, cost.mesh),
        )
