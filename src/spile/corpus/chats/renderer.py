"""A process that renders chats within limits: a chat template is a stranger's program.

It may compare lists that hold one another, or copy a long text in a loop: no counting in Python
sees such work, and no signal reaches Python while it lasts. So templates are compiled and rendered
only here, in a process whose memory and processor time the system limits, and which may be killed
at any time.

It is asked through its standard input, which ends when the process that started it does, however
that ended: then so does this one. What travels is `marshal`ed, by and for the same interpreter.
"""

import contextlib
import datetime
import marshal
import os
import resource
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from spile.core.errors import DataError, InputError
from spile.corpus.chats.template import ChatTemplate, TemplateLimit

_LENGTH = struct.Struct("<Q")
_POLL = 0.1  # seconds between looks at whether to stop, while the process renders
_MORE_MEMORY = 32  # bytes for each byte of the chats
_NO_MEMORY = 97  # the exit code of a process that met the limit outside a template
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL})

REFUSED = "refused by the chat template"  # why a document is left out

# What becomes of a chat: (text, roles); a reason why there is none; (fault,), which ends the run.
Answer = tuple[str, tuple[tuple[int, int, int], ...]] | str | tuple[str]


@dataclass(frozen=True)
class RenderLimits:
    """What a process that renders may take: far more than published templates need.

    Attributes:
        seconds: of processor time for a chat, and one more for each MiB of it.
        memory: bytes beyond what the process begins with, and 32 for each byte of the chats in
            hand.
    """

    seconds: float = 10.0
    memory: int = 1 << 30


