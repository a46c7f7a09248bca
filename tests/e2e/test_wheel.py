"""The wheel is complete, and its reader needs no jax."""

import json
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import spile
from chaos.harness import Work
from support.installing import ROOT, call, make_environment

ABSENT = ("jax", "jaxlib", "torch", "transformers")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a new environment with the wheel, which can also import our dependencies."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    return make_environment(folder, wheel, Path(sysconfig.get_path("purelib")))


def test_the_wheel_holds_the_demo_corpus_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "spile/corpus/demo/sotu.jsonl.gz" in names
    assert "spile/corpus/demo/README.md" in names  # its origin and licence
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {str(path.relative_to(ROOT / "src")) for path in ROOT.glob("src/spile/**/*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    page = {str(path.relative_to(ROOT / "src")) for path in ROOT.glob("src/spile/serve/page/*")}
    assert page <= {*names}


def test_the_wheel_needs_no_compiler(wheel: Path) -> None:
    assert wheel.name == f"spile-{spile.__version__}-py3-none-any.whl"


OPEN = """
import sys, spile
dataset = spile.open(sys.argv[1])
rows = dataset.read("embed", 0, dataset.num_tokens)
assert rows.shape == (dataset.num_tokens, 32) and len(rows) > 100
print(spile.__file__)
"""


@pytest.mark.full  # asks the package index
def test_the_wheel_works_in_an_empty_environment(
    wheel: Path, model: Path, corpus: Path, tmp_path: Path
) -> None:
    """Install it with its dependencies, all as wheels; nothing else can be imported."""
    fresh, out = tmp_path / "fresh", tmp_path / "out"
    venv.create(fresh, with_pip=False, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", fresh / "bin/python", "install", "--quiet")
    call(*pip, "--only-binary", ":all:", f"{wheel}[demo,hub,cloud,chat]", cwd=tmp_path)
    spile_command = fresh / "bin/spile"
    assert "extract" in call(spile_command, "--help", cwd=tmp_path)
    assert spile.__version__ in call(spile_command, "doctor", cwd=tmp_path)
    flags = Work(model, corpus).flags(out, taps="embed")
    call(spile_command, "extract", *flags, cwd=tmp_path)
    call(spile_command, "verify", out, cwd=tmp_path)
    module = call(fresh / "bin/python", "-c", OPEN, out, cwd=tmp_path)
    assert Path(module.strip()).is_relative_to(fresh)


def test_the_installed_command_tells_its_version(installed: Path, tmp_path: Path) -> None:
    assert call(installed / "spile", "--version", cwd=tmp_path) == f"spile {spile.__version__}\n"


def test_the_installed_package_finds_its_own_demo_corpus(installed: Path, tmp_path: Path) -> None:
    script = "import spile, spile.corpus.files as c; print(spile.__file__); print(c.DEMO)"
    module, demo = call(installed / "python", "-c", script, cwd=tmp_path).splitlines()
    assert Path(module).is_relative_to(installed.parent)
    assert Path(demo).is_relative_to(installed.parent)
    assert Path(demo).stat().st_size > 100_000


@pytest.mark.full  # documented commands plan over it, too
def test_the_installed_command_plans_over_the_demo_corpus(
    installed: Path, model: Path, tmp_path: Path
) -> None:
    options = ["--model", model, "--corpus", "demo", "--taps", "embed", "--max-docs", 3]
    options += ["--calibrate", "off"]
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
for verb in (["status"], ["verify"], ["gc"], ["status", "--json"], ["ls"]):
    assert cli.run([*verb, {out!r}]) == 0
assert cli.run(["export", {out!r}, "--to", "npy", {out!r} + ".npy"]) == 0
flags = ["--model", {model!r}, "--corpus", {corpus!r}, "--taps", "embed"]
assert cli.run(["plan", *flags]) == 0
launch = ["launch", "local", "--name", "run1", "--dry-run", "--", *flags, "--out", {out!r}]
assert cli.run(launch) == 0
# The supervisor itself needs no jax; the run it starts does, and says so by its exit code.
assert cli.run(["supervise", "--max-restarts", "0", "--", "extract", "--out", {out!r} + ".no"]) != 0
"""


def test_reading_and_auditing_work_where_jax_is_absent(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    Work(model, corpus).extract(out, taps="embed")
    call(
        sys.executable,
        "-c",
        READ.format(absent=ABSENT, out=str(out), model=str(model), corpus=str(corpus)),
        cwd=tmp_path,
    )


def test_nothing_heavy_is_imported_to_read(tmp_path: Path) -> None:
    report = f"print([name for name in {ABSENT!r} if name in sys.modules])"
    verbs = [f"cli.run([{verb!r}, {str(tmp_path)!r}])" for verb in ("status", "verify")]
    steps = "; ".join(["import sys, spile; spile.open", report, "from spile import cli", *verbs])
    told = call(sys.executable, "-c", f"{steps}; {report}", cwd=tmp_path).splitlines()
    assert (told[0], told[-1]) == ("[]", "[]"), told
