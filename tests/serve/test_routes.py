"""Parsing of parameters, values as JSON, and values computed in the background."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError, StoreError
from spile.dataset.read.opening import finished_taps
from spile.serve import run_history
from spile.serve.routes import Answers, BackgroundCache, Ready, number, plain
from support import stored


def test_values_become_json_and_what_is_not_finite_null() -> None:
    told = plain(
        {
            "floats": np.array([1 / 3, np.nan, np.inf], np.float32),
            "ints": np.arange(3, dtype=np.uint16),
            "table": np.eye(2),
            "one": np.float64(123456789.125),
            "flag": np.bool_(True),
            "text": "<é>",
            "none": None,
            "ready": Ready([1, {"a": 2}]),
            7: (1, 2.5),
        }
    )
    assert told == {
        "floats": [0.333333, None, None],
        "ints": [0, 1, 2],
        "table": [[1.0, 0.0], [0.0, 1.0]],
        "one": 123457000.0,
        "flag": True,
        "text": "<é>",
        "none": None,
        "ready": [1, {"a": 2}],
        "7": [1, 2.5],
    }
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    with pytest.raises(StoreError, match="a bytes cannot be shown"):
        plain([b"x"])


def test_numbers_are_whole_and_within_bounds() -> None:
    assert number({"n": "12"}, "n", None) == 12
    assert number({}, "n", 5) == 5
    for text in ("", "-1", "1.0", " 1", "1e3", "٣", "9" * 17, "0x10", "+1", "11"):
        with pytest.raises(ConfigError, match="n must be"):
            number({"n": text}, "n", None, 0, 10)
    with pytest.raises(ConfigError, match="n must be a whole number"):
        number({}, "n", None)


def waited(ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    limit = time.monotonic() + 60
    while (found := ask())["making"]:
        assert time.monotonic() < limit
        time.sleep(0.01)
    return found


def test_a_value_is_made_once_while_nobody_waits() -> None:
    kept, go, calls = BackgroundCache(), threading.Event(), []

    def make() -> str:
        calls.append(1)
        assert go.wait(60)
        return "made"

    first = kept.ask("key", 1, make)
    assert first == {"value": None, "making": True, "error": None}
    assert kept.ask("key", 1, make)["making"]
    go.set()
    assert waited(lambda: kept.ask("key", 1, make))["value"] == "made"
    assert calls == [1]
    kept.close()


def test_an_older_value_is_given_until_the_new_one_is_made() -> None:
    kept, go = BackgroundCache(), threading.Event()
    waited(lambda: kept.ask("key", 1, lambda: "old"))

    def make() -> str:
        assert go.wait(60)
        return "new"

    assert kept.ask("key", 2, make) == {"value": "old", "making": True, "error": None}
    go.set()
    assert waited(lambda: kept.ask("key", 2, make))["value"] == "new"
    kept.close()


def test_taps_are_shown_by_layer(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", taps={"resid_post.10": 4, "resid_post.9": 4})
    stored.add_pass(made, {"z.9": 4}, commit=range(5))
    by_layer = ["z.9", "resid_post.9", "resid_post.10"]
    assert spile.open(made.path).taps == by_layer
    with closing(answers(made)) as page:
        assert [tap["name"] for tap in page.routes["dataset"]({})["taps"]] == by_layer
        assert [tap["tap"] for tap in page.routes["layers"]({})["taps"]] == by_layer
        assert [*page.routes["run"]({})["taps"]] == by_layer[1:]


def test_what_cannot_be_made_is_said_and_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, calls = BackgroundCache(), []

    def make() -> None:
        calls.append(1)
        raise ValueError("too many")

    found = waited(lambda: kept.ask("key", 1, make))
    assert (found["value"], found["error"]) == (None, "too many")
    assert kept.ask("key", 1, make)["error"] == "too many"
    assert calls == [1]
    assert "too many" in caplog.text
    kept.close()


def test_taps_that_are_added_are_shown_when_they_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_history, "_SECONDS", 0.02)
    monkeypatch.setattr(run_history, "_PATIENCE", 0)
    made = stored.build(tmp_path / "out")
    rows_of = {tap: len(made.index) for tap in made.rows}
    with closing(answers(made)) as page:
        page.start()
        shown(page, rows_of)
        added, rows = stored.add_pass(made, {"z.0": 4}, commit=(0, 1))
        until(lambda: [each["units_done"] for each in page.routes["run"]({})["passes"]] == [2])
        assert page.routes["dataset"]({})["rows"] == len(made.index)
        shown(page, rows_of)
        for unit in (2, 3, 4):
            assert added.ledger.commit(stored.write_added(made, added, unit, rows))
        assert added.ledger.complete(added.ledger.table())
        shown(page, {**rows_of, "z.0": len(made.index)})
        (channel, *_) = page.routes["channels"]({"tap": "z.0"})["channels"]
        assert channel["largest"] == np.abs(rows["z.0"]).max()
        added.drop()
        shown(page, rows_of)


def test_a_page_opens_on_documents_when_the_run_is_over(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", commit=(0, 2))
    for units, finished in (((), False), ((1, 3, 4), True)):
        for unit in units:
            assert made.ledger.commit(made.attempt(unit))
        made.ledger.complete(made.table)
        with closing(answers(made)) as page:
            assert page.routes["dataset"]({})["finished"] is finished
    stored.add_pass(made, {"z.0": 4}, commit=(0,))
    with closing(answers(made)) as page:
        assert page.routes["dataset"]({})["finished"] is False, "taps are being added"


def test_points_of_a_projection_have_the_kept_column_of_their_document(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", keep=("id", "mixed"))
    about = spile.open(made.path).documents().to_pylist()
    wanted = {row["doc"]: row["id"] for row in about}
    asked = {"tap": "resid_post.0", "first": "with", "column": "id"}
    with closing(answers(made)) as page:
        page.start()
        until(lambda: not page.digest.at_work and len(page.digest.sample) == len(made.index))

        def told() -> dict[str, Any]:
            return page.routes["projection"](asked)

        until(lambda: not told()["making"] and bool(told()["kept"]["value"]))
        points = plain(told())
        assert page.routes["dataset"]({})["columns"] == ["id", "mixed"]
        assert points["kept"]["value"] == [wanted[doc] for doc in points["value"]["doc"]]
        assert len({*points["kept"]["value"]}) > 3
        with pytest.raises(ConfigError, match="no column 'text' was kept; there are: id, mixed"):
            page.routes["projection"]({**asked, "column": "text"})


def answers(made: stored.Stored) -> Answers:
    def opened() -> spile.Dataset:
        return spile.open(made.path, partial=True, taps=finished_taps(made.objects))

    return Answers(made.objects, opened, tokenizer=None, most_bytes=1 << 30)


def shown(page: Answers, rows_of: dict[str, int]) -> None:
    """Wait until these taps are shown, and all of their rows are read."""
    until(lambda: {tap["name"] for tap in page.routes["dataset"]({})["taps"]} == {*rows_of})
    until(lambda: {t: m.count for t, m in page.digest.moments.items()} == rows_of)


def until(reached: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < limit
        time.sleep(0.01)
