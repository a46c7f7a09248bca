"""Datasets written before the sources moved still open, verify, export, and can be continued."""

import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import spile
from spile.dataset.maintain.verify import verify
from spile.objects import LocalObjects
from support import tiny, zygote
from support.marks import some

FIXTURES = Path(__file__).parents[1] / "fixtures" / "version6"
MADE = json.loads((FIXTURES / "cases.json").read_bytes())
CASES = sorted(MADE["cases"])
CONTINUED = ("latents",)  # in the suite; with --chaos-full all
UNIT = "00000001"  # the one that is taken away and made again

# All are continued by one process: starting one is most of the work.
CONTINUE = """
import json, sys
from spile import cli
for flags in json.loads(sys.argv[1]):
    assert cli.run(flags) == 0, flags
"""


@pytest.fixture(scope="module")
def continued(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every dataset without one of its units, and then continued by the command."""
    folder = tmp_path_factory.mktemp("continued")
    commands = []
    for name in CASES if pytestconfig.getoption("--chaos-full") else CONTINUED:
        out = folder / name
        shutil.copytree(FIXTURES / name, out)
        (out / "manifest.json").unlink()
        (out / "done" / f"{UNIT}.json").unlink()
        shutil.rmtree(out / "attempts" / UNIT)
        flags = [*MADE["common"], "--model", "/fixtures/model", *MADE["cases"][name]]
        here = [flag.replace("/fixtures", str(FIXTURES)) for flag in flags]
        commands.append(["extract", *here, "--out", str(out), "--quiet"])
    # As users compile: the suite's own flags change the last bits.
    environment = {k: v for k, v in tiny.environment().items() if k != "XLA_FLAGS"}
    zygote.run([sys.executable, "-c", CONTINUE, json.dumps(commands)], env=environment, check=True)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_it_opens_and_every_byte_is_sound(name: str) -> None:
    dataset = spile.open(str(FIXTURES / name))
    assert dataset.num_tokens > 0
    assert set(dataset.taps)
    assert not verify(LocalObjects(FIXTURES / name)).faults


@pytest.mark.parametrize("name", CASES)
def test_it_exports_what_it_reads(name: str, tmp_path: Path) -> None:
    dataset = spile.open(str(FIXTURES / name))
    spile.export(str(FIXTURES / name), tmp_path / "npy", to="npy")
    for tap in dataset.taps:
        (file,) = (tmp_path / "npy").rglob(f"*{tap}*.npy")
        exported, rows = np.load(file), dataset.read(tap, 0, dataset.num_tokens)
        assert np.array_equal(exported, rows.astype(exported.dtype))


@pytest.mark.parametrize("name", some(CASES, *CONTINUED))
def test_it_can_be_continued(name: str, continued: Path) -> None:
    before, after = spile.open(str(FIXTURES / name)), spile.open(str(continued / name))
    count = before.num_tokens
    assert np.array_equal(after.index(0, count), before.index(0, count))
    assert after.documents().equals(before.documents())
    alike = (platform.machine(), jax.__version__) == (MADE["machine"], MADE["jax"])
    for tap in before.taps:
        old, new = before.read(tap, 0, count), after.read(tap, 0, count)
        if alike:
            assert np.array_equal(new, old), tap
        else:
            _check_close(name, tap, old, new)
    record = json.loads((continued / name / "done" / f"{UNIT}.json").read_bytes())
    assert record["attempt"] not in os.listdir(FIXTURES / name / "attempts" / UNIT)


def _check_close(name: str, tap: str, old: Any, new: Any) -> None:
    if "latent_ids" in tap:  # which of two equally large ones is kept may differ
        assert np.mean(old == new) > 0.99
    elif name == "int8":  # one step of the scale, where rounding falls the other way
        assert np.max(np.abs(new - old)) <= np.max(np.abs(old)) / 100
    else:
        assert np.max(np.abs(new - old)) <= 2e-5
