"""The plan against the outcome."""

from pathlib import Path
from typing import Any

import pytest

import spile
from spile.config import Recipe, Runtime
from spile.engine.estimate import batch_rows, estimate, refuse_if_too_large
from spile.engine.resolve import Job, resolve
from spile.errors import ConfigError
from spile.objects import open_objects
from spile.store.ledger import Ledger


def make_job(model: Path, corpus: Path, out: Path, **fields: Any) -> Job:
    recipe = Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:all,logits", seq_len=64, **fields
    )
    return resolve(recipe, Ledger(open_objects(str(out))), "cpu")


def test_the_estimate_meets_the_outcome(model: Path, corpus: Path, tmp_path: Path) -> None:
    job = make_job(model, corpus, tmp_path / "out")
    cost = estimate(job, Runtime(), "cpu", done=set(), free_bytes=None)
    outcome = spile.extract(
        Recipe(model=str(model), corpus=str(corpus), taps="resid_post:all,logits", seq_len=64),
        str(tmp_path / "out"),
    )
    assert cost.documents == outcome.documents == 40
    assert abs(cost.tokens - outcome.rows) <= 0.05 * outcome.rows
    assert abs(cost.total_bytes - outcome.bytes) <= 0.15 * outcome.bytes
    per_row = {tap: size / cost.tokens for tap, size in cost.bytes_per_tap.items()}
    assert per_row["logits"] == 260 * 2
    assert per_row["resid_post.0"] == 32 * 2


def test_weights_are_counted_exactly(model: Path, corpus: Path, tmp_path: Path) -> None:
    job = make_job(model, corpus, tmp_path / "out")
    held = sum(info.stop - info.start for _, info in job.checkpoint.tensors.values())
    cost = estimate(job, Runtime(), "cpu", done=set(), free_bytes=None)
    assert cost.weights_bytes == held


def test_a_disk_too_small_is_refused_and_what_is_done_counts(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    job = make_job(model, corpus, tmp_path / "out", unit_tokens=500)
    fresh = estimate(job, Runtime(), "cpu", done=set(), free_bytes=10)
    with pytest.raises(ConfigError, match="--ignore-space"):
        refuse_if_too_large(fresh, "out")
    everything = {unit.id for unit in job.units}
    finished = estimate(job, Runtime(), "cpu", done=everything, free_bytes=10)
    refuse_if_too_large(finished, "out")


def test_a_step_is_never_larger_than_a_unit(model: Path, corpus: Path, tmp_path: Path) -> None:
    job = make_job(model, corpus, tmp_path / "out", unit_tokens=100)
    largest = max(unit.tokens for unit in job.units)
    rows = batch_rows(job, Runtime(batch_tokens=1_000_000), "cpu")
    assert rows == -(-largest // 64)
    assert batch_rows(job, Runtime(batch_tokens=1), "cpu") == 1
