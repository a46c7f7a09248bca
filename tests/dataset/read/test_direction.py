"""Directions between labelled documents: as numpy computes them from all rows at once."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError, DataError
from spile.dataset.format import TapInfo
from spile.dataset.maintain.shuffle import shuffle
from spile.dataset.read import direction as module
from spile.dataset.read.dataset import Dataset
from spile.objects import LocalObjects
from support import stored, web_page
from support.marks import some

TAP = "resid_post.0"
KEPT = {"keep": ("label", "mixed")}


def plain(path: Path) -> Path:
    return stored.copied(path / "plain", **KEPT).path


def shuffled(path: Path) -> Path:
    shuffle(LocalObjects(plain(path)), LocalObjects(path / "shuffled"), seed=3)
    return path / "shuffled"


def drawn_in_eight_bits(path: Path) -> Path:
    options = {"taps": stored.SCALED, "first_docs": [8, 5, 3, 2, 0]}
    return stored.copied(path / "bits", **options, **KEPT).path


def parity(ds: Dataset) -> np.ndarray:
    """A label of each document with rows: "odd", "even", and "other" for one of them."""
    docs = ds.columns("doc")
    return np.where(docs == 3, "other", np.where(docs % 2, "odd", "even"))


def samples(
    ds: Dataset, tap: str, over: str, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what is averaged, in float64, by numpy over all rows: of "odd", and of "even"."""
    rows = ds.read(tap, 0, len(ds)).astype(np.float64).reshape(len(ds), -1)
    doc, labels = ds.index(0, len(ds))["doc"], dict(zip(ds.columns("doc"), parity(ds), strict=True))
    found: dict[str, list[np.ndarray]] = {"odd": [], "even": [], "other": []}
    for each in np.unique(doc[mask]):
        mine = rows[mask & (doc == each)]
        found[labels[each]] += [mine.mean(axis=0)] if over == "documents" else [*mine]
    odd, even = np.array(found["odd"]), np.array(found["even"])
    return odd, even, odd.mean(axis=0) - even.mean(axis=0)


@pytest.mark.parametrize("make", some([plain, shuffled, drawn_in_eight_bits], shuffled))
@pytest.mark.parametrize("over", ["documents", "tokens"])
def test_a_direction_is_the_difference_of_means(
    make: Callable[[Path], Path], over: module.MeanOver, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "_WINDOW_BYTES", 30 * 24)  # a few rows at a time
    monkeypatch.setattr(module, "_SCANNED", 60)
    ds = spile.open(make(tmp_path))
    index = ds.index(0, len(ds))
    where, mask = "pos >= 1 and doc != 1", (index["pos"] >= 1) & (index["doc"] != 1)
    for tap in (tap for tap in ds.taps if "ids" not in tap):
        for chosen, kept in ((None, np.ones(len(ds), bool)), (where, mask)):
            options = {"by": parity(ds), "over": over, "where": chosen}
            odd, even, wanted = samples(ds, tap, over, kept)
            found = spile.direction(ds, "odd", "even", tap, **options)
            assert (found.values.dtype, found.values.shape) == (np.float32, ds.shape(tap))
            np.testing.assert_allclose(found.values.reshape(-1), wanted, rtol=1e-6, atol=1e-6)
            assert found.shrinkage is None
            if over == "tokens":
                assert found.rows == {"odd": len(odd), "even": len(even)}
            else:
                assert found.documents == {"odd": len(odd), "even": len(even)}
            lda = spile.direction(ds, "odd", "even", tap, **options, whiten=True)
            expected, shrinkage = discriminant(odd, even)
            assert lda.shrinkage == pytest.approx(shrinkage, rel=1e-9)
            np.testing.assert_allclose(lda.values.reshape(-1), expected, rtol=1e-5, atol=1e-6)


