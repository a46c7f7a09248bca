"""Owned texts: what `str` does, with every character's owner where the character went.

The owner of a character is settled by the character itself, so that whoever has been followed
wrongly is seen at once.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import InputError
from spile.corpus.chats.provenance import (
    FOLLOWED,
    OwnedText,
    joined,
    lifted,
    owned,
    owned_whole,
    sole_owner,
)

PLAIN = st.text("ab01 \n\r.", max_size=12)
SOME = st.text("ab01 .", min_size=1, max_size=2)


def follow(text: str) -> OwnedText:
    """Letters belong to message 0, digits to message 1, other characters to none."""
    owners = [(0, 0) if c.isalpha() else (1, 0) if c.isdigit() else None for c in text]
    pieces = (c if o is None else owned_whole(c, o) for c, o in zip(text, owners, strict=True))
    return joined(pieces)


def check(found: Any, wanted: Any) -> None:
    assert found == wanted
    if isinstance(wanted, str):
        assert found.runs == follow(wanted).runs
    else:
        assert type(found) is type(wanted)
        for one, other in zip(found, wanted, strict=True):
            check(one, other)


@given(PLAIN, SOME, SOME, st.integers(-1, 3))
def test_every_method_gives_what_str_gives_with_its_owners(
    text: str, one: str, other: str, count: int
) -> None:
    mine = follow(text)
    check(mine, text)
    for method in ("capitalize", "casefold", "lower", "swapcase", "title", "upper"):
        check(getattr(mine, method)(), getattr(text, method)())
    for method in ("lstrip", "rstrip", "strip", "split", "rsplit"):
        check(getattr(mine, method)(), getattr(text, method)())
        check(getattr(mine, method)(one), getattr(text, method)(one))
    for method in ("partition", "rpartition", "removeprefix", "removesuffix"):
        check(getattr(mine, method)(one), getattr(text, method)(one))
    for separator in (None, one):
        check(mine.split(separator, count), text.split(separator, count))
        check(mine.rsplit(separator, count), text.rsplit(separator, count))
    for keep in (True, False):
        check(mine.splitlines(keep), text.splitlines(keep))
    check(mine.replace(one, follow(other)), text.replace(one, other))
    check(mine.replace(one, follow(other), count), text.replace(one, other, count))
    check(mine.join([follow(one), follow(other), follow(one)]), text.join([one, other, one]))


def test_nothing_that_may_be_called_forgets() -> None:
    """Every method that returns a text, and that a template may call, is one of ours."""
    for method in FOLLOWED:
        assert method in vars(OwnedText), method


@given(PLAIN, st.integers(-14, 14), st.integers(-14, 14), st.integers(-3, 3).filter(bool))
def test_slices_and_sums_keep_owners(text: str, start: int, stop: int, step: int) -> None:
    mine = follow(text)
    check(mine[start:stop:step], text[start:stop:step])
    check(mine[start:stop], text[start:stop])
    check(list(mine), list(text))
    check(follow("a.") + mine, "a." + text)
    if -len(text) <= start < len(text):
        check(mine[start], text[start])
    else:
        with pytest.raises(IndexError):
            mine[start]


def test_a_sum_with_a_plain_text_keeps_owners_on_both_sides() -> None:
    text = owned_whole("said", (3, 0))
    assert joined(("<" + text, ">")).runs == ((1, 5, (3, 0)),)
    assert (text + text).runs == ((0, 8, (3, 0)),)
    assert (text + owned_whole("x", (3, 1))).runs == ((0, 4, (3, 0)), (4, 5, (3, 1)))
    assert isinstance(str(text), OwnedText)
    assert hash(text) == hash("said") and {"said": 1}[text] == 1


def test_no_character_has_a_shorter_other_case() -> None:
    """A text of unchanged length therefore has every character in its place."""
    characters = list(map(chr, range(sys.maxunicode + 1)))
    for change in (str.lower, str.upper, str.title, str.casefold):
        assert all(map(change, characters))


def test_a_case_that_is_longer_is_followed_where_one_owner_has_all() -> None:
    assert owned_whole("ß", (2, 0)).upper().runs == ((0, 2, (2, 0)),)
    with pytest.raises(InputError, match="only in part"):
        (owned_whole("ß", (2, 0)) + ":").upper()


@pytest.mark.parametrize(
    "act",
    [
        lambda text: text * 2,
        lambda text: 2 * text,
        lambda text: text % (),
        lambda text: text.replace("", "-"),
    ],
)
def test_what_cannot_be_followed_is_refused_of_the_owned_alone(
    act: Callable[[str], str],
) -> None:
    assert act(lifted("said")) == act("said")
    with pytest.raises(InputError, match="speaker cannot be determined"):
        act(owned_whole("said", (0, 0)))


def test_values_are_owned_to_the_last_key_and_have_one_owner() -> None:
    value = owned({"a": ["b", {"c": 1, "d": None}], "e": ""}, (5, 0))
    assert value == {"a": ["b", {"c": 1, "d": None}], "e": ""}
    texts = [*value, value["a"][0], *value["a"][1], value["e"]]
    assert sole_owner(texts, "writes out") == (5, 0)
    assert sole_owner(["plain", lifted("plain")], "writes out") is None
    with pytest.raises(InputError, match="only in part"):
        sole_owner([owned_whole("a", (1, 0)), owned_whole("b", (2, 0))], "writes out")
    parts = [owned_whole("a", (1, 2)), owned_whole("b", (1, 3))]
    assert sole_owner(parts[:1], "writes out") == (1, 2)
    assert sole_owner(parts, "writes out") == (1, 0)
