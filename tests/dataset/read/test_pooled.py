"""One row for each document, in the order of the corpus, however its rows are stored."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.core.expressions import RowFilter
from spile.dataset.format import TapInfo
from spile.dataset.maintain.assemble import merge
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.shuffle import shuffle
from spile.dataset.read import pooled as module
from spile.dataset.read.dataset import Dataset
from spile.objects import LocalObjects
from support import stored
from support.marks import some

KEPT = {"keep": ("label",)}
ADDED = "attn_out.1"


def drawn_order(path: Path) -> Path:
    """The units of a corpus of eleven documents, the last ones first."""
    return stored.copied(path / "drawn", first_docs=[8, 5, 3, 2, 0], **KEPT).path


def grown(path: Path) -> Path:
    return stored.copied(path / "grown", grown=(2, 3), **KEPT).path


def with_a_pass(path: Path) -> Path:
    made = stored.copied(path / "added", **KEPT)
    stored.add_pass(made, {ADDED: 5})
    return made.path


def merged(path: Path) -> Path:
    one = stored.copied(path / "one", **KEPT)
    other = stored.copied(
        path / "two", ((7, 0), (9, 2, 11)), corpus=("34-cd",), corpus_source="/c/other", **KEPT
    )
    merge([other.objects, one.objects], LocalObjects(path / "merged"))
    return path / "merged"


def compacted(path: Path) -> Path:
    compact(LocalObjects(drawn_order(path)), LocalObjects(path / "compacted"))
    return path / "compacted"


def shuffled(path: Path) -> Path:
    shuffle(LocalObjects(with_a_pass(path)), LocalObjects(path / "shuffled"), seed=3)
    return path / "shuffled"


def in_eight_bits(path: Path) -> Path:
    return stored.copied(path / "bits", taps=stored.SCALED, compress=True, **KEPT).path


def expected(ds: Dataset, tap: str, by: str, mask: np.ndarray) -> dict[int, np.ndarray]:
    """The pooled row of each document, by numpy over all rows."""
    index = ds.index(0, ds.num_tokens)
    rows = ds.read(tap, 0, ds.num_tokens).astype(np.float64)
    found: dict[int, np.ndarray] = {}
    for doc in np.unique(index["doc"][mask]).tolist():
        (mine,) = np.nonzero(mask & (index["doc"] == doc))
        mine = mine[np.argsort(index["offset"][mine])]
        found[doc] = {
            "mean": lambda rows: rows.mean(axis=0),
            "max": lambda rows: rows.max(axis=0),
            "first": lambda rows: rows[0],
            "last": lambda rows: rows[-1],
        }[by](rows[mine])  # fmt: skip
    return found


@pytest.mark.parametrize(
    "make",
    some(
        [drawn_order, grown, with_a_pass, merged, compacted, shuffled, in_eight_bits],
        grown,
        with_a_pass,
        shuffled,
    ),
)
def test_each_document_is_pooled_in_the_order_of_the_corpus(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WINDOW_BYTES", 40 * 24)  # a few rows at a time
    monkeypatch.setattr(module, "_SCANNED", 60)
    ds = spile.open(make(tmp_path))
    asked = [(tap, by) for tap in ds.taps for by in get_args(module.PoolBy)]
    asked = [(tap, by) for tap, by in asked if "ids" not in tap or by in ("first", "last")]
    for where in (None, "pos >= 1 and not end"):
        index = ds.index(0, len(ds))
        mask = RowFilter(where, None).mask(index)
        for tap, by in asked:
            wanted = expected(ds, tap, by, mask)
            found = ds.pooled(tap, by, where=where)
            assert found.doc.tolist() == sorted(wanted)
            assert (found.rows.dtype, found.rows.shape[1:]) == (np.float32, ds.shape(tap))
            rows = np.array([wanted[doc] for doc in found.doc.tolist()], np.float32)
            np.testing.assert_allclose(found.rows, rows, rtol=1e-6, atol=1e-6)
            chosen = index["doc"][mask]
            assert found.counts.tolist() == [np.count_nonzero(chosen == d) for d in found.doc]


def test_columns_come_beside_the_rows(tmp_path: Path) -> None:
    ds = spile.open(drawn_order(tmp_path))
    last = ds.pooled("mlp_out.1", "last")
    assert last["label"].tolist() == [f"label-{doc}" for doc in last.doc]
    assert last["label"].tolist() == ds.columns("label").tolist()
    few = ds.pooled("mlp_out.1", where="label in ('label-9', 'label-1', 'label-4')")
    assert 1 < len(few) < len(last)
    assert few["label"].tolist() == [f"label-{doc}" for doc in few.doc]
    assert np.array_equal(np.asarray(few), few.rows)
    with pytest.raises(ConfigError, match="no column 'topic' of documents; there are doc"):
        few["topic"]
    with pytest.raises(ConfigError, match=r"columns by name: .*label; .* pooled.rows\[0\]"):
        few[0]  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="not iterable"):
        iter(few)


def test_documents_without_rows_are_left_out(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", where="pos >= 2", every=2, **KEPT)
    ds = spile.open(made.path)
    read = {row["doc"] for row in ds.documents().to_pylist() if row["tokens"]}
    kept = ds.pooled("mlp_out.1", "last")
    assert {5, 9} == read - {*kept.doc.tolist()}
    assert not np.isnan(kept.rows).any()
    with pytest.raises(ConfigError, match="where 'pos == 7': matches no row of"):
        ds.pooled("mlp_out.1", where="pos == 7")
    nothing = spile.open(stored.copied(tmp_path / "none", commit=(), **KEPT).path, partial=True)
    assert nothing.pooled("mlp_out.1").rows.shape == (0, 3)


def test_sums_are_in_float64(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", ((4000,),), seq_len=4000, taps={"embed": 1})
    ds = spile.open(made.path)
    rows = ds.read("embed", 0, len(ds)).astype(np.float64)
    assert ds.pooled("embed").rows[0, 0] == np.float32(rows.mean())


def test_ids_and_latents_by_rank_have_neither_mean_nor_maximum(tmp_path: Path) -> None:
    ds = spile.open(stored.copied(tmp_path / "l", taps=stored.LATENTS, **stored.ENCODED).path)
    other = spile.open(stored.copied(tmp_path / "s", taps=stored.SHAPED).path)
    for dataset, tap in ((ds, "mlp_out_latents.1"), (other, "expert_ids.1")):
        for by in ("mean", "max"):
            with pytest.raises(ConfigError, match=f"{tap}: place k of a row .* pool by 'first'"):
                dataset.pooled(tap, by)
        assert len(dataset.pooled(tap, "last")) == 8
    ranks = {"next_rank": TapInfo((), "int32")}  # a rank alone is a number like others
    ranked = spile.open(stored.copied(tmp_path / "r", taps=ranks).path)
    rows, docs = ranked.read("next_rank").astype(np.float64), ranked.index(0, len(ranked))["doc"]
    found = ranked.pooled("next_rank", "mean")
    wanted = [rows[docs == doc].mean() for doc in found.doc]
    np.testing.assert_allclose(found.rows, wanted, rtol=1e-6)
    with pytest.raises(ConfigError, match="'mean', 'max', 'first' or 'last', not by 'sum'"):
        ds.pooled("resid_post.0", "sum")  # pyright: ignore[reportArgumentType]


def test_pooled_rows_say_what_they_are(tmp_path: Path) -> None:
    ds = spile.open(grown(tmp_path))
    told = repr(ds.pooled("mlp_out.1", "last", where="end"))
    assert told.startswith("<spile pooled rows: last of mlp_out.1 where end, 8 x 3 in float32; ")
    assert told.endswith("label>")
