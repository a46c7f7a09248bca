"""The tutorial, from its first block to its last, with the demo model: as a reader goes through."""

from pathlib import Path
from typing import Any

import pytest

from chaos.harness import run
from documented import exceptions, pages
from documented.scratch import Scratch

PAGE = "docs/tutorial.md"


@pytest.mark.full  # as the commands of all pages but the README
def test_the_tutorial_runs_from_beginning_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in pages.blocks(PAGE):
        if block.language == "python":
            exec(compile(block.text, f"{PAGE}:{block.line}", "exec"), names)
            continue
        for command in pages.commands(block):
            if command.words[0] == "pip":
                exceptions.can_be_installed(command, Scratch(tmp_path, monkeypatch, tmp_path))
                continue
            assert command.words[0] == "spile"
            result = run(*command.words[1:])
            assert result.code == 0, f"{command.text}\n{result.err}"
    assert "rows of 576 bfloat16" in capsys.readouterr().out
