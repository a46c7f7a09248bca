"""Chats give the same documents whichever process renders them; renderers end with their parent."""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from spile.core.errors import DataError, InputError
from spile.core.index import ROLES
from spile.corpus.chats.pool import RenderPool, made_at, processes_for
from spile.corpus.chats.rows import Chats, Pairs, template_of
from spile.corpus.chats.template import ChatTemplate
from spile.corpus.documents import CorpusDocument
from spile.corpus.files import find_files
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.reader import CorpusReader
from support import tiny
from support.texts import units_of

SOURCE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if 'no' in messages[1].content %}{{ raise_exception('no') }}{% endif %}"
)
TEMPLATE = ChatTemplate(
    SOURCE, tokens={"bos_token": "<s>"}, system="be kind", date=datetime.date(2024, 2, 29)
)
CHATS = Chats(("chat",), TEMPLATE)
PAIRS = Pairs("q", "a", "Q: ", "?", TEMPLATE)


def rows(reading: Any, count: int) -> list[CorpusDocument]:
    """Chats to render; some documents are skipped before that, and keep their places."""
    found: list[CorpusDocument] = []
    for n in range(count):
        said = {3: "\ud800", 5: "no"}.get(n % 7, f" words of {n} ")
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": said},
            {"role": "assistant", "content": "🌳" * (n % 4)},
        ]
        row: dict[str, Any] = {"chat": chat, "q": said, "a": "x" if n % 5 else None}
        if n % 11 == 0:
            row["chat"] = None if n % 2 else []
        row["when"] = datetime.date(2024, 1, 1)  # of no concern
        if n == 333:
            chat[0]["when"] = row["when"]  # which cannot travel
        before = CorpusDocument(skipped="left out before")
        made = made_at(f"f line {n}", partial(reading.document, row))
        found.append(before if n % 17 == 2 else made)
    return found


def rendered_here(document: CorpusDocument) -> CorpusDocument:
    """The result that the pool should return."""
    if document.chat is None:
        return document
    try:
        rendered = TEMPLATE.render(document.chat)
        rendered.text.encode()
    except InputError:
        return CorpusDocument(skipped="refused by the chat template")
    except UnicodeEncodeError:
        return CorpusDocument(skipped="not UTF-8")
    flags = [ROLES["template"]] * len(rendered.text)
    for start, stop, role in rendered.roles:
        flags[start:stop] = [ROLES[role]] * (stop - start)
    roles: list[tuple[int, int, int]] = []
    for flag, run in groupby(range(len(flags)), key=flags.__getitem__):
        places = [*run]
        roles.append((places[0], places[-1] + 1, flag))
    turns = zip(rendered.roles, rendered.turns, strict=True)
    spans = tuple((start, stop, turn) for (start, stop, _), turn in turns)
    return CorpusDocument(rendered.text, tuple(roles), spans)


@pytest.fixture(scope="module", params=[CHATS, PAIRS], ids=["chats", "pairs"])
def reading(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def pool(reading: Any) -> Iterator[RenderPool]:
    made = RenderPool(reading.template, 3)
    yield made
    made.close()


def test_documents_are_the_same_and_in_their_order(reading: Any, pool: RenderPool) -> None:
    wanted = [rendered_here(document) for document in rows(reading, 700)]
    assert list(pool.documents(rows(reading, 700))) == wanted
    kinds = {item.skipped or "text" for item in wanted}
    assert kinds >= {"text", "left out before", "not UTF-8", "refused by the chat template", "null"}
    assert list(pool.documents([])) == []


def test_what_is_no_chat_is_refused_by_its_place(reading: Any) -> None:
    bad = {"chat": "text", "q": 1, "a": "x"}
    with pytest.raises(InputError, match=r"^f line 300: '(chat|q)' holds"):
        made_at("f line 300", partial(reading.document, bad))


def test_what_nobody_reads_to_the_end_is_forgotten(pool: RenderPool, reading: Any) -> None:
    some: Any = pool.documents(rows(reading, 700))
    assert next(some) == rendered_here(rows(reading, 1)[0])
    some.close()
    assert [*pool.documents([rows(reading, 5)[4]])] == [rendered_here(rows(reading, 5)[4])]


def test_what_is_kept_of_a_document_stays_with_it(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    with path.open("w") as file:
        for n in range(500):
            said = "no" if n % 7 == 3 else f"words of {n}"
            chat = [{"role": "user", "content": said}]
            line = (
                "" if n % 11 == 5 else json.dumps({"chat": None if n % 13 == 0 else chat, "id": n})
            )
            file.write(line + "\n")
    files = find_files(str(path))
    (unit,) = units_of(files, reading=CHATS)
    found: list[Any] = []
    for processes in (1, 2):
        options = ReadOptions(keep=("id",), preview=40)
        reader = CorpusReader(files, options, reading=CHATS, processes=processes)
        with closing(reader):
            found.append(reader.read(unit.spans, 0).every)
    assert found[0] == found[1] and len(found[0]) == 500
    for n, document in enumerate(found[0]):
        assert document.ordinal == n
        assert [each[n].columns for each in found] == [{"id": None if n % 11 == 5 else n}] * 2
        assert (document.skipped is None) == (f"words of {n}" in (document.preview or "")), n


def test_only_chats_are_rendered_and_always_by_another_process() -> None:
    assert template_of(CHATS) is template_of(PAIRS) is TEMPLATE
    assert template_of(None) is None and template_of(Pairs("q", "a", "", "", None)) is None
    assert CHATS.document({"chat": None}).skipped == "null"
    assert processes_for(None) >= 1 and processes_for(0) == 1 and processes_for(5) == 5


def test_a_process_that_was_killed_is_said_to_be() -> None:
    pool = RenderPool(TEMPLATE, 2)
    list(pool.documents(rows(CHATS, 100)))
    for renderer in pool._idle:
        os.kill(renderer.pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"ended \(signal 9.*run the same command again"):
        list(pool.documents(rows(CHATS, 100)))
    pool.close()


ASKING = """
import sys, time
from spile.corpus.chats.template import ChatTemplate
from spile.corpus.chats.pool import RenderPool
from spile.corpus.documents import CorpusDocument
pool = RenderPool(ChatTemplate("{{ messages[0].content }}"), 2)
chat = [{"role": "user", "content": "x" * 100}]
list(pool.documents([CorpusDocument(chat=chat)]))
print(*[renderer.pid for renderer in pool._idle], "jax" in sys.modules, flush=True)
while True:
    list(pool.documents(CorpusDocument(chat=chat) for _ in range(1000)))
"""


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_they_end_with_whoever_started_them(number: int) -> None:
    asking = subprocess.Popen(
        [sys.executable, "-c", ASKING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=tiny.environment(), start_new_session=True,
    )  # fmt: skip
    assert asking.stdout
    *children, with_jax = asking.stdout.readline().split()
    assert with_jax == "False" and all(is_alive(int(child)) for child in children)
    os.kill(asking.pid, number) if number == signal.SIGKILL else os.killpg(asking.pid, number)
    asking.communicate(timeout=30)
    until = time.monotonic() + 30
    while any(is_alive(int(child)) for child in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [child for child in children if is_alive(int(child))]
