"""Messages as corpora spell them, turned into those that chat templates read: role and content.

What a row becomes depends on the row and on the columns that `--messages` names, and on nothing
else, so the recipe need not say more.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

SYSTEM, TOOLS = "system", "tools"  # columns that a row may leave empty
# Columns of prompts and of their responses, as published corpora call them.
PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "chosen"),
    ("prompt", "rejected"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
    ("problem", "solution"),
)
_SPEAKERS = {  # of a column that holds a text
    SYSTEM: "system",
    **{prompt: "user" for prompt, _ in PAIRS},
    **{response: "assistant" for _, response in PAIRS},
}
_ROLES = {  # names of roles that chat templates do not know
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_CALL = "function_call"  # ShareGPT's role of a message that is one call, or a list of them
# The keys that make a list of objects a chat: those of the speaker, and those of the text.
_SPELLINGS = (({"role"}, {"content", "tool_calls"}), ({"from"}, {"value"}))


def is_message(keys: set[str]) -> bool:
    """Return whether an object with these keys is a message."""
    return any(keys >= speaker and keys & said for speaker, said in _SPELLINGS)


def is_sharegpt(message: Mapping[str, Any]) -> bool:
    """Return whether a message has `from` and `value` in place of `role` and `content`."""
    return message.get("role") is None and {"from", "value"} <= message.keys()


def is_chat(value: Any) -> bool:
    """Return whether a JSON value is a list of messages."""
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(message, dict) and is_message({*cast(dict[str, Any], message)})
        for message in cast(list[Any], value)
    )


def role_of(message: Mapping[str, Any]) -> Any:
    """Return the role of a message in the name that templates use."""
    said = message["from"] if is_sharegpt(message) else message.get("role")
    return "assistant" if said == _CALL else _ROLES.get(said, said) if said else said


def messages_in(column: str, value: Any) -> list[dict[str, Any]]:
    """Return the messages that a column's value stands for.

    Raises:
        ValueError: if it holds no messages.
    """
    speaker = _SPEAKERS.get(column.rpartition(".")[2])
    if isinstance(value, str) and speaker:
        return [{"role": speaker, "content": value}]
    if not isinstance(value, list) or not all(
        isinstance(message, dict) for message in cast(list[Any], value)
    ):
        raise ValueError(f"{column!r} holds no list of messages; choose with --messages")
    return [_plain(message) for message in cast(list[dict[str, Any]], value)]


def tools_in(value: Any) -> list[dict[str, Any]] | None:
    """Return the descriptions of tools that a template shows to the model; None if there are none.

    Raises:
        ValueError: if the value, or the JSON that it spells, is no list of objects.
    """
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value or "null")
        except (ValueError, RecursionError):
            raise ValueError(f"{TOOLS!r} holds a text that is not JSON") from None
    if not found:
        return None
    tools = cast(list[Any], found)
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{TOOLS!r} holds no list of objects, each of which describes a tool")
    return cast(list[dict[str, Any]], tools)


def tool_names(
    messages: Iterable[Mapping[str, Any]], tools: Iterable[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the names of the tools that a chat describes or calls."""
    calls = (message.get("tool_calls") for message in messages)
    lists = (cast(list[Any], each) for each in calls if isinstance(each, list))
    for each in (*tools, *itertools.chain.from_iterable(lists)):
        found = cast(dict[str, Any], each) if isinstance(each, dict) else {}
        function = found.get("function", found)
        name = cast(dict[str, Any], function).get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            yield name


def pairs_in(columns: Sequence[str]) -> str:
    """Return advice about a prompt and a response among the columns; empty if there are none."""
    for prompt, response in PAIRS:
        if prompt in columns and response in columns:
            return f"--prompt-column {prompt} --response-column {response} reads its pairs"
    return ""


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with `role` and `content`; one that has them already, unchanged."""
    role = role_of(message)
    if not is_sharegpt(message):
        return message if role == message.get("role") else message | {"role": role}
    rest = {key: value for key, value in message.items() if key not in ("from", "value", "role")}
    calls = _calls(message["value"]) if message["from"] == _CALL else None
    if calls:
        return {**rest, "role": role, "content": "", "tool_calls": calls}
    return {**rest, "role": role, "content": message["value"]}


def _calls(value: Any) -> list[dict[str, Any]] | None:
    """Return the calls that a text spells; None if it is something else, and so a plain text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
    calls = cast(list[Any], found if isinstance(found, list) else [found])
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        return None
    return [{"type": "function", "function": call} for call in cast(list[dict[str, Any]], calls)]
