"""One tap's rows for other trainers: tensors in the order of `ds.batches`, resumable."""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import spile
from spile.interop.torch_loader import TorchRows
from support import stored


def test_rows_are_those_of_the_dataset_in_its_order_epoch_after_epoch(
    written: stored.Stored,
) -> None:
    ds = spile.open(str(written.path))
    rows = TorchRows(ds, "blocks.1.hook_resid_post", 16, seed=3)
    assert iter(rows) is rows
    batches = ds.batches(["resid_post.1"], 16, seed=3, epochs=None, drop_last=True, dtype="float32")
    for _, wanted in zip(range(15), batches, strict=False):  # six batches an epoch
        found = next(rows)
        assert found.dtype == torch.float32 and found.shape == (16, 6)
        assert np.array_equal(found.numpy(), wanted["resid_post.1"])


def test_heads_lie_one_after_another_and_the_dtype_is_what_was_asked_for(
    written: stored.Stored,
) -> None:
    found = next(TorchRows(spile.open(str(written.path)), "q.1", 8, dtype="bfloat16", shuffle=None))
    assert found.dtype == torch.bfloat16 and found.shape == (8, 6)
    wanted = torch.from_numpy(written.rows["q.1"][:8].astype(np.float32).reshape(8, 6))
    assert torch.equal(found, wanted.to(torch.bfloat16)) or "int8" in str(written.path)


def test_a_trainer_goes_on_where_another_stood(written: stored.Stored) -> None:
    ds = spile.open(str(written.path))
    first = TorchRows(ds, "resid_post.0", 10, seed=1)
    for _ in range(14):  # within the second epoch
        next(first)
    second = TorchRows(ds, "resid_post.0", 10, seed=1)
    next(second)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(5):
        assert torch.equal(next(first), next(second))


def test_it_ends_where_epochs_are_given(written: stored.Stored) -> None:
    rows = TorchRows(spile.open(str(written.path)), "resid_post.0", 10, epochs=2)
    assert len(list(rows)) == 2 * 11


def test_it_has_what_dictionary_learning_writes_beside_what_it_trains(
    written: stored.Stored,
) -> None:
    ds = spile.open(str(written.path))
    config = json.loads(json.dumps(TorchRows(ds, "resid_post.0", 10, seed=4).config))
    assert config["fingerprint"] == ds.fingerprint
    assert (config["tap"], config["batch_size"], config["seed"]) == ("resid_post.0", 10, 4)


_SAELENS = """
import json, sys
sys.path += json.loads(sys.argv[2])  # what SAELens' environment lacks
import torch
import spile
from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig
from sae_lens.config import LoggingConfig, SAETrainerConfig
from sae_lens.training.sae_trainer import SAETrainer
from spile.interop.torch_loader import TorchRows

ds = spile.open(sys.argv[1])
x = next(TorchRows(ds, "resid_post.1", 96, shuffle=None))
sae = StandardTrainingSAE(StandardTrainingSAEConfig(d_in=6, d_sae=12, l1_coefficient=0.01))
def error():
    with torch.no_grad():
        return float(((sae(x) - x) ** 2).mean())

before = error()
settings = SAETrainerConfig(
    total_training_samples=8192, train_batch_size_samples=16, lr=1e-2, lr_end=1e-3
)
rows = TorchRows(ds, "blocks.1.hook_resid_post", 16, seed=0)
SAETrainer(cfg=settings, sae=sae, data_provider=rows).fit()
print(json.dumps({"before": before, "after": error(), "state": rows.state_dict()}))
"""


@pytest.mark.full
def test_saelens_trains_straight_from_a_dataset(floats: stored.Stored) -> None:
    python = os.environ.get("SPILE_SAELENS_PYTHON")
    if not python:
        pytest.skip("SPILE_SAELENS_PYTHON does not name an interpreter that has sae-lens")
    spec = importlib.util.find_spec("ml_dtypes")
    assert spec and spec.origin
    ours = [str(Path(spile.__file__).parent.parent), str(Path(spec.origin).parent.parent)]
    result = subprocess.run(
        [python, "-c", _SAELENS, str(floats.path), json.dumps(ours)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["after"] < found["before"] / 2
    assert found["state"]["epoch"] == 512 // 6, "512 batches were asked for, six an epoch"
