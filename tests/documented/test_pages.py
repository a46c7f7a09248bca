"""README.md and docs/*.md, each from its first block to its last, in a directory of its own.

What a command writes is there for the commands and the Python after it, and nothing is removed
between them: two commands that collide fail their page.
"""

import ast
import dataclasses
import importlib
import json
import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import spile
from chaos.harness import files
from chaos.test_hub import write_tables
from documented import exceptions, pages
from documented.pages import Block, Command
from documented.scratch import DEMO_TAPS, Scratch
from support import hub_server
from support.hub_network import Network
from support.hub_server import Hub
from support.marks import some

CARD = b"""---
configs:
- config_name: sample-10BT
  data_files:
  - {split: train, path: sample/*}
- config_name: CONFIG
  data_files:
  - {split: SPLIT, path: sample/*}
- config_name: default
  data_files: data/*/*
---
"""
# The tutorial has a test of its own, which prepares nothing.
PAGES = [
    page
    for page in pages.pages()
    if page != "docs/tutorial.md" and (pages.shell_blocks(page) or pages.python_blocks(page))
]


@pytest.fixture
def hub(
    deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scratch: Scratch
) -> Iterator[Hub]:
    """The Hub as pages know it: their models and datasets, small."""
    server = Hub()
    server.network = Network(server.large)
    hub_server.use(server.url, tmp_path / "home", monkeypatch, HF_TOKEN="writer")
    tables = {**write_tables(tmp_path / "published", 2, 5), "README.md": CARD}
    server.publish("models/Qwen/Qwen2.5-7B", files(deep))
    server.publish("models/Qwen/Qwen2.5-7B-Instruct", files(deep))
    for name in ("HuggingFaceFW/fineweb-edu", "OWNER/NAME"):
        server.publish(name, tables)
    yield server
    for each in (server, server.network):
        each.shutdown()
        each.server_close()


@pytest.fixture
def spawning() -> Iterator[None]:
    """Workers of torch's loaders are started, not forked: jax runs in this process."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("spawning", "hub")
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the Hub's client's own
@pytest.mark.filterwarnings("ignore:'pin_memory':UserWarning")  # torch's, where there is no GPU
@pytest.mark.parametrize("page", some(PAGES, "README.md", "docs/architecture.md"))
def test_everything_on_the_page_runs_in_order_or_is_excepted(
    page: str, scratch: Scratch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [c for block in _shell(page) for c in pages.commands(block)]
    scratch.prepare({out for c in commands if (out := made_by(c)) is not None})
    names = known(scratch) if pages.python_blocks(page) else {}
    for block in pages.blocks(page):
        if block.language == "python":
            for statement in ast.parse(block.text).body:
                if not _excepted(block, statement):
                    execute(block, statement, names)
        elif block in _shell(page):
            for command in pages.commands(block):
                run(command, scratch)
    capsys.readouterr()


def test_readers_of_where_end_learn_that_labels_are_joined_by_document() -> None:
    """Rows are not in the order of the corpus: whoever zips them with its labels is wrong."""
    explained = {
        page: [part for part in (pages.ROOT / page).read_text().split("\n## ") if sign in part]
        for page, sign in {
            "docs/models.md": "--where end  ", "docs/how-to.md": "with `--where end`, where",
            "docs/reading.md": "labels in the order of the corpus",
        }.items()
    }  # fmt: skip
    assert all(part and all("ds.pooled" in text for text in part) for part in explained.values())
    (where,) = (f for f in dataclasses.fields(spile.Recipe) if f.name == "where")
    told = (where.metadata["help"], spile.Dataset.read.__doc__, spile.Dataset.columns.__doc__)
    for text in told:
        assert "pooled" in text and "order" in text


def _shell(page: str) -> list[Block]:
    return [block for block in pages.shell_blocks(page) if not exceptions.is_no_command(block)]


def made_by(command: Command) -> str | None:
    """Where a whole `spile extract` leaves its dataset."""
    words = command.words if command.text.startswith("spile extract ") else []
    return words[words.index("--out") + 1] if {"--model", "--out"} <= {*words} else None


def run(command: Command, scratch: Scratch) -> None:
    """As it stands, with small things in place of the reader's own; or what is checked instead."""
    excepted = [each for each in exceptions.COMMANDS if each.covers(command)]
    if excepted:
        excepted[0].check(command, scratch)
        return
    where = f"{command.page}:{command.line}: {command.text}"
    words = scratch.filled(_described(command).words)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables come before the program
        name, _, value = words.pop(0).partition("=")
        scratch.patch.setenv(name, value)
    if words[0].startswith("--"):  # a part of a command: planned with it
        words = scratch.filled(["spile", "plan", *words, "…"])
    assert words[0] == "spile", f"{where}: neither run nor excepted"
    out = words[words.index("--out") + 1] if "--out" in words else None
    result = scratch.spile(words[1:])
    assert result.code == 0, f"{where}\n{words}\n{result.err}"
    if words[1] == "extract":
        assert out and spile.open(out).num_tokens, where


