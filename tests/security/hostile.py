"""What a stranger may hand us: values, bytes and places for the tests of this folder to use.

In the suite each test tries the same few examples. `make chaos-fuzz` explores: see `explored`.
"""

import copy
import faulthandler
import functools
import inspect
import json
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from spile.core.errors import SpileError
from spile.dataset import format as fmt
from support.marks import examples

DEEP = 100_000
# Spelled as JSON has them; Python's own limit on digits, its infinity and its NaN are among them.
NUMBERS = ("1e400", "-1e400", "NaN", "-Infinity", "1" * 5000, "1" * 4000, "-1", "0.5", "1e3")

NAMES = st.sampled_from(
    ["", ".", "..", "../../etc/passwd", "/etc/passwd", "a\0b", "a\\..\\b", "\ud800", "\x1b[2J",
     "done/000000/00000000.json", "attempts/000000/00000001/x/y", "a/../b", "é", "%2e%2e",
     "x" * 300]
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


_SUPPRESSED = [
    HealthCheck.function_scoped_fixture,
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
]

# Of an exploring run.
SECONDS = float(os.environ.get("SPILE_FUZZ_SECONDS", 0))  # for all tests together
SEED = os.environ.get("SPILE_FUZZ_SEED")  # one round with it, instead: to see a find again
LOG = "SPILE_FUZZ_LOG"  # the file that notes rounds, for the summary
ROUND = 25  # examples of a seed: a round that began is finished, whatever the time
MOST_SECONDS = 10  # of processor time for one example
STUCK_SECONDS = 300  # of an example that Python cannot end: it ends the process
MOST_BYTES = 3 << 30  # of memory that one example may add
_PAGE = resource.getpagesize()


class Exploration:
    """The state of the exploring run."""

    seconds_each = 0.0  # of a test
    seed = 0  # of its round


exploration = Exploration()


def fuzz(count: int) -> Callable[[Any], Any]:
    """Use the same examples in every run, and share fixtures: tests restore them."""
    if SECONDS or SEED:
        return explored
    return examples(count, derandomize=True, database=None, suppress_health_check=_SUPPRESSED)


def explored(test: Any) -> Any:
    """Rounds of other examples, each with a seed of its own, for as long as this test may take.

    An example may take so much processor time and no more memory than `MOST_BYTES`. Each round is
    noted before it begins: a process that crashed can be told, and the seed that did it.
    """
    rounds = hypothesis.settings(
        max_examples=ROUND, deadline=None, database=None, derandomize=False, print_blob=False,
        suppress_health_check=_SUPPRESSED,
    )(test)  # fmt: skip
    inner, tried = rounds.hypothesis.inner_test, 0

    @functools.wraps(inner)
    def limited(*args: Any, **kwargs: Any) -> None:
        nonlocal tried
        tried += 1
        with within_limits():
            inner(*args, **kwargs)

    rounds.hypothesis.inner_test = limited

    def exploring(*args: Any, **kwargs: Any) -> None:
        nonlocal tried
        name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        until = time.monotonic() + exploration.seconds_each
        while True:
            seed = int(SEED) if SEED else random.SystemRandom().getrandbits(48)
            exploration.seed, tried = seed, 0
            _note({"test": name, "seed": seed})
            try:
                hypothesis.seed(seed)(rounds)(*args, **kwargs)
            except BaseException as error:
                error.add_note(f"again: SPILE_FUZZ_SEED={seed} pytest --chaos-full '{name}'")
                raise
            finally:
                _note({"test": name, "seed": seed, "examples": tried})
            if SEED or time.monotonic() > until:
                return

    exploring.__name__, exploring.__doc__ = test.__name__, test.__doc__
    exploring.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    exploring.pytestmark = [*getattr(test, "pytestmark", [])]  # type: ignore[attr-defined]
    return pytest.mark.fuzzed(pytest.mark.varied(exploring))


@contextmanager
def within_limits() -> Iterator[None]:
    """Fails what takes too long; a process that it cannot fail ends, and says where it was.

    Memory counts from this example on: Arrow keeps 256 KiB of addresses for each damaged zstd
    stream, and thousands of examples are not one that takes too much.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * _PAGE + MOST_BYTES, memory[1]))
    before = signal.signal(signal.SIGPROF, _took_too_long)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, memory)


def _took_too_long(*_: Any) -> None:
    raise AssertionError(f"this example takes more than {MOST_SECONDS} s of processor time")


def _note(said: dict[str, Any]) -> None:
    if LOG in os.environ:
        with open(os.environ[LOG], "a") as file:
            file.write(json.dumps(said) + "\n")


@contextmanager
def only_our_errors() -> Any:
    """Let a `SpileError` of one line pass; any other exception fails the test."""
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
    """Bytes that are changed in a few places, cut, doubled, or mixed with noise."""
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


_WORDS = [0, 1, 2, 7, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 1 << 26, (1 << 31) - 1, 1 << 31, (1 << 32) - 1,
          1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]  # fmt: skip
_SPELLED = ["0", "-1", "1", "2", "255", "65536", "2147483648", "4294967295", "1099511627776",
            "9223372036854775807", "18446744073709551616", "-9223372036854775809", "0.5", "1e400",
            "NaN", "1" + "0" * 30, "null", "true", '""', "[]", "{}"]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, seeds: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """One of some files, with a few places changed: bits, runs, numbers, parts of another, or
    words that mean something there."""
    found = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        to = min(len(found), at + draw(st.sampled_from([1, 2, 4, 8, 32, 200])))
        match draw(st.integers(0, 11 if words else 8)):
            case 0 if found:
                found[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                found[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 2:
                del found[at:to]
            case 3:
                del found[at:]
            case 4:
                found[at:at] = found[at:to] * draw(st.sampled_from([1, 2, 50]))
            case 5:
                other = draw(st.sampled_from(seeds))
                start = draw(st.integers(0, len(other)))
                found[at:to] = other[start : start + draw(st.sampled_from([4, 16, 64, 1 << 20]))]
            case 6:
                width = draw(st.sampled_from([2, 4, 8]))
                word = draw(st.sampled_from(_WORDS)) % (1 << 8 * width)
                found[at : at + width] = word.to_bytes(width, "little")
            case 7:
                places = [each.span() for each in re.finditer(rb"-?\d+(\.\d+)?", found)]
                if places:
                    start, stop = draw(st.sampled_from(places))
                    found[start:stop] = draw(st.sampled_from(_SPELLED)).encode()
            case 8:
                found[at:to] = draw(st.binary(max_size=16))
            case _ if words:
                stop = draw(st.sampled_from([at, to]))
                found[at:stop] = draw(st.sampled_from(words))
            case _:
                pass
    return bytes(found)


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with one or two of its places replaced by anything, or removed."""
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
    """Return the body of a record."""
    told = ("format", "kind", "checksum")
    return {name: value for name, value in json.loads(data).items() if name not in told}


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Yield every place of a JSON value, as its container and its key there."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            found += [(value, name), *_places(part)]
    return found
