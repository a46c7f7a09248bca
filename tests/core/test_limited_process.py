"""A process within limits: its answers, and the report if it ends."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spile.core.errors import Interrupted
from spile.core.limited_process import LimitedProcess, ProcessEnded, ProcessLimits
from spile.core.threads import cancelled_by

MODULE = """
import os, signal, sys
from spile.core.limited_process import Allowance, ProcessLimits, received, run_limited, send

def serve(asked, answers):
    allowance = Allowance(ProcessLimits(0.2, 64 << 20))
    while (data := received(asked)) is not None:
        allowance.allow_memory(len(data))
        allowance.allow_time(len(data))
        match data:
            case b"hang":
                a = b = [1]
                for _ in range(60):
                    a, b = [a, a], [b, b]
                a == b
            case b"fill":
                bytes(1 << 30)
            case b"abort":
                os.abort()
            case b"leave":
                sys.exit(3)
            case b"be killed":
                os.kill(os.getpid(), signal.SIGKILL)
        send(answers, data.upper())

run_limited(serve)
"""


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LimitedProcess]]:
    (tmp_path / "limited_module.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(filter(None, sys.path))}")
    started: list[LimitedProcess] = []

    def start() -> LimitedProcess:
        limits = ProcessLimits(0.2, 64 << 20)
        started.append(LimitedProcess("limited_module", limits, quiet=True))
        return started[-1]

    yield start
    for process in started:
        process.close()


def test_it_answers_as_often_as_it_is_asked(start: Callable[..., LimitedProcess]) -> None:
    process = start()
    for data in (b"a", b"", b"b" * (1 << 20)):
        process.send(data)
        assert process.received() == data.upper()


@pytest.mark.parametrize(
    ("asked", "limit", "said"),
    [
        (b"hang", "more than 0.2 s of processor time", "signal 27"),
        (b"fill", "more than 64 MiB of memory", "code 97"),
        (b"abort", "down the process that does it (signal 6)", "signal 6"),
        (b"leave", None, "code 3"),
        (b"be killed", None, "signal 9, as when memory runs out"),
    ],
)
def test_what_ended_it_is_said(
    asked: bytes, limit: str | None, said: str, start: Callable[..., LimitedProcess]
) -> None:
    process = start()
    process.send(asked)
    with pytest.raises(ProcessEnded, match=said) as caught:
        process.received()
    assert caught.value.limit == limit
    process.send(b"again")  # which nobody reads
    with pytest.raises(ProcessEnded, match=said):
        process.received()


def test_whoever_waits_may_stop(start: Callable[..., LimitedProcess]) -> None:
    process, stop = start(), threading.Event()
    stop.set()
    with cancelled_by(stop), pytest.raises(Interrupted):
        process.received()  # it was never asked
