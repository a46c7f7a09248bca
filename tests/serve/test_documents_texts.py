"""The text that each token adds, by the tokenizer of the dataset and no other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.core.errors import ConfigError
from spile.core.identity import full_digest
from spile.core.recipe import ResolvedRecipe
from spile.serve.documents import PageTexts
from support import stored, tiny, web_page


def recipe(source: str, **changes: Any) -> ResolvedRecipe:
    return stored.make_table(model_source=source, **changes).recipe


def test_pieces_add_up_to_the_text(model: Path) -> None:
    texts = PageTexts(recipe(str(model)), None)
    assert texts.missing is None
    text = "plain <b> and\n\ttabs"
    pieces = texts.pieces(web_page.tokens(text).tolist())
    assert pieces[0] == "<s>"
    assert "".join(pieces[1:]) == text
    assert all(len(piece) == 1 for piece in pieces[1:])


def test_a_character_of_several_tokens_is_the_last_ones(model: Path) -> None:
    texts = PageTexts(recipe(str(model)), None)
    ids = web_page.tokens("aé€b").tolist()[1:]
    assert texts.pieces(ids) == ["a", "", "é", "", "", "€", "b"]
    assert texts.pieces(ids[:4]) == ["a", "", "é", "�"], "cut off"


def test_ids_beyond_the_vocabulary_are_named(model: Path) -> None:
    texts = PageTexts(recipe(str(model)), None)
    assert texts.pieces([5000, *web_page.tokens("a").tolist()[1:]]) == ["⟨5000⟩", "a"]


def test_spellings_find_a_text_at_a_beginning_and_after_a_space(model: Path) -> None:
    texts = PageTexts(recipe(str(model)), None)
    plain, spaced = texts.spellings("ab")
    np.testing.assert_array_equal(plain, web_page.tokens("ab")[1:])
    np.testing.assert_array_equal(spaced, web_page.tokens(" ab")[1:])


def test_without_a_tokenizer_there_are_numbers_and_a_reason() -> None:
    texts = PageTexts(recipe("/nowhere/model"), None)
    assert "no usable tokenizer.json in /nowhere/model" in (texts.missing or "")
    assert texts.pieces([5, 7]) == ["5", "7"]
    assert texts.spellings("x") == []


def test_nothing_is_fetched_because_a_store_names_it() -> None:
    texts = PageTexts(recipe("http://127.0.0.1:1/model"), None)
    assert "not on this machine" in (texts.missing or "")


def test_a_tokenizer_that_was_replaced_is_not_used_unless_it_is_given(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model")
    files = [model / "tokenizer.json", model / "tokenizer_config.json"]
    same = recipe(str(model), model={"tokenizer": full_digest(*files)})
    assert PageTexts(same, None).missing is None
    files[1].write_text("{}")
    assert "another tokenizer" in (PageTexts(same, None).missing or "")
    given = PageTexts(same, str(model))
    assert given.missing is None
    assert "not the one" in (given.note or "")


def test_a_directory_that_was_given_must_hold_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer .* no usable"):
        PageTexts(recipe("/nowhere"), str(tmp_path))


def test_the_datasets_own_tokenizer_needs_no_model(model: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json")
    own = {name: (model / name).read_bytes() for name in names}
    texts, here = PageTexts(recipe("/nowhere"), None, own), PageTexts(recipe(str(model)), None)
    assert texts.missing is None
    assert texts.encoded("some text") == here.encoded("some text") != []
    assert texts.spellings("ab") == here.spellings("ab")
