"""Documents of programs: which values are accepted, their one form, and which are refused."""

import json
from typing import Any

import numpy as np
import pytest

from spile.core.errors import InputError
from spile.corpus.programs.program import ProgramDocument, checked_document, digest_of


@pytest.mark.parametrize(
    ("given", "document"),
    [
        ("a text", ProgramDocument("a text")),
        ("", ProgramDocument("")),
        (None, ProgramDocument(None)),
        ("é🌳".encode(), ProgramDocument("é🌳")),
        ({"text": "x"}, ProgramDocument("x")),
        ({"text": None, "n": 1}, ProgramDocument(None, metadata={"n": 1})),
        ({"text": b"x", "label": np.int64(3)}, ProgramDocument("x", metadata={"label": 3})),
        (
            {"text": np.str_("x"), "tags": np.array([b"a", b"b"], object), "p": np.float32(0.5)},
            ProgramDocument("x", metadata={"tags": ["a", "b"], "p": 0.5}),
        ),
        (
            {"segments": [["user", "2+2="], ("assistant", "4")], "deep": {"a": (1, [None, True])}},
            ProgramDocument(
                "2+2=4",
                (("user", "2+2="), ("assistant", "4")),
                metadata={"deep": {"a": [1, [None, True]]}},
            ),
        ),
        ({"segments": []}, ProgramDocument("")),
        (
            {"messages": [{"role": "user", "content": b"hi"}, {"role": "tool", "calls": [1]}]},
            ProgramDocument(
                None,
                messages=({"role": "user", "content": "hi"}, {"role": "tool", "calls": [1]}),
            ),
        ),
    ],
)
def test_what_is_given_becomes_a_document(given: Any, document: ProgramDocument) -> None:
    assert checked_document("here", given) == document


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (5, "is int"),
        (["a", "b"], "is list"),
        ({}, "has no keys"),
        ({"body": "x", "n": 1}, "has 'body', 'n'; it must have one of text, messages, segments"),
        ({"text": "x", "messages": []}, "--text-column or --messages"),
        ({"text": 5}, "'text' is not a text"),
        ({"text": ["x"]}, "'text' is not a text"),
        ({"messages": []}, "each with a role"),
        ({"messages": [{"content": "x"}]}, "each with a role"),
        ({"messages": [{"role": 1}]}, "each with a role"),
        ({"messages": "user: x"}, "each with a role"),
        ({"segments": [["narrator", "x"]]}, "the role one of system, user"),
        ({"segments": [["user", "x", "y"]]}, "a list of [role, text]"),
        ({"segments": ["ab"]}, "a list of [role, text]"),
        ({"segments": [["user", None]]}, "a list of [role, text]"),
        ({"text": "x", "n": float("nan")}, "'n': holds float that JSON cannot"),
        ({"text": "x", "n": np.float32("inf")}, "'n': holds float that JSON cannot"),
        ({"text": "x", "n": 1 << 63}, "numbers below 2**63"),
        ({"text": "x", "n": {"m": {1, 2}}}, "'n': 'm': holds set"),
        ({"text": "x", "n": object()}, "'n': holds object"),
        ({"text": "x", "n": {1: 2}}, "keys that are not texts"),
        ({1: "x"}, "keys that are not texts"),
        ({"text": "x", "image": b"\xff\xd8"}, "metadata is not UTF-8"),
        ({"text": "x", "a\n\ud800": 1}, "metadata is not UTF-8"),
        ({"text\n": "x"}, "has 'text\\n'"),
    ],
)
def test_what_is_no_document_is_refused_in_one_line(given: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        checked_document("program: document 7", given)
    message = str(caught.value)
    assert message.startswith("program: document 7: ")
    assert said in message
    assert "\n" not in message


def test_what_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InputError, match="nested too deeply"):
        checked_document("here", {"text": "x", "n": endless})


def test_text_that_is_not_utf8_is_left_to_be_counted_by_whoever_reads_it() -> None:
    document = checked_document("here", {"text": b"caf\xe9"})
    assert document.text is not None
    with pytest.raises(UnicodeEncodeError):
        document.text.encode()
    assert digest_of([document]) != digest_of([checked_document("here", "caf")])


def test_a_column_is_chosen_among_others() -> None:
    both = {"text": "t", "body": "b", "messages": [{"role": "user"}], "chat": [{"role": "tool"}]}
    document = checked_document("here", both, text_column="body")
    assert document.text == "b"
    assert set(document.metadata) == {"text", "messages", "chat"}
    document = checked_document("here", both, messages_column="chat")
    assert document.messages == ({"role": "tool"},)
    with pytest.raises(InputError, match="it must have 'title'"):
        checked_document("here", both, text_column="title")


def test_a_pair_is_selected_by_columns_and_refused_by_its_flags_name() -> None:
    given = {"question": "q", "answer": "a", "text": "t", "topic": "law"}
    document = checked_document("here", given, pair_columns=("question", "answer"))
    assert document.pair == {"question": "q", "answer": "a"} and document.text is None
    assert document.metadata == {"text": "t", "topic": "law"}
    other = checked_document("here", {**given, "answer": "b"}, pair_columns=("question", "answer"))
    assert digest_of([document]) != digest_of([other])
    with pytest.raises(InputError, match=r"has no 'reply', which --response-column names; it has"):
        checked_document("here", given, pair_columns=("question", "reply"))
    with pytest.raises(InputError, match="is str, not a mapping with --prompt-column"):
        checked_document("here", "text", pair_columns=("question",))


def test_a_text_is_its_segments_joined() -> None:
    segments = [["system", "é🌳"], ["user", ""], ["user", "b c"], ["assistant", "d"]]
    document = checked_document("here", {"segments": segments})
    assert document.text == "é🌳b cd"
    assert [list(segment) for segment in document.segments] == segments
    assert checked_document("here", "no roles").segments == ()


def test_every_part_of_a_document_and_their_order_are_in_the_digest() -> None:
    given: list[list[Any]] = [
        ["ab"], ["a", "b"], ["b", "a"], [], [None], [{"text": "ab", "n": 1}],
        [{"text": "ab", "n": "1"}], [{"segments": [["user", "ab"]]}],
        [{"segments": [["user", "a"], ["user", "b"]]}],
        [{"messages": [{"role": "user", "content": "ab"}]}],
    ]  # fmt: skip
    digests = {digest_of([checked_document("here", value) for value in each]) for each in given}
    assert len(digests) == len(given)


def test_the_order_of_keys_is_not_in_the_digest() -> None:
    one, other = {"text": "x", "a": 1, "b": {"c": 1, "d": 2}}, {"b": {"d": 2, "c": 1}, "a": 1}
    other["text"] = "x"
    first, second = (checked_document("here", value) for value in (one, other))
    assert digest_of([first]) == digest_of([second])
    assert json.loads(first.canonical())[0] == "x"
