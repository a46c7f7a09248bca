"""For tests of launchers: jobs, hostile arguments, and programs that record their calls."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.harness import Work
from spile.launch.job import Container, LaunchJob

DIGEST = "sha256:" + "0123456789abcdef" * 4
IMAGE = f"registry.example/team/spile@{DIGEST}"
EXTRACT = ("--model", "M", "--corpus", "C", "--taps", "resid_post:20", "--out", "gs://B/acts")
SECRET = "hf_never-shown"
# Some shell, template or terminal on the way would give each another meaning.
HOSTILE = (
    "two words", "it's", '"', "$(touch pwned)", "`touch pwned`", "$HOME", "$(NAME)", "$$", "a\nb",
    "-rf", "--", "; exit 7", "&& touch pwned", "*", "\\", "\\n", "ü€😀", "", "!!", "%A", "#x",
    "a=b", "{file}", "\tx\t", "END", "<&9", "~", "trailing ", "\x07\x1b[31m",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(model: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Work, Path]:
    """An extraction by one process on one device, and its output."""
    work = Work(model, corpus)
    work.options["batch_tokens"] = 256
    out = tmp_path_factory.mktemp("made") / "out"
    work.extract(out)
    return work, out


def job(**changes: Any) -> LaunchJob:
    given: dict[str, Any] = {"name": "run1", "extract": EXTRACT, **changes}
    return LaunchJob(**given)


def contained(**changes: Any) -> Container:
    return Container(image=IMAGE, **changes)


def hostile_job(**changes: Any) -> LaunchJob:
    """A job whose arguments, variables and secrets are hostile."""
    env = {f"E{number}": value for number, value in enumerate(HOSTILE)}
    secrets = {f"S{number}": value for number, value in enumerate(HOSTILE)}
    return job(extract=HOSTILE, env=env, secrets=secrets, **changes)


def recorder(path: Path, code: int = 0, body: str = "") -> Path:
    """A program that writes a line of JSON beside itself for each call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "with open(__file__ + '.calls', 'a') as file:\n"
        "    file.write(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ)}) + '\\n')\n"
        f"{body}\nsys.exit({code})\n"
    )
    path.chmod(0o755)
    return path


def calls(program: Path) -> list[dict[str, Any]]:
    file = Path(f"{program}.calls")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def path_with(folder: Path) -> str:
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
