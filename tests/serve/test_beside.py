"""What is stored of a token beside its rows: next tokens with probabilities, and keys of heads."""

from contextlib import closing
from pathlib import Path

import pytest

import spile
from spile.core.errors import ConfigError
from spile.dataset.read.dataset import Dataset
from spile.objects import LocalObjects
from spile.serve.beside import attended, has_next, keys, next_tokens
from spile.serve.documents import PageTexts
from spile.serve.routes import Answers
from support import web_page

TEXTS = ["first text", "another one"]
TAP = "attn_top_weights.1.h0.h2"


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Dataset:
    out = tmp_path_factory.mktemp("beside") / "out"
    web_page.build_beside(out, model, TEXTS, seq_len=8)
    return spile.open(out)


@pytest.fixture(scope="module")
def texts(ds: Dataset) -> PageTexts:
    return PageTexts(ds.recipe, None)


def test_next_tokens_have_probabilities_and_a_rank(ds: Dataset, texts: PageTexts) -> None:
    assert has_next(ds)
    told = next_tokens(ds, texts, ds.document(0), 2)  # after BOS and "fi"
    following = int(ds.document(0).index["token_id"][3])
    assert [each["share"] for each in told["likely"]] == pytest.approx([0.5, 0.25, 0.125])
    assert told["likely"][1] == {"id": following, "piece": "r", "share": pytest.approx(0.25)}
    assert told["rest"] == pytest.approx(0.125)
    assert (told["next"], told["rank"]) == (following, 1)
    last = next_tokens(ds, texts, ds.document(0), 7)  # of a context: the model saw nothing after
    assert (last["next"], last["rank"]) == (None, None)


def test_a_lens_says_its_likeliest_tokens_at_each_layer(model: Path, tmp_path: Path) -> None:
    web_page.build_beside(tmp_path / "out", model, TEXTS, seq_len=8, taps=web_page.LENS_TAPS)
    ds = spile.open(tmp_path / "out")
    assert has_next(ds)
    told = next_tokens(ds, PageTexts(ds.recipe, None), ds.document(0), 2)
    following = int(ds.document(0).index["token_id"][3])
    (only,) = told["lens"]
    assert only["layer"] == 0 and told["likely"] == [] and told["rank"] is None
    assert [each["id"] for each in only["likely"]] == [following, 5]
    assert only["likely"][0]["piece"] == "r"
    assert [each["share"] for each in only["likely"]] == pytest.approx([0.6, 0.3])


def test_keys_are_tokens_of_the_same_context(ds: Dataset, texts: PageTexts) -> None:
    assert attended(ds) == [{"tap": TAP, "heads": [0, 2]}]
    first = keys(ds, texts, ds.document(1), 10, TAP, 0)["keys"]  # the third of its context
    assert first == [
        {"offset": 8, "piece": " ", "weight": 0.75}, {"offset": 10, "piece": "n", "weight": 0.25}
    ]  # fmt: skip
    own = keys(ds, texts, ds.document(1), 10, TAP, 2)["keys"]
    assert [(key["offset"], key["weight"]) for key in own] == [(10, 0.5), (9, 0.25)]
    assert [key["offset"] for key in keys(ds, texts, ds.document(1), 8, TAP, 2)["keys"]] == [8]


def test_other_views_leave_out_what_keeps_the_largest(ds: Dataset) -> None:
    """Place k of such a row is the k-th largest, whichever that is."""
    objects = LocalObjects(Path(ds.url))
    with closing(Answers(objects, lambda: ds, tokenizer=None, most_bytes=1 << 30)) as page:
        told = page.routes["dataset"]({})
        assert [tap["name"] for tap in told["taps"]] == ["resid_post.1", "next_rank"]
        assert told["next"] and told["attended"] == [{"tap": TAP, "heads": [0, 2]}]
        assert page.routes["positions"]({})["tap"] == "resid_post.1"
        for route in ("positions", "channels"):
            with pytest.raises(ConfigError, match=TAP):
                page.routes[route]({"tap": TAP})


def test_keys_without_a_row_have_no_text(tmp_path: Path, model: Path) -> None:
    web_page.build_beside(tmp_path / "out", model, TEXTS, seq_len=8, where="pos >= 2")
    ds = spile.open(tmp_path / "out")
    told = keys(ds, PageTexts(ds.recipe, None), ds.document(0), 4, TAP, 0)["keys"]
    assert [(key["offset"], key["piece"]) for key in told] == [(0, None), (4, "s")]


def test_what_is_not_stored_is_refused(
    ds: Dataset, texts: PageTexts, tmp_path: Path, model: Path
) -> None:
    document = ds.document(0)
    with pytest.raises(ConfigError, match="heads 0, 2, not 1"):
        keys(ds, texts, document, 2, TAP, 1)
    with pytest.raises(ConfigError, match="'resid_post.1' holds no weights of keys"):
        keys(ds, texts, document, 2, "resid_post.1", 0)
    with pytest.raises(ConfigError, match="no row for the token at offset 99"):
        next_tokens(ds, texts, document, 99)
    web_page.build_texts(tmp_path / "plain", model, TEXTS)
    plain = spile.open(tmp_path / "plain")
    assert not has_next(plain) and attended(plain) == []
    with pytest.raises(ConfigError, match="extract with --taps top_logits"):
        next_tokens(plain, texts, plain.document(0), 2)
