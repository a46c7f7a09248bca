"""Chat corpora as they are published: recognised by their columns, in every format."""

import csv
import json
import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spile.core.config import Recipe
from spile.core.errors import ConfigError, InputError
from spile.corpus.chat_layouts import LAYOUTS, settle_chats
from spile.corpus.chats.rows import Chats, Pairs, RowReader
from spile.corpus.chats.template import ChatTemplate
from spile.corpus.files import find_files
from spile.corpus.formats.contract import CorpusFile, ReadOptions
from spile.corpus.named_columns import settled_columns
from spile.corpus.reader import CorpusReader

TEMPLATE = ChatTemplate(
    "{% if tools %}[{{ tools[0].name }}]{% endif %}{% for m in messages %}"
    "<{{ m.role[0] }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "({{ c.function.name }}){% endfor %}{% endfor %}"
)
ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
WRONG = {"role": "assistant", "content": "b"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
TOOL = {"name": "add", "description": "Adds."}
# For each layout: a record, the options that read it, what the line says, and the text.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "messages": (
        {"messages": [ASKED, SAID], "id": "x"}, {"messages": "messages"},
        "chats, read as messages by --messages messages", "<u>q<a>a",
    ),
    "system message of its own": (
        {"messages": [{"role": "system", "content": "s"}, ASKED, SAID], "system": "other"},
        {"messages": "system+messages"}, "chats", "<s>s<u>q<a>a",
    ),
    "conversations": (
        {"conversations": [ASKED, SAID]}, {"messages": "conversations"}, "conversations",
        "<u>q<a>a",
    ),
    "conversation": (
        {"conversation": [ASKED, SAID]}, {"messages": "conversation"}, "conversations", "<u>q<a>a",
    ),
    "ShareGPT": (
        {"conversations": [HUMAN, GPT], "id": "x"}, {"messages": "conversations"},
        "ShareGPT conversations, read as messages by --messages conversations", "<u>q<a>a",
    ),
    "ShareGPT with system": (
        {"system": "s", "conversations": [HUMAN, GPT]}, {"messages": "system+conversations"},
        "ShareGPT conversations, read as messages by --messages system+conversations",
        "<s>s<u>q<a>a",
    ),
    "tool calls": (
        {
            "tools": [TOOL],
            "messages": [
                ASKED,
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
                {"role": "tool", "content": "3"},
                SAID,
            ],
        },
        {"messages": "tools+messages"}, "chats", "[add]<u>q<a>(add)<t>3<a>a",
    ),
    "ShareGPT with tool calls": (
        {
            "conversations": [
                HUMAN, {"from": "function_call", "value": '{"name": "add"}'},
                {"from": "observation", "value": "3"}, GPT,
            ],
            "tools": json.dumps([TOOL]),
        },
        {"messages": "tools+conversations"}, "ShareGPT", "[add]<u>q<a>(add)<t>3<a>a",
    ),
    "preferred chats": (
        {"chosen": [ASKED, SAID], "rejected": [ASKED, WRONG], "prompt": "q"},
        {"messages": "chosen"},
        "preference pairs, read as messages by --messages chosen (--messages rejected reads the "
        "others)", "<u>q<a>a",
    ),
    "preferred replies": (
        {"prompt": [ASKED], "chosen": [SAID], "rejected": [WRONG]}, {"messages": "prompt+chosen"},
        "(--messages prompt+rejected reads", "<u>q<a>a",
    ),
    "preferred replies to a text": (
        {"prompt": "q", "chosen": [SAID], "rejected": [WRONG]}, {"messages": "prompt+chosen"},
        "preference pairs", "<u>q<a>a",
    ),
    "preferred texts": (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt_column": "prompt", "response_column": "chosen"},
        "by --prompt-column prompt --response-column chosen (--prompt-column prompt "
        "--response-column rejected reads the others)", "<u>q<a>a",
    ),
    "preferred plain texts": (
        {"chosen": "Human: q", "rejected": "Human: no"}, {"text_column": "chosen"},
        "preference pairs, read as text by --text-column chosen (--text-column rejected reads",
        "Human: q",
    ),
    "completion": (
        {"prompt": "q", "completion": "a"},
        {"prompt_column": "prompt", "response_column": "completion"},
        "prompts and completions, read as messages by --prompt-column prompt --response-column "
        "completion", "<u>q<a>a",
    ),
    "completion with system": (
        {"system": "s", "prompt": "q", "completion": "a"},
        {"messages": "system+prompt+completion"}, "prompts and completions", "<s>s<u>q<a>a",
    ),
    "completion of messages": (
        {"prompt": [ASKED], "completion": [SAID]}, {"messages": "prompt+completion"},
        "prompts and completions", "<u>q<a>a",
    ),
    "completion of a message": (
        {"prompt": "q", "completion": [SAID]}, {"messages": "prompt+completion"},
        "prompts and completions", "<u>q<a>a",
    ),
}  # fmt: skip


