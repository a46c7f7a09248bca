"""A child process for work that may hang, crash or run out of memory, limited by the system.

Python cannot interrupt some work, and a library may abort. Such work runs in a child process, which
has limits on memory and processor time and can be killed at any moment. It reads requests from its
standard input, which ends when the parent ends for whatever reason; then the child exits.
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

from spile.core.threads import cancellation

_LENGTH = struct.Struct("<Q")
_POLL = 0.1  # seconds between looks whether to stop waiting for the process
_MORE_MEMORY = 32  # bytes for each byte of a request
_NO_MEMORY = 97  # the exit code of a process that had too little memory to report it
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL})


@dataclass(frozen=True)
class ProcessLimits:
    """The resources a limited process may use.

    Attributes:
        seconds: processor time for each part of its work; each MiB of that part adds one second.
        memory: bytes beyond the process's initial memory; each byte of a request adds 32.
    """

    seconds: float = 10.0
    memory: int = 1 << 30


class ProcessEnded(Exception):
    """The process ended before it answered.

    Attributes:
        limit: the excess, if the process itself is at fault: "more than 10 s of processor time";
            None if it was killed.
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
    """The parent's handle to the process.

    The process runs `module`, which must call `run_limited`.
    """

    def __init__(
        self,
        module: str,
        limits: ProcessLimits,
        *,
        arguments: Sequence[str] = (),
        pass_fds: Sequence[int] = (),
        quiet: bool = False,
    ) -> None:
        """`quiet`: whether to discard its standard error."""
        self._limits = limits
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
        # (If it has ended, `received` reports that.)
        with contextlib.suppress(BrokenPipeError):
            send(self._process.stdin, data)

    def received(self) -> bytes:
        """Wait for the answer and return it.

        Raises:
            ProcessEnded: if the process ends without an answer.
            Interrupted: if the work is cancelled while it waits.
        """
        assert self._process.stdout
        ready = select.poll()
        ready.register(self._process.stdout, select.POLLIN)
        while not ready.poll(_POLL * 1000):
            cancellation().check()
        answer = received(self._process.stdout)
        if answer is None:
            raise ProcessEnded(self._process.wait(), self._limits)
        return answer

    def close(self) -> None:
        """Kill the process, whatever it does: it holds nothing of value."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            with contextlib.suppress(OSError):  # unsent data
                stream.close()


def send(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def received(stream: IO[bytes]) -> bytes | None:
    """Read one message; return None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = int(_LENGTH.unpack(head)[0])
    data = stream.read(size)
    return data if len(data) == size else None


# -- within the process --------------------------------------------------------------------------


class Allowance:
    """The limits of this process, renewed for each part of its work."""

    def __init__(self, limits: ProcessLimits) -> None:
        self._limits, self._most = limits, 0
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
        except OSError:  # such systems do not enforce RLIMIT_AS either
            pages = 0
        self._begun = pages * resource.getpagesize()

    def allow_memory(self, size: int) -> None:
        # Never lower the limit: freed memory still belongs to the process.
        self._most = max(self._most, self._limits.memory + _MORE_MEMORY * size)
        if self._begun:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            most = self._begun + self._most
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))

    def allow_time(self, size: int) -> None:
        # The default action of its signal ends the process without running Python code.
        signal.setitimer(signal.ITIMER_PROF, self._limits.seconds + size / (1 << 20))


def run_limited(serve: Callable[[IO[bytes], IO[bytes]], None]) -> None:
    """Serve requests until the parent is gone; the whole main program of such a module."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        sys.stderr.close()  # nobody is left to read it
    except MemoryError:
        os._exit(_NO_MEMORY)
