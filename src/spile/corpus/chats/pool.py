"""Chats rendered by several processes: templates are Python, of which one thread runs at a time.

Rows go out in batches and come back in their order, so that the documents are the same with any
number of processes. Each process is asked through its standard input, which ends when the process
that started it does, however that ended: then so does this one. What travels is `marshal`ed, by
and for the same interpreter.
"""

import contextlib
import datetime
import marshal
import os
import queue
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import IO, Any

from spile.core.errors import DataError, InputError
from spile.core.threads import mapped
from spile.corpus.chats.rows import Chats, Pairs, RowReader
from spile.corpus.chats.template import ChatTemplate
from spile.corpus.documents import CorpusDocument, Row

_ROWS = 64  # of a batch
_LENGTH = struct.Struct("<Q")


def made_at(where: str, make: Callable[[], CorpusDocument]) -> CorpusDocument:
    """The document that is made of what lies there."""
    made = _made(make)
    if isinstance(made, ValueError):
        raise InputError(f"{where}: {made}")
    return made


def _made(make: Callable[[], CorpusDocument]) -> CorpusDocument | ValueError:
    """The error is returned, not raised: a row that is no document of this kind at all."""
    try:
        made = make()
        made.text.encode("utf-8")
    except UnicodeEncodeError:
        return CorpusDocument(skipped="not UTF-8")
    except ValueError as error:
        return error
    return made


def processes_for(asked: int | None) -> int:
    """How many there are to be: other cores tokenize, and few have none to spare."""
    cores = os.cpu_count() or 1
    return asked if asked is not None else (min(8, cores // 4) if cores >= 8 else 0)


def can_render(reading: RowReader | None) -> bool:
    """Whether making documents takes so long that processes help."""
    return isinstance(reading, Chats | Pairs) and reading.template is not None


class RenderPool:
    """Processes that make documents of rows, by one way of reading."""

    def __init__(self, reading: RowReader, processes: int) -> None:
        self._reading = reading
        described = marshal.dumps(_described(reading))
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "spile.corpus.chats.pool"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for _ in range(processes)
        ]
        try:
            for process in self._processes:
                self._exchange(process, described)
                self._idle.put(process)
        except BaseException:
            self.close()
            raise

    def documents(self, found: Iterable[CorpusDocument]) -> Iterator[CorpusDocument]:
        """Those that are still rows are made into documents; the others pass through unchanged."""
        following = iter(found)
        batches = iter(lambda: list(islice(following, _ROWS)), [])
        for rendered in mapped(self._render, batches, len(self._processes)):
            yield from rendered

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin and process.stdout
            with contextlib.suppress(OSError):  # it may have ended
                process.stdin.close()
            process.stdout.close()
            process.wait()
        self._processes = []

    def _render(self, found: list[CorpusDocument]) -> list[CorpusDocument]:
        made = iter(self._documents([document.row for document in found if document.row]))
        return [
            next(made).with_columns(document.columns) if document.row else document
            for document in found
        ]

    def _documents(self, rows: list[Row]) -> list[CorpusDocument]:
        columns = self._reading.columns
        try:
            asked = marshal.dumps([{name: row.get(name) for name in columns} for _, row in rows])
        except ValueError:  # dates and the like cannot travel
            return [made_at(where, partial(self._reading.document, row)) for where, row in rows]
        process = self._idle.get()
        try:
            answers: list[Any] = marshal.loads(self._exchange(process, asked))
        finally:
            self._idle.put(process)
        return [_understood(where, a) for (where, _), a in zip(rows, answers, strict=True)]

    def _exchange(self, process: "subprocess.Popen[bytes]", data: bytes) -> bytes:
        assert process.stdin and process.stdout
        try:
            _send(process.stdin, data)
            answer = _received(process.stdout)
        except OSError:
            answer = None
        if answer is None:
            code = process.wait()
            why = f"signal {-code}, as when memory runs out" if code < 0 else f"code {code}"
            raise DataError(
                f"a process that renders chats has ended ({why}); run the same command again, or "
                "with --render-processes 0"
            )
        return answer


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


# Answers are (text, roles), a reason, or (fault,): what is no document of this kind.


def _answer(make: Callable[[], CorpusDocument]) -> Any:
    made = _made(make)
    if isinstance(made, ValueError):
        return (str(made),)
    return (made.text, made.roles) if made.skipped is None else made.skipped


def _understood(where: str, answer: Any) -> CorpusDocument:
    if isinstance(answer, str):
        return CorpusDocument(skipped=answer)
    if len(answer) == 1:
        raise InputError(f"{where}: {answer[0]}")
    return CorpusDocument(*answer)


def _described(reading: RowReader) -> dict[str, Any]:
    """What a process must know to read alike."""
    assert isinstance(reading, Chats | Pairs) and reading.template
    template = reading.template
    columns = (
        ("column",) if isinstance(reading, Chats) else ("prompt", "response", "prefix", "suffix")
    )
    return {
        "columns": {name: getattr(reading, name) for name in columns},
        "template": str(template.text),
        "date": template.date.isoformat() if template.date else None,
        "options": {
            name: getattr(template, name) for name in ("tokens", "system", "generation_prompt")
        },
    }


def _reading(described: Mapping[str, Any]) -> RowReader:
    date = described["date"] and datetime.date.fromisoformat(described["date"])
    template = ChatTemplate(described["template"], **described["options"], date=date)
    columns: dict[str, Any] = described["columns"]
    kind = Chats if "column" in columns else Pairs
    return kind(**columns, template=template)


def serve(asked: IO[bytes], answers: IO[bytes]) -> None:
    """Answer until whoever asks is gone."""
    first = _received(asked)
    if first is None:
        return
    reading = _reading(marshal.loads(first))
    _send(answers, b"")
    while (data := _received(asked)) is not None:
        rows: list[dict[str, Any]] = marshal.loads(data)
        _send(answers, marshal.dumps([_answer(partial(reading.document, row)) for row in rows]))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks decides when to stop
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        sys.stderr.close()  # nobody is left to tell