def write(path: Path, *rows: dict[str, Any]) -> str:
    lines = [json.dumps(row) + "\n" for row in rows]
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist([*rows]), path)
        case ".arrow":
            table = pa.Table.from_pylist([*rows])
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        case ".json":
            path.write_text(f"[{','.join(lines)}]")
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case _:
            path.write_text("".join(lines))
    return str(path)


def reading(recipe: Recipe) -> RowReader | None:
    if recipe.messages:
        return Chats.parse(recipe.messages, TEMPLATE)
    if recipe.prompt_column:
        return Pairs(recipe.prompt_column, recipe.response_column, "", "", TEMPLATE)
    return None


def texts(files: list[CorpusFile], recipe: Recipe) -> list[str]:
    """Return what the template makes of a corpus, here and not in a process of its own."""
    options = ReadOptions(recipe.text_column)
    with closing(CorpusReader(files, options, reading=reading(recipe))) as reader:
        documents, _ = reader.sample(0, render=False)
    return [
        TEMPLATE.render(each.chat, each.tools).text if each.chat else each.skipped or each.text
        for each in documents.every
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow", "csv"])
def test_every_layout_is_recognised_said_and_mapped(
    suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spile.corpus")
    for name, (record, options, told, text) in CASES.items():
        if suffix == "csv" and any(isinstance(value, list) for value in record.values()):
            continue
        corpus = write(tmp_path / f"{name}.{suffix}", record, record)
        files = find_files(corpus)
        caplog.clear()
        recipe = settle_chats(Recipe(), files)
        assert recipe == replace(Recipe(), **options), name
        [line] = caplog.messages
        assert line.startswith(f"{corpus}: ") and told in line
        assert texts(files, recipe) == [text] * 2, name


def test_every_layout_of_the_table_has_a_case() -> None:
    tried = [options for _, options, _, _ in CASES.values()]
    assert all(dict(layout.options) in tried for layout in LAYOUTS), "add a record of it"


@pytest.mark.parametrize(
    "given", [{"messages": "m"}, {"text_column": "id"}, {"prompt_column": "p"}]
)
def test_options_that_are_given_win(given: dict[str, Any], tmp_path: Path) -> None:
    files = find_files(write(tmp_path / "a.jsonl", CASES["ShareGPT"][0]))
    recipe = replace(Recipe(), **given)
    assert settle_chats(recipe, files) == recipe


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_column_of_texts_is_read_before_any_chat(suffix: str, tmp_path: Path) -> None:
    record = {"text": "x", **CASES["ShareGPT"][0]}
    files = find_files(write(tmp_path / f"a.{suffix}", record))
    assert settle_chats(Recipe(), files) == Recipe()


@pytest.mark.parametrize("record", [{"body": "x"}, {"prompt": "q"}, {"prompt": "q", "reply": "a"}])
def test_other_records_are_left_to_the_other_rules(record: dict[str, Any], tmp_path: Path) -> None:
    assert settle_chats(Recipe(), find_files(write(tmp_path / "a.jsonl", record))) == Recipe()


def test_the_first_files_may_be_empty(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    write(tmp_path / "b.jsonl", CASES["ShareGPT"][0])
    files = find_files(f"{tmp_path}/*.jsonl")
    assert settle_chats(Recipe(), files).messages == "conversations"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_objects_that_are_no_messages_are_refused_by_their_keys(
    suffix: str, tmp_path: Path
) -> None:
    path = write(tmp_path / f"a.{suffix}", {"conversations": [{"speaker": "a", "line": "x"}]})
    said = r"'conversations' holds objects with line, speaker, .* --messages or --text-column$"
    with pytest.raises(InputError, match=said):
        settle_chats(Recipe(), find_files(path))


def test_a_system_field_that_is_no_text_is_refused_with_the_way_around(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"system": {"x": 1}, "messages": [ASKED, SAID]})
    with pytest.raises(InputError, match="'system' holds dict.*; --messages messages reads its"):
        settle_chats(Recipe(), find_files(path))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_may_lack_system_and_tools_but_no_messages(suffix: str, tmp_path: Path) -> None:
    full = {"tools": [TOOL], "system": "s", "messages": [ASKED, SAID]}
    rows = [full, {**full, "tools": None, "system": None}, {**full, "messages": None}]
    files = find_files(write(tmp_path / f"a.{suffix}", *rows))
    recipe = settle_chats(Recipe(), files)
    assert texts(files, recipe) == ["[add]<s>s<u>q<a>a", "<u>q<a>a", "null"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_labels_are_kept_beside_chats_and_not_their_own_columns(
    suffix: str, tmp_path: Path
) -> None:
    record = {"system": "s", "conversations": [HUMAN, GPT], "id": "x", "score": 3}
    files = find_files(write(tmp_path / f"a.{suffix}", record))
    recipe = settle_chats(Recipe(), files)
    assert settled_columns(None, files, None, reading(recipe)) == ("id", "score")


@pytest.mark.parametrize("given", ["", "+", "a+", "+a"])
def test_columns_of_chats_are_joined_by_plus(given: str) -> None:
    with pytest.raises(ConfigError, match="columns are joined by"):
        Chats.parse(given, TEMPLATE)
