"""The job of rows that another engine made: what is settled, refused, and found again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spile.core.config import Recipe
from spile.core.errors import ConfigError, DriftError
from spile.plan.ingested import ingested_job, stored_job
from spile.plan.job import ExtractionJob
from support import tiny


def settled(model: Path, **options: Any) -> ExtractionJob:
    recipe = Recipe(**{"model": str(model), "taps": "resid_post:1,embed", **options})
    return ingested_job(recipe, rows_by="an engine", corpus="here", identity="those")


def test_what_is_not_given_is_settled(model: Path) -> None:
    job = settled(model)
    recipe = job.recipe
    assert recipe.taps == ("embed", "resid_post.1") == tuple(job.table.taps)
    assert (recipe.rows_by, recipe.corpus, recipe.corpus_source) == (
        "an engine",
        ("those",),
        "here",
    )
    assert (recipe.seq_len, recipe.pack) == (tiny.CONFIG["max_position_embeddings"], "none")
    assert recipe.unit_tokens == (256 << 20) // (2 * 32 * 2)
    assert recipe.store_dtype == recipe.compute_dtype == "bfloat16"
    assert job.table.fingerprint == recipe.fingerprint()
    assert type(recipe).from_json(recipe.to_json()) == recipe


def test_engine_and_identity_are_fingerprinted_and_the_place_is_not(model: Path) -> None:
    recipe = Recipe(model=str(model), taps="embed")
    told = {"rows_by": "an engine", "corpus": "here", "identity": "those"}
    first = ingested_job(recipe, **told).table.fingerprint
    assert ingested_job(recipe, **{**told, "corpus": "there"}).table.fingerprint == first
    for name in ("rows_by", "identity"):
        assert ingested_job(recipe, **{**told, name: "other"}).table.fingerprint != first


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"taps": "attn_pattern:0"}, "rows of attention cannot be ingested"),
        ({"store_dtype": "int8"}, "--store-dtype int8"),
        ({"seq_len": 500}, "--seq-len must be at most 128"),
        ({"taps": "resid_post:7"}, "layer 7 does not exist"),
    ],
)
def test_what_cannot_be_ingested_is_refused(
    model: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        settled(model, **options)


def test_a_stored_job_needs_the_same_model(model: Path, tmp_path: Path) -> None:
    table = settled(model).table
    again = stored_job(Recipe(), table, "out")
    assert again.recipe == table.recipe and [tap.name for tap in again.taps] == [*table.taps]
    other = tiny.write_model(tmp_path / "other", seed=5)
    with pytest.raises(DriftError, match="model weights"):
        stored_job(Recipe(model=str(other)), table, "out")
    moved = replace(table, recipe=replace(table.recipe, model_source="/nowhere"))
    assert stored_job(Recipe(model=str(model)), moved, "out").recipe == moved.recipe
