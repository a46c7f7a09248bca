"""Files of vLLM and speculators, written as their code writes them, come back bit for bit.

Both save with safetensors' own `save_file`; the eight-bit form is computed here as speculators'
`fp8_utils.py` does (a scale for each token: its largest value over 448, at least 1e-12).
"""

import fcntl
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import spile
from interop.ingest.conftest import Answers, Same
from spile.core.errors import ConfigError, InputError
from spile.interop.ingest import Ingested, ingest

TAPS = "aux_hidden_states[1],aux_hidden_states[3]"


def save(path: Path, tokens: np.ndarray, rows: torch.Tensor, **more: torch.Tensor) -> None:
    path.parent.mkdir(exist_ok=True)
    save_file({"hidden_states": rows, "token_ids": torch.from_numpy(tokens), **more}, path)


def tensor(rows: np.ndarray) -> torch.Tensor:
    """[tokens, layers, width] in bfloat16."""
    return torch.from_numpy(rows.astype(np.float32)).bfloat16().contiguous()


def written(folder: Path, answers: Answers, *layers: int) -> Path:
    for number, (tokens, rows) in enumerate(
        zip(answers.tokens, answers.layers(*layers), strict=True)
    ):
        save(folder / f"hs_{number}.safetensors", tokens, tensor(rows))
    return folder


def taken(source: Path, out: Path, answers: Answers, **options: Any) -> Ingested:
    return ingest(source, out, model=str(answers.model), **{"taps": TAPS, **options})


def test_bfloat16_comes_back_bit_for_bit(answers: Answers, tmp_path: Path, same: Same) -> None:
    made = taken(written(tmp_path / "hs", answers, 1, 3), tmp_path / "out", answers)
    same(tmp_path / "out", answers.tokens, answers.layers(1, 3))
    assert (made.format, made.rows_by, made.dtype) == ("vllm", "vLLM", "bfloat16")
    assert made.taps == ("resid_post.0", "resid_post.2")
    assert made.documents == 10 and made.refused == {}
    told = spile.open(str(tmp_path / "out")).documents().to_pydict()
    assert told["source"] == [f"hs_{number}.safetensors" for number in range(10)]


@pytest.mark.parametrize("shape", ["[T, 1, 1]", "[T, 1]", "[T, L, 1]"])
def test_float8_comes_back_with_its_scales(answers: Answers, tmp_path: Path, shape: str) -> None:
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, (tokens, rows) in enumerate(zip(answers.tokens, answers.layers(1, 3), strict=True)):
        wide = tensor(rows).float()
        largest = wide.abs().amax(dim=-1 if shape == "[T, L, 1]" else (-2, -1), keepdim=True)
        scales = (largest / 448.0).clamp(min=1e-12)
        coded = (wide / scales).to(torch.float8_e4m3fn)
        kept.append((coded, scales))
        given = scales[:, 0] if shape == "[T, 1]" else scales
        path = tmp_path / "hs" / f"hs_{number}.safetensors"
        save(path, tokens, coded, hidden_states_scales=given.contiguous())
    made = taken(tmp_path / "hs", tmp_path / "out", answers)
    assert made.dtype == "float8_e4m3"
    ds = spile.open(str(tmp_path / "out"))
    for number, (coded, scales) in enumerate(kept):
        wanted = (coded.float() * scales).numpy()
        for layer, tap in enumerate(made.taps):
            assert ds.document(number).read(tap).tobytes() == wanted[:, layer].tobytes()


WRITES = """
import sys
import torch
from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8
from safetensors.torch import load_file, save_file
for path in sys.argv[1:]:
    tensors = load_file(path)
    coded, scales = quantize_tensor_to_fp8(tensors["hidden_states"])
    save_file({**tensors, "hidden_states": coded, SCALES_KEY: scales}, path)
"""


