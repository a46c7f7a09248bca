"""Commands in prose, the table of exceptions, and examples with their output."""

import argparse
import ast
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest

from documented import exceptions, pages
from documented.pages import Command
from documented.scratch import Scratch, records
from spile import cli
from spile.core.config import Recipe
from spile.core.errors import InputError
from spile.corpus.chat_layouts import settle_chats
from spile.corpus.files import find_files
from support import quick, tiny, zygote


def commands(page: str) -> list[Command]:
    found = (block for block in pages.shell_blocks(page) if not exceptions.is_no_command(block))
    return [command for block in found for command in pages.commands(block)]


def compiled(words: list[str], where: str) -> str:
    """Run with so many virtual devices, in a new process on the CPU."""
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
    scratch.prepare(set())
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
                shutil.rmtree("DEST", ignore_errors=True)  # each makes its own
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
    """Return the flags of a verb and of the verbs below it."""
    own = {flag for action in parser._actions for flag in action.option_strings}
    return own.union(*(_flags(sub) for sub in verbs_of(parser).values()))


def test_records_of_chats_are_read_as_their_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "spile.corpus")
    page = "docs/corpora.md"
    shown = [b.text for b in pages.blocks(page) if b.language in ("console", "text")]
    for name, record in records(page).items():
        Path(name).write_text(record)
        caplog.clear()
        try:
            settle_chats(Recipe(), find_files(name))
            (told,) = caplog.messages
        except InputError as error:
            told = str(error)
        (line,) = (b for b in shown if f"spile: {name}: " in b)
        assert f"spile: {told}\n" in line


def test_the_example_of_a_family_is_the_one_in_the_source() -> None:
    (block,) = (b for b in pages.shell_blocks("docs/models.md") if "Family(" in b.first)
    shown = ast.parse(block.text.strip().rstrip(","), mode="eval").body
    source = (pages.ROOT / "src/spile/models/config/rows/llama_like.py").read_text()
    rows = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert ast.dump(shown) in {ast.dump(row) for row in rows}


@pytest.mark.full
def test_what_compile_is_said_to_print_is_what_it_prints(scratch: Scratch) -> None:
    """Return the example's output without times, and without another compiler's memory."""
    (block,) = (b for b in pages.shell_blocks("docs/tpu.md") if b.first.startswith("$ "))
    (command,) = pages.commands(block)
    printed = compiled(command.words, block.first).splitlines()
    for line in block.text.splitlines():
        if line.startswith(
            ("  weights", "  cut", "  taps", "  arithmetic", "  memory moves", "at most")
        ):
            assert line in printed, line


def test_every_install_line_works_without_a_release() -> None:
    """Flags are checked in blocks, in prose, and in arguments of other commands."""
    for page in (
        *pages.pages(),
        "CHANGELOG.md",
        "examples/first_feature.ipynb",
        "examples/free_gpu.ipynb",
    ):
        text = (pages.ROOT / page).read_text()
        found = re.findall(r"pip install\s+(?:'([^']+)'|([^\s`;)]+))", text)
        assert len(found) == len(re.findall(r"pip install\s", text)), page
        for quoted, plain in found:
            exceptions.requirement_works_today(quoted or plain, page)