def _described(command: Command) -> Command:
    """A part of a command has what it means beside it, after spaces."""
    if not command.text.startswith("--"):
        return command
    return Command(command.page, command.line, command.text.split("  ")[0])


def known(scratch: Scratch) -> dict[str, Any]:
    """What a page takes for granted that its reader has."""
    model, corpus = str(scratch.folder / "M"), str(scratch.folder / "C")
    return {
        "spile": spile,
        "jax": jax,
        "jnp": importlib.import_module("jax.numpy"),
        "NamedSharding": NamedSharding,
        "P": P,
        "mesh": Mesh(jax.devices(), ("data",)),
        "ds": spile.open("acts/demo"),
        "taps": ["resid_post.9", "resid_post.20"],
        "recipe": spile.Recipe(model=model, corpus=corpus, taps="embed", seq_len=64),
        "out": "acts/from-python",
    }


def execute(block: Block, statement: ast.stmt, names: dict[str, Any]) -> None:
    where = f"{block.page}:{block.line + statement.lineno}"
    try:
        exec(compile(ast.Module([statement], []), where, "exec"), names)
    except Exception as error:
        raise AssertionError(f"{where}: {ast.unparse(statement)}") from error


def _excepted(block: Block, statement: ast.stmt) -> bool:
    text = ast.unparse(statement)
    return any(
        page == block.page and text.startswith(start) for page, start in exceptions.STATEMENTS
    )


def test_every_excepted_statement_is_still_on_its_page() -> None:
    for page, start in exceptions.STATEMENTS:
        found = [s for block in pages.python_blocks(page) for s in ast.parse(block.text).body]
        assert any(ast.unparse(statement).startswith(start) for statement in found), (page, start)


def test_a_new_command_must_be_run_or_excepted(scratch: Scratch) -> None:
    for text in ("frobnicate --all", "spile extract --no-such-flag", "spile no-such-verb"):
        (command,) = pages.commands(Block("docs/new.md", 1, "", f"{text}\n"))
        assert not any(each.covers(command) for each in exceptions.COMMANDS)
        with pytest.raises(AssertionError):
            run(command, scratch)
    assert Path.cwd() == scratch.folder


def test_a_page_that_extracts_to_where_make_demo_does_fails(scratch: Scratch) -> None:
    scratch.prepare({"acts/demo"})
    line = "spile extract --model M --corpus C --taps resid_post:4 --out acts/demo\n"
    (command,) = pages.commands(Block("docs/new.md", 1, "", line))
    with pytest.raises(AssertionError, match="acts/demo"):
        run(command, scratch)


def test_no_two_pages_make_different_datasets_of_one_name() -> None:
    """A reader goes from page to page in one checkout: README, tutorial, SAEs, notebook."""
    made: dict[str, set[str]] = {}
    makefile = (pages.ROOT / "Makefile").read_text().replace("\\\n", " ")
    for line in re.findall(r"/(spile extract .*)", makefile):
        text = " ".join(line.replace("$(OUT)", "acts/demo").split())
        assert f"--taps {DEMO_TAPS} " in text
        made.setdefault("acts/demo", set()).add(text)
    for page in pages.pages():
        for command in (c for block in _shell(page) for c in pages.commands(block)):
            out = made_by(command)
            if out is not None:
                made.setdefault(out, set()).add(" ".join(command.words))
    assert {"acts/demo", "acts/first"} <= {*made}
    collisions = {out: texts for out, texts in made.items() if len(texts) > 1}
    assert not collisions, json.dumps({out: sorted(texts) for out, texts in collisions.items()})
    for notebook in (pages.ROOT / "examples").glob("*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        source = "".join(line for cell in cells for line in cell["source"])
        assert not {out for out in made if f'"{out}"' in source}
