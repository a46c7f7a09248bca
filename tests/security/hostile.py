"""What a stranger may hand us: values, bytes and places for the tests of this folder to use."""

import copy
import json
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from marks import examples
from spile.core.errors import SpileError
from spile.dataset import format as fmt

DEEP = 100_000
# Spelled as JSON has them; Python's own limit on digits, its infinity and its NaN are among them.
NUMBERS = ("1e400", "-1e400", "NaN", "-Infinity", "1" * 5000, "1" * 4000, "-1", "0.5", "1e3")

NAMES = st.sampled_from(
    ["", ".", "..", "../../etc/passwd", "/etc/passwd", "a\0b", "a\\..\\b", "\ud800", "\x1b[2J",
     "done/00000000.json", "attempts/00000001/x/y", "a/../b", "é", "%2e%2e", "x" * 300]
)  # fmt: skip
SIZES = st.sampled_from([-1, 0, 1, 2, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 1 << 200, -(1 << 63)])
SCALARS = st.none() | st.booleans() | st.integers(-3, 9) | SIZES | st.floats() | NAMES | st.text(
    max_size=8
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            NAMES | st.sampled_from(["key", "count", "unit", "shape"]), inner, max_size=4
        )
        | inner.map(lambda value: _nested(value, 40))
    ),
    max_leaves=6,
)


def fuzz(count: int) -> Callable[[Any], Any]:
    """The same examples at every run, and no fixture made anew for each: tests restore them."""
    return examples(
        count,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@contextmanager
def only_our_errors() -> Any:
    """Lets a `SpileError` of one line pass; whatever else is raised fails the test."""
    try:
        with np.errstate(all="ignore"):
            yield
    except SpileError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 6000


@contextmanager
def refused(match: str) -> Any:
    with pytest.raises(SpileError, match=match) as caught:
        yield
    assert len(str(caught.value)) < 6000


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Some bytes with others in a few places, cut, doubled, or with noise put in."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        to = min(len(found), at + draw(st.integers(1, 64)))
        match draw(st.sampled_from(["flip", "cut", "end", "double", "noise"])):
            case "flip":
                found[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "cut":
                del found[at:to]
            case "end":
                del found[at:]
            case "double":
                found[at:at] = found[at:to]
            case _:
                found[at:to] = draw(st.binary(max_size=16))
    return bytes(found)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with anything in one or two of its places, or without them."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        places = _places(value)
        if not places:
            break
        holder, name = draw(st.sampled_from(places))
        match draw(st.integers(0, 5)):
            case 0:
                del holder[name]
            case 1 if isinstance(holder, dict):
                holder[draw(NAMES)] = holder.pop(name)
            case 1:
                holder.append(holder[name])
            case _:
                holder[name] = draw(JSON)
    return value


def sealed(kind: str, body: dict[str, Any]) -> bytes | None:
    """A record with a checksum that fits, as a stranger can compute it too."""
    try:
        return fmt.encode_record(kind, body)
    except ValueError:  # JSON cannot hold it, so no record can
        return None


def body_of(data: bytes) -> dict[str, Any]:
    """What a record says."""
    told = ("format", "kind", "checksum")
    return {name: value for name, value in json.loads(data).items() if name not in told}


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place of a JSON value, as what holds it and its name there."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            found += [(value, name), *_places(part)]
    return found
