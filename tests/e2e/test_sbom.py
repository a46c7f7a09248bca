"""`make wheel` writes a bill of materials for each lock, which CycloneDX's own schema accepts."""

import hashlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource

import spile
from support.installing import ROOT, normal

SCHEMAS = ROOT / "tests/fixtures/cyclonedx"
TARGETS = ("build", "cpu", "cuda", "tpu")


@pytest.fixture(scope="module")
def dist(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that `make wheel` writes."""
    folder = tmp_path_factory.mktemp("dist")
    shutil.copy(wheel, folder)
    locks = [ROOT / f"docker/requirements-{target}.txt" for target in TARGETS]
    subprocess.run([sys.executable, ROOT / "scripts/make_sbom.py", folder, *locks], check=True)
    return folder


def read(dist: Path, target: str) -> dict[str, Any]:
    return json.loads((dist / f"spile-{spile.__version__}-{target}.cdx.json").read_text())


def schema(name: str) -> dict[str, Any]:
    return json.loads((SCHEMAS / f"{name}.schema.json").read_text())


@cache
def validator() -> jsonschema.Draft7Validator:
    address = "http://cyclonedx.org/schema/{}.SNAPSHOT.schema.json"
    parts = [
        (address.format(name), Resource.from_contents(schema(name)))
        for name in ("spdx", "jsf-0.82")
    ]
    return jsonschema.Draft7Validator(schema("bom-1.6"), registry=Registry().with_resources(parts))


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_the_schema_accepts_it(dist: Path, target: str) -> None:
    made = read(dist, target)
    assert not list(validator().iter_errors(made))
    made["components"][0]["type"] = "something"
    made["metadata"]["component"]["licenses"][0]["license"]["id"] = "Mine"
    assert len(list(validator().iter_errors(made))) >= 2


@pytest.mark.full
def test_it_names_the_wheel_and_every_locked_package_by_hash(dist: Path, wheel: Path) -> None:
    made = read(dist, "cpu")
    root = made["metadata"]["component"]
    assert (root["name"], root["version"]) == ("spile", spile.__version__)
    assert root["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    text = (ROOT / "docker/requirements-cpu.txt").read_text()
    locked = {f"{normal(n)}=={v}" for n, v in re.findall(r"(?m)^([\w.-]+)==(\S+)", text)}
    assert {f"{c['name']}=={c['version']}" for c in made["components"]} == locked
    hashes = [h for c in made["components"] for h in c["externalReferences"][0]["hashes"]]
    assert sorted(h["content"] for h in hashes) == sorted(
        re.findall(r"--hash=sha256:([0-9a-f]{64})", text)
    )


@pytest.mark.full
def test_who_needs_whom_is_what_the_packages_say(dist: Path) -> None:
    made = read(dist, "cpu")
    names = {component["bom-ref"]: component["name"] for component in made["components"]}
    needs = {
        names.get(entry["ref"], "spile"): {names[ref] for ref in entry["dependsOn"]}
        for entry in made["dependencies"]
    }
    assert {"jax", "numpy", "obstore", "huggingface-hub", "jinja2"} <= needs["spile"]
    for name in ("jax", "rich", "jinja2"):
        said = importlib.metadata.requires(name) or []
        plain = {normal(re.split(r"[^\w.-]", line)[0]) for line in said if "extra ==" not in line}
        assert needs[name] == plain & set(names.values())


@pytest.mark.full
def test_the_same_gives_the_same_bytes(dist: Path, tmp_path: Path, wheel: Path) -> None:
    shutil.copy(wheel, tmp_path)
    lock = ROOT / "docker/requirements-cpu.txt"
    subprocess.run([sys.executable, ROOT / "scripts/make_sbom.py", tmp_path, lock], check=True)
    (made,) = tmp_path.glob("*.json")
    assert made.read_bytes() == (dist / made.name).read_bytes()


def test_make_wheel_writes_it() -> None:
    said = subprocess.run(
        ["make", "-n", "wheel"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "scripts/make_sbom.py dist docker/requirements-" in said
