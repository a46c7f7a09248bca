"""Elements of JSON arrays are found wherever chunks end; other JSON is refused."""

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import InputError
from spile.corpus.formats.json import pieces
from support.marks import examples

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def chunks(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


@examples(150)
@given(
    st.lists(VALUES, max_size=6),
    st.sampled_from([None, 0, 3]),
    st.booleans(),
    st.sampled_from([1, 2, 7, 64, 1 << 20]),
)
def test_elements_are_those_of_the_array(
    rows: list[object], indent: int | None, ascii_only: bool, size: int
) -> None:
    data = json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "replace")
    whole = b"\xef\xbb\xbf\n" + data
    found = list(pieces("f", chunks(whole + b" \n", size), 1 << 20))
    assert [json.loads(piece.data) for piece in found] == json.loads(data)
    assert all(piece.ends and whole[piece.start : piece.stop] == piece.data for piece in found)
    for before, after in zip(found, found[1:], strict=False):
        assert whole[before.stop : after.start] == b","
    cut = list(pieces("f", chunks(whole, size), 3))
    assert b"".join(piece.data + b"," * piece.ends for piece in cut) == b"".join(
        piece.data + b"," for piece in found
    )
    assert all(whole[piece.start : piece.stop] == piece.data for piece in cut)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no JSON array"),
        (b"{}", "no JSON array"),
        (b'{"a": [1]}', "no JSON array"),
        (b"x [1]", "no JSON array"),
        (b"] [1]", "no JSON array"),
        (b'"[1]"', "no JSON array"),
        (b"[1", "does not end"),
        (b'["a', "does not end"),
        (b"[1,,2]", "element is missing before byte 4"),
        (b"[1,]", "element is missing"),
        (b"[1] 2", "something follows"),
    ],
)
def test_what_is_no_array_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        list(pieces("f.json", chunks(data, 3), 1 << 20))


def test_a_large_array_takes_time_in_proportion_to_its_size() -> None:
    """A chunk with thousands of elements is not copied once per element."""
    data = json.dumps([{"text": "word " * 20, "n": n} for n in range(60_000)]).encode()
    assert sum(1 for _ in pieces("f", chunks(data, 8 << 20), 8 << 20)) == 60_000


def test_an_element_of_any_size_is_skipped_in_bounded_time_and_memory() -> None:
    """A text that spans many chunks is not scanned again for each of them."""
    chunk, count = b'\\"word ' * (1 << 15), 400
    data = iter([b'[1, {"text": "', *[chunk] * count, b'"}, 3]'])
    found = list(pieces("f", data, 1 << 19))
    assert [piece.ends for piece in found[:1] + found[-2:]] == [True, True, True]
    assert max(len(piece.data) for piece in found) < (1 << 19) + 2 * len(chunk)
    assert found[-2].stop - found[1].start == count * len(chunk) + len(b' {"text": ""}')
