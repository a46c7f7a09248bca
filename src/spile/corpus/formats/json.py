"""JSON arrays as files of documents: find each element without holding the file in memory."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from spile.core.errors import InputError

# The next bracket, brace or comma outside of texts; or the quote that opens a text which continues
# in the next chunk. Within an element commas do not matter.
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_MARK = re.compile(rb'(?:[^\[\]{},"]++|' + _TEXT + rb')*+([\[\]{},"])', re.DOTALL)
_BRACKET = re.compile(rb'(?:[^\[\]{}"]++|' + _TEXT + rb')*+([\[\]{}"])', re.DOTALL)
_INSIDE = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # inside a text, up to its end
_SPACE = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_BEFORE = 1 << 20  # bytes of white space before the array


class JsonPiece(NamedTuple):
    """An element, or a part of one that is too large to hold."""

    start: int  # in the file
    data: bytes
    ends: bool  # whether this completes the element

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


def pieces(where: str, chunks: Iterator[bytes], whole: int) -> Iterator[JsonPiece]:
    """Yield the elements of the single array in a file, in order.

    An element of more than `whole` bytes comes in several pieces; only the last one `ends`.
    """
    buffer, base = b"", 0  # unprocessed bytes, and their offset in the file
    depth, inside = 0, False  # open brackets; whether a text is open
    at = begun = 0  # scanned so far, and where the part not yet yielded begins
    some = solid = False  # whether there was any element, and any part of this one
    for chunk in chunks:
        buffer += chunk
        while at < len(buffer):
            if inside:
                found = _INSIDE.match(buffer, at)
                assert found
                at = found.end()
                if at == len(buffer) or buffer[at] != ord('"'):
                    break  # the text, or an escape, continues in the next chunk
                at, inside = at + 1, False
            mark = (_BRACKET if depth > 1 else _MARK).match(buffer, at)
            if mark is None:
                at = len(buffer)
                break
            token, at = mark[1], mark.end()
            if depth == 0:
                if token != b"[" or buffer[: at - 1].removeprefix(_BOM).strip(_SPACE):
                    raise _no_array_error(where)
                begun, depth = at, 1
            elif token == b'"':
                inside = True
            elif token in b"[{":
                depth += 1
            elif token in b"]}":
                depth -= 1
            ends = depth == 0 and token == b"]"
            if ends or (depth == 1 and token == b","):
                data = buffer[begun : at - 1]
                if solid or data.strip(_SPACE):
                    yield JsonPiece(base + begun, data, ends=True)
                    some = True
                elif not ends or some:
                    raise InputError(f"{where}: an element is missing before byte {base + at}")
                begun, solid = at, False
            if ends:
                if buffer[at:].strip(_SPACE) or any(rest.strip(_SPACE) for rest in chunks):
                    raise InputError(f"{where}: something follows the array")
                return
        if depth == 0:
            if len(buffer) > _BEFORE:
                raise _no_array_error(where)
            continue
        if solid or at - begun > whole:
            data = buffer[begun:at]
            solid = solid or bool(data.strip(_SPACE))
            yield JsonPiece(base + begun, data, ends=False)
            begun = at
        buffer, base, at, begun = buffer[begun:], base + begun, at - begun, 0
    raise InputError(f"{where}: holds no JSON array, or it does not end; is the file whole?")


def _no_array_error(where: str) -> InputError:
    return InputError(f"{where}: holds no JSON array (one row a line is .jsonl)")
