"""What the page tells of features, against the rows themselves."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spile
from spile.dataset.records.features import FeatureSet
from spile.features.run import FeatureRequest, make_features
from spile.objects import LocalObjects
from spile.serve import features as features_page
from spile.serve.features import FeaturePages
from support import web_page

LOUD = web_page.LOUD_LATENT


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Two encoded taps with the same latents, and a direction of a dense one."""
    folder = tmp_path_factory.mktemp("features")
    built = web_page.build_two_encoders(folder / "out", model, web_page.texts())
    for tap in ("resid_post.0", "resid_post.1"):
        make_features(str(built.path), FeatureRequest(tap=tap, logits=0, examples=4))
    np.save(folder / "one.npy", np.eye(built.table.taps["mlp_out.1"].width)[1])
    files = [str(folder / "one.npy")]
    make_features(str(built.path), FeatureRequest(tap="mlp_out.1", directions=files, logits=0))
    return built.path


@pytest.fixture(scope="module")
def told(out: Path) -> Iterator[web_page.Served]:
    with web_page.served(out) as found:
        yield found


def test_all_features_are_listed_in_order(told: web_page.Served, out: Path) -> None:
    sets = told.api("dataset")["features"]
    assert [each["tap"] for each in sets] == ["mlp_out.1", "resid_post.0", "resid_post.1"]
    features = spile.open(out).features("resid_post.1")
    for by, values in (("density", features.counts), ("largest", features.largest)):
        found = told.api("features", set="resid_post.1-1", by=by)
        ids = [each["feature"] for each in found["features"]]
        assert found["listed"] == found["active"] == np.count_nonzero(features.counts)
        assert (np.diff(values[ids]) <= 0).all() and len(ids) == min(60, found["listed"])
    later = told.api("features", set="resid_post.1-1", by="id", start=3)["features"]
    active = np.flatnonzero(features.counts)
    assert [each["feature"] for each in later] == active[3:63].tolist()


def test_a_feature_is_shown_with_its_rows_in_context(told: web_page.Served, out: Path) -> None:
    features = spile.open(out).features("resid_post.1")
    found = told.api("feature", set="resid_post.1-1", feature=LOUD)
    assert found["count"] == features.counts[LOUD] and found["piece"] == web_page.LOUD_TOKEN
    assert [hit["value"] for hit in found["top"]] == features.top(LOUD).values.tolist()
    for hit in found["top"]:
        assert hit["pieces"][hit["at"]] == web_page.LOUD_TOKEN
        assert hit["values"][hit["at"]] == hit["value"]
    assert sum(each["rows"] for each in found["histogram"]) == found["count"]
    assert sum(band["share"] for band in found["bands"]) == pytest.approx(1)
    assert all(band["hits"] for band in found["bands"])
    assert [each["feature"] for each in found["neighbours"]] == features.neighbours(LOUD)[
        0
    ].tolist()
    assert found["logits"] is None
    direction = told.api("feature", set="mlp_out.1-1", feature=0)
    assert direction["name"] == "one" and direction["scale"]["signed"]
    assert direction["density"] == 1


def test_features_are_found_by_token_text_and_document(told: web_page.Served) -> None:
    where = {"set": "resid_post.1-1"}
    by_token = told.api("feature-search", how="token", q=web_page.LOUD_TOKEN, **where)["features"]
    assert by_token[0]["feature"] == LOUD and by_token[0]["score"] == 1
    by_text = told.api("feature-search", how="text", q=web_page.LOUD_TOKEN, **where)["features"]
    assert by_text[0]["feature"] == LOUD and by_text[0]["score"] == 1
    hit = told.api("feature", feature=LOUD, **where)["top"][0]
    in_document = told.api("feature-search", how="document", q=hit["doc"], **where)["features"]
    assert LOUD in [each["feature"] for each in in_document]
    for how, text, why in (
        ("token", "two words", "is not one token"),
        ("token", "9" * 25, "token ids are from 0 to 2147483647"),
        ("document", "x", "give the number"),
        ("name", "x", "are found by token, text, document"),
    ):
        answer = told.ask(
            f"/api/feature-search?set=resid_post.1-1&how={how}&q={text.replace(' ', '%20')}"
        )
        assert answer.status == 400 and why in answer.json["error"]


