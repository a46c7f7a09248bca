"""JSON arrays as files of documents: where each element lies, found without holding the file."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from spile.errors import InputError

# Texts, whatever is in them, and what opens, closes and separates. A lone quote begins a text that
# goes on in the next chunk.
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},"]', re.DOTALL)
_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"


class Element(NamedTuple):
    start: int  # in the file
    stop: int
    between: bytes  # since the element before it; nothing before the first
    data: bytes


def elements(where: str, chunks: Iterator[bytes]) -> Iterator[Element]:
    """The elements of the one array that a file holds, in order."""
    buffer, base = b"", 0  # what is not done with, and where that begins in the file
    depth = 0  # open brackets
    done = at = begun = 0  # the last element ended, looked through so far, this one begins
    some = False
    for chunk in chunks:
        buffer += chunk
        while (match := _TOKEN.search(buffer, at)) and match[0] != b'"':
            token, at = match[0], match.end()
            if token in b"[{":
                if depth == 0:
                    before = buffer[: match.start()].removeprefix(_MARK)
                    if token == b"{" or before.strip(_SPACE):
                        raise InputError(f"{where}: holds no JSON array (one row a line is .jsonl)")
                    begun = at
                depth += 1
            elif token in b"]}":
                depth -= 1
            ends = depth == 0 and token == b"]"
            if ends or (depth == 1 and token == b","):
                data = buffer[begun : match.start()]
                if data.strip(_SPACE):
                    start = base + begun
                    between = buffer[done:begun] if some else b""
                    yield Element(start, start + len(data), between, data)
                    done, some = match.start(), True
                elif not ends or some:
                    raise InputError(f"{where}: an element is missing before byte {base + at}")
                begun = at
            if ends:
                if buffer[at:].strip(_SPACE) or any(rest.strip(_SPACE) for rest in chunks):
                    raise InputError(f"{where}: something follows the array")
                return
        buffer, base, at, begun, done = buffer[done:], base + done, at - done, begun - done, 0
    raise InputError(f"{where}: holds no JSON array, or it does not end; is the file whole?")
