"""A pool of processes that render chats in parallel.

Chats are sent in batches and come back in their order, so that the documents are the same with any
number of processes.
"""

import marshal
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from spile.core.errors import InputError, first_line
from spile.core.index import ROLES
from spile.core.limited_process import ProcessLimits
from spile.corpus.chats.messages import tool_names
from spile.corpus.chats.renderer import REFUSED, Renderer, Rendering
from spile.corpus.chats.template import ChatTemplate, plain_messages
from spile.corpus.documents import CorpusDocument

_CHATS, _BYTES = 64, 1 << 20  # most chats and bytes in a batch
# Most characters rendered from all chats of one call, and the allowance for each byte of them.
_CHARACTERS, _MORE_CHARACTERS = 1 << 28, 16


def made_at(where: str, make: Callable[[], CorpusDocument]) -> CorpusDocument:
    """Make the document of a row; `where` is the row's place."""
    try:
        made = make()
        made.text.encode("utf-8")
    except UnicodeEncodeError:
        return CorpusDocument(skipped="not UTF-8")
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None
    made.where = where
    return made


def processes_for(asked: int | None) -> int:
    """Return how many processes render; the other cores tokenize."""
    cores = os.cpu_count() or 1
    return max(1, min(8, cores // 4) if asked is None else asked)


@dataclass
class _Batch:
    documents: list[CorpusDocument] = field(default_factory=list[CorpusDocument])
    places: list[str] = field(default_factory=list[str])  # where each chat among them came from
    chats: list[bytes] = field(default_factory=list[bytes])


class RenderPool:
    """Processes that render the chats of one template. They start with the first chat."""

    def __init__(
        self,
        template: ChatTemplate,
        processes: int = 1,
        *,
        limits: ProcessLimits | None = None,
    ) -> None:
        self._template, self._count = template, max(1, processes)
        self._limits = limits or ProcessLimits()
        self._idle: list[Renderer] = []

    def documents(self, found: Iterable[CorpusDocument]) -> Iterator[CorpusDocument]:
        """Render the chats among the documents; other documents pass through unchanged.

        Raises:
            InputError: if the template is invalid, or a rendering exceeded a limit.
            DataError: if a process was killed.
        """
        waiting: deque[tuple[Renderer | None, _Batch]] = deque()
        ready: list[CorpusDocument] = []
        started = False
        asked = made = 0
        try:
            for batch in _batches(found):  # the next batch is made while the processes render
                renderer = None
                if batch.chats:
                    if not started:
                        self._start()
                        started = True
                    while not self._idle:
                        ready += self._filled(*waiting.popleft())
                    renderer = self._idle.pop()
                    renderer.ask(batch.places, batch.chats)
                waiting.append((renderer, batch))
                asked += sum(map(len, batch.chats))
                made += sum(len(document.text) for document in ready)
                if made > _CHARACTERS + _MORE_CHARACTERS * asked:
                    raise InputError(
                        f"{batch.documents[0].where}: {self._template.where}: it has made {made} "
                        f"characters of {asked} bytes of chats; give a simpler template with "
                        "--template, or smaller --unit-tokens"
                    )
                yield from ready
                ready.clear()
            while waiting:
                yield from self._filled(*waiting.popleft())
        finally:
            for renderer, _ in waiting:
                if renderer:  # nobody will read its answer
                    renderer.close()

    def close(self) -> None:
        for renderer in self._idle:
            renderer.close()
        self._idle = []

    def _start(self) -> None:
        """Start processes until there are enough; those of an earlier call are reused."""
        new: list[Renderer] = []
        try:
            while len(self._idle) + len(new) < self._count:
                new.append(Renderer(self._template, ROLES, self._limits))
            for renderer in new:
                renderer.wait()
        except BaseException:
            for renderer in new:
                renderer.close()
            raise
        self._idle += new

    def _filled(self, renderer: Renderer | None, batch: _Batch) -> list[CorpusDocument]:
        """Return the documents of a batch, once its chats are rendered."""
        if renderer is None:
            return batch.documents
        try:
            answers = renderer.answers()
        except BaseException:
            renderer.close()
            raise
        self._idle.append(renderer)
        following = iter(answers)
        for document in batch.documents:
            if document.chat is not None:
                _fill(document, next(following))
        return batch.documents


def _batches(found: Iterable[CorpusDocument]) -> Iterator[_Batch]:
    batch, size = _Batch(), 0
    for document in found:
        if document.chat is not None and (chat := _packed(document)) is not None:
            batch.places.append(document.where)
            batch.chats.append(chat)
            size += len(chat)
        batch.documents.append(document)
        if len(batch.documents) >= _CHATS or size >= _BYTES:
            yield batch
            batch, size = _Batch(), 0
    if batch.documents:
        yield batch


def _packed(document: CorpusDocument) -> bytes | None:
    """Serialize a chat; if no template could accept it, skip the document and return None."""
    chat: Any = document.chat
    tools: Any = document.tools
    try:
        return marshal.dumps((chat, tools))
    except ValueError:  # it holds a date, for example
        pass
    try:
        plain: Any = plain_messages(chat)
        return marshal.dumps((plain, tools))
    except (InputError, ValueError) as error:
        document.skip(REFUSED)
        document.refusal = first_line(error)
        return None


def _fill(document: CorpusDocument, answer: Rendering) -> None:
    if isinstance(answer, str):
        reason, _, document.refusal = answer.partition("\n")
        document.skip(reason)
    elif len(answer) == 1:
        raise InputError(f"{document.where}: {answer[0]}")
    else:
        document.text, document.roles, document.spans = answer
        named = tool_names(document.chat or (), document.tools or ())
        document.unshown = next((name for name in named if name not in document.text), "")
        document.chat = document.tools = None