def test_what_speculators_own_code_quantised_comes_back(answers: Answers, tmp_path: Path) -> None:
    python = os.environ.get("SPILE_SPECULATORS_PYTHON")
    if not python:
        pytest.skip("SPILE_SPECULATORS_PYTHON does not name an interpreter that has speculators")
    files = sorted(written(tmp_path / "hs", answers, 1, 3).iterdir())
    subprocess.run(
        [python, "-c", WRITES, *map(str, files)], check=True, env={**os.environ, "PYTHONPATH": ""}
    )
    made = taken(tmp_path / "hs", tmp_path / "out", answers)
    assert (made.dtype, made.refused) == ("float8_e4m3", {})
    ds = spile.open(str(tmp_path / "out"))
    for number, path in enumerate(files):
        tensors = load_file(path)
        wide = tensors["hidden_states"].float() * tensors["hidden_states_scales"]
        for layer, tap in enumerate(made.taps):
            stored = ds.document(number).read(tap)
            assert stored.tobytes() == wide[:, layer].contiguous().numpy().tobytes()


def test_float8_without_scales_that_fit_is_refused(answers: Answers, tmp_path: Path) -> None:
    for number, (tokens, rows) in enumerate(zip(answers.tokens, answers.layers(1, 3), strict=True)):
        coded, scales = tensor(rows).to(torch.float8_e4m3fn), torch.ones(len(tokens))
        cut = scales[: len(tokens) - (number == 2)]
        more = {} if number == 1 else {"hidden_states_scales": cut}
        save(tmp_path / "hs" / f"hs_{number}.safetensors", tokens, coded, **more)
    made = taken(tmp_path / "hs", tmp_path / "out", answers)
    assert made.refused == {"another shape or dtype than the first document": 2}


def test_faulty_files_are_refused_by_name(answers: Answers, tmp_path: Path, same: Same) -> None:
    folder = written(tmp_path / "hs", answers, 1, 3)
    rows = [tensor(each) for each in answers.layers(1, 3)]
    tokens = answers.tokens
    save(folder / "hs_1.safetensors", tokens[1], rows[1][:-1])  # as in vllm#44485
    rows[2][-1, 1, 5] = torch.nan
    save(folder / "hs_2.safetensors", tokens[2], rows[2])
    save_file({"hidden_states": rows[3]}, folder / "hs_3.safetensors")
    whole = (folder / "hs_4.safetensors").read_bytes()
    (folder / "hs_4.safetensors").write_bytes(whole[:-7])
    save(folder / "hs_5.safetensors", tokens[5], rows[5][:, :1].contiguous())
    (folder / "hs_6.safetensors").write_bytes(b"not a file of tensors")
    save_file({"token_ids": torch.from_numpy(tokens[7])}, folder / "hs_7.safetensors")
    made = taken(folder, tmp_path / "out", answers)
    left = [0, 8, 9]
    same(tmp_path / "out", [tokens[n] for n in left], [answers.layers(1, 3)[n] for n in left])
    assert made.refused == {
        "NaN or infinity": 1, "another shape or dtype than the first document": 1,
        "file cannot be read": 2, "no hidden states": 1, "no token ids": 1,
        "rows and tokens differ in number": 1,
    }  # fmt: skip
    assert made.named[0] == (
        f"hs_1.safetensors: rows and tokens differ in number "
        f"({len(tokens[1]) - 1} rows, {len(tokens[1])} tokens)"
    )
    assert made.named[1] == (
        f"hs_2.safetensors: NaN or infinity (resid_post.2, token {len(tokens[2]) - 1})"
    )
    assert "truncated" in made.named[3]


def test_numbers_of_files_order_them(answers: Answers, tmp_path: Path) -> None:
    for number in (11, 2, 100):
        save(tmp_path / "hs" / f"hs_{number}.safetensors", answers.tokens[0],
             tensor(answers.layers(1, 3)[0]))  # fmt: skip
    taken(tmp_path / "hs", tmp_path / "out", answers)
    told = spile.open(str(tmp_path / "out")).documents()["source"].to_pylist()
    assert told == ["hs_2.safetensors", "hs_11.safetensors", "hs_100.safetensors"]


