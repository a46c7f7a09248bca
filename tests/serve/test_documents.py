"""The explorer and the finder: documents, numbers for tokens, top tokens, searches."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError, StoreError
from spile.serve import documents as finding
from spile.serve.digest import Digest
from spile.serve.documents import BoundedCache, Colour, Explorer, Finder, PageTexts, sequences
from support import web_page

TAP = "resid_post.0"
NORM = Colour(TAP, "norm")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, model: Path) -> web_page.Built:
    """Documents, one of them longer than its preview."""
    return web_page.build_texts(
        tmp_path_factory.mktemp("web") / "out", model, [*web_page.texts(), "long " * 60]
    )


@pytest.fixture(scope="module")
def explorer(built: web_page.Built, model: Path) -> Iterator[Explorer]:
    yield explorer_of(built, model)


@pytest.fixture
def finder(explorer: Explorer, built: web_page.Built) -> Finder:
    return Finder(explorer)


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
    page = explorer.document(0, 0, 99, Colour(TAP, "sum"))
    np.testing.assert_allclose(page["values"], rows.sum(axis=1), rtol=1e-5, atol=1e-5)
    assert page["scale"]["signed"]
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
        (Colour(TAP, "shape"), "norm, sum, channel or direction"),
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


# -- tokens of which no row is stored --------------------------------------------------------

WHERE = "pos < 3 or pos >= 9"


def explorer_of(built: web_page.Built, model: Path) -> Explorer:
    """An explorer whose digest has read every row."""
    dataset = spile.open(str(built.path))
    digest = Digest(dataset, 1 << 40)
    digest.start()
    limit = time.monotonic() + 60
    while digest.at_work and time.monotonic() < limit:
        time.sleep(0.01)
    digest.close()
    return Explorer(dataset, PageTexts(dataset.recipe, str(model)), digest)


@pytest.fixture(scope="module")
def gapped(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Explorer:
    """One document that its preview holds whole, and one that is longer; contexts of 64."""
    texts = ["héllo wörld, said he", "word " * 60]
    out = tmp_path_factory.mktemp("gapped") / "out"
    return explorer_of(web_page.build_texts(out, model, texts, where=WHERE), model)


def test_missing_tokens_leave_a_gap_with_their_text_from_the_preview(
    gapped: Explorer,
) -> None:
    page = gapped.document(0, None, 99, NORM)
    (gap,) = page["gaps"]
    assert (gap["at"], gap["count"], len(gap["pieces"])) == (3, 6, 6)
    text = [*page["pieces"][:3], *gap["pieces"], *page["pieces"][3:]]
    assert "".join(text[1:]) == "héllo wörld, said he"
    assert page["offsets"].tolist() == [0, 1, 2, *range(9, len(text))]
    assert len(page["values"]) == len(page["pieces"]) == page["tokens"]


def test_missing_tokens_beyond_the_preview_are_counted(gapped: Explorer) -> None:
    page = gapped.document(1, None, 2048, NORM)
    gaps = {gap["at"]: (gap["count"], gap["pieces"] is not None) for gap in page["gaps"]}
    # Of each context of 64 tokens six are missing; a preview of 200 characters ends with those of
    # the fourth, and no stored token after them says that they are right.
    assert gaps == {3: (6, True), 61: (6, True), 119: (6, True), 177: (6, False), 235: (6, False)}
    later = gapped.document(1, 58, 20, NORM)
    assert [(gap["at"], gap["count"]) for gap in later["gaps"]] == [(3, 6)]


def test_gaps_at_a_pages_edge_and_at_a_documents_end_are_shown(tmp_path: Path, model: Path) -> None:
    built = web_page.build_texts(tmp_path / "out", model, ["x" * 50], where="10 <= pos < 20")
    found = explorer_of(built, model)
    gaps = found.document(0, 0, 5, NORM)["gaps"]
    assert [(gap["at"], "".join(gap["pieces"][1:])) for gap in gaps] == [(0, "x" * 9)]
    gaps = found.document(0, 5, 5, NORM)["gaps"]
    assert [(gap["at"], "".join(gap["pieces"])) for gap in gaps] == [(5, "x" * 31)]
    assert found.document(0, 10, 5, NORM)["gaps"] == []


def test_a_preview_that_does_not_agree_with_the_tokens_tells_nothing(
    tmp_path: Path, model: Path
) -> None:
    texts = ["the text that was read"]
    units = [[web_page.tokens(text) for text in texts]]
    built = web_page.build(
        tmp_path / "out", units, [["a text of another kind"]], where=WHERE, model_source=str(model)
    )
    (gap,) = explorer_of(built, model).document(0, None, 99, NORM)["gaps"]
    assert (gap["count"], gap["pieces"]) == (6, None)


def test_the_page_that_holds_a_token_is_found_by_its_offset(gapped: Explorer) -> None:
    page = gapped.document(1, None, 50, NORM, offset=140)
    assert page["start"] == 100
    assert 140 in page["offsets"].tolist()
    assert gapped.document(1, None, 50, NORM, offset=10**6)["start"] == 250, "the last"


def test_tokens_in_context_are_not_joined_across_a_gap(gapped: Explorer) -> None:
    hits = gapped.top(TAP, 2, "high")["hits"]
    marked = 0
    for hit in hits:
        before = [gap["count"] for gap in hit["gaps"] if gap["at"] <= hit["at"]]
        assert hit["offset"] - sum(before) - hit["at"] >= 0
        assert all(0 < gap["at"] < len(hit["pieces"]) for gap in hit["gaps"])
        marked += len(hit["gaps"])
    assert marked, "some are beside one"


def test_a_search_shows_where_tokens_are_missing(gapped: Explorer) -> None:
    (found,) = Finder(gapped).find("d word word wo", 0, 50)["documents"]
    assert found["doc"] == 1
    gone = np.array([[0, 5, 6, 7]])
    entries = np.zeros(gone.shape[1], gapped.dataset.index(0, 0).dtype)
    entries["offset"], entries["token_id"] = gone[0], web_page.tokens("abc")
    assert gapped.snippet(entries).endswith(" ⋯ abc")


# -- latents ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Explorer:
    out = tmp_path_factory.mktemp("sparse") / "out"
    return explorer_of(web_page.build_latents(out, model, web_page.texts()), model)


def test_tokens_are_coloured_by_a_latent_wherever_it_is_stored(sparse: Explorer) -> None:
    first, last = (int(row) for row in sparse.dataset.document(3).rows[[0, -1]])
    dense = sparse.dataset.latents("resid_post.1", first, last + 1).dense()
    for latent in (0, 7, web_page.LOUD_LATENT, web_page.SILENT_LATENT):
        page = sparse.document(3, 0, 999, Colour(web_page.LATENT_TAP, "latent", latent=latent))
        np.testing.assert_array_equal(page["values"], dense[:, latent])
        assert (page["scale"]["low"], page["scale"]["signed"]) == (0, False)
    page = sparse.document(3, 0, 999, Colour(web_page.LATENT_TAP, "active"))
    np.testing.assert_array_equal(page["values"], np.count_nonzero(dense, axis=1))


def test_the_rows_of_a_latent_are_those_in_which_it_is_largest(sparse: Explorer) -> None:
    found = sparse.top_of_latent(web_page.LATENT_TAP, web_page.LOUD_LATENT)
    best = spile.top_rows(sparse.dataset, "resid_post.1", web_page.LOUD_LATENT, 24)
    assert [hit["value"] for hit in found["hits"]] == best.values.tolist()
    assert [hit["offset"] for hit in found["hits"]] == best.index["offset"].tolist()
    for hit in found["hits"]:
        assert hit["pieces"][hit["at"]] == web_page.LOUD_TOKEN
        assert hit["values"][hit["at"]] == hit["value"]
    assert found["scale"]["high"] == found["largest"] == best.values[0]
    assert found["share"] == found["fires"] / sparse.dataset.num_tokens
    silent = sparse.top_of_latent(web_page.LATENT_TAP, web_page.SILENT_LATENT)
    assert (silent["hits"], silent["fires"], silent["mean"]) == ([], 0, None)
    with pytest.raises(ConfigError, match="latents 0 to 39, not 40"):
        sparse.top_of_latent(web_page.LATENT_TAP, 40)


def test_the_latents_of_a_token_are_told_by_id(sparse: Explorer) -> None:
    document = sparse.dataset.document(3)
    loud = web_page.tokens(web_page.HOSTILE).tolist().index(web_page.tokens("z")[1])
    found = sparse.latents_of(web_page.LATENT_TAP, 3, loud)
    row = int(document.rows[loud])
    active = sparse.dataset.latents("resid_post.1", row, row + 1)
    assert [each["latent"] for each in found["latents"]] == active.ids.tolist()
    assert [each["value"] for each in found["latents"]] == active.values.tolist()
    assert found["latents"][0]["latent"] == web_page.LOUD_LATENT
    with pytest.raises(ConfigError, match="no row for the token at offset 99999"):
        sparse.latents_of(web_page.LATENT_TAP, 3, 99999)


@pytest.mark.parametrize("by", ["channel", "direction"])
def test_a_rank_colours_nothing(sparse: Explorer, by: str) -> None:
    with pytest.raises(ConfigError, match="latent, active or norm"):
        sparse.document(0, 0, 9, Colour(web_page.LATENT_TAP, by))


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
    (found,) = Finder(other).find("hidden gem", 0, 50)["documents"]
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
    offsets = np.array([0, 1, 2, 0, 1])
    assert sequences(tokens, docs, offsets, [1, 2]).tolist() == [0]
    assert sequences(tokens, docs, offsets, [2]).tolist() == [1, 3]
    assert sequences(tokens, docs, offsets, [1, 2, 1, 2, 1, 2]).tolist() == []


def test_sequences_do_not_cross_tokens_that_are_missing() -> None:
    tokens, docs = np.array([1, 2, 1, 2]), np.zeros(4, int)
    assert sequences(tokens, docs, np.array([0, 5, 6, 7]), [1, 2]).tolist() == [2]
    assert sequences(tokens, docs, np.array([0, 5, 6, 8]), [1, 2]).tolist() == []


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
