"""The explorer and the finder: documents, numbers for tokens, top tokens, searches."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import spile
import web_page
from spile.core.errors import ConfigError, StoreError
from spile.serve import documents as finding
from spile.serve.digest import Digest
from spile.serve.documents import BoundedCache, Colour, Explorer, Finder, Texts, sequences

TAP = "resid_post.0"
NORM = Colour(TAP, "norm")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, model: Path) -> web_page.Built:
    """With one that is longer than its preview."""
    return web_page.build_texts(
        tmp_path_factory.mktemp("web") / "out", model, [*web_page.texts(), "long " * 60]
    )


@pytest.fixture(scope="module")
def explorer(built: web_page.Built, model: Path) -> Iterator[Explorer]:
    dataset = spile.open(str(built.path))
    digest = Digest(dataset, 1 << 40)
    digest.start()
    limit = time.monotonic() + 60
    while digest.at_work and time.monotonic() < limit:
        time.sleep(0.01)
    yield Explorer(dataset, Texts(dataset.recipe, str(model)), digest)
    digest.close()


@pytest.fixture
def finder(explorer: Explorer, built: web_page.Built) -> Finder:
    return Finder(explorer, {unit["id"]: unit["num_docs"] for unit in built.table.units})


def test_a_document_is_read_in_order_with_a_number_for_each_token(explorer: Explorer) -> None:
    page = explorer.document(3, 0, 2048, NORM)
    assert "".join(page["pieces"][1:]) == web_page.HOSTILE
    rows = explorer.dataset.document(3)[TAP]
    np.testing.assert_allclose(page["values"], np.linalg.norm(rows, axis=1), rtol=1e-5)
    assert page["tokens"] == len(rows) == page["about"]["rows"]
    assert page["flags"][0] == ["bos", "first"]
    assert page["flags"][-1] == ["last", "end"]


def test_a_long_document_is_given_in_pages(explorer: Explorer) -> None:
    whole = explorer.document(30, 0, 2048, NORM)
    assert len(whole["pieces"]) == 301
    page = explorer.document(30, 100, 50, NORM)
    assert page["pieces"] == whole["pieces"][100:150]
    np.testing.assert_array_equal(page["offsets"], np.arange(100, 150))
    np.testing.assert_array_equal(page["values"], whole["values"][100:150])
    assert explorer.document(30, 5000, 50, NORM)["pieces"] == []


def test_tokens_are_coloured_by_a_channel_or_a_direction(explorer: Explorer) -> None:
    rows = explorer.dataset.document(0)[TAP]
    page = explorer.document(0, 0, 99, Colour(TAP, "channel", channel=7))
    np.testing.assert_allclose(page["values"], rows[:, 7])
    assert page["scale"]["signed"]
    assert page["scale"]["low"] == -page["scale"]["high"]
    vector = np.arange(12) - 4.0
    number = explorer.directions.add("v", str(vector.tolist()).encode(), {12})
    page = explorer.document(0, 0, 99, Colour(TAP, "direction", direction=number))
    expected = rows @ (vector / np.linalg.norm(vector))
    np.testing.assert_allclose(page["values"], expected, rtol=1e-4, atol=1e-4)


def test_a_scale_is_of_all_rows_and_no_outlier_takes_it(explorer: Explorer) -> None:
    scale = explorer.document(0, 0, 99, NORM)["scale"]
    assert explorer.document(7, 0, 99, NORM)["scale"] == scale
    norms = np.linalg.norm(explorer.dataset.read(TAP, 0, 10**6), axis=1)
    assert scale["low"] > norms.min()
    assert scale["high"] < norms.max()


@pytest.mark.parametrize(
    ("colour", "message"),
    [
        (Colour(TAP, "shape"), "norm, channel or direction"),
        (Colour(TAP, "channel", channel=12), "channels 0 to 11"),
        (Colour(TAP, "direction", direction=77), "no direction 77"),
        (Colour("resid_post.9", "norm"), "no tap"),
    ],
)
def test_what_is_not_there_cannot_colour(explorer: Explorer, colour: Colour, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        explorer.document(0, 0, 9, colour)


def test_a_document_that_is_not_there_is_said_to_be_so(explorer: Explorer) -> None:
    with pytest.raises(StoreError, match="document 4000"):
        explorer.document(4000, 0, 9, NORM)


def test_top_tokens_are_those_of_all_rows_in_context(
    explorer: Explorer, built: web_page.Built
) -> None:
    found = explorer.top(TAP, web_page.LOUD, "high")
    rows = explorer.dataset.read(TAP, 0, 10**6)[:, web_page.LOUD]
    index = np.concatenate(built.index)
    best = np.argsort(-rows, kind="stable")[: len(found["hits"])]
    assert [hit["value"] for hit in found["hits"]] == pytest.approx(rows[best].tolist())
    loud = found["hits"][0]
    assert (loud["doc"], loud["offset"]) == (int(index["doc"][best[0]]), index["offset"][best[0]])
    assert loud["pieces"][loud["at"]] == web_page.LOUD_TOKEN
    text = "".join(loud["pieces"])
    assert text in web_page.HOSTILE, "its own document alone"
    assert loud["values"][loud["at"]] == loud["value"]
    low = explorer.top(TAP, 2, "low")["hits"]
    assert low[0]["value"] == explorer.dataset.read(TAP, 0, 10**6)[:, 2].min()
    with pytest.raises(ConfigError):
        explorer.top(TAP, 2, "middle")
    with pytest.raises(ConfigError):
        explorer.top(TAP, 12, "high")


def test_documents_are_listed_across_units(finder: Finder) -> None:
    page = finder.listed(8, 5)
    assert [each["doc"] for each in page["documents"]] == [8, 9, 10, 11, 12]
    assert page["total"] == 31
    assert finder.listed(500, 5)["documents"] == []
    assert finder.listed(0, 1)["documents"][0]["preview"].startswith("document 0 ")


def test_documents_are_found_by_preview_by_number_and_by_their_tokens(finder: Finder) -> None:
    assert [each["doc"] for each in finder.find("NEEDLE", 0, 50)["documents"]] == [5]
    assert 17 in [each["doc"] for each in finder.find("17", 0, 50)["documents"]]
    # The preview of the last ends before its text does.
    assert [each["doc"] for each in finder.find("long long", 0, 50)["documents"]] == [30]
    assert finder.find("nowhere to be found", 0, 50)["documents"] == []
    assert finder.find("<script>", 0, 50)["documents"][0]["doc"] == 3


def test_a_text_beyond_the_preview_is_found_and_shown(
    tmp_path: Path, model: Path, explorer: Explorer
) -> None:
    text = "begins " + "x" * 300 + " hidden gem " + "y" * 50
    built = web_page.build_texts(tmp_path / "out", model, ["first", text])
    dataset = spile.open(str(built.path))
    other = Explorer(dataset, explorer.texts, Digest(dataset, 0))
    (found,) = Finder(other, {0: 2}).find("hidden gem", 0, 50)["documents"]
    assert found["doc"] == 1
    assert "hidden gem" in found["snippet"]
    assert found["offset"] == 1 + text.index("hidden gem"), "after the BOS"


def test_a_search_whose_time_is_up_says_where_to_go_on(
    finder: Finder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "_SECONDS", -1)
    found, after, answers = [], 0, 0
    while after is not None:
        answer = finder.find("document", after, 50)
        found += [each["doc"] for each in answer["documents"]]
        after, answers = answer["next"], answers + 1
    assert answers == 4
    assert found == [doc for doc in range(30) if doc != 3]


def test_sequences_do_not_cross_documents() -> None:
    tokens, docs = np.array([1, 2, 1, 2, 1]), np.array([0, 0, 0, 1, 1])
    assert sequences(tokens, docs, [1, 2]).tolist() == [0]
    assert sequences(tokens, docs, [2]).tolist() == [1, 3]
    assert sequences(tokens, docs, [1, 2, 1, 2, 1, 2]).tolist() == []


def test_what_was_used_longest_ago_makes_room() -> None:
    held, made = BoundedCache(10), []

    def get(key: str, size: int) -> str:
        def make() -> tuple[str, int]:
            made.append(key)
            return key, size

        return held.get(key, make)

    for key in ("a", "b", "a", "c", "a", "b"):
        assert get(key, 5) == key
    assert made == ["a", "b", "c", "b"]
    assert get("large", 50) == "large"
    get("large", 50)
    assert made == ["a", "b", "c", "b", "large"], "one is kept, whatever its size"
