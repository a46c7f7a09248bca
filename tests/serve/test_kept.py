"""What takes a while is made once, in the background; what is kept has a limit."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from spile.serve.kept import Bounded, Kept


def waited(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    limit = time.monotonic() + 60
    while (found := ask())["making"]:
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found


def test_a_value_is_made_once_while_nobody_waits() -> None:
    kept, go, calls = Kept(), threading.Event(), []

    def make() -> str:
        calls.append(1)
        assert go.wait(60)
        return "made"

    first = kept.ask("key", 1, make)
    assert first == {"value": None, "making": True, "error": None}
    assert kept.ask("key", 1, make)["making"]
    go.set()
    assert waited(lambda: kept.ask("key", 1, make))["value"] == "made"
    assert calls == [1]
    kept.close()


def test_an_older_value_is_given_until_the_new_one_is_made() -> None:
    kept, go = Kept(), threading.Event()
    waited(lambda: kept.ask("key", 1, lambda: "old"))

    def make() -> str:
        assert go.wait(60)
        return "new"

    assert kept.ask("key", 2, make) == {"value": "old", "making": True, "error": None}
    go.set()
    assert waited(lambda: kept.ask("key", 2, make))["value"] == "new"
    kept.close()


def test_what_cannot_be_made_is_said_and_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, calls = Kept(), []

    def make() -> None:
        calls.append(1)
        raise ValueError("too many")

    found = waited(lambda: kept.ask("key", 1, make))
    assert (found["value"], found["error"]) == (None, "too many")
    assert kept.ask("key", 1, make)["error"] == "too many"
    assert calls == [1]
    assert "too many" in caplog.text
    kept.close()


def test_what_was_used_longest_ago_makes_room() -> None:
    held, made = Bounded(10), []

    def get(key: str, size: int) -> str:
        def make() -> tuple[str, int]:
            made.append(key)
            return key, size

        return held.get(key, make)

    for key in ("a", "b", "a", "c", "a", "b"):
        assert get(key, 5) == key
    assert made == ["a", "b", "c", "b"]
    assert get("large", 50) == "large"
    get("large", 50)
    assert made == ["a", "b", "c", "b", "large"], "one is kept, whatever its size"
