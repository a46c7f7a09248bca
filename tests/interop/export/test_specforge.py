"""SpecForge's offline features for EAGLE-3, opened by torch as its reader opens them."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from interop.export.conftest import Drafted
from spile.interop.export import Exported, export, specforge
from support import tiny

TAPS = ("resid_post.0", "resid_post.1", "resid_post.2", "final_norm")
READS = """
import json, sys
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.algorithms.eagle3.data import normalize_offline_sample
for ref in OfflineManifestReader(sys.argv[1], validate_files=True):
    raw = load_feature_file(ref.feature_store_uri[len("file://"):])
    sample = normalize_offline_sample(raw, 10_000)
    print(json.dumps({name: value.float().tolist() for name, value in sample.items()}))
"""


def exported(drafted: Drafted, dest: Path) -> Exported:
    return export(str(drafted.path), dest, to="specforge", taps=",".join(TAPS))


def test_every_context_is_a_file_of_tensors(
    drafted: Drafted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specforge, "_GROUP", 4)
    made = exported(drafted, tmp_path / "dest")
    assert made.rows == sum(map(len, drafted.tokens))
    wanted = zip(drafted.layers(*TAPS), drafted.tokens, drafted.masks, strict=True)
    for number, (rows, tokens, mask) in enumerate(wanted):
        first = number // 4 * 4
        path = tmp_path / "dest" / f"rows_{first}-{first + 4}" / f"data_{number}.ckpt"
        found = torch.load(path, weights_only=True, mmap=True)
        assert found["input_ids"].dtype == found["loss_mask"].dtype == torch.int64
        assert found["input_ids"].tolist() == tokens.tolist()
        assert found["loss_mask"].tolist() == mask.tolist()
        wide = rows.astype(np.float32)
        aux = found["aux_hidden_state"]
        assert aux.dtype == torch.bfloat16 and aux.shape == (1, len(tokens), 3 * 32)
        assert aux[0].float().tolist() == wide[:, :3].reshape(len(tokens), -1).tolist()
        assert found["hidden_state"].float().tolist() == [wide[:, 3].tolist()]


def test_specforges_own_reader_takes_every_sample(drafted: Drafted, tmp_path: Path) -> None:
    python = os.environ.get("SPILE_SPECFORGE_PYTHON")
    if not python:
        pytest.skip("SPILE_SPECFORGE_PYTHON does not name an interpreter that has specforge")
    exported(drafted, tmp_path / "dest")
    read = subprocess.run(
        [python, "-c", READS, str(tmp_path / "dest")],
        capture_output=True, text=True, check=True, env={**tiny.environment(), "PYTHONPATH": ""},
    )  # fmt: skip
    samples = [json.loads(line) for line in read.stdout.splitlines() if line.startswith("{")]
    wanted = zip(drafted.layers(*TAPS), drafted.tokens, drafted.masks, strict=True)
    for sample, (rows, tokens, mask) in zip(samples, wanted, strict=True):
        wide = rows.astype(np.float32)
        assert sample["hidden_state"] == [wide[:, :3].reshape(len(tokens), -1).tolist()]
        assert sample["target"] == [wide[:, 3].tolist()]
        assert sample["input_ids"] == [tokens.tolist()]
        assert sample["loss_mask"] == [[*mask[:-1].tolist(), 0]]  # its reader drops the last