def test_files_that_are_still_written_are_refused(answers: Answers, tmp_path: Path) -> None:
    folder = written(tmp_path / "hs", answers, 1, 3)
    lock = folder / "hs_3.safetensors.lock"
    with lock.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"hs_3\.safetensors: is still being written"):
            taken(folder, tmp_path / "out", answers)
    assert taken(folder, tmp_path / "out", answers).documents == 10  # a lock that nobody holds


def test_taps_must_be_said_and_be_as_many_as_the_layers(answers: Answers, tmp_path: Path) -> None:
    folder = written(tmp_path / "hs", answers, 1, 3)
    with pytest.raises(ConfigError, match="say with --taps what its 2 layers of each token are"):
        taken(folder, tmp_path / "out", answers, taps=None)
    with pytest.raises(ConfigError, match=r"--taps names 1 \(embed\), and .* has 2 layers"):
        taken(folder, tmp_path / "out", answers, taps="embed")
    four = written(tmp_path / "four", answers, 0, 1, 2, 3)
    with pytest.raises(ConfigError, match=r"aux_hidden_states\[NUMBER\]"):
        taken(four, tmp_path / "out", answers, taps=None)


def test_what_is_no_such_folder_is_refused(answers: Answers, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no rows in a format that spile ingests \(vllm: "):
        taken(tmp_path / "empty", tmp_path / "out", answers)
    with pytest.raises(InputError, match=r"holds no \.safetensors file"):
        taken(tmp_path / "empty", tmp_path / "out", answers, format="vllm")
    save_file({"weight": torch.zeros(3)}, tmp_path / "empty" / "model.safetensors")
    with pytest.raises(InputError, match="none of its 1 files holds hidden_states"):
        taken(tmp_path / "empty", tmp_path / "out", answers, format="vllm")


def test_another_dtype_may_be_stored_but_not_of_eight_bits(
    answers: Answers, tmp_path: Path
) -> None:
    folder = written(tmp_path / "hs", answers, 1, 3)
    assert taken(folder, tmp_path / "wide", answers, store_dtype="float32").dtype == "float32"
    ds = spile.open(str(tmp_path / "wide"))
    wanted = answers.layers(1, 3)[0][:, 0].astype(np.float32)
    assert ds.document(0).read("resid_post.0").tobytes() == wanted.tobytes()
    rows = tensor(answers.layers(1, 3)[0]).to(torch.float8_e4m3fn)
    scales = torch.ones(len(rows))
    save(
        tmp_path / "eight" / "hs_0.safetensors",
        answers.tokens[0],
        rows,
        hidden_states_scales=scales,
    )
    with pytest.raises(ConfigError, match="rows in float8_e4m3 are stored as they are"):
        taken(tmp_path / "eight", tmp_path / "other", answers, store_dtype="bfloat16")


def test_an_interrupted_ingestion_continues(answers: Answers, tmp_path: Path, same: Same) -> None:
    folder = written(tmp_path / "hs", answers, 1, 3)
    seen: list[int] = []

    def stop(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == 6:
            raise KeyboardInterrupt

    options = {"unit_tokens": 8}
    with pytest.raises(KeyboardInterrupt):
        taken(folder, tmp_path / "out", answers, progress=stop, **options)
    seen.clear()
    taken(folder, tmp_path / "out", answers, progress=lambda done, _: seen.append(done), **options)
    assert 1 < seen[0] <= 7 and seen[-1] == 10
    same(tmp_path / "out", answers.tokens, answers.layers(1, 3))
    save(folder / "hs_0.safetensors", answers.tokens[0], tensor(answers.layers(1, 3)[0]) + 1)
    with pytest.raises(spile.DriftError, match="corpus: stored"):
        taken(folder, tmp_path / "out", answers, **options)
