"""Layouts of published chat corpora: one table, recognised by the columns of the first records.

A layout becomes options of the recipe, as if the user had given them, so a dataset says how its
chats were read, and an explicit option always wins. A column `text` is read as text.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

from spile.core.config import Recipe
from spile.core.errors import InputError
from spile.core.options import listed
from spile.corpus.chats.messages import (
    SYSTEM,
    TOOLS,
    is_chat,
    is_sharegpt,
    role_of,
)
from spile.corpus.documents import CorpusDocument
from spile.corpus.formats.contract import CorpusFile, CorpusFormat, ReadContext

_log = logging.getLogger("spile.corpus")

_FILES = 4  # files to look into until one has records
_ROWS = 64  # records that are looked at
TEXT, CHAT, REPLY = "text", "chat", "reply"  # a reply is a chat that the assistant begins


@dataclass(frozen=True)
class ChatLayout:
    """One layout.

    Attributes:
        title: what it is called in the line that reports it.
        needs: what its columns hold; a chat may also be a reply.
        options: the options that read it.
        others: advice about what these options leave unread.
    """

    title: str
    needs: Mapping[str, str]
    options: Mapping[str, str]
    others: str = ""

    def fits(self, shapes: Mapping[str, str]) -> bool:
        return all(
            shapes.get(column) in ({CHAT, REPLY} if shape == CHAT else {shape})
            for column, shape in self.needs.items()
        )


_PREFERRED = "preference pairs"
LAYOUTS = (
    *(
        ChatLayout(title, {column: CHAT}, {"messages": column})
        for column, title in {
            "messages": "chats",
            "conversations": "conversations",
            "conversation": "conversations",
        }.items()
    ),
    *(
        ChatLayout(
            _PREFERRED,
            {"prompt": prompt, "chosen": REPLY, "rejected": REPLY},
            {"messages": "prompt+chosen"},
            "--messages prompt+rejected",
        )
        for prompt in (TEXT, CHAT)
    ),
    ChatLayout(
        _PREFERRED,
        {"chosen": CHAT, "rejected": CHAT},
        {"messages": "chosen"},
        "--messages rejected",
    ),
    ChatLayout(
        _PREFERRED,
        {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT},
        {"prompt_column": "prompt", "response_column": "chosen"},
        "--prompt-column prompt --response-column rejected",
    ),
    ChatLayout(
        _PREFERRED,
        {"chosen": TEXT, "rejected": TEXT},
        {"text_column": "chosen"},
        "--text-column rejected",
    ),
    *(
        ChatLayout(
            "prompts and completions",
            {"prompt": prompt, "completion": REPLY},
            {"messages": "prompt+completion"},
        )
        for prompt in (TEXT, CHAT)
    ),
    ChatLayout(
        "prompts and completions",
        {"prompt": TEXT, "completion": TEXT},
        {"prompt_column": "prompt", "response_column": "completion"},
    ),
)
_COLUMNS = (*dict.fromkeys(name for layout in LAYOUTS for name in layout.needs), SYSTEM, TOOLS)


@dataclass(frozen=True)
class _Records:
    """Reads columns unchanged, so that records can be looked at."""

    columns: tuple[str, ...]
    flag: str = "--messages"

    def document(self, row: Mapping[str, Any]) -> CorpusDocument:
        return CorpusDocument(row=("", row))


def settle_chats(recipe: Recipe, files: Sequence[CorpusFile]) -> Recipe:
    """Return the recipe with the options that read a corpus of a known chat layout.

    Raises:
        InputError: if columns of chats hold something else.
    """
    given = ("text_column", "messages", "prompt_column", "tokens_column", "tokens_dtype")
    if any(getattr(recipe, name) for name in given):
        return recipe
    for file in files[:_FILES]:
        columns = _columns_of(file)
        if not columns:
            continue
        if "text" in columns:
            return recipe
        shapes = {name: _shape(values) for name, values in columns.items()}
        layout = next((each for each in LAYOUTS if each.fits(shapes)), None)
        if layout is None:
            _refuse_other_chats(file, columns)
            return recipe
        options = _with_optional(layout, file, columns, shapes)
        _say(layout, file, columns, options)
        return replace(recipe, **options)
    return recipe


def refuse_other_layout(recipe: Recipe, files: Sequence[CorpusFile], flag: str) -> None:
    """Refuse files that lack the columns from which a dataset's chats are read.

    Args:
        flag: the flag that adds the files.
    """
    named = [*(recipe.messages or "").split("+"), recipe.prompt_column, recipe.response_column]
    wanted = {name.partition(".")[0] for name in named if name} - {SYSTEM, TOOLS}
    for file in files[:_FILES] if wanted else ():
        columns = _columns_of(file)
        lacking = sorted(name for name in wanted if columns and name not in columns)
        if lacking:
            raise InputError(
                f"{flag}: {file.path} has no {listed(lacking)}, from which this dataset's chats "
                f"are read; it has {listed(sorted(columns))}: rename its columns, or make a "
                "dataset of its own with another --out"
            )


def _columns_of(file: CorpusFile) -> dict[str, list[Any]]:
    """Return the values of columns that a layout may need; those of `text` are not looked at."""
    if not file.format.has_columns or file.format.keeps_all:  # (a program says what it gives)
        return {}
    with closing(_opened(file)) as opened:
        named = opened.columns()
        asked = _COLUMNS if named is None else tuple(name for name in _COLUMNS if name in named)
    if named is not None and ("text" in named or not asked):
        return {name: [] for name in named}
    found: dict[str, list[Any]] = {name: [] for name in named or ()}
    with closing(_opened(file, asked)) as opened:
        for row in _rows(opened):
            for name, value in row.items():
                values = found.setdefault(name, [])
                if value is not None:
                    values.append(value)
    return found


def _opened(file: CorpusFile, columns: tuple[str, ...] = ()) -> CorpusFormat:
    return file.format(file, 0, ReadContext(rows=_Records(columns)))


def _rows(opened: CorpusFormat) -> Iterator[Mapping[str, Any]]:
    documents, _ = opened.sample()
    return (document.row[1] for document in islice(documents, _ROWS) if document.row)


def _shape(values: Sequence[Any]) -> str:
    """Return what a column holds; empty if that is no text and no chat, or several of them."""
    shapes = {_shape_of(value) for value in values if value not in ("", [])}
    if shapes == {CHAT, REPLY}:
        return CHAT
    return shapes.pop() if len(shapes) == 1 else ""


def _shape_of(value: Any) -> str:
    if isinstance(value, str):
        return TEXT
    if not is_chat(value):
        return ""
    return REPLY if role_of(value[0]) == "assistant" else CHAT


def _with_optional(
    layout: ChatLayout,
    file: CorpusFile,
    columns: Mapping[str, Sequence[Any]],
    shapes: Mapping[str, str],
) -> dict[str, str]:
    """Return the layout's options, with the columns of system messages and tools if there are."""
    options = dict(layout.options)
    optional = [name for name in (TOOLS, SYSTEM) if name in columns]
    if not optional or "text_column" in options:
        return options
    plain = options.get("messages") or "+".join(options.values())
    if SYSTEM in optional and shapes[SYSTEM] != TEXT and columns[SYSTEM]:
        kind = type(columns[SYSTEM][0]).__name__
        raise InputError(
            f"{file.path}: {SYSTEM!r} holds {kind}, not the text of a system message; "
            f"--messages {plain} reads its chats without it"
        )
    return {"messages": "+".join([*optional, plain])}


