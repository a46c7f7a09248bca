"""Reports come during a run and once more at its end, even if a backend fails."""

import logging
import threading
from collections.abc import Mapping

import pytest

from spile.metrics import Counters, Reporter


class Told:
    """A backend that remembers reports, and fails where a test asks for it."""

    def __init__(self, fails: str = "") -> None:
        self.reports: list[tuple[int, Mapping[str, float]]] = []
        self.closed, self.asked = 0, 0
        self.twice = threading.Event()
        self._fails = fails

    def log(self, tokens: int, values: Mapping[str, float]) -> None:
        self.asked += 1
        if self._fails == "log":
            raise OSError(28, "No space left\non device")
        self.reports.append((tokens, dict(values)))
        if len(self.reports) == 2:
            self.twice.set()

    def close(self) -> None:
        self.closed += 1
        if self._fails == "close":
            raise RuntimeError


def test_reports_come_at_intervals_and_at_the_end() -> None:
    counters, told = Counters(), Told()
    with Reporter({"told": told}, counters, 0.01, tokens_before=100):
        counters.add(tokens=5)
        assert told.twice.wait(60)
        counters.add(tokens=7)
    assert told.reports[-1][0] == 112 and told.reports[-1][1]["progress/tokens"] == 12
    assert len(told.reports) >= 3 and told.closed == 1


def test_what_a_failed_run_counted_is_reported() -> None:
    counters, told = Counters(), Told()
    with pytest.raises(ValueError, match="a cause"), Reporter({"told": told}, counters, 1000):
        counters.add(tokens=5)
        raise ValueError("a cause")
    assert [tokens for tokens, _ in told.reports] == [5] and told.closed == 1


def test_a_backend_that_fails_is_named_once_and_asked_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sound, broken, last = Told(), Told("log"), Told("close")
    backends = {"broken": broken, "sound": sound, "last": last}
    with Reporter(backends, Counters(), 0.01):
        assert sound.twice.wait(60)
    assert (broken.asked, broken.closed) == (1, 0)
    assert len(sound.reports) == len(last.reports) > 2 and sound.closed == 1
    assert caplog.messages == [
        "--metrics broken: OSError: [Errno 28] No space left on device; "
        "the run continues without it",
        "--metrics last: RuntimeError; the run continues without it",
    ]


def test_with_nobody_to_tell_no_thread_is_started() -> None:
    before = threading.active_count()
    with Reporter({}, Counters(), 1):
        assert threading.active_count() == before


def test_the_largest_is_of_the_time_since_the_last_report() -> None:
    counters, told = Counters(), Told()
    counters.met(**{"tap/max_abs/embed": 3.0})
    counters.met(**{"tap/max_abs/embed": 2.0})
    with Reporter({"told": told}, counters, 0.01):
        assert told.twice.wait(60)
    assert told.reports[0][1]["tap/max_abs/embed"] == 3.0
    assert "tap/max_abs/embed" not in told.reports[-1][1]


def test_what_else_is_so_is_reported_with_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    told, counters, memory = Told(), Counters(), {"memory_used/0": 7.0}
    with Reporter({"told": told}, counters, 1000, more=lambda: memory):
        counters.sample(step_seconds=0.25)
    assert told.reports[0][1]["device/memory_used/0"] == 7.0
    assert told.reports[0][1]["step/p95"] == 0.25
    assert caplog.messages == []
