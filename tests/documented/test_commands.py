"""Every command of README.md and docs/*.md is run, or is in the one table of exceptions."""

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hub_server
import quick
import spile
import tiny
import zygote
from chaos.harness import files
from chaos.test_hub import write_tables
from documented import exceptions, pages
from documented.pages import Block, Command
from documented.scratch import Scratch
from hub_network import Network
from hub_server import Hub
from marks import some
from spile import cli

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
# The tutorial has a test of its own: its blocks go on from each other.
PAGES = [p for p in pages.pages() if pages.shell_blocks(p) and p != "docs/tutorial.md"]


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
    for name in ("HuggingFaceFW/fineweb-edu", "OWNER/NAME"):
        server.publish(name, tables)
    yield server
    for each in (server, server.network):
        each.shutdown()
        each.server_close()


def commands(page: str) -> list[Command]:
    found = (block for block in pages.shell_blocks(page) if not exceptions.is_no_command(block))
    return [command for block in found for command in pages.commands(block)]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the Hub's client's own
@pytest.mark.parametrize("page", some(PAGES, "README.md"))
def test_every_command_of_the_page_runs_or_is_excepted(
    page: str, scratch: Scratch, hub: Hub
) -> None:
    for command in commands(page):
        excepted = [each for each in exceptions.COMMANDS if each.covers(command)]
        if excepted:
            excepted[0].check(command, scratch)
        else:
            run(command, scratch)


def run(command: Command, scratch: Scratch) -> None:
    """As it stands, with small things in place of the reader's own."""
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


def compiled(words: list[str], where: str) -> str:
    """With as many virtual devices as are asked for: in a process of its own, on the CPU."""
    result = zygote.run(
        [sys.executable, "-m", "spile.cli", *words[1:], "--on", "cpu"],
        env={**tiny.environment(), "XLA_FLAGS": quick.FLAGS},
    )  # fmt: skip
    assert result.returncode == 0, f"{where}\n{result.stderr}"
    return result.stdout


# Verbs that take no time: run where prose names them with all they need.
_CHEAP = ("taps", "status", "verify", "gc", "compact", "export")


def test_every_exception_is_still_on_a_page() -> None:
    for excepted in (each for each in exceptions.COMMANDS if each.page != "*"):
        assert any(map(excepted.covers, commands(excepted.page))), excepted.start
    found = [block for page in pages.pages() for block in pages.shell_blocks(page)]
    for page, start in exceptions.NO_COMMANDS:
        assert any(b.page == page and b.first.startswith(start) for b in found), (page, start)


def test_commands_in_prose_have_their_verbs_flags_and_files(scratch: Scratch) -> None:
    for command in (command for page in pages.pages() for command in pages.named(page)):
        program, first, *_ = command.text.split()
        if program == "make":
            exceptions.has_that_target(command, scratch)
        elif program == "python":
            exceptions.is_a_script_with_those_flags(command, scratch)
        elif program == "pytest":
            paths = [word for word in command.words[1:] if word.startswith("tests")]
            assert all((pages.ROOT / path).exists() for path in paths), command
        else:
            _check_flags(command, first)
            words = ["DEST" if word == "DIR" else word for word in command.words[1:]]
            if first in _CHEAP and len(words) > 1 and words[1] != "DEST":
                result = scratch.spile(scratch.filled(words))
                assert result.code == 0, f"{command.page}: `{command.text}`: {result.err}"


def _check_flags(command: Command, verb: str) -> None:
    verbs = verbs_of(cli.make_parser())  # pyright: ignore[reportPrivateUsage]
    assert verb in verbs, f"{command.page}: `{command.text}`"
    if verb == "legacy":  # its flags are other programs'
        return
    known = _flags(verbs[verb])
    words = re.findall(r"(?<![\w-])--[a-z-]+", command.text)
    assert {*words} <= known, f"{command.page}: `{command.text}`: { ({*words} - known) }"


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {name: sub for group in groups for name, sub in group.choices.items()}


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    """Of a verb, and of those under it."""
    own = {flag for action in parser._actions for flag in action.option_strings}
    return own.union(*(_flags(sub) for sub in verbs_of(parser).values()))


def test_the_example_of_a_family_is_the_one_in_the_source() -> None:
    (block,) = (b for b in pages.shell_blocks("docs/models.md") if "Family(" in b.first)
    shown = ast.parse(block.text.strip().rstrip(","), mode="eval").body
    source = ast.parse((pages.ROOT / "src/spile/models/config/families.py").read_text())
    rows = [node for node in ast.walk(source) if isinstance(node, ast.Call)]
    assert ast.dump(shown) in {ast.dump(row) for row in rows}


def test_what_compile_is_said_to_print_is_what_it_prints(scratch: Scratch) -> None:
    """Of the example: all but how long it took, and what another compiler's memory would be."""
    (block,) = (b for b in pages.shell_blocks("docs/tpu.md") if b.first.startswith("$ "))
    (command,) = pages.commands(block)
    printed = compiled(command.words, block.first).splitlines()
    for line in block.text.splitlines():
        if line.startswith(("  weights", "  taps", "  arithmetic", "  memory moves", "at most")):
            assert line in printed, line


def test_a_new_command_must_be_run_or_excepted(scratch: Scratch, tmp_path: Path) -> None:
    for text in ("frobnicate --all", "spile extract --no-such-flag", "spile no-such-verb"):
        (command,) = pages.commands(Block("docs/new.md", 1, "", f"{text}\n"))
        assert not any(each.covers(command) for each in exceptions.COMMANDS)
        with pytest.raises(AssertionError):
            run(command, scratch)
    assert os.getcwd() == str(tmp_path)
