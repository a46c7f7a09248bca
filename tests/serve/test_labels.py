"""Labels: columns worth choosing, directions between two values, probes on held-out documents."""

from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.dataset.read.dataset import Dataset
from spile.serve import labels as module
from spile.serve.labels import accuracies, columns_of, direction_between, mean_rows
from support import web_page

TAPS = ["resid_post.0", "resid_post.1"]
ASKED = "parity", "odd", "even"


def planted(tap: str, width: int, index: np.ndarray) -> np.ndarray:
    """Rows that say in the second layer whether their document is odd."""
    rows = web_page.planted(tap, width, index)
    if tap == TAPS[1]:
        rows[index["pos"] > 0, 2] += 4 * (index["doc"][index["pos"] > 0] % 2)
    return rows


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Dataset:
    rng = np.random.default_rng(1)
    texts = ["".join(rng.choice(list("abcdef"), 3 + n % 5)) for n in range(60)]
    out = tmp_path_factory.mktemp("labels") / "out"
    web_page.build_texts(out, model, texts, keep=("score", "parity"), rows=planted)
    return spile.open(out)


def test_columns_are_offered_if_two_values_occur_twice(ds: Dataset) -> None:
    (column,) = columns_of(ds)
    assert (column["name"], column["distinct"]) == ("parity", 2)
    counts = [{"value": name, "documents": 30} for name in ("even", "odd")]
    assert column["values"] == counts


def test_the_direction_is_that_of_the_public_function(ds: Dataset) -> None:
    means = mean_rows(ds, TAPS, *ASKED)
    assert sorted(means.docs.tolist()) == [*range(60)] and means.of == 60 and not means.first
    for tap in TAPS:
        told = direction_between(ds, means, tap)
        wanted = spile.direction(ds, "odd", "even", tap, where="pos >= 1").values
        np.testing.assert_allclose(told["values"] * told["length"], wanted, rtol=1e-5, atol=1e-6)
        assert told["documents"] == [30, 30]
        assert [sum(counts) for counts in told["counts"]] == [30, 30]
    ends = told["high"] + told["low"]  # of the second layer
    assert [end["doc"] % 2 for end in ends] == [1] * 12 + [0] * 12
    assert all(end["positive"] == bool(end["doc"] % 2) for end in ends) and told["right"] > 0.95
    values = [end["value"] for end in told["high"]]
    assert values == sorted(values, reverse=True) and values[0] > 0 > told["low"][0]["value"]
    assert ends[0]["preview"] == ds.about(ends[0]["doc"])["preview"]


def test_a_probe_finds_the_label_in_the_layer_that_has_it(ds: Dataset) -> None:
    found = accuracies(mean_rows(ds, TAPS, *ASKED))
    first, second = (each["accuracy"] for each in found["taps"])
    assert second > 0.9 > 0.7 > first
    assert (found["usual"], found["trained"], found["held"]) == (0.5, 30, 30)


def test_bytes_and_documents_that_are_read_are_limited(
    ds: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_BYTES", 4 * 12 * 40)  # forty rows
    few = mean_rows(ds, TAPS[:1], *ASKED)
    assert 4 < len(few.docs) < 15 and few.of == 60
    monkeypatch.setattr(module, "_MOST_DOCUMENTS", 3)
    assert len(mean_rows(ds, TAPS[:1], *ASKED).docs) == 3


def test_labels_that_do_not_occur_are_refused(ds: Dataset) -> None:
    with pytest.raises(ConfigError, match="no document has parity 'third'"):
        mean_rows(ds, TAPS, "parity", "odd", "third")
    with pytest.raises(ConfigError, match="both labels are 'odd'"):
        mean_rows(ds, TAPS, "parity", "odd", "odd")
    one = mean_rows(ds, TAPS, "score", "0.5", "1.0")
    assert len(one.docs) == 2
    with pytest.raises(ConfigError, match="at least three documents of each label"):
        accuracies(one)


def test_rows_of_first_tokens_alone_are_used(tmp_path: Path, model: Path) -> None:
    texts = ["a", "b", "c", "d"]
    web_page.build_texts(tmp_path / "out", model, texts, keep=("parity",), where="pos == 0")
    means = mean_rows(spile.open(tmp_path / "out"), TAPS, *ASKED)
    assert means.first and len(means.docs) == 4


@pytest.mark.parametrize("pool", ["mean:turn", "max"])
def test_pooled_rows_count_as_in_the_public_function(
    pool: str, tmp_path: Path, model: Path
) -> None:
    texts = web_page.texts(20)
    web_page.build_texts(tmp_path / "out", model, texts, keep=("parity",), pool=pool)
    ds = spile.open(tmp_path / "out")
    told = direction_between(ds, mean_rows(ds, TAPS, *ASKED), TAPS[0])
    wanted = spile.direction(ds, "odd", "even", TAPS[0]).values
    np.testing.assert_allclose(told["values"] * told["length"], wanted, rtol=1e-5, atol=1e-5)
    assert told["first"] and told["documents"] == [10, 10]
