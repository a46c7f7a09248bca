"""Programs as corpora: a function that returns documents, named by its module or its file.

    package.module:function(argument=value, ...)
    path/to/file.py[:function][(argument=value, ...)]      without a name: create_dataset
    arc:path/to/tasks[(argument=value, ...)]               short for spile.data.arc:tasks

The function returns documents that can be iterated over, or indexed by number like the sources of
Grain and TFDS. It must return the same ones on every call: documents are hashed when the corpus is
cut, and compared when they are read later, in this process or another.

A document is a text, or a mapping with one of `text`, `messages` (for a chat template) and
`segments` (pieces with roles; joined, they are the text). The mapping's other keys are metadata.
"""

import ast
import importlib
import inspect
import itertools
import json
import math
import operator
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

from spile.core.config import canonical_json
from spile.core.errors import ConfigError, DataError, InputError, SpileError
from spile.core.identity import full_digest
from spile.core.index import ROLES
from spile.core.threads import cancellation
from spile.core.units import Span
from spile.objects.hub.names import BUILT

_DEFAULT = "create_dataset"
# Programs shipped with Spile: module, function, and the argument that follows the colon. These
# names are part of the format, since recipes are fingerprinted with them: files may move.
_ALIASES = {"arc": ("spile.data.arc", "tasks", "path")}
_HOMES = {"spile.data.arc": "spile.corpus.programs.arc"}
_NAME = r"[^\W\d]\w*"
_ALIAS = re.compile(rf"({'|'.join(_ALIASES)}):([^(]+)(\(.*\))?", re.DOTALL)
_FILE = re.compile(rf"(.+?\.py)(?::({_NAME}))?(\(.*\))?", re.DOTALL)
_MODULE = re.compile(rf"({_NAME}(?:\.{_NAME})*):({_NAME})(\(.*\))?", re.DOTALL)
_MAX_CHARACTERS = 10_000
_MAX_SHOWN = 200  # most characters of a name in a message
_KINDS = {
    "text": "a text",
    "messages": "a list of mappings, each with a role",
    "segments": f"a list of [role, text], the role one of {', '.join(ROLES)}",
}
_MAX_DEPTH = 32
_LIMIT = 1 << 63
_SHOWN = 12  # most keys in a message
_SAMPLE_DOCS = 256
_SAMPLE_BYTES = 1 << 22
_END = object()


