"""Compile a test module's programs for TPUs that are elsewhere, where libtpu can be imported.

    python -m support.libtpu MODULE TOPOLOGY...

The module's `PROGRAMS` are functions and the shapes of what they take, by name. Each is compiled
for one chip of each topology, in a process of its own: libtpu knows no flags of CPUs.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from spile.compile.targets import find_target

LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(
    not LIBTPU, reason="libtpu cannot be imported (it exists for x86-64 alone)"
)


def with_own_flags() -> dict[str, str]:
    """Return this process's environment without XLA's flags."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def compiled(module: str, topology: str) -> list[str]:
    """Compile a module's programs; return the names of those that have a TPU's kernel."""
    result = subprocess.run(
        [sys.executable, "-m", "support.libtpu", module, topology],
        cwd=Path(__file__).parent.parent, env=with_own_flags(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.split()


def main(module: str, topology: str) -> None:
    place = SingleDeviceSharding(find_target(topology, "libtpu").devices[0])
    for name, (function, shapes) in importlib.import_module(module).PROGRAMS.items():
        given = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=place) for each in shapes]
        if "tpu_custom_call" in jax.jit(function).lower(*given).compile().as_text():
            sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