def test_two_encoders_are_compared_by_their_rows(told: web_page.Served) -> None:
    asked = {"set": "resid_post.1-1", "other": "resid_post.0-1"}
    whole = told.wait("feature-comparison", lambda found: found["value"], **asked)["value"]
    assert whole["shared"] == 1, "both have the same latents"
    assert sum(each["latents"] for each in whole["bins"]) == whole["seen"] == whole["active"]
    one = told.wait("feature-comparison", lambda f: f["value"], feature=LOUD, **asked)["value"]
    assert (one["nearest"][0]["feature"], one["nearest"][0]["near"]) == (LOUD, 1)
    refused = told.ask("/api/feature-comparison?set=resid_post.1-1&other=mlp_out.1-1")
    assert refused.status == 400 and "comparisons are of latents" in refused.json["error"]


def test_encoders_are_compared_on_the_rows_that_both_have_drawn(
    model: Path, tmp_path: Path
) -> None:
    built = web_page.build_two_encoders(tmp_path / "out", model, web_page.texts(12))
    for tap, rows in (("resid_post.0", 5), ("resid_post.1", 1000)):
        make_features(str(built.path), FeatureRequest(tap=tap, logits=0, rows=rows))
    with web_page.served(built.path) as found:
        asked = {"set": "resid_post.1-1", "other": "resid_post.0-1"}
        whole = found.wait("feature-comparison", lambda each: each["value"], **asked)["value"]
    assert whole["sampled"] == 5
    assert 0 < whole["seen"] < whole["active"], "latents that the sample lacks are not compared"
    assert sum(each["latents"] for each in whole["bins"]) == whole["seen"]
    assert len(whole["apart"]) == whole["seen"]


def test_logits_that_were_computed_later_are_shown(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features_page, "_SETTLED", 0.0)
    shutil.copytree(out, tmp_path / "out")
    explorer: Any = SimpleNamespace(dataset=spile.open(tmp_path / "out"))
    pages = FeaturePages(explorer, explorer)
    before = pages.chosen("resid_post.1-1")
    assert before.logits(0) is None and pages.chosen("resid_post.1-1") is before
    ids, values = np.array([[5, 6]], np.int32), np.array([[2.0, 1.0]], np.float32)
    columns = {"ids": ids, "value": values}
    block = {f"{name}/{n}": a for name in ("raised", "lowered") for n, a in columns.items()}
    features = FeatureSet(LocalObjects(tmp_path / "out"), "resid_post.1-1")
    features.create_logits(0, features.store("columns/", block))
    found = pages.chosen("resid_post.1-1").logits(0)
    assert found is not None and found.raised_by.tolist() == [2, 1]


def test_a_dataset_without_features_says_how_to_count_them(tmp_path: Path, model: Path) -> None:
    built = web_page.build_texts(tmp_path / "out", model, web_page.texts(6))
    with web_page.served(built.path) as found:
        answer = found.ask("/api/features")
        assert answer.status == 400 and "`spile features` counts them" in answer.json["error"]


def test_a_page_of_many_latents_is_quick(tmp_path: Path) -> None:
    built = web_page.build_large(tmp_path / "out", rows=1 << 15, documents=64)
    make_features(str(built.path), FeatureRequest(logits=0, rows=1024))
    with web_page.served(built.path) as found:
        found.api("features")
        asked = [f"/api/features?by=mean&start={at}" for at in (0, 60, 9000)]
        took = min(found.ask(each).milliseconds for each in asked)
        assert took < 62.5, "milliseconds"
