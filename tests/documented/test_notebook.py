"""The notebook runs unchanged, and its stored output is that of a run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from documented.pages import ROOT
from support import tiny

NOTEBOOK = ROOT / "examples" / "first_feature.ipynb"


def printed(cell: dict[str, Any]) -> str:
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.full
def test_the_notebook_finds_a_feature(tmp_path: Path) -> None:
    path = tmp_path / NOTEBOOK.name
    shutil.copy(NOTEBOOK, path)
    program = Path(sys.executable).with_name("jupyter-execute")
    result = subprocess.run(
        [program, "--inplace", path.name], cwd=tmp_path, env=tiny.environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    cells = code_cells(path)
    displayed = [o["data"] for cell in cells for o in cell["outputs"] if "data" in o]
    assert any("100%" in "".join(data.get("text/plain", "")) for data in displayed), displayed
    _, extracted, trained, _, shown = map(printed, cells)
    assert "rows of 576 values, 16 documents" in extracted
    errors = [float(line.rpartition(" ")[2]) for line in trained.splitlines()]
    assert errors[-1] < 0.5 < errors[0]
    lines = shown.splitlines()
    assert len(lines) == 8
    tokens = [line.partition("[")[2].partition("]")[0] for line in lines]
    assert max(map(tokens.count, tokens)) >= 4, shown  # it is about something


def test_the_notebook_is_kept_with_what_it_printed() -> None:
    cells = code_cells(NOTEBOOK)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(printed(cell) for cell in cells[1:])
    assert NOTEBOOK.stat().st_size < 20_000
