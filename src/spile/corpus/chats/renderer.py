"""A process that renders chats within limits: a chat template is an untrusted program.

It may compare lists that contain one another, or copy a long text in a loop. Templates are
therefore compiled and rendered only here, never in the main process. Messages are serialized with
`marshal`; the same interpreter runs on both sides.
"""

import contextlib
import datetime
import marshal
import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from spile.core.errors import DataError, InputError
from spile.core.limited_process import (
    Allowance,
    LimitedProcess,
    ProcessEnded,
    ProcessLimits,
    received,
    run_limited,
    send,
)
from spile.corpus.chats.template import ChatTemplate, TemplateLimit

REFUSED = "refused by the chat template"  # the reason a document is skipped

# The outcome of a chat: (text, roles, the range and number of each message); the reason it is
# skipped, and what the template said on the lines after it; or (fault,), which ends the run.
_Ranges = tuple[tuple[int, int, int], ...]
Rendering = tuple[str, _Ranges, _Ranges] | str | tuple[str]


class Renderer:
    """The parent's handle to the process, which starts at once and compiles the template."""

    def __init__(
        self, template: ChatTemplate, roles: Mapping[str, int], limits: ProcessLimits
    ) -> None:
        """`roles`: the flag of each role."""
        self._where = template.where
        self._places: Sequence[str] | None = None  # origins of the current chats; None: compiling
        self._done, done = os.pipe()  # receives a byte for each rendered chat
        try:
            self._process = LimitedProcess(__name__, limits, arguments=[str(done)], pass_fds=[done])
        finally:
            os.close(done)
        self._process.send(marshal.dumps(_described(template, roles, limits)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> None:
        """Wait until the template is compiled.

        Raises:
            InputError: if the template is invalid.
        """
        if fault := marshal.loads(self._received()):
            raise InputError(fault)

    def ask(self, places: Sequence[str], chats: list[bytes]) -> None:
        """Send chats to be rendered, each `marshal`ed; `places` says where each came from."""
        self._places = places
        self._process.send(marshal.dumps(chats))

    def answers(self) -> list[Rendering]:
        """Return the outcomes of the chats.

        Raises:
            InputError: if the template exceeded a limit of the process.
            DataError: if the process was killed.
        """
        found: list[Rendering] = marshal.loads(self._received())
        os.read(self._done, len(found))
        return found

    def close(self) -> None:
        """Kill the process, whatever it does."""
        self._process.close()
        if self._done >= 0:
            os.close(self._done)
            self._done = -1

    def _received(self) -> bytes:
        try:
            return self._process.received()
        except ProcessEnded as ended:
            raise self._failure(ended) from None

    def _failure(self, ended: ProcessEnded) -> InputError | DataError:
        """Return the error to raise, which names the cause and the chat."""
        if ended.limit is None:
            return DataError(
                f"a process that renders chats has ended ({ended}); run the same command again"
            )
        advice = "give a simpler template with --template"
        if self._places is None:
            return InputError(f"{self._where}: compiling it takes {ended.limit}; {advice}")
        os.set_blocking(self._done, False)
        done = 0
        with contextlib.suppress(BlockingIOError):
            done = len(os.read(self._done, 1 << 16))
        return InputError(
            f"{self._places[done]}: {self._where}: rendering this chat takes {ended.limit}; "
            f"{advice}, or leave the document out"
        )


def _described(
    template: ChatTemplate, roles: Mapping[str, int], limits: ProcessLimits
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


# -- within the process --------------------------------------------------------------------------


def serve(asked: IO[bytes], answers: IO[bytes], done: int) -> None:
    """Answer requests until the parent is gone."""
    first = received(asked)
    if first is None:
        return
    described: dict[str, Any] = marshal.loads(first)
    limited = Allowance(ProcessLimits(*described["limits"]))
    date = described["date"] and datetime.date.fromisoformat(described["date"])
    text, where, roles = (described[name] for name in ("text", "where", "roles"))
    limited.allow_memory(len(text))
    limited.allow_time(len(text))
    template = ChatTemplate(text, where, **described["options"], date=date)
    send(answers, marshal.dumps(_fault(template)))
    while (data := received(asked)) is not None:
        limited.allow_memory(len(data))
        found: list[Rendering] = []
        for chat in marshal.loads(data):
            limited.allow_time(len(chat))
            messages, tools = marshal.loads(chat)
            found.append(_answer(template, messages, tools, roles))
            os.write(done, b".")
        send(answers, marshal.dumps(found))


def _fault(template: ChatTemplate) -> str:
    try:
        template.compile()
    except InputError as error:
        return error.message
    return ""


def _answer(
    template: ChatTemplate, messages: Any, tools: Any, flags: Mapping[str, int]
) -> Rendering:
    try:
        rendered = template.render(messages, tools)
        rendered.text.encode("utf-8")
    except TemplateLimit as error:
        return (error.message,)
    except InputError as error:
        return f"{REFUSED}\n{error.message}"
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
    turns = zip(rendered.roles, rendered.turns, strict=True)
    return rendered.text, tuple(roles), tuple((a, b, turn) for (a, b, _), turn in turns)


if __name__ == "__main__":
    run_limited(lambda asked, answers: serve(asked, answers, int(sys.argv[1])))
