"""Captures of tpu-mech-interp: `.npy` shards of whole prompts, a manifest, and the prompts' file.

`capture` writes what its `scripts/capture_activations.py` (WandLZhang/tpu-mech-interp@52d12bd)
writes: a version 2.0 header of 128 bytes, SHA-256 of the data, a shard closed at the first prompt
at or above `shard_bytes`.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from interop.ingest.conftest import Answers, Same
from spile.core.errors import InputError
from spile.interop.ingest import Ingested, ingest

HEADER = 128


def header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    text = str({"descr": dtype.str, "fortran_order": False, "shape": shape}).ljust(HEADER - 13)
    return b"\x93NUMPY\x02\x00" + (HEADER - 12).to_bytes(4, "little") + text.encode() + b"\n"


def capture(
    folder: Path,
    answers: Answers,
    layers: Sequence[int],
    *,
    dtype: str = "float32",
    shard_bytes: int = 4000,
    jsonl: bool = False,
    changes: dict[str, Any] | None = None,
) -> Path:
    """The captured folder, with the prompts beside it as `prompts.txt` or `.jsonl`."""
    folder.mkdir()
    digest = hashlib.sha256()
    for text in answers.texts:
        digest.update(text.encode() + b"\0")
    shards: list[dict[str, Any]] = []
    open_rows: list[np.ndarray] = []

    def close() -> None:
        rows = np.concatenate(open_rows)
        rows = rows[:, 0] if len(layers) == 1 else rows
        path = folder / f"shard-{len(shards):05d}.npy"
        path.write_bytes(header(rows.shape, rows.dtype) + rows.tobytes())
        sha256 = hashlib.sha256(rows.tobytes()).hexdigest()
        size = HEADER + rows.nbytes
        shards.append({"path": path.name, "tokens": len(rows), "bytes": size, "sha256": sha256})
        open_rows.clear()

    for rows in answers.rows:
        open_rows.append(np.ascontiguousarray(rows[:, list(layers)].astype(dtype)))
        if sum(each.nbytes for each in open_rows) >= shard_bytes:
            close()
    if open_rows:
        close()
    manifest = {
        "model": "tiny", "layers": list(layers), "layer_axis": len(layers) > 1, "dtype": dtype,
        "engine_dtype": "bfloat16", "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "d_model": 32, "num_model_layers": 3, "tokens": sum(map(len, answers.tokens)),
        "tokens_kept": "all", "prompts_total": len(answers.texts),
        "prompts_done": len(answers.texts), "prompts_sha256": digest.hexdigest(),
        "shard_bytes": shard_bytes, "shards": shards, **(changes or {}),
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    lines = [json.dumps({"text": text}) for text in answers.texts] if jsonl else answers.texts
    prompts_of(folder, jsonl).write_text("".join(f"{line}\n\n" for line in lines))
    return folder


def prompts_of(folder: Path, jsonl: bool = False) -> Path:
    return folder.parent / ("prompts.jsonl" if jsonl else "prompts.txt")


def taken(source: Path, out: Path, answers: Answers, **options: Any) -> Ingested:
    options = {"prompts": prompts_of(source), **options}
    return ingest(source, out, model=str(answers.model), **options)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layers", [[2], [0, 1, 2]])
def test_rows_and_tokens_come_back(
    answers: Answers, tmp_path: Path, same: Same, dtype: str, layers: list[int]
) -> None:
    source = capture(tmp_path / "caps", answers, layers, dtype=dtype)
    assert len(list(source.glob("*.npy"))) > 2
    made = taken(source, tmp_path / "out", answers)
    taps = {0: "resid_pre.0", 1: "resid_post.0", 2: "resid_post.1"}
    assert made.taps == tuple(taps[layer] for layer in layers)
    assert (made.dtype, made.rows_by, made.refused) == (dtype, "sglang-jax", {})
    rows = [each[:, layers].astype(dtype) for each in answers.rows]
    same(tmp_path / "out", answers.tokens, rows)


def test_prompts_may_be_lines_of_jsonl(answers: Answers, tmp_path: Path, same: Same) -> None:
    source = capture(tmp_path / "caps", answers, [1], jsonl=True)
    taken(source, tmp_path / "out", answers, prompts=prompts_of(source, jsonl=True))
    same(tmp_path / "out", answers.tokens, [each[:, [1]] for each in answers.rows])


def test_documents_of_a_damaged_shard_are_refused(
    answers: Answers, tmp_path: Path, same: Same
) -> None:
    source = capture(tmp_path / "caps", answers, [1])
    shards = sorted(source.glob("*.npy"))
    flipped = bytearray(shards[0].read_bytes())
    flipped[-1] ^= 1
    shards[0].write_bytes(bytes(flipped))
    shards[1].write_bytes(shards[1].read_bytes()[:-4])
    shards[2].unlink()
    made = taken(source, tmp_path / "out", answers)
    ds = spile.open(str(tmp_path / "out"))
    refused = [name for name, why in zip(*ds.documents(["source", "skipped"]).to_pydict().values(),
                                         strict=True) if why]  # fmt: skip
    assert made.refused == {"file cannot be read": len(refused)}
    assert "SHA-256" in made.named[0] and any("cut short" in each for each in made.named)
    kept = [n for n in range(len(answers.tokens)) if f"prompt {n}" not in refused]
    same(tmp_path / "out", [answers.tokens[n] for n in kept],
         [answers.rows[n][:, [1]] for n in kept])  # fmt: skip


def test_shards_that_do_not_end_with_a_prompt_are_refused(answers: Answers, tmp_path: Path) -> None:
    source = capture(tmp_path / "caps", answers, [1])
    manifest = json.loads((source / "manifest.json").read_text())
    manifest["shards"][1]["tokens"] -= 1
    (source / "manifest.json").write_text(json.dumps(manifest))
    made = taken(source, tmp_path / "out", answers)
    assert made.documents + sum(made.refused.values()) == len(answers.texts)
    assert {*made.refused} == {"rows and tokens differ in number"}
    assert made.documents > 0
    del manifest["shards"][1:]
    (source / "manifest.json").write_text(json.dumps(manifest))
    made = taken(source, tmp_path / "fewer", answers)
    assert made.refused == {"no hidden states": len(answers.texts) - made.documents}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompts_sha256": "0"}, "are not the prompts that the manifest was made from"),
        ({"sampling_params": {"max_new_tokens": 4}}, "has rows of sampled tokens"),
        ({"tokens_kept": "completion"}, "has rows of sampled tokens"),
        ({"layers": [2, 1]}, "ascending numbers and a width"),
        ({"dtype": "bfloat16"}, "must be float32 or float16"),
        ({"shards": [{"path": "../shard.npy", "tokens": 3}]}, "is not the name of a shard"),
        ({"shards": [7]}, "a shard has no path"),
        ({"prompts_done": 99}, "counts 99 of 10 prompts"),
    ],
)
def test_manifests_that_cannot_be_right_are_refused(
    answers: Answers, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    source = capture(tmp_path / "caps", answers, [1], changes=changes)
    with pytest.raises(InputError, match=named):
        taken(source, tmp_path / "out", answers)


def test_without_prompts_nothing_is_stored(answers: Answers, tmp_path: Path) -> None:
    source = capture(tmp_path / "caps", answers, [1])
    with pytest.raises(InputError, match="holds no token ids; give the prompts"):
        taken(source, tmp_path / "out", answers, prompts=None)
    (tmp_path / "prompts.jsonl").write_text("not JSON\n")
    with pytest.raises(InputError, match="line 1 is not JSON"):
        taken(source, tmp_path / "out", answers, prompts=tmp_path / "prompts.jsonl")
