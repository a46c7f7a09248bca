"""How a run handles signals, and documents that come while it adds taps."""

import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spile.core.config import Runtime
from spile.core.errors import StoreError
from spile.run import extract as running
from spile.run.extract import has_grown, outcome_of, stop_on_signal
from support import stored


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


def test_taps_are_not_complete_while_documents_are_being_added(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "acts", grown=(3,), commit=range(4))
    added, _ = stored.add_pass(made, {"z.0": 4}, commit=range(3))
    begun = added.table_over(made.ledger.table().at(0))
    assert begun and not added.ledger.complete(begun)
    outcome = outcome_of(added.ledger, begun, cast(Any, None), Runtime())
    assert outcome.complete
    with pytest.raises(StoreError, match="documents are being added there, which these taps lack"):
        has_grown(added.ledger, outcome)
    assert made.ledger.commit(made.attempt(4)) and made.ledger.complete(made.table)
    assert has_grown(added.ledger, outcome)
