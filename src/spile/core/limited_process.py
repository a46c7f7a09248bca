"""A process that does for another one what may not end, or may end it: within limits of the system.

Some work no counting in Python sees, and no signal reaches Python while it lasts; and a library may
abort. So it is done in a process whose memory and processor time are limited, and which may be
killed at any time. It is asked through its standard input, which ends when the process that started
it does, however that ended: then so does this one.
"""

import contextlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_LENGTH = struct.Struct("<Q")
_POLL = 0.1  # seconds between looks at whether to stop, while the process is at work
_MORE_MEMORY = 32  # bytes for each byte that is asked
_NO_MEMORY = 97  # the exit code of a process that could not even say so
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL})


@dataclass(frozen=True)
class ProcessLimits:
    """What such a process may take.

    Attributes:
        seconds: of processor time for each part of its work, and one more for each MiB of it.
        memory: bytes beyond what the process begins with, and 32 for each byte that is asked.
    """

    seconds: float = 10.0
    memory: int = 1 << 30


class ProcessEnded(Exception):
    """The process has ended before it answered.

    Attributes:
        limit: what it took, where that is its own fault: "more than 10 s of processor time"; None
            if somebody killed it.
    """

    def __init__(self, code: int, limits: ProcessLimits) -> None:
        self.limit: str | None = None
        if code == -signal.SIGPROF:
            self.limit = f"more than {limits.seconds:g} s of processor time"
        elif code == _NO_MEMORY:
            self.limit = f"more than {limits.memory >> 20} MiB of memory"
        elif -code in _CRASHES:
            self.limit = f"down the process that does it (signal {-code})"
        super().__init__(f"signal {-code}, as when memory runs out" if code < 0 else f"code {code}")


class LimitedProcess:
    """The process, as whoever asks it sees it.

    `module` is what it runs: it calls `run_limited`.
    """

    def __init__(
        self,
        module: str,
        limits: ProcessLimits,
        *,
        heed: Callable[[], None] = lambda: None,
        arguments: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        quiet: bool = False,
    ) -> None:
        """Args:
        heed: is called now and then while the process is at work, and may raise to end that.
        quiet: whether what it says to the terminal is dropped.
        """
        self._limits, self._heed = limits, heed
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            pass_fds=pass_fds,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, data: bytes) -> None:
        assert self._process.stdin
        # (That it has ended is seen when it does not answer.)
        with contextlib.suppress(BrokenPipeError):
            send(self._process.stdin, data)

    def received(self) -> bytes:
        """Its answer.

        Raises:
            ProcessEnded: if there is none.
        """
        assert self._process.stdout
        ready = select.poll()
        ready.register(self._process.stdout, select.POLLIN)
        while not ready.poll(_POLL * 1000):
            self._heed()
        answer = received(self._process.stdout)
        if answer is None:
            raise ProcessEnded(self._process.wait(), self._limits)
        return answer

    def close(self) -> None:
        """End the process, whatever it does: there is nothing to lose in it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            with contextlib.suppress(OSError):  # what it was not yet sent
                stream.close()


def send(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def received(stream: IO[bytes]) -> bytes | None:
    """None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = int(_LENGTH.unpack(head)[0])
    data = stream.read(size)
    return data if len(data) == size else None


# -- within the process --------------------------------------------------------------------------


class Allowance:
    """What this process may still take, set anew for each part of its work."""

    def __init__(self, limits: ProcessLimits) -> None:
        self._limits, self._most = limits, 0
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
        except OSError:  # nor do such systems heed RLIMIT_AS
            pages = 0
        self._begun = pages * resource.getpagesize()

    def allow_memory(self, size: int) -> None:
        # Never less than before: what was freed is still the process's.
        self._most = max(self._most, self._limits.memory + _MORE_MEMORY * size)
        if self._begun:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            most = self._begun + self._most
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))

    def allow_time(self, size: int) -> None:
        # Its signal ends the process without asking Python.
        signal.setitimer(signal.ITIMER_PROF, self._limits.seconds + size / (1 << 20))


def run_limited(serve: Callable[[IO[bytes], IO[bytes]], None]) -> None:
    """All that the module of such a process does: answer until whoever asks is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks decides when to stop
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        sys.stderr.close()  # nobody is left to tell
    except MemoryError:
        os._exit(_NO_MEMORY)
