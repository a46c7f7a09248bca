"""A model larger than its memory limit: two of its blocks are in memory at a time."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spile.core.tensors import build_header
from spile.models.config.hf_config import read_config
from spile.models.files.checkpoint import Checkpoint
from support import tiny

MEASURED = """
import sys, spile
model, corpus, out, tap, kept = sys.argv[1:]
recipe = spile.Recipe(model=model, corpus=corpus, taps=tap, seq_len=64, max_docs=2)
spile.extract(recipe, out, spile.Runtime(weights=kept))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def write_model(directory: Path, layers: int, width: int) -> int:
    """Write a checkpoint that repeats one number, as large as any other; return its bytes."""
    sizes = {
        "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 4,
    }  # fmt: skip
    tiny.write_model(directory, num_hidden_layers=1)
    config = {**tiny.CONFIG, **sizes}
    (directory / "config.json").write_text(json.dumps(config))
    family, arch = read_config(config, "test")
    shapes = Checkpoint(directory, family, arch, {}, (), family.prefixes[0]).shapes()
    path = directory / "model.safetensors"
    path.unlink()
    with path.open("wb") as file:
        file.write(build_header((n, np.dtype(np.float32), s) for n, s in shapes.items()))
        for shape in shapes.values():
            file.write(np.full(shape, 1 / 1024, np.float32).data)
    return path.stat().st_size


def most_memory(model: Path, corpus: Path, out: Path, last: int, kept: str = "disk") -> int:
    """The most bytes that a new process ever held."""
    given = [str(model), str(corpus), str(out), f"resid_post:{last}", kept]
    command = [sys.executable, "-c", MEASURED, *given]
    said = subprocess.run(command, capture_output=True, text=True, env=tiny.environment())
    assert said.returncode == 0, said.stderr
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", said.stdout)[0])


@pytest.mark.full
def test_memory_does_not_grow_with_depth(corpus: Path, tmp_path: Path) -> None:
    size = write_model(tmp_path / "model", 48, 1024)
    assert size > 2e9
    few, many = (
        most_memory(tmp_path / "model", corpus, tmp_path / str(last), last) for last in (5, 47)
    )
    assert many < size / 3
    assert many < 1.1 * few
    assert most_memory(tmp_path / "model", corpus, tmp_path / "all", 47, "resident") > size
