"""`spile ingest` at the command line: what it prints, and how it ends."""

import json
from pathlib import Path

import numpy as np

from spile.core.tensors import write_tensors
from support import tiny


def write(folder: Path, rows: int = 6) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(3):
        values = rng.standard_normal((rows, 2, 32)).astype(np.float32)
        if number == 1:
            values[2, 0, 0] = np.nan
        tensors = {"hidden_states": values, "token_ids": rng.integers(0, 250, rows)}
        write_tensors(folder / f"hs_{number}.safetensors", tensors)
    return folder


def test_it_tells_what_was_stored_and_what_was_refused(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "hs")
    flags = ["ingest", str(source), "--model", str(model), "--taps", "resid_post:0+2"]
    made = tiny.spile(*flags, "--out", str(tmp_path / "out"), "--rows-by", "vLLM 0.21")
    assert made.stdout.startswith(
        f"{tmp_path}/out: 12 rows of 2 taps (resid_post.0, resid_post.2) in float32, from 2 "
        "documents of vLLM 0.21, in 1 unit\nrefused: 1 document (1 NaN or infinity)\n"
    )
    assert "refused hs_1.safetensors: NaN or infinity (resid_post.0, token 2)" in made.stderr
    again = tiny.spile(*flags, "--out", str(tmp_path / "out"), "--rows-by", "vLLM 0.21", "--json")
    told = json.loads(again.stdout)
    assert (told["rows"], told["refused"], told["named"]) == (12, {"NaN or infinity": 1}, [])
    verified = tiny.spile("verify", str(tmp_path / "out"))
    assert "whole and sound" in verified.stdout


def test_bad_input_ends_with_code_2(model: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "hs")
    flags = ["ingest", str(source), "--model", str(model), "--out", str(tmp_path / "out")]
    for more, told in (
        ([], "say with --taps what its 2 layers"),
        (["--taps", "embed", "--unit-tokens", "many"], "--unit-tokens must be a number"),
        (["--taps", "embed", "--format", "gguf"], "--format gguf: no such format"),
    ):
        found = tiny.spile(*flags, *more, check=False)
        assert found.returncode == 2 and told in found.stderr, found.stderr
