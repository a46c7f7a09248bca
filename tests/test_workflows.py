"""Files that GitHub and pre-commit read are valid by their schemas and run our own targets."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_files_that_github_reads_are_valid(schema: str, pattern: str) -> None:
    files = sorted(map(str, ROOT.glob(pattern)))
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}"]
    checked = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_workflow_runs_targets_on_each_python_and_processor() -> None:
    (job,) = load(".github/workflows/ci.yml")["jobs"].values()
    assert job["strategy"]["matrix"] == {
        "os": ["ubuntu-latest", "ubuntu-24.04-arm"],
        "python": ["3.11", "3.12", "3.13"],
    }
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs == ["make test", "make docs", "make wheel"]
    assert {run.split()[1] for run in runs} <= TARGETS


def test_pre_commit_runs_make_style() -> None:
    (repo,) = load(".pre-commit-config.yaml")["repos"]
    assert repo["repo"] == "local"
    (hook,) = repo["hooks"]
    assert {"id", "name", "entry", "language"} <= hook.keys()  # those that pre-commit requires
    assert hook["entry"] == "make style" and "style" in TARGETS
    assert hook["pass_filenames"] is False
