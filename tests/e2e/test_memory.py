"""Memory is queue depth times batch bytes plus the weights in use, and nothing else."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from chaos.harness import Work, launch
from spile.core.tensors import build_header
from spile.models.config.hf_config import read_config
from spile.models.files.checkpoint import Checkpoint
from support import tiny

TEXT = "the same few words for every document, so that units are alike; "
DOCUMENTS = 1200
OPTIONS = {
    "taps": "embed,resid_post:0",
    "seq_len": 128,
    "unit_tokens": 20_000,
    "store_dtype": "float32",
}


def write_corpus(path: Path, documents: int) -> Path:
    """Lines of which little is text, so that a reader that kept the file would show."""
    padding = "." * 12_000
    with path.open("w") as file:
        for number in range(documents):
            file.write(f'{{"text": "{number} {TEXT}", "x": "{padding}"}}\n')
    return path


def peak_of(work: Work, folder: Path) -> int:
    """Peak resident memory of a whole run, in kB."""
    peak = folder / f"{work.corpus.stem}.peak"
    out = folder / work.corpus.stem
    process = launch({"peak": str(peak)}, "extract", *work.flags(out))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    made = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    assert made > work.corpus.stat().st_size // 2
    return int(peak.read_text())


@pytest.mark.full
def test_peak_memory_does_not_grow_with_the_corpus(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # these runs are long enough to be optimized
    small = Work(model, write_corpus(tmp_path / "small.jsonl", DOCUMENTS), OPTIONS)
    large = Work(model, write_corpus(tmp_path / "large.jsonl", 8 * DOCUMENTS), OPTIONS)
    # Else a run that kept all it read, or all it made, would pass.
    assert large.corpus.stat().st_size > 100e6
    # Compiling takes more memory than running: both runs find it done.
    tiny.spile("extract", *small.flags(tmp_path / "warm"))
    first, second = peak_of(small, tmp_path), peak_of(large, tmp_path)
    assert second < 1.1 * first, f"{first} kB, then {second} kB for eight times the corpus"


WIDE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 4096,
    "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip


def write_wide_model(directory: Path) -> int:
    """Some 800 MB of zeros that take no space on the disk; returns their size."""
    tiny.write_model(directory)
    config = {**tiny.CONFIG, **WIDE}
    (directory / "config.json").write_text(json.dumps(config))
    family, arch = read_config(config, "test")
    shapes = Checkpoint(directory, family, arch, {}, (), family.prefixes[0]).shapes()
    header = build_header((name, np.dtype(np.float32), shape) for name, shape in shapes.items())
    size = sum(4 * math.prod(shape) for shape in shapes.values())
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
    return size


@pytest.mark.full
def test_a_process_needs_memory_only_for_its_quarter_of_the_weights(
    tmp_path: Path,
) -> None:
    """Each of four processes holds a quarter of the checkpoint; together they hash all of it."""
    size, processes = write_wide_model(tmp_path / "model"), 4
    script = [sys.executable, str(Path(__file__).with_name("loading.py")), str(tmp_path / "model")]
    where = [f"127.0.0.1:{tiny.free_port()}", str(processes)]
    started = [
        subprocess.Popen([*script, *where, str(n)], stdout=subprocess.PIPE, text=True,
                         env=tiny.environment())
        for n in range(processes)
    ]  # fmt: skip
    said = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in started]
    for each in said:
        assert size / 4 <= each["held"] < size / 4 * 1.05
        assert each["took"] <= 1.3 * each["held"], each
    hashed = [name for each in said for name in each["hashed"]]
    assert len(hashed) == len(set(hashed)) == 12 * 9 + 3