class Renderer:
    """The process, as whoever asks it sees it. It starts at once, and compiles the template."""

    def __init__(
        self,
        template: ChatTemplate,
        roles: Mapping[str, int],
        limits: RenderLimits,
        heed: Callable[[], None],
    ) -> None:
        """Args:
        roles: the flag of each role.
        heed: is called now and then while the process renders, and may raise to end that.
        """
        self._where, self._limits, self._heed = template.where, limits, heed
        self._places: Sequence[str] | None = None  # of the chats in hand; None: it compiles
        self._done, done = os.pipe()  # a byte for each chat that is rendered
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(done)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[done],
            )
        finally:
            os.close(done)
        self._send(marshal.dumps(_described(template, roles, limits)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Wait until the template is compiled.

        Raises:
            InputError: if it is none.
        """
        if fault := marshal.loads(self._received()):
            raise InputError(fault)

    def ask(self, places: Sequence[str], chats: list[bytes]) -> None:
        """Have chats rendered, each `marshal`ed; `places` say where they are from."""
        self._places = places
        self._send(marshal.dumps(chats))

    def answers(self) -> list[Answer]:
        """What has become of the chats.

        Raises:
            InputError: if the template met a limit of the process.
            DataError: if the process was killed.
        """
        found: list[Answer] = marshal.loads(self._received())
        os.read(self._done, len(found))
        return found

    def close(self) -> None:
        """End the process, whatever it does: there is nothing to lose in it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            with contextlib.suppress(OSError):  # what it was not yet sent
                stream.close()
        if self._done >= 0:
            os.close(self._done)
            self._done = -1

    def _send(self, data: bytes) -> None:
        assert self._process.stdin
        # (That it has ended is seen when it does not answer.)
        with contextlib.suppress(BrokenPipeError):
            _send(self._process.stdin, data)

    def _received(self) -> bytes:
        assert self._process.stdout
        ready = select.poll()
        ready.register(self._process.stdout, select.POLLIN)
        while not ready.poll(_POLL * 1000):
            self._heed()
        answer = _received(self._process.stdout)
        if answer is None:
            raise self._ended(self._process.wait())
        return answer

    def _ended(self, code: int) -> InputError | DataError:
        """Why it did, and over which chat."""
        if code == -signal.SIGPROF:
            limit = f"more than {self._limits.seconds:g} s of processor time"
        elif code == _NO_MEMORY:
            limit = f"more than {self._limits.memory >> 20} MiB of memory"
        elif -code in _CRASHES:
            limit = f"down the process that renders it (signal {-code})"
        else:
            why = f"signal {-code}, as when memory runs out" if code < 0 else f"code {code}"
            return DataError(
                f"a process that renders chats has ended ({why}); run the same command again"
            )
        advice = "give a simpler template with --template"
        if self._places is None:
            return InputError(f"{self._where}: compiling it takes {limit}; {advice}")
        os.set_blocking(self._done, False)
        with contextlib.suppress(BlockingIOError):
            place = self._places[len(os.read(self._done, 1 << 16))]
            return InputError(
                f"{place}: {self._where}: rendering this chat takes {limit}; {advice}, or leave "
                "the document out"
            )
        return InputError(f"{self._where}: rendering takes {limit}; {advice}")


def _described(
    template: ChatTemplate, roles: Mapping[str, int], limits: RenderLimits
) -> dict[str, Any]:
    options = ("tokens", "system", "generation_prompt")
    return {
        "text": str(template.text),
        "where": template.where,
        "date": template.date.isoformat() if template.date else None,
        "options": {name: getattr(template, name) for name in options},
        "roles": dict(roles),
        "limits": (limits.seconds, limits.memory),
    }


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def _received(stream: IO[bytes]) -> bytes | None:
    """None at the end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    size = int(_LENGTH.unpack(head)[0])
    data = stream.read(size)
    return data if len(data) == size else None


# -- within the process --------------------------------------------------------------------------


class _Limited:
    """The limits of this process, set anew for what comes next."""

    def __init__(self, seconds: float, memory: int) -> None:
        self._seconds, self._memory, self._most = seconds, memory, 0
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
        except OSError:  # nor do such systems heed RLIMIT_AS
            pages = 0
        self._begun = pages * resource.getpagesize()

    def allow_memory(self, size: int) -> None:
        # Never less than before: what was freed is still the process's.
        self._most = max(self._most, self._memory + _MORE_MEMORY * size)
        if self._begun:
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            most = self._begun + self._most
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))

    def allow_time(self, size: int) -> None:
        # Its signal ends the process without asking Python.
        signal.setitimer(signal.ITIMER_PROF, self._seconds + size / (1 << 20))


def serve(asked: IO[bytes], answers: IO[bytes], done: int) -> None:
    """Answer until whoever asks is gone."""
    first = _received(asked)
    if first is None:
        return
    described: dict[str, Any] = marshal.loads(first)
    limited = _Limited(*described["limits"])
    date = described["date"] and datetime.date.fromisoformat(described["date"])
    text, where, roles = (described[name] for name in ("text", "where", "roles"))
    limited.allow_memory(len(text))
    limited.allow_time(len(text))
    template = ChatTemplate(text, where, **described["options"], date=date)
    _send(answers, marshal.dumps(_fault(template)))
    while (data := _received(asked)) is not None:
        limited.allow_memory(len(data))
        found: list[Answer] = []
        for chat in marshal.loads(data):
            limited.allow_time(len(chat))
            found.append(_answer(template, marshal.loads(chat), roles))
            os.write(done, b".")
        _send(answers, marshal.dumps(found))


def _fault(template: ChatTemplate) -> str:
    try:
        template.compile()
    except InputError as error:
        return str(error)
    return ""


def _answer(template: ChatTemplate, messages: Any, flags: Mapping[str, int]) -> Answer:
    try:
        rendered = template.render(messages)
        rendered.text.encode("utf-8")
    except TemplateLimit as error:
        return (str(error),)
    except InputError:
        return REFUSED
    except UnicodeEncodeError:
        return "not UTF-8"
    roles: list[tuple[int, int, int]] = []
    reached = 0
    for start, stop, role in rendered.roles:
        if start > reached:
            roles.append((reached, start, flags["template"]))
        roles.append((start, stop, flags[role]))
        reached = stop
    if reached < len(rendered.text):
        roles.append((reached, len(rendered.text), flags["template"]))
    return rendered.text, tuple(roles)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks decides when to stop
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]))
    except BrokenPipeError:
        sys.stderr.close()  # nobody is left to tell
    except MemoryError:
        os._exit(_NO_MEMORY)
