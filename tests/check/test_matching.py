"""Rows that an engine calls by a wrong name: `check` says of which layer or token they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.check.compare import CheckReport, check
from spile.cli.model import check_text
from spile.core.config import Recipe
from spile.core.errors import DriftError
from spile.interop.ingest.writer import Writer
from support import tiny

TAPS = ("resid_post.0", "resid_post.1")
Rows = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def computed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Rows]]:
    """The tokens of documents, and the rows of every stream in float32."""
    folder = tmp_path_factory.mktemp("computed")
    corpus = tiny.write_corpus(folder / "docs.jsonl", 8, mean=1.6)
    every = "resid_pre:0,resid_post:all,final_norm"
    recipe = Recipe(model=str(model), corpus=str(corpus), taps=every,
                    compute_dtype="float32", store_dtype="float32")  # fmt: skip
    spile.extract(recipe, str(folder / "out"))
    ds = spile.open(str(folder / "out"))
    documents = [ds.document(number) for number in range(ds.num_documents)]
    return [
        (each.index["token_id"].copy(), {tap: each.read(tap).copy() for tap in ds.taps})
        for each in documents
    ]


def checked(
    model: Path,
    out: Path,
    computed: list[tuple[Any, Rows]],
    of: Callable[[Rows], Rows],
    **options: Any,
) -> CheckReport:
    """Check a dataset of the rows that an engine makes of the right ones."""
    told: dict[str, Any] = {"taps": TAPS, "rows_by": "an engine", "compute_dtype": "float32"}
    with Writer(out, model=str(model), **{**told, **options}) as made:
        for tokens, rows in computed:
            assert made.add(tokens, of(rows)) is None
    return check(str(out), samples=3)


def right(rows: Rows) -> Rows:
    return {tap: rows[tap] for tap in TAPS}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_right_rows_agree(
    model: Path, tmp_path: Path, computed: list[tuple[Any, Rows]], dtype: str
) -> None:
    report = checked(model, tmp_path / "out", computed, right, store_dtype=dtype)
    assert report.ok and {tap.really for tap in report.taps.values()} == {None}
    assert report.documents == 3
    assert "every tap agrees" in check_text("out", report)


def test_a_layer_that_is_off_by_one_is_named(
    model: Path, tmp_path: Path, computed: list[tuple[Any, Rows]]
) -> None:
    def before(rows: Rows) -> Rows:
        return {TAPS[0]: rows["resid_pre.0"], TAPS[1]: rows["resid_post.0"]}

    report = checked(model, tmp_path / "before", computed, before)
    assert not report.ok
    assert report.taps[TAPS[0]].really in ("resid_pre.0", "embed")  # which are the same here
    assert report.taps[TAPS[1]].really in ("resid_post.0", "resid_pre.1")
    told = check_text("out", report)
    assert f"<- too far: these are rows of {report.taps[TAPS[1]].really}\n" in told

    def after(rows: Rows) -> Rows:
        return {TAPS[0]: rows["resid_post.2"], TAPS[1]: rows["final_norm"]}

    report = checked(model, tmp_path / "after", computed, after, store_dtype="bfloat16")
    assert [tap.really for tap in report.taps.values()] == ["resid_post.2", "final_norm"]


def test_rows_of_another_token_are_named_and_wrong_ones_are_not(
    model: Path, tmp_path: Path, computed: list[tuple[Any, Rows]]
) -> None:
    rng = np.random.default_rng(0)

    def moved(rows: Rows) -> Rows:
        noise = rng.standard_normal(rows[TAPS[1]].shape).astype(np.float32)
        return {TAPS[0]: np.roll(rows[TAPS[0]], 1, axis=0), TAPS[1]: noise}

    report = checked(model, tmp_path / "out", computed, moved)
    assert report.taps[TAPS[0]].really == "resid_post.0 of the token before"
    assert report.taps[TAPS[1]].really is None and not report.taps[TAPS[1]].ok
    back = checked(
        model,
        tmp_path / "back",
        computed,
        lambda rows: {tap: np.roll(rows[tap], -1, axis=0) for tap in TAPS},
    )
    assert back.taps[TAPS[0]].really == "resid_post.0 of the token after"


def test_an_engine_with_other_weights_is_caught_and_not_named(
    model: Path, tmp_path: Path, computed: list[tuple[Any, Rows]]
) -> None:
    other = tiny.write_model(tmp_path / "other", seed=3)
    report = checked(other, tmp_path / "out", computed, right)
    assert not report.ok and {tap.really for tap in report.taps.values()} == {None}
    with pytest.raises(DriftError, match="model weights"):
        check(str(tmp_path / "out"), recipe=Recipe(model=str(model)))
