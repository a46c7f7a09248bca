from typing import Any

import pytest

from spile.core.bounded_json import JsonError, parse_json, parse_json_object


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b"3", 3),
        (nested(3), [[[]]]),
    ],
)
def test_values_within_the_limits_are_returned(data: bytes, value: Any) -> None:
    assert parse_json(data, max_bytes=30, max_depth=3) == value


@pytest.mark.parametrize(
    ("data", "problem", "reason"),
    [
        (b" " * 31, "size", "larger than 30 bytes"),
        (b"{oops", "syntax", "not valid JSON (Expecting property name"),
        (b"", "syntax", "not valid JSON (Expecting value"),
        (b"\xff", "syntax", "not valid JSON ("),
        (b'{"b": {"a": 1, "a": 2}}', "syntax", "not valid JSON (key 'a' comes twice)"),
        (nested(4), "depth", "nested too deeply: 3 levels at most"),
        (b'{"a": {"b": {"c": {}}}}', "depth", "nested too deeply: 3 levels at most"),
    ],
)
def test_a_broken_limit_is_named(data: bytes, problem: str, reason: str) -> None:
    with pytest.raises(JsonError) as caught:
        parse_json(data, max_bytes=30, max_depth=3, unique_keys=True)
    assert caught.value.problem == problem
    assert str(caught.value).startswith(reason)


def test_depth_beyond_the_interpreter_is_a_problem_of_depth() -> None:
    with pytest.raises(JsonError) as caught:
        parse_json(nested(1 << 20))
    assert caught.value.problem == "depth"


def test_only_an_object_is_an_object() -> None:
    assert parse_json_object(b'{"a": 1}') == {"a": 1}
    for data in (b"[]", b"1", b"null"):
        with pytest.raises(JsonError, match="not a JSON object") as caught:
            parse_json_object(data)
        assert caught.value.problem == "type"


def test_a_caller_that_checks_every_value_may_leave_out_the_depth() -> None:
    parsed = parse_json(nested(40), max_depth=None)
    for _ in range(39):
        (parsed,) = parsed
    assert parsed == []
    with pytest.raises(JsonError, match="not valid JSON"):
        parse_json(nested(100_000), max_depth=None)
