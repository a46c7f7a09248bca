"""What needs several devices runs here, on virtual ones, in a process that has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import quick
from marks import some

FILES = sorted((Path(__file__).parent.parent / "mesh").glob("test_*.py"))


QUICKEST = [FILES[0].parent / f"test_{name}.py" for name in ("sharding", "step")]


@pytest.mark.parametrize("file", some(FILES, *QUICKEST), ids=lambda file: file.stem)
def test_what_is_in_tests_mesh_passes_on_eight_devices(
    file: Path, pytestconfig: pytest.Config
) -> None:
    flags = f"--xla_force_host_platform_device_count=8 {quick.FLAGS}"
    more = ["--chaos-full"] if pytestconfig.getoption("--chaos-full") else []
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), *more],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": flags},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:]
