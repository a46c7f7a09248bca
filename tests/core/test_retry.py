"""Pauses between attempts grow, have a limit, and respect what a service asks for."""

import time

import pytest

from spile.core.errors import StoreError
from spile.core.retry import Retrying, backoff


def test_pauses_double_and_are_capped() -> None:
    pauses = [backoff(failures, 5.0, 300.0) for failures in (1, 2, 6, 7, 101, 10_000)]
    assert pauses == [5, 10, 160, 300, 300, 300]


def test_jitter_shortens_and_what_is_asked_for_is_the_least() -> None:
    for _ in range(100):
        assert 15 <= backoff(3, 5.0, 300.0, jitter=0.25) <= 20
        assert 40 <= backoff(3, 5.0, 300.0, jitter=0.5, at_least=40.0) <= 60


def test_retries_are_told_of_until_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(time, "sleep", told.append)
    calls: list[None] = []
    trying = Retrying("reading x", 0.05, lambda: calls.append(None))
    trying.again("no answer")
    trying.again("no answer")
    assert len(calls) == len(told) == 2
    assert 0.05 <= told[0] <= 0.1 <= told[1] <= 0.2
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass
    with pytest.raises(StoreError, match="reading x: no answer .tried for 0 s.; check the address"):
        trying.again("no answer")
    trying.again("wait", at_least=0.5)
    assert told[2] >= 0.5, "a service that asks for patience is there"
