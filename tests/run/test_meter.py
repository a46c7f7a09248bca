"""How fast a run goes, from its counters."""

from types import SimpleNamespace

import pytest

from spile.metrics import Counters
from spile.run import meter
from spile.run.meter import Meter


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that is set by hand."""
    hand = SimpleNamespace(at=100.0)
    clock = SimpleNamespace(monotonic=lambda: hand.at, time=lambda: 1e9 + hand.at)
    monkeypatch.setattr(meter, "time", clock)
    return hand


def test_a_run_that_has_not_begun_has_no_rate(now: SimpleNamespace) -> None:
    seen = Meter(Counters()).look()
    assert (seen.tokens, seen.rate, seen.average, seen.idle) == (0, None, None, None)


def test_now_is_the_last_seconds_and_the_average_all_since_the_first_tokens(
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
