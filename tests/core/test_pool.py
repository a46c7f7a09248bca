"""`--pool` as it is spelled, and what follows from it."""

import pytest

from spile.core.errors import ConfigError
from spile.core.pool import (
    COVARIANCE,
    MOMENTS,
    Pool,
    is_reduced,
    label_columns,
    reduced_by,
    reduces,
)


@pytest.mark.parametrize(("text", "pool"), [
    ("mean", Pool("mean", "document")),
    ("max:turn", Pool("max", "turn")),
    ("last:assistant", Pool("last", "assistant")),
    ("first:spans", Pool("first", "spans")),
    ("mean:a:b", Pool("mean", "a:b")),
])  # fmt: skip
def test_it_reads_back_as_it_is_spelled(text: str, pool: Pool) -> None:
    assert Pool.parse(text) == pool and str(pool) == text


def test_a_document_need_not_be_named() -> None:
    assert str(Pool.parse("mean:document")) == "mean"


@pytest.mark.parametrize("text", ["", "median", "mean:", ":turn", "Mean"])
def test_other_spellings_are_refused_with_those_that_exist(text: str) -> None:
    with pytest.raises(ConfigError, match="--pool must be mean, max, last or first"):
        Pool.parse(text)


def test_only_unknown_names_are_columns() -> None:
    named = {over: Pool("mean", over).column for over in ("document", "turn", "user", "template")}
    assert named == {"document": None, "turn": None, "user": None, "template": "template"}
    assert Pool("mean", "turn").by_speaker and Pool("mean", "tool").by_speaker
    assert not Pool("mean", "spans").by_speaker


def test_only_mean_and_max_compute_values() -> None:
    assert [reduces(f"{by}:turn") for by in ("mean", "max", "last", "first")] == [
        "mean", "max", None, None
    ]  # fmt: skip
    assert reduces(None) is None


@pytest.mark.parametrize(("given", "text", "pool"), [
    (("mean", "label"), "reduce mean by label", Pool("mean", labels=("label",))),
    (("count,mean", None), "reduce mean", Pool("mean", labels=())),
    (("var", "label, role"), "reduce mean,var by label,role",
     Pool(MOMENTS, labels=("label", "role"))),
    (("mean,cov", "label"), "reduce mean,cov by label", Pool(COVARIANCE, labels=("label",))),
    (("var,cov", None), "reduce mean,cov", Pool(COVARIANCE, labels=())),
    (("moments", None), "reduce mean,cov", Pool(COVARIANCE, labels=())),
    (("cov:resid_post.3", "label"), "reduce mean,cov:resid_post.3 by label",
     Pool(COVARIANCE, labels=("label",), beside="resid_post.3")),
    (("mean", "a b"), "reduce mean by a b", Pool("mean", labels=("a b",))),
])  # fmt: skip
def test_reduce_is_a_pool_whose_spans_have_labels(
    given: tuple[str, str | None], text: str, pool: Pool
) -> None:
    assert reduced_by(*given) == text
    assert Pool.parse(text) == pool and str(pool) == text
    assert is_reduced(text) and reduces(text) == pool.by and pool.column is None
    assert label_columns(text) == tuple(name for name in pool.labels or () if name != "role")
    assert pool.by_speaker == ("role" in (pool.labels or ()))
    assert not is_reduced("mean") and not is_reduced(None) and label_columns("mean:turn") == ()
