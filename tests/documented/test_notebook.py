"""The notebooks run unchanged, and their stored output is that of a run."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from documented.pages import ROOT
from support import tiny

EXAMPLES = ROOT / "examples"
NOTEBOOK, FREE = EXAMPLES / "first_feature.ipynb", EXAMPLES / "free_gpu.ipynb"


def printed(cell: dict[str, Any]) -> str:
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def executed(notebook: Path, directory: Path) -> list[dict[str, Any]]:
    """The code cells of a notebook after a run of it in a directory."""
    path = directory / notebook.name
    shutil.copy(notebook, path)
    program = Path(sys.executable).with_name("jupyter-execute")
    result = subprocess.run(
        [program, "--inplace", path.name], cwd=directory, env=tiny.environment(),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return code_cells(path)


@pytest.mark.full
def test_the_notebook_finds_a_feature(tmp_path: Path) -> None:
    cells = executed(NOTEBOOK, tmp_path)
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


@pytest.mark.full
def test_the_notebook_for_free_gpus_measures_float16(tmp_path: Path) -> None:
    cells = executed(FREE, tmp_path)
    _, extracted, measured, directions, probed = map(printed, cells)
    assert "rows of 576 values, computed in float16" in extracted
    means = {line.split()[0]: float(line.split()[2].rstrip(",")) for line in measured.splitlines()}
    assert means["float16"] < 2e-3 and means["float16"] < means["bfloat16"] / 4
    assert len(directions.splitlines()) == 9
    held, right = probed.splitlines()
    assert held.startswith("32 speeches held out, ")
    assert min(map(int, re.findall(r"(\d+)%", right))) > 75
    shown = [output.get("data", {}) for output in cells[-1]["outputs"]]
    (drawn,) = (data["image/svg+xml"] for data in shown if "image/svg+xml" in data)
    assert len(re.findall(r"\d+,\d+", "".join(drawn))) == 30, "a point for each layer"


@pytest.mark.parametrize("notebook", [NOTEBOOK, FREE], ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_what_it_printed(notebook: Path) -> None:
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert all(printed(cell) for cell in cells[1:])
    assert notebook.stat().st_size < 20_000