@dataclass(frozen=True)
class ProgramDocument:
    """A document as a program returned it.

    Attributes:
        text: None if there are messages instead, or if the program returned nothing.
        segments: role and text of each piece; joined, they are the text. Empty if not given.
        messages: a chat for the model's template to render. Empty if not given.
        metadata: all other keys, as JSON values.
        pair: the prompt and the response by their columns' names, if those were requested.
    """

    text: str | None
    segments: tuple[tuple[str, str], ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    pair: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def canonical(self) -> bytes:
        """Return the whole document in canonical form, for hashes and sizes."""
        parts: list[Any] = [self.text, self.segments, self.messages, self.metadata]
        return canonical_json([*parts, self.pair] if self.pair else parts)


def digest_of(documents: Iterable[ProgramDocument]) -> str:
    """Return a hash of documents in their order."""
    digest = xxhash.xxh3_128()
    for document in documents:
        hash_into(digest, document)
    return digest.hexdigest()


def hash_into(digest: xxhash.xxh3_128, document: ProgramDocument) -> int:
    """Add a document to a hash; return its size in bytes."""
    data = document.canonical()
    digest.update(data + b"\n")  # a newline, which its JSON never contains
    return len(data)


def checked_document(
    where: str,
    value: Any,
    text_column: str | None = None,
    messages_column: str | None = None,
    pair_columns: tuple[str, ...] = (),
) -> ProgramDocument:
    """Check a program's value and make a document of it; column names choose keys of a mapping.

    `pair_columns`: the column of the prompt and, if there is one, of the response.

    Raises:
        InputError: if it is not a document; the message begins with `where`.
    """
    if pair_columns:
        return _pair(where, value, pair_columns)
    if value is None or isinstance(value, str | bytes):
        return ProgramDocument(clean(where, value))
    if not isinstance(value, Mapping):
        raise InputError(
            f"{where}: is {type(value).__name__}; a document is a text, or a mapping with "
            f"{', '.join(_KINDS)}"
        )
    fields: dict[str, Any] = clean(where, cast(Any, value))
    kind, key = _kind(where, fields, {"text": text_column, "messages": messages_column})
    content: Any = fields.pop(key)
    _check_metadata(where, fields)
    if kind == "text" and (content is None or isinstance(content, str)):
        return ProgramDocument(content, metadata=fields)
    if kind == "messages" and _are_messages(content):
        return ProgramDocument(None, messages=tuple(content), metadata=fields)
    if kind == "segments" and _are_segments(content):
        segments = tuple((role, text) for role, text in content)
        return ProgramDocument("".join(text for _, text in segments), segments, metadata=fields)
    raise InputError(f"{where}: {key!r} is not {_KINDS[kind]}")


def _pair(where: str, value: Any, columns: tuple[str, ...]) -> ProgramDocument:
    flags = dict(zip(columns, ("--prompt-column", "--response-column"), strict=False))
    if not isinstance(value, Mapping):
        named = " and ".join(flags.values())
        raise InputError(f"{where}: is {type(value).__name__}, not a mapping with {named}")
    fields: dict[str, Any] = clean(where, cast(Any, value))
    pair: dict[str, Any] = {}
    for column, flag in flags.items():
        if column not in fields:
            has = ", ".join(map(repr, list(fields)[:_SHOWN])) or "no keys"
            raise InputError(f"{where}: has no {column!r}, which {flag} names; it has {has}")
        pair[column] = fields.pop(column)
    _check_metadata(where, fields)
    return ProgramDocument(None, metadata=fields, pair=pair)


def _check_metadata(where: str, fields: Mapping[str, Any]) -> None:
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # invalid text is counted and skipped, invalid metadata refused
        raise InputError(f"{where}: its metadata is not UTF-8 text; leave it out") from None


def _kind(
    where: str, fields: Mapping[str, Any], columns: Mapping[str, str | None]
) -> tuple[str, str]:
    """Return which kind of document a mapping is, and the key that holds it."""
    found = [(kind, column) for kind, column in columns.items() if column]
    found = found or [(key, key) for key in _KINDS if key in fields]
    if len(found) == 1 and found[0][1] in fields:
        return found[0]
    has = ", ".join(map(repr, list(fields)[:_SHOWN])) or "no keys"
    wanted = repr(found[0][1]) if len(found) == 1 else f"one of {', '.join(_KINDS)}"
    raise InputError(
        f"{where}: has {has}; it must have {wanted}: choose with --text-column or --messages"
    )


def _are_messages(value: Any) -> bool:
    parts = cast(list[Any], value) if isinstance(value, list) else []
    return bool(parts) and all(
        isinstance(part, dict) and isinstance(cast(dict[str, Any], part).get("role"), str)
        for part in parts
    )


def _are_segments(value: Any) -> bool:
    parts = cast(list[Any], value) if isinstance(value, list) else [None]
    for part in parts:
        match part:
            case [str(role), str()] if role in ROLES:
                continue
            case _:
                return False
    return True


def clean(where: str, value: Any, depth: int = 0) -> Any:
    """Convert a value to JSON's types: numpy's become Python's, bytes become UTF-8, tuples lists.

    Bytes that are not UTF-8 become lone surrogates, as JSON escapes can spell.
    """
    if depth > _MAX_DEPTH:
        raise InputError(f"{where}: nested too deeply: {_MAX_DEPTH} levels at most")
    match value:
        case np.generic() | np.ndarray():
            return clean(where, cast(Any, value).tolist(), depth + 1)
        case None | bool() | str():
            return value
        case int() if -_LIMIT <= value < _LIMIT:
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
        case bytes():
            return value.decode("utf-8", "surrogateescape")
        case list() | tuple():
            return [clean(where, part, depth + 1) for part in cast(list[Any], value)]
        case Mapping():
            parts = cast(Mapping[Any, Any], value)
            if all(isinstance(key, str) for key in parts):
                return {
                    str(key): clean(f"{where}: {key!r}", part, depth + 1)
                    for key, part in parts.items()
                }
            raise InputError(f"{where}: has keys that are not texts")
        case _:
            raise InputError(
                f"{where}: holds {type(value).__name__} that JSON cannot: leave it out, or give "
                "text, numbers below 2**63, or lists and mappings of them"
            )


class ProgramSource:
    """An opened program's documents, numbered from 0.

    Attributes:
        length: the number of documents; None if they can only be read in order.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[], Any],
        described: Mapping[str, Any],
        text_column: str | None,
        messages_column: str | None,
        pair_columns: tuple[str, ...] = (),
    ) -> None:
        """Call the function; `described` is its identity, if the result has none of its own."""
        self.name = name
        self._function, self._described = call, described
        self._columns = (text_column, messages_column, pair_columns)
        self._given = self._call()
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        self.length: int | None = None
        if _by_number(self._given):
            self.length = guarded(f"{name}: len()", len, self._given)
        else:
            self._iterator = guarded(name, iter, self._given)

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)  # a generator and a file have one
        if callable(close):
            guarded(self.name, close)
        self._iterator = None

    def identity(self) -> tuple[str, ...]:
        """Return the identity of the program for the recipe, without paths.

        It consists of the name, arguments and source file. If the returned object has a method
        `identity()`, it consists of the name and what that method returns.
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

    def sample(self) -> tuple[list[ProgramDocument], int]:
        """Return some documents, spread evenly if they can be indexed, and their size in bytes."""
        if self.length is None:
            found = self.documents(0)
        else:
            count = min(self.length, _SAMPLE_DOCS)
            found = (self._document(i * self.length // count) for i in range(count))
        documents: list[ProgramDocument] = []
        size = 0
        for document in itertools.islice(found, _SAMPLE_DOCS):
            documents.append(document)
            size += len(document.canonical())
            if size >= _SAMPLE_BYTES:
                break
        return documents, size

    def spans(self, size: int, max_docs: int | None = None) -> Iterator[Span]:
        """Yield all documents in spans of about `size` bytes each; `stop` is the size of a span.

        If documents can only be read in order, this takes a whole pass, in which each is hashed.
        Otherwise only the first and the last of a span are hashed, and sizes are estimated from a
        sample.
        """
        if self.length is None:
            yield from self._counted(size, max_docs)
            return
        sampled, total = self.sample()
        each = max(1, total // max(1, len(sampled)))
        stop = self.length if max_docs is None else min(self.length, max_docs)
        step = max(1, -(-size // each))
        for first in range(0, stop, step):
            cancellation().check()
            part = self.part(first, min(step, stop - first))
            yield replace(part, stop=part.count * each)

    def part(self, first: int, count: int) -> Span:
        """Return the span of `count` documents from `first` on; its size is not known."""
        ends = [self._document(first), self._document(first + count - 1)]
        return Span(0, first, count, digest=digest_of(ends))

    def read(self, wanted: Span) -> list[ProgramDocument]:
        """Return the documents of a span; raise DataError if they have changed since."""
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

    def documents(self, first: int) -> Iterator[ProgramDocument]:
        """Yield the documents from number `first` on."""
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

    def _document(self, number: int) -> ProgramDocument:
        value = guarded(self._where(number), operator.getitem, self._given, number)
        return self._checked(number, value)

    def _checked(self, number: int, value: Any) -> ProgramDocument:
        return checked_document(self._where(number), value, *self._columns)

    def _where(self, number: int) -> str:
        return f"{self.name}: document {number}"

    def _counted(self, size: int, max_docs: int | None) -> Iterator[Span]:
        first = count = reached = 0
        digest = xxhash.xxh3_128()
        for document in itertools.islice(self.documents(0), max_docs):
            cancellation().check()
            count, reached = count + 1, reached + hash_into(digest, document)
            if reached >= size:
                yield Span(0, first, count, 0, reached, digest.hexdigest())
                first, count, reached = first + count, 0, 0
                digest = xxhash.xxh3_128()
        if count:
            yield Span(0, first, count, 0, reached, digest.hexdigest())


def _by_number(given: Any) -> bool:
    return hasattr(given, "__len__") and hasattr(given, "__getitem__")


def guarded(where: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Call a function that is not ours; turn any exception into a one-line InputError."""
    try:
        return call(*args, **options)
    except SpileError:
        raise
    except (Exception, SystemExit) as error:  # a script may call sys.exit
        raise InputError(f"{where}: {said(error)}") from error


def said(error: BaseException) -> str:
    """Format an exception as one line: its type and message."""
    try:
        lines = str(error).split("\n")
    except Exception:  # a foreign exception may fail to format itself
        lines = [""]
    return f"{type(error).__name__}: {lines[0][:200]}".removesuffix(": ")


@dataclass(frozen=True)
class Program:
    """A function and its arguments, by name; nothing is loaded before it is opened."""

    where: str  # a module, or the absolute path of a file
    function: str
    arguments: Mapping[str, Any]

    @classmethod
    def parse(cls, corpus: str) -> "Program":
        """Parse a name that `is_program` accepts; arguments are literals, never executed."""
        if len(corpus) > _MAX_CHARACTERS:
            raise ConfigError(
                f"--corpus: a program's name has {_MAX_CHARACTERS} characters at most"
            )
        shown = f"--corpus {' '.join(corpus.split())[:_MAX_SHOWN]}"
        if match := _ALIAS.fullmatch(corpus):
            module, function, argument = _ALIASES[match[1]]
            given = _arguments(shown, match[3])
            if argument in given:
                raise ConfigError(f"{shown}: {argument} is given before the parenthesis")
            return cls(module, function, {argument: _absolute(match[2]), **given})
        if match := _FILE.fullmatch(corpus):
            where = os.path.abspath(match[1])
            return cls(where, match[2] or _DEFAULT, _arguments(shown, match[3]))
        match = _MODULE.fullmatch(corpus)
        assert match, corpus
        return cls(match[1], match[2], _arguments(shown, match[3]))

    def __str__(self) -> str:
        """Return the whole name, which is valid in any working directory."""
        given = ", ".join(f"{name}={value!r}" for name, value in sorted(self.arguments.items()))
        return f"{self.name}({given})"

    @property
    def name(self) -> str:
        return f"{self.where}:{self.function}"

    @property
    def shipped(self) -> bool:
        """Whether the program is Spile's own: no other runs merely because a store names it."""
        return (self.where, self.function) in [target[:2] for target in _ALIASES.values()]

    def open(
        self,
        text_column: str | None = None,
        messages_column: str | None = None,
        pair_columns: tuple[str, ...] = (),
    ) -> ProgramSource:
        """Load the function and call it. Given columns replace the default keys of documents."""
        function = self._load()
        name = f"--corpus {self.name}"
        described = {
            "program": f"{Path(self.where).name}:{self.function}",
            "arguments": self.arguments,
            "source": _source_digest(function),
        }
        call = partial(function, **self.arguments)
        return ProgramSource(name, call, described, text_column, messages_column, pair_columns)

    def _load(self) -> Callable[..., Any]:
        by_path = self.where.endswith(".py")
        module = load_file(Path(self.where), "--corpus") if by_path else _import(self.where)
        function = getattr(module, self.function, None)
        if not callable(function):
            raise InputError(
                f"--corpus {self.name}: {self.where} has no function {self.function!r}; name one, "
                "as in FILE.py:FUNCTION"
            )
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some C functions have no signature
            return function
        try:
            signature.bind(**self.arguments)
        except TypeError as error:
            takes = ", ".join(signature.parameters) or "none"
            raise ConfigError(f"--corpus {self.name}: {error}; its arguments: {takes}") from None
        return function


def is_program(corpus: str) -> bool:
    """Return whether a corpus names a program, and not a file, a URL or a dataset of the Hub."""
    head = corpus.partition("(")[0]
    if corpus.startswith(BUILT):
        return False
    if _ALIAS.fullmatch(corpus) or _MODULE.fullmatch(corpus):
        return True
    return "://" not in head and _FILE.fullmatch(corpus) is not None


def _arguments(shown: str, given: str | None) -> dict[str, Any]:
    """Parse the arguments in parentheses, if any: keywords and literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about unknown escapes in strings
            tree = ast.parse(f"f{given or '()'}", mode="eval").body
        if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.args:
            raise ValueError("arguments are given by name, as in seed=0")
        arguments: dict[str, Any] = {}
        for keyword in tree.keywords:
            if keyword.arg is None or keyword.arg in arguments:
                raise ValueError(f"{keyword.arg or '**'} may not be given twice or unpacked")
            arguments[keyword.arg] = _literal(shown, keyword)
    except SyntaxError as error:
        raise ConfigError(f"{shown}: {error.msg}") from None
    except (ValueError, MemoryError, RecursionError) as error:
        said = str(error) or "its arguments are nested too deeply"
        raise ConfigError(f"{shown}: {said}") from None
    return arguments


def _literal(shown: str, keyword: ast.keyword) -> Any:
    try:
        value = ast.literal_eval(keyword.value)
    except (ValueError, TypeError):
        raise ValueError(
            f"{keyword.arg} is not a literal: a text, a number, True, False, None, or a list or "
            "dictionary of them"
        ) from None
    return clean(f"{shown}: {keyword.arg}", value)


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(path)


def load_file(path: Path, flag: str) -> types.ModuleType:
    """Run a file as a module of its own. It is read every time, since it may have changed.

    `flag` is the one that names it, for errors.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror or error}") from None
    module = types.ModuleType(f"spile_program_{xxhash.xxh3_64_hexdigest(bytes(path))}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    code = guarded(f"{flag} {path}", compile, source, str(path), "exec", dont_inherit=True)
    guarded(f"{flag} {path}", exec, code, module.__dict__)
    return module


def _import(name: str) -> types.ModuleType:
    try:
        return importlib.import_module(_HOMES.get(name, name))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise InputError(f"--corpus {name}: cannot be imported: {said(error)}") from error
        raise InputError(
            f"--corpus {name}: no module {error.name!r}; install it or put it on PYTHONPATH, or "
            "name a file, as in ./FILE.py:FUNCTION"
        ) from None
    except SpileError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"--corpus {name}: cannot be imported: {said(error)}") from error


def _source_digest(function: Callable[..., Any]) -> str:
    """Return the digest of a function's source file; empty if it is not written in Python."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except (TypeError, ValueError):
        return ""
    return full_digest(Path(file)) if file else ""
