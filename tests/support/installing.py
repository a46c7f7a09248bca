"""Build the wheel, and make environments that hold it and chosen packages."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def clean_environment() -> dict[str, str]:
    left_out = ("PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "JAX_PLATFORMS": "cpu"}


def call(*command: object, cwd: Path, **env: str) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean_environment(), **env},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def build_wheel(folder: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT)
    call(*pip, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


def make_environment(folder: Path, wheel: Path, within_sight: Path) -> Path:
    """Make an environment with the wheel and the packages of a folder; return its `bin`."""
    venv.create(folder, with_pip=False, symlinks=True)
    binaries = folder / "bin"
    pip = (sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--quiet")
    call(*pip, "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("lib/python3*/site-packages")
    # Python does not look for .pth files in a folder that a .pth file names, so the editable
    # install of spile there is not imported.
    (site / "dependencies.pth").write_text(f"{within_sight}\n")
    return binaries


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
