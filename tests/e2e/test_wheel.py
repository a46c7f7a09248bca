"""What people install: a wheel that is whole, and a reader that needs no jax."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import spile
from chaos.harness import Work

ROOT = Path(__file__).parents[2]
ABSENT = ("jax", "jaxlib", "torch", "transformers")


def clean_environment() -> dict[str, str]:
    left_out = ("PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "JAX_PLATFORMS": "cpu"}


def call(*command: object, cwd: Path) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT)
    call(*pip, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment with the wheel in it and our dependencies within sight."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    binaries = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--quiet")
    call(*pip, "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("lib/python3*/site-packages")
    # A path in a .pth file is not searched for further .pth files: our own, editable install of
    # spile stays out of sight.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return binaries


def test_the_wheel_holds_the_demo_corpus_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "spile/data/demo/sotu.jsonl.gz" in names
    assert "spile/data/demo/README.md" in names  # its origin and licence
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {str(path.relative_to(ROOT / "src")) for path in ROOT.glob("src/spile/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


def test_the_installed_command_tells_its_version(installed: Path, tmp_path: Path) -> None:
    assert call(installed / "spile", "--version", cwd=tmp_path) == f"spile {spile.__version__}\n"


def test_the_installed_package_finds_its_own_demo_corpus(installed: Path, tmp_path: Path) -> None:
    script = "import spile, spile.data.corpus_files as c; print(spile.__file__); print(c.DEMO)"
    module, demo = call(installed / "python", "-c", script, cwd=tmp_path).splitlines()
    assert Path(module).is_relative_to(installed.parent)
    assert Path(demo).is_relative_to(installed.parent)
    assert Path(demo).stat().st_size > 100_000


def test_the_installed_command_plans_over_the_demo_corpus(
    installed: Path, model: Path, tmp_path: Path
) -> None:
    options = ["--model", model, "--corpus", "demo", "--taps", "embed", "--max-docs", 3]
    cost = json.loads(call(installed / "spile", "plan", *options, "--json", cwd=tmp_path))
    assert cost["documents"] == 3
    assert cost["tokens"] > 1000


READ = """
import sys
for name in {absent!r}:
    sys.modules[name] = None  # importing it fails, as where it is not installed
import spile
from spile import cli
dataset = spile.open({out!r})
rows = dataset.read("embed", 0, 10)
assert rows.shape == (10, 32) and rows.dtype.name == "float32"
assert len(dataset.index(0, 10)) == 10 and len(dataset.document(3)) > 0
assert sum(len(batch["embed"]) for batch in dataset.batches(["embed"], 64)) == dataset.num_tokens
for verb in (["status"], ["verify"], ["gc"], ["status", "--json"]):
    assert cli.run([*verb, {out!r}]) == 0
"""


def test_reading_and_auditing_work_where_jax_is_absent(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    Work(model, corpus).extract(out)
    call(sys.executable, "-c", READ.format(absent=ABSENT, out=str(out)), cwd=tmp_path)


@pytest.mark.parametrize(
    "action", ["spile.open", "from spile import cli; cli.run(['status', '{}'])",
               "from spile import cli; cli.run(['verify', '{}'])"],
)  # fmt: skip
def test_nothing_heavy_is_imported_to_read(action: str, tmp_path: Path) -> None:
    report = f"print([name for name in {ABSENT!r} if name in sys.modules])"
    script = f"import sys, spile; {action.format(tmp_path)}; {report}"
    assert call(sys.executable, "-c", script, cwd=tmp_path).splitlines()[-1] == "[]"
