"""speculators' files: opened by safetensors and `datasets`, ingested, and read by its own code."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from interop.export.conftest import STREAMS, Drafted
from spile.interop.export import export
from spile.interop.ingest import ingest
from support import tiny

READS = """
import json, sys, types
import torch
from speculators.train.data import ArrowDataset
data = ArrowDataset(10_000, sys.argv[1], on_missing="raise")
for number in range(len(data)):
    sample = data[number]
    print(json.dumps({name: value.float().tolist() for name, value in sample.items()}))
"""


def test_every_context_is_a_file_beside_its_ids_and_mask(drafted: Drafted, tmp_path: Path) -> None:
    taps = ",".join(STREAMS)
    made = export(str(drafted.path), tmp_path / "dest", to="speculators", taps=taps)
    assert made.rows == sum(map(len, drafted.tokens)) and made.taps["embed"] == "bfloat16"
    wanted = zip(drafted.layers(*STREAMS), drafted.tokens, strict=True)
    for number, (rows, tokens) in enumerate(wanted):
        found = load_file(tmp_path / "dest" / "hidden_states" / f"hs_{number}.safetensors")
        assert found["hidden_states"].dtype == torch.bfloat16
        assert found["hidden_states"].float().tolist() == rows.astype(np.float32).tolist()
        assert found["token_ids"].dtype == torch.int64
        assert found["token_ids"].tolist() == tokens.tolist()


def test_datasets_opens_the_table_as_tensors(drafted: Drafted, tmp_path: Path) -> None:
    datasets: Any = pytest.importorskip("datasets", reason="datasets is not installed")
    export(str(drafted.path), tmp_path / "dest", to="speculators", taps=",".join(STREAMS))
    table = datasets.load_from_disk(str(tmp_path / "dest"))
    assert list(table.with_format(None)["seq_len"]) == [len(ids) for ids in drafted.tokens]
    for row, tokens, mask in zip(table, drafted.tokens, drafted.masks, strict=True):
        assert torch.equal(row["input_ids"], torch.from_numpy(tokens))
        assert row["loss_mask"].tolist() == mask.tolist()


def test_what_was_exported_is_ingested_the_same(
    drafted: Drafted, model: Path, tmp_path: Path
) -> None:
    export(str(drafted.path), tmp_path / "dest", to="speculators", taps=",".join(STREAMS))
    made = ingest(
        tmp_path / "dest" / "hidden_states", tmp_path / "out", model=str(model), taps=STREAMS
    )
    assert made.documents == len(drafted.tokens) and made.dtype == "bfloat16"
    again = export(str(tmp_path / "out"), tmp_path / "again", to="speculators")
    assert again.rows == made.rows
    for number in range(len(drafted.tokens)):
        path = Path("hidden_states") / f"hs_{number}.safetensors"
        assert (tmp_path / "again" / path).read_bytes() == (tmp_path / "dest" / path).read_bytes()


def test_speculators_own_reader_takes_every_sample(drafted: Drafted, tmp_path: Path) -> None:
    python = os.environ.get("SPILE_SPECULATORS_PYTHON")
    if not python:
        pytest.skip("SPILE_SPECULATORS_PYTHON does not name an interpreter that has speculators")
    export(str(drafted.path), tmp_path / "dest", to="speculators", taps=",".join(STREAMS))
    read = subprocess.run(
        [python, "-c", READS, str(tmp_path / "dest")],
        capture_output=True, text=True, check=True, env={**tiny.environment(), "PYTHONPATH": ""},
    )  # fmt: skip
    samples = [json.loads(line) for line in read.stdout.splitlines() if line.startswith("{")]
    wanted = zip(drafted.layers(*STREAMS), drafted.tokens, drafted.masks, strict=True)
    for sample, (rows, tokens, mask) in zip(samples, wanted, strict=True):
        wide = rows.astype(np.float32)
        assert sample["hidden_states"] == wide[:, :-1].reshape(len(tokens), -1).tolist()
        assert sample["verifier_last_hidden_states"] == wide[:, -1].tolist()
        assert sample["input_ids"] == tokens.tolist() and sample["loss_mask"] == mask.tolist()
