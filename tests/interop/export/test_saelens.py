"""SAELens' cached activations, opened by Arrow, `datasets` and SAELens."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spile.interop.export import Exported, saelens
from support import stored

Run = Callable[..., tuple[Path, Exported]]
NAMED = {
    "resid_post.0": "blocks.0.hook_resid_post",
    "q.1": "blocks.1.attn.hook_q",
    "expert_ids.1": "blocks.1.mlp.hook_expert_indices",
    "resid_post.1": "blocks.1.hook_resid_post",
    "resid_post.2": "blocks.2.hook_resid_post",
}


def contexts(rows: np.ndarray, size: int) -> np.ndarray:
    count = len(rows) // size
    return rows[: count * size].reshape(count, size, -1)


def test_the_files_are_streams_of_sequences(
    floats: stored.Stored, exported: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saelens, "_SHARD_BYTES", 2000)
    dest, _ = exported(floats, "saelens", taps="resid_post:all")
    files = sorted(dest.glob("*.arrow"))
    assert [path.name for path in files] == [f"data-{i:05d}-of-00005.arrow" for i in range(5)]
    hook = NAMED["resid_post.1"]
    table = pa.concat_tables([pa.ipc.open_stream(path).read_all() for path in files])
    field, rows = table.schema.field(hook), table.column(hook).combine_chunks()
    name, shape = b"datasets.features.features.Array2DExtensionType", b'[[8, 6], "float32"]'
    if isinstance(field.type, pa.ExtensionType):  # `datasets` has been imported by another test
        assert field.type.extension_name == name.decode()
        assert field.type.__arrow_ext_serialize__() == shape
        rows = rows.storage
    else:
        assert field.metadata[b"ARROW:extension:name"] == name
        assert field.metadata[b"ARROW:extension:metadata"] == shape
    assert rows.type == pa.list_(pa.list_(pa.float32()))
    assert table.column("token_ids").type == pa.list_(pa.int32(), 8)
    expected = contexts(floats.rows["resid_post.1"], 8)
    assert np.array_equal(np.array(rows.to_pylist(), np.float32), expected)


@pytest.mark.parametrize(("size", "dtype"), [(8, None), (5, None), (8, "float16")])
def test_datasets_opens_what_saelens_reads(
    written: stored.Stored, exported: Run, size: int, dtype: str | None
) -> None:
    datasets: Any = pytest.importorskip("datasets", reason="datasets is not installed")
    dest, made = exported(written, "saelens", taps=list(NAMED), context_size=size, dtype=dtype)
    found = datasets.load_from_disk(str(dest))
    assert found.column_names == [*NAMED.values(), "token_ids"]
    assert len(found) == 111 // size
    assert made.left_over == 111 % size
    found.set_format("numpy")
    tokens = written.index["token_id"][: len(found) * size].reshape(-1, size)
    assert np.array_equal(found[:]["token_ids"], tokens)
    for tap, hook in NAMED.items():
        feature, values = found.features[hook], found[:][hook]
        assert (feature.shape, feature.dtype) == ((size, written.rows[tap][0].size), made.taps[tap])
        expected = contexts(written.rows[tap], size).astype(made.taps[tap])
        assert np.array_equal(values, expected), "(its numpy has float32 of every float)"


_SAELENS = """
import json, sys
import numpy as np, torch
from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig
from sae_lens.config import SAETrainerConfig
from sae_lens.training.activations_store import ActivationsStore
from sae_lens.training.sae_trainer import SAETrainer

path, hook = sys.argv[1:]

def store(batch):
    return ActivationsStore(
        model=None, dataset=None, streaming=False, hook_name=hook, hook_head_index=None,
        context_size=8, d_in=6, n_batches_in_buffer=8, total_training_tokens=2048,
        store_batch_size_prompts=1, train_batch_size_tokens=batch, prepend_bos=True,
        normalize_activations="none", device=torch.device("cpu"), dtype="float32",
        cached_activations_path=path,
    )

reader, rows, ids = store(16), [], []
for _ in range(13):
    values, tokens = reader.get_raw_llm_batch()
    rows.append(values)
    ids.append(tokens)
sae = StandardTrainingSAE(StandardTrainingSAEConfig(d_in=6, d_sae=12, l1_coefficient=0.01))
x = torch.cat(rows)
def error():
    with torch.no_grad():
        return float(((sae(x) - x) ** 2).mean())

before = error()
settings = SAETrainerConfig(
    total_training_samples=8192, train_batch_size_samples=16, lr=1e-2, lr_end=1e-3
)
SAETrainer(cfg=settings, sae=sae, data_provider=store(16)).fit()
after = error()
print(json.dumps({"rows": x.tolist(), "ids": torch.cat(ids).int().tolist(),
                  "before": before, "after": after}))
"""


@pytest.mark.full
def test_saelens_reads_the_rows_and_trains_on_them(floats: stored.Stored, exported: Run) -> None:
    python = os.environ.get("SPILE_SAELENS_PYTHON")
    if not python:
        pytest.skip("SPILE_SAELENS_PYTHON does not name an interpreter that has sae-lens")
    dest, _ = exported(floats, "saelens", taps=list(NAMED))
    result = subprocess.run(
        [python, "-c", _SAELENS, str(dest), NAMED["resid_post.1"]], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert np.array_equal(np.array(found["rows"], np.float32), floats.rows["resid_post.1"][:104])
    assert found["ids"] == floats.index["token_id"][:104].tolist()
    assert found["after"] < found["before"] / 2
