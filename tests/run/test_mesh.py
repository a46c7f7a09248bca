"""Starts the tests that need several devices, in a process with virtual ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import quick

FOLDER = Path(__file__).parent.parent / "mesh"
SUITE = ["test_sharding.py", "test_step.py"]  # in one process: starting it costs the most


@pytest.mark.parametrize(
    "files",
    [SUITE, *(pytest.param([path.name], marks=pytest.mark.full)
              for path in sorted(FOLDER.glob("test_*.py")) if path.name not in SUITE)],
    ids=" ".join,
)  # fmt: skip
def test_what_is_in_tests_mesh_passes_on_eight_devices(
    files: list[str], pytestconfig: pytest.Config
) -> None:
    flags = "--xla_force_host_platform_device_count=8"
    if pytestconfig.getoption("--chaos-full"):
        more = ["--chaos-full"]
    else:  # `make chaos` compiles as users do
        flags += f" {quick.FLAGS}"
        # The suite checks shapes against their declarations where there is one device.
        more = ["--override-ini", "addopts=--strict-markers --import-mode=importlib"]
    paths = [str(FOLDER / name) for name in files]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths, *more],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:]
