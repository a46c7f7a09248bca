"""How a run handles signals."""

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from spile.run import extract as running
from spile.run.extract import stop_on_signal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop_and_its_echo_is_the_same_one(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_on_signal(threading.Event()) as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.is_set()
        signal.raise_signal(number)  # as a launcher sends it to a process and to its parent
    assert signal.getsignal(number) is before


def test_a_second_signal_no_longer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = SimpleNamespace(at=0.0)
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: hand.at))
    with stop_on_signal(threading.Event()) as stop:
        signal.raise_signal(signal.SIGINT)
        hand.at = 2.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stop.is_set()


def test_a_second_signal_may_end_the_command_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, ended = SimpleNamespace(at=0.0), list[str]()
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: hand.at))
    with stop_on_signal(threading.Event(), lambda: ended.append("now")):
        signal.raise_signal(signal.SIGINT)
        assert ended == []
        hand.at = 2.0
        with pytest.raises(KeyboardInterrupt):  # had the process not ended
            signal.raise_signal(signal.SIGINT)
    assert ended == ["now"]


def test_signals_are_the_main_threads_own() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []

    def work() -> None:
        with stop_on_signal(threading.Event()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