def discriminant(odd: np.ndarray, even: np.ndarray) -> tuple[np.ndarray, float]:
    """LDA with the covariance of Ledoit and Wolf, sample by sample, as their paper defines it."""
    difference = odd.mean(axis=0) - even.mean(axis=0)
    centred = np.concatenate([odd - odd.mean(axis=0), even - even.mean(axis=0)])
    count, width = centred.shape
    covariance = sum(np.outer(x, x) for x in centred) / count
    target = np.eye(width) * np.trace(covariance) / width
    apart = np.square(covariance - target).sum()
    scatter = sum(np.square(np.outer(x, x) - covariance).sum() for x in centred) / count**2
    shrinkage = min(scatter, apart) / apart if apart else 1.0
    shrunk = (1 - shrinkage) * covariance + shrinkage * target
    found = np.linalg.inv(shrunk) @ difference
    return found * (found @ difference) / (found @ found), shrinkage


def test_whitening_separates_what_varies_along_the_difference(tmp_path: Path) -> None:
    """Both groups vary far more along the first channel than they differ in it."""

    def rows_of(rng: np.random.Generator, count: int, info: TapInfo) -> np.ndarray:
        rows = rng.standard_normal((count, *info.shape)).astype(np.float32)
        rows[:, 0] *= 30
        rows += np.repeat([[3.0, 1.0], [0.0, 0.0]], [count // 2, count - count // 2], axis=0)
        return rows

    made = stored.build(tmp_path / "out", ((50,) * 4, (50,) * 4), taps={TAP: 2}, rows_of=rows_of)
    ds = spile.open(made.path)
    first = ds.index(0, len(ds))["doc"] < 4
    rows = ds.read(TAP, 0, len(ds))

    def ratio(whiten: bool) -> float:
        """How far the means lie apart along the direction, in deviations."""
        labels = ds.columns("doc") < 4
        vector = spile.direction(ds, True, False, TAP, by=labels, over="tokens", whiten=whiten)
        along = rows @ vector
        return (along[first].mean() - along[~first].mean()) / along[first].std()

    assert ratio(True) > 0.8 > 0.3 > ratio(False) > 0


def test_a_pooled_row_counts_as_its_tokens_if_it_is_their_mean(tmp_path: Path) -> None:
    """Of each document two rows are stored, which stand for different numbers of tokens."""
    texts = [[web_page.tokens("x" * (6 + 3 * n)) for n in range(8)]]
    labels = np.array(["odd", "even"] * 4)

    def means(pool: str, over: str) -> tuple[Dataset, np.ndarray]:
        out = tmp_path / f"{pool}-{over}".replace(":", "-")
        web_page.build(out, texts, [[""] * 8], pool=pool)
        ds = spile.open(out)
        index, rows = ds.index(0, len(ds)), ds.read(TAP).astype(np.float64)
        weights = index["count"].astype(float) if pool.startswith("mean") else np.ones(len(index))
        assert {*index["count"].tolist()} > {3, 4, 6} and len(index) == 16
        if over == "documents":
            weights /= np.bincount(index["doc"], weights)[index["doc"]]
        each = [labels[index["doc"]] == label for label in ("odd", "even")]
        found = [weights[side] @ rows[side] / weights[side].sum() for side in each]
        return ds, found[0] - found[1]

    for pool, over in (("mean:turn", "documents"), ("mean:turn", "tokens"), ("max", "documents")):
        ds, wanted = means(pool, over)
        found = spile.direction(ds, "odd", "even", TAP, by=labels, over=over)
        np.testing.assert_allclose(found.values, wanted, rtol=1e-5, atol=1e-6)
        if over == "documents":
            lda = spile.direction(ds, "odd", "even", TAP, by=labels, whiten=True)
            assert lda.shrinkage is not None and 0 < lda.shrinkage < 1
    for options, told in (({"whiten": True}, "covariance"), ({}, "mean")):
        with pytest.raises(ConfigError, match=f"made with --pool .* so that tokens have no {told}"):
            pooled = spile.open(tmp_path / ("mean-turn-tokens" if options else "max-documents"))
            spile.direction(pooled, "odd", "even", TAP, by=labels, over="tokens", **options)


def test_numpy_takes_a_direction_as_an_array(tmp_path: Path) -> None:
    ds = spile.open(plain(tmp_path))
    found = spile.direction(ds, "odd", "even", TAP, by=parity(ds))
    np.save(tmp_path / "direction.npy", found)
    saved = np.load(tmp_path / "direction.npy")
    assert saved.dtype == np.float32 and np.array_equal(saved, found.values)
    assert np.array_equal(4 * found, 4 * saved) and type(4 * found) is np.ndarray
    assert np.array_equal(ds.read(TAP, 0, 9) @ found, ds.read(TAP, 0, 9) @ saved)
    assert np.asarray(found, np.float64).dtype == np.float64 and len(found) == 6
    steered = spile.added(found)(jnp.ones((1, 2, 6), jnp.float32))
    assert np.array_equal(steered[0, 1], 1 + found.values)
    assert repr(found).startswith(f"<spile direction: {TAP}, 'odd' (3 documents, ")
    assert "minus 'even' (4 documents, " in repr(found)


def test_the_column_is_found_if_one_has_both_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = spile.open(plain(tmp_path))
    by_name = spile.direction(ds, "label-1", "label-5", TAP, by="label")
    assert np.array_equal(spile.direction(ds, "label-1", "label-5", TAP).values, by_name.values)
    assert by_name.documents == {"label-1": 1, "label-5": 1}
    assert spile.direction(ds, "mixed-3", "mixed-8", TAP).documents == {"mixed-3": 1, "mixed-8": 1}
    with pytest.raises(ConfigError, match="no kept column has both 'a' and 'b'; label has 'label-"):
        spile.direction(ds, "a", "b", TAP)
    none = spile.open(stored.copied(tmp_path / "none").path)
    with pytest.raises(ConfigError, match="no column was kept: extract with --keep COLUMN, or"):
        spile.direction(none, "a", "b", TAP)
    monkeypatch.setitem(web_page.KEPT, "again", web_page.KEPT["parity"])
    texts = [[web_page.tokens(text) for text in ("one", "two", "three")]]
    web_page.build(tmp_path / "two", texts, [["", "", ""]], keep=("parity", "again"))
    with pytest.raises(ConfigError, match="parity, again have both 'odd' and 'even'; name"):
        spile.direction(spile.open(tmp_path / "two"), "odd", "even", TAP)


def test_labels_and_taps_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    ds = spile.open(plain(tmp_path))
    odd, labels = ("odd", "even", TAP), parity(ds)
    for message, given, options in [
        ("no document has the label 'old'; there are 'even' .4., 'odd' .3., 'other' .1.",
         ("odd", "old", TAP), {"by": labels}),
        ("no document has label 'x'; there are 'label-0' .1., ", ("label-0", "x", TAP),
         {"by": "label"}),
        ("no column 'topic' of documents", odd, {"by": "topic"}),
        (r"by: \[2\] labels for 8 documents with rows", odd, {"by": ["odd", "even"]}),
        ("both labels are 'odd'", ("odd", "odd", TAP), {"by": labels}),
        ("over 'documents' or 'tokens', not over 'rows'", odd, {"by": labels, "over": "rows"}),
        ("no tap 'resid_post.7'", ("odd", "even", "resid_post.7"), {"by": labels}),
        (r"where 'doc in \(1, 9\)': no row of .* the label 'even'", odd,
         {"by": labels, "where": "doc in (1, 9)"}),
        ("whiten needs a group with two documents that differ", ("label-0", "label-1", TAP),
         {"whiten": True}),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            spile.direction(ds, *given, **options)
    ranks = spile.open(stored.copied(tmp_path / "s", taps=stored.SHAPED).path)
    with pytest.raises(ConfigError, match="expert_ids.1: place k of a row is its k-th largest"):
        spile.direction(ranks, "odd", "even", "expert_ids.1", by=parity(ranks))


def test_rows_without_a_mean_or_a_difference_are_refused(tmp_path: Path) -> None:
    def build(name: str, value: float) -> Dataset:
        made = stored.build(
            tmp_path / name, rows_of=lambda _, n, info: np.full((n, *info.shape), value, np.float32)
        )
        return spile.open(made.path)

    with np.errstate(invalid="ignore"):
        broken, equal = build("broken", np.inf), build("equal", 2.0)
    with pytest.raises(DataError, match="resid_post.0: rows hold NaN or infinity"):
        spile.direction(broken, "odd", "even", TAP, by=parity(broken))
    with pytest.raises(ConfigError, match="the means of 'odd' and 'even' are equal"):
        spile.direction(equal, "odd", "even", TAP, by=parity(equal))