def _refuse_other_chats(file: CorpusFile, columns: Mapping[str, Sequence[Any]]) -> None:
    """Refuse columns that are called as in a layout, and hold objects that are no messages."""
    for name in _COLUMNS:
        value = next(iter(columns.get(name, ())), None)
        if name in (SYSTEM, TOOLS) or not isinstance(value, list) or not value or is_chat(value):
            continue
        first = cast(list[Any], value)[0]
        if isinstance(first, dict):
            keys = listed(sorted(cast(dict[str, Any], first)))
            raise InputError(
                f"{file.path}: {name!r} holds objects with {keys}, not messages with role and "
                "content, or from and value; convert them, or choose another column with "
                "--messages or --text-column"
            )


def _say(
    layout: ChatLayout,
    file: CorpusFile,
    columns: Mapping[str, Sequence[Any]],
    options: Mapping[str, str],
) -> None:
    column = next(iter(layout.needs))
    value = next(iter(columns[column]), None)
    chat = cast(list[dict[str, Any]], value) if isinstance(value, list) else []
    title = layout.title
    if chat and is_sharegpt(chat[0]):
        title = f"ShareGPT {title}"
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    kind = "text" if "text_column" in options else "messages"
    others = f" ({layout.others} reads the others)" if layout.others else ""
    _log.info("%s: %s, read as %s by %s%s", file.path, title, kind, flags, others)
