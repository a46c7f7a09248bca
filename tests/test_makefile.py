"""Every long or varied test belongs to one target of `make chaos`."""

import argparse
import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# How a file says that some of its tests run only with --chaos-full, or more of them.
MARKED = re.compile(r"\bmark\.(full|chaos|varied)\b|\b(some|examples)\(")
ELSEWHERE = "tests/mesh/"  # run by tests/run/test_mesh.py


def chaos_runs() -> list[argparse.Namespace]:
    """Return what each pytest command of `make chaos` selects; `make chaos-fuzz` only explores."""
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--ignore", action="append", default=[])
    parser.add_argument("-k", default="")
    parser.add_argument("-m", default="")
    for name in ("-n", "--dist"):
        parser.add_argument(name)
    for name in ("-rP", "--chaos-full"):
        parser.add_argument(name, action="store_true")
    told = subprocess.run(
        ["make", "-n", "chaos"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    commands = [line.partition("/pytest ")[2] for line in told if "SPILE_FUZZ" not in line]
    return [parser.parse_args(shlex.split(command)) for command in commands if command]


def below(file: str, paths: list[str]) -> bool:
    return any(file == path or file.startswith(f"{path}/") for path in paths)


def test_every_chaos_test_is_run_by_one_chaos_target() -> None:
    runs, wrong = chaos_runs(), {}
    assert len(runs) > 5
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = str(path.relative_to(ROOT))
        if file.startswith(ELSEWHERE) or not MARKED.search(path.read_text()):
            continue
        chosen = [run.k for run in runs if below(file, run.paths) and not below(file, run.ignore)]
        if sorted(chosen) not in ([""], ["not thousand", "thousand"]):
            wrong[file] = chosen
    assert wrong == {}


def test_every_path_that_a_chaos_target_names_exists() -> None:
    named = {path for run in chaos_runs() for path in (*run.paths, *run.ignore)}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
