"""Parse untrusted JSON within limits on its size and its depth.

A caller may recurse through the result: nothing in it is nested deeper than the limit.
"""

import json
from collections import Counter
from typing import Any, Literal, cast

from spile.core.options import shown

MAX_BYTES = 256 << 20  # the index of the largest checkpoints is a tenth of this size
MAX_DEPTH = 32

# A parsed value of unchecked type.
Json = dict[str, Any] | list[Any] | str | int | float | bool | None


class JsonError(ValueError):
    """Bytes are not the JSON that was expected. The message says why, but not where.

    Attributes:
        problem: the kind of limit or rule that was broken, for callers that write their own
            message.
    """

    def __init__(self, problem: Literal["size", "syntax", "depth", "type"], reason: str) -> None:
        self.problem = problem
        super().__init__(reason)


def check_size(size: int, max_bytes: int = MAX_BYTES) -> None:
    """Refuse a file by its size, before it is read.

    Raises:
        JsonError: if it is larger than allowed.
    """
    if size > max_bytes:
        raise JsonError("size", f"larger than {max_bytes} bytes")


def parse_json(
    data: bytes,
    *,
    max_bytes: int = MAX_BYTES,
    max_depth: int | None = MAX_DEPTH,
    unique_keys: bool = False,
) -> Any:
    """Parse bytes in UTF-8, UTF-16 or UTF-32, with or without a byte-order mark.

    Args:
        max_depth: how deeply objects and lists may be nested; None for callers that check the type
            of every value they take.
        unique_keys: refuse an object that repeats a key, instead of keeping its last value.

    Raises:
        JsonError: if a limit is exceeded, or the bytes are not JSON.
    """
    check_size(len(data), max_bytes)
    try:
        value: Any = json.loads(
            data, object_pairs_hook=_without_repetitions if unique_keys else None
        )
    except RecursionError as error:
        raise JsonError("depth", f"not valid JSON ({error})") from None
    except ValueError as error:
        raise JsonError("syntax", f"not valid JSON ({error})") from None
    if max_depth is None:
        return value
    level = _containers([value])
    for _ in range(max_depth):
        if not level:
            break
        level = [part for each in level for part in _containers(each)]
    if level:
        raise JsonError("depth", f"nested too deeply: {max_depth} levels at most")
    return value


def parse_json_object(
    data: bytes, *, max_bytes: int = MAX_BYTES, max_depth: int | None = MAX_DEPTH
) -> dict[str, Any]:
    """Parse bytes that must hold an object, as `parse_json` does.

    Raises:
        JsonError: as `parse_json`, and if the value is not an object.
    """
    value = parse_json(data, max_bytes=max_bytes, max_depth=max_depth)
    if not isinstance(value, dict):
        raise JsonError("type", "not a JSON object")
    return cast(dict[str, Any], value)


def _containers(value: dict[str, Any] | list[Any]) -> list[Any]:
    """Return the objects and lists directly inside a value."""
    inside = value.values() if isinstance(value, dict) else value
    return [part for part in inside if type(part) in (dict, list)]  # (as `json` makes them)


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(repeated)} comes twice")
    return found
