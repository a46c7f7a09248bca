"""Pooled rows: what each stands for, and which others are near."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.objects import LocalObjects
from spile.serve.routes import Answers
from support import web_page

TAP = "resid_post.0"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Answers]:
    out = tmp_path_factory.mktemp("pooled") / "out"
    texts = web_page.texts(25)
    web_page.build_texts(out, model, texts, keep=("parity",), pool="mean:turn")
    with closing(answers(out)) as found:
        found.start()
        while len(found.digest.sample) < 50:
            time.sleep(0.01)
        yield found


def answers(path: Path) -> Answers:
    return Answers(
        LocalObjects(path), lambda: spile.open(path), tokenizer=None, most_bytes=1 << 30
    )  # fmt: skip


def test_rows_are_listed_with_their_spans_and_labels(page: Answers) -> None:
    ds = page.explorer.dataset
    told = page.routes["rows"]({"start": "15", "count": "20"})
    index = ds.index(15, 35)
    assert told["total"] == len(ds) == 50
    for row, entry in zip(told["rows"], index, strict=True):
        assert {name: row[name] for name in ("doc", "span", "start", "count", "offset")} == {
            name: int(entry[name]) for name in ("doc", "span", "start", "count", "offset")
        }
        assert row["labels"] == {"parity": "odd" if entry["doc"] % 2 else "even"}
        assert row["preview"] == ds.about(int(entry["doc"]))["preview"]
        assert ds.rows_of_unit(row["unit"])[0] + row["row"] == 15 + told["rows"].index(row)
    assert page.routes["rows"]({"start": "90"})["rows"] == []


def test_nearest_rows_and_values_are_those_of_all_rows(page: Answers) -> None:
    ds = page.explorer.dataset
    told = page.routes["nearest"]({"tap": TAP, "unit": "1", "row": "3"})
    rows = ds.read(TAP, 0, len(ds)).astype(np.float64)
    own = ds.rows_of_unit(1)[0] + 3
    beyond = rows - rows.mean(axis=0)
    cosine = beyond @ beyond[own] / np.linalg.norm(beyond, axis=1) / np.linalg.norm(beyond[own])
    order = [each for each in np.argsort(-cosine).tolist() if each != own][:20]
    near = [ds.rows_of_unit(each["unit"])[0] + each["row"] for each in told["near"]]
    assert near == order and told["of"] == 50
    np.testing.assert_allclose([each["cosine"] for each in told["near"]], cosine[order], rtol=1e-4)
    best = told["channels"][0]
    scores = beyond[own] / rows.std(axis=0)
    assert best["channel"] == np.abs(scores).argmax()
    assert best["beyond"] == pytest.approx(scores[best["channel"]], rel=1e-4)
    assert best["value"] == pytest.approx(rows[own, best["channel"]])


def test_rows_that_do_not_exist_are_refused(page: Answers, built: web_page.Built) -> None:
    for asked, message in (
        ({"unit": "1", "row": "99"}, "unit 1 has no row 99"),
        ({"unit": "7", "row": "0"}, "unit 7 has no row 0"),
        ({"unit": "0"}, "row must be a whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            page.routes["nearest"]({"tap": TAP, **asked})
    with pytest.raises(ConfigError, match="the rows of this dataset are tokens"):
        answers(built.path).routes["rows"]({})
