"""Chats are the same documents whoever renders them; and who renders them ends with who asked."""

import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tiny
from spile.core.errors import DataError, InputError
from spile.corpus.chats.pool import RenderPool, can_render, made_at
from spile.corpus.chats.rows import Chats, Pairs
from spile.corpus.chats.template import ChatTemplate
from spile.corpus.documents import CorpusDocument
from spile.corpus.files import find_files
from spile.corpus.reader import CorpusReader, ReadOptions
from texts import units_of

SOURCE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    "{% if 'no' in messages[1].content %}{{ raise_exception('no') }}{% endif %}"
)
TEMPLATE = ChatTemplate(
    SOURCE, tokens={"bos_token": "<s>"}, system="be kind", date=datetime.date(2024, 2, 29)
)
CHATS = Chats("chat", TEMPLATE)
PAIRS = Pairs("q", "a", "Q: ", "?", TEMPLATE)


def rows(count: int) -> list[CorpusDocument]:
    """Rows to be rendered; some are left out before, and keep their places."""
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
        found.append(before if n % 17 == 2 else CorpusDocument(row=(f"f line {n}", row)))
    return found


@pytest.fixture(scope="module", params=[CHATS, PAIRS], ids=["chats", "pairs"])
def reading(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def pool(reading: Any) -> Iterator[RenderPool]:
    made = RenderPool(reading, 3)
    yield made
    made.close()


def test_documents_are_the_same_and_in_their_order(reading: Any, pool: RenderPool) -> None:
    given = rows(700)
    wanted = [
        made_at(item.row[0], lambda r=item.row[1]: reading.document(r)) if item.row else item
        for item in given
    ]
    assert list(pool.documents(given)) == wanted
    kinds = {item.skipped or "text" for item in wanted}
    assert kinds >= {"text", "left out before", "not UTF-8", "refused by the chat template", "null"}
    assert list(pool.documents([])) == []


def test_what_is_no_chat_is_refused_by_its_place(pool: RenderPool, reading: Any) -> None:
    bad = {"chat": "text", "q": 1, "a": "x"}
    with pytest.raises(InputError, match=r"^f line 300: '(chat|q)' holds"):
        given = CorpusDocument(row=("f line 300", bad))
        list(pool.documents([*rows(300), given, *rows(300)]))
    assert next(pool.documents([rows(5)[4]])).skipped is None, "it goes on"


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
    (unit,) = units_of(files, columns=("chat",))
    found: list[Any] = []
    for processes in (0, 2):
        options = ReadOptions(keep=("id",), preview=40)
        reader = CorpusReader(files, options, reading=CHATS, processes=processes)
        with closing(reader):
            found.append(reader.read(unit.spans, 0).every)
    assert found[0] == found[1] and len(found[0]) == 500
    for n, document in enumerate(found[0]):
        assert document.ordinal == n
        assert [each[n].columns for each in found] == [{"id": None if n % 11 == 5 else n}] * 2
        assert (document.skipped is None) == (f"words of {n}" in (document.preview or "")), n


def test_only_chats_take_so_long() -> None:
    assert can_render(CHATS) and can_render(PAIRS)
    assert not can_render(None) and not can_render(Pairs("q", "a", "", "", None))
    assert CHATS.document({"chat": None}).skipped == "null"


def test_a_process_that_was_killed_is_said_to_be() -> None:
    pool = RenderPool(CHATS, 2)
    for process in pool._processes:
        process.kill()
    with pytest.raises(DataError, match=r"ended \(signal 9.*--render-processes 0"):
        list(pool.documents(rows(100)))
    pool.close()


ASKING = """
import sys, time
from spile.corpus.chats.template import ChatTemplate
from spile.corpus.reader import CorpusReader
from spile.corpus.documents import CorpusDocument
from spile.corpus.files import find_files
from spile.corpus.chats.rows import Chats
from spile.corpus.chats.pool import RenderPool
from spile.corpus.documents import CorpusDocument
pool = RenderPool(Chats("chat", ChatTemplate("{{ messages[0].content }}")), 2)
row = {"chat": [{"role": "user", "content": "x" * 100}]}
print(*[process.pid for process in pool._processes], "jax" in sys.modules, flush=True)
while True:
    list(pool.documents([CorpusDocument(row=("", row))] * 1000))
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
