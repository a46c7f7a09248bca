"""The documents of a program that was opened: numbered, cut into ranges, and read again.

What is cut is hashed, and what is read afterwards, in this process or another, must be the same.
"""

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import xxhash

from spile.core.config import canonical_json
from spile.core.errors import DataError, InputError, SpileError
from spile.corpus.programs.document import Document, checked_document, clean, digest_of, hash_into

_SAMPLE_DOCS = 256
_SAMPLE_BYTES = 1 << 22
_END = object()


@dataclass(frozen=True)
class Range:
    """Consecutive documents: about `size` bytes of them, and a hash to know them by."""

    first: int
    count: int
    size: int
    digest: str


class Source:
    """An opened program's documents, numbered from 0.

    Attributes:
        length: how many there are; None where they can only be read in order.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], Any],
        described: Mapping[str, Any],
        text_column: str | None,
        messages_column: str | None,
    ) -> None:
        """What `call` returns; `described` is its identity, if it has none of its own."""
        self.name = name
        self._function, self._described = call, described
        self._columns = (text_column, messages_column)
        self._given = self._call()
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        self.length: int | None = None
        if _by_number(self._given):
            self.length = guarded(f"{name}: len()", len, self._given)
        else:
            self._iterator = guarded(name, iter, self._given)

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)  # of a generator, or a file
        if callable(close):
            guarded(self.name, close)
        self._iterator = None

    def identity(self) -> tuple[str, ...]:
        """What the program is, for the recipe: paths are no part of it.

        Its name, arguments and source file; or its name, and what `identity()` of that which it
        returned says, if it has such a method.
        """
        parts = {**self._described}
        own = getattr(self._given, "identity", None)
        if callable(own):
            where = f"{self.name}: identity()"
            said_itself = clean(where, guarded(where, own))
            if not isinstance(said_itself, dict):
                raise InputError(f"{where} must return a mapping of JSON values")
            parts = {"program": parts["program"], **cast(dict[str, Any], said_itself)}
        return tuple(f"{key} {canonical_json(parts[key]).decode()}" for key in sorted(parts))

    def sample(self) -> tuple[list[Document], int]:
        """Some documents, spread evenly where they can be asked for, and their size in bytes."""
        if self.length is None:
            found = self.documents(0)
        else:
            count = min(self.length, _SAMPLE_DOCS)
            found = (self._document(i * self.length // count) for i in range(count))
        documents: list[Document] = []
        size = 0
        for document in itertools.islice(found, _SAMPLE_DOCS):
            documents.append(document)
            size += len(document.canonical())
            if size >= _SAMPLE_BYTES:
                break
        return documents, size

    def ranges(
        self, size: int, max_docs: int | None = None, heed: Callable[[], None] = lambda: None
    ) -> Iterator[Range]:
        """All documents, in ranges of about `size` bytes each.

        Where documents can only be read in order this is a whole pass, in which each is hashed;
        else only the first and the last of a range are, and sizes are estimated from a sample.
        `heed` is called for every document or range, and may raise to stop the pass.
        """
        if self.length is None:
            yield from self._counted(size, max_docs, heed)
            return
        sampled, total = self.sample()
        each = max(1, total // max(1, len(sampled)))
        stop = self.length if max_docs is None else min(self.length, max_docs)
        step = max(1, -(-size // each))
        for first in range(0, stop, step):
            heed()
            part = self.part(first, min(step, stop - first))
            yield replace(part, size=part.count * each)

    def part(self, first: int, count: int) -> Range:
        """So many documents of those with numbers; nothing is known of their size."""
        ends = [self._document(first), self._document(first + count - 1)]
        return Range(first, count, 0, digest_of(ends))

    def read(self, wanted: Range) -> list[Document]:
        """The documents of a range, which must be those that it was made of."""
        documents = list(itertools.islice(self.documents(wanted.first), wanted.count))
        hashed = documents if self.length is None else [*documents[:1], *documents[-1:]]
        if len(documents) != wanted.count or digest_of(hashed) != wanted.digest:
            last = wanted.first + wanted.count - 1
            raise DataError(
                f"{self.name}: documents {wanted.first} to {last} are not those it gave when "
                "the corpus was cut; a program must give the same ones whenever it is called: sort "
                "what has no order, seed within the function what is random"
            )
        return documents

    def documents(self, first: int) -> Iterator[Document]:
        """Those from a number on."""
        if self.length is not None:
            yield from map(self._document, range(first, self.length))
            return
        if self._iterator is None or self._position > first:
            self.close()
            self._given = self._call()
            self._iterator, self._position = guarded(self.name, iter, self._given), 0
        while (value := self._next()) is not _END:
            if self._position > first:
                yield self._checked(self._position - 1, value)

    def _call(self) -> Any:
        given = guarded(self.name, self._function)
        kind, many = type(given).__name__, _by_number(given) or hasattr(given, "__iter__")
        if isinstance(given, str | bytes | Mapping) or not many:
            raise InputError(
                f"{self.name}: returned {kind}; it must return documents: something to iterate "
                "over, or with __len__ and __getitem__"
            )
        return given

    def _next(self) -> Any:
        value = guarded(self._where(self._position), next, self._iterator, _END)
        self._position += value is not _END
        return value

    def _document(self, number: int) -> Document:
        value = guarded(self._where(number), operator.getitem, self._given, number)
        return self._checked(number, value)

    def _checked(self, number: int, value: Any) -> Document:
        return checked_document(self._where(number), value, *self._columns)

    def _where(self, number: int) -> str:
        return f"{self.name}: document {number}"

    def _counted(
        self, size: int, max_docs: int | None, heed: Callable[[], None]
    ) -> Iterator[Range]:
        first = count = reached = 0
        digest = xxhash.xxh3_128()
        for document in itertools.islice(self.documents(0), max_docs):
            heed()
            count, reached = count + 1, reached + hash_into(digest, document)
            if reached >= size:
                yield Range(first, count, reached, digest.hexdigest())
                first, count, reached = first + count, 0, 0
                digest = xxhash.xxh3_128()
        if count:
            yield Range(first, count, reached, digest.hexdigest())


def _by_number(given: Any) -> bool:
    return hasattr(given, "__len__") and hasattr(given, "__getitem__")


def guarded(where: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Call what is not ours; whatever it raises is one line."""
    try:
        return call(*args, **options)
    except SpileError:
        raise
    except (Exception, SystemExit) as error:  # a script may end itself
        raise InputError(f"{where}: {said(error)}") from error


def said(error: BaseException) -> str:
    """What an exception is and says, in one line."""
    try:
        lines = str(error).split("\n")
    except Exception:  # an exception of someone else's may fail to say what it is
        lines = [""]
    return f"{type(error).__name__}: {lines[0][:200]}".removesuffix(": ")
