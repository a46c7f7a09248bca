"""Messages in the spellings of corpora."""

from typing import Any

import pytest

from spile.corpus.chats.messages import (
    is_chat,
    messages_in,
    pairs_in,
    role_of,
    tool_names,
    tools_in,
)

CALL: dict[str, Any] = {"name": "add", "arguments": {"a": 1}}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": CALL}],
}


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ({"from": "human", "value": "x"}, {"role": "user", "content": "x"}),
        ({"from": "gpt", "value": "x"}, {"role": "assistant", "content": "x"}),
        ({"from": "system", "value": "x"}, {"role": "system", "content": "x"}),
        ({"from": "observation", "value": "x"}, {"role": "tool", "content": "x"}),
        ({"from": "narrator", "value": "x"}, {"role": "narrator", "content": "x"}),
        ({"from": "gpt", "value": "x", "role": None}, {"role": "assistant", "content": "x"}),
        ({"from": "gpt", "value": "x", "w": 1}, {"w": 1, "role": "assistant", "content": "x"}),
        ({"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}, CALLED),
        ({"from": "function_call", "value": "add(1)"}, {"role": "assistant", "content": "add(1)"}),
        ({"role": "model", "content": "x"}, {"role": "assistant", "content": "x"}),
        ({"role": "user", "content": "x", "from": "gpt"},) * 2,
        (CALLED, CALLED),
    ],
)
def test_a_message_of_any_spelling_has_role_and_content(
    spelled: dict[str, Any], message: dict[str, Any]
) -> None:
    assert messages_in("any", [spelled]) == [message]
    assert role_of(spelled) == message["role"]


@pytest.mark.parametrize(
    ("column", "role"),
    [("system", "system"), ("prompt", "user"), ("completion", "assistant"), ("a.prompt", "user")],
)
def test_a_text_is_said_by_whom_its_column_names(column: str, role: str) -> None:
    assert messages_in(column, "x") == [{"role": role, "content": "x"}]


@pytest.mark.parametrize("value", ["x", 1, ["x"], [[{"role": "user"}]]])
def test_what_is_no_list_of_messages_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="'body' holds no list of messages"):
        messages_in("body", value)


@pytest.mark.parametrize(
    ("value", "chat"),
    [
        ([{"role": "user", "content": "x"}], True),
        ([{"role": "assistant", "tool_calls": []}], True),
        ([{"from": "human", "value": "x"}], True),
        ([{"role": "user", "content": "x"}, {"role": "user"}], False),
        ([{"speaker": "a", "text": "x"}], False),
        ([], False),
        ("x", False),
    ],
)
def test_a_chat_is_known_by_the_keys_of_its_messages(value: Any, chat: bool) -> None:
    assert is_chat(value) is chat


@pytest.mark.parametrize("given", [[CALL], '[{"name": "add", "arguments": {"a": 1}}]'])
def test_tools_are_a_list_or_its_json(given: Any) -> None:
    assert tools_in(given) == [CALL]
    assert tools_in(None) is tools_in([]) is tools_in("") is tools_in("[]") is None


@pytest.mark.parametrize("given", ["add", '"add"', ["add"], 1])
def test_tools_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="'tools' holds"):
        tools_in(given)


def test_columns_of_pairs_are_known_by_their_names() -> None:
    told = "--prompt-column question --response-column answer reads its pairs"
    assert pairs_in(["id", "answer", "question"]) == told
    assert pairs_in(["question", "prompt"]) == ""


def test_tools_are_named_by_descriptions_and_calls() -> None:
    odd = [{"tool_calls": None}, {"tool_calls": ["x", {"function": "y"}, {"name": 1}]}]
    assert [*tool_names([{"role": "user"}, *odd, CALLED], [{"name": "sub"}])] == ["sub", "add"]
