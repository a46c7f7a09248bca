"""Programs as corpora: a function that gives documents, by the name of its module or its file.

    package.module:function(argument=value, ...)
    path/to/file.py[:function][(argument=value, ...)]      without a name: create_dataset
    arc:path/to/tasks[(argument=value, ...)]               short for spile.data.arc:tasks

It returns documents (see `document.py`) that can be iterated over, or asked for by number as the
sources of Grain and TFDS can. It must give the same ones whenever it is called: what was hashed
when the corpus was cut is compared with what is read afterwards.
"""

import ast
import importlib
import inspect
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from spile.core.errors import ConfigError, InputError, SpileError
from spile.core.identity import full_digest
from spile.corpus.formats.built import is_built
from spile.corpus.programs.document import clean
from spile.corpus.programs.source import Source, guarded, said

_DEFAULT = "create_dataset"
# Programs of our own: module, function, and the argument that follows the colon. These names are
# part of the format, since recipes are fingerprinted with them: they outlive the files' places.
_ALIASES = {"arc": ("spile.data.arc", "tasks", "path")}
_HOMES = {"spile.data.arc": "spile.corpus.programs.arc"}
_NAME = r"[^\W\d]\w*"
_ALIAS = re.compile(rf"({'|'.join(_ALIASES)}):([^(]+)(\(.*\))?", re.DOTALL)
_FILE = re.compile(rf"(.+?\.py)(?::({_NAME}))?(\(.*\))?", re.DOTALL)
_MODULE = re.compile(rf"({_NAME}(?:\.{_NAME})*):({_NAME})(\(.*\))?", re.DOTALL)
_MAX_CHARACTERS = 10_000
_MAX_SHOWN = 200  # of them, in a message


@dataclass(frozen=True)
class Program:
    """A function and its arguments, by name: nothing of it is loaded before it is opened."""

    where: str  # a module, or the absolute path of a file
    function: str
    arguments: Mapping[str, Any]

    @classmethod
    def parse(cls, corpus: str) -> "Program":
        """Read a name for which `is_program` holds; arguments are literals, never executed."""
        if len(corpus) > _MAX_CHARACTERS:
            raise ConfigError(
                f"--corpus: a program's name has {_MAX_CHARACTERS} characters at most"
            )
        shown = f"--corpus {' '.join(corpus.split())[:_MAX_SHOWN]}"
        if match := _ALIAS.fullmatch(corpus):
            module, function, argument = _ALIASES[match[1]]
            given = _arguments(shown, match[3])
            if argument in given:
                raise ConfigError(f"{shown}: {argument} is what stands before the parenthesis")
            return cls(module, function, {argument: _absolute(match[2]), **given})
        if match := _FILE.fullmatch(corpus):
            where = os.path.abspath(match[1])
            return cls(where, match[2] or _DEFAULT, _arguments(shown, match[3]))
        match = _MODULE.fullmatch(corpus)
        assert match, corpus
        return cls(match[1], match[2], _arguments(shown, match[3]))

    def __str__(self) -> str:
        """The whole name; it means the same in any working directory."""
        given = ", ".join(f"{name}={value!r}" for name, value in sorted(self.arguments.items()))
        return f"{self.name}({given})"

    @property
    def name(self) -> str:
        return f"{self.where}:{self.function}"

    @property
    def shipped(self) -> bool:
        """Whether it is one of Spile's own: no other may be run because a store names it."""
        return (self.where, self.function) in [target[:2] for target in _ALIASES.values()]

    def open(self, text_column: str | None = None, messages_column: str | None = None) -> Source:
        """Load the function and call it. A column takes the place of the keys documents have."""
        function = self._load()
        name = f"--corpus {self.name}"
        described = {
            "program": f"{Path(self.where).name}:{self.function}",
            "arguments": self.arguments,
            "source": _source_digest(function),
        }
        call = partial(function, **self.arguments)
        return Source(name, call, described, text_column, messages_column)

    def _load(self) -> Callable[..., Any]:
        by_path = self.where.endswith(".py")
        module = _load_file(Path(self.where)) if by_path else _import(self.where)
        function = getattr(module, self.function, None)
        if not callable(function):
            raise InputError(
                f"--corpus {self.name}: {self.where} has no function {self.function!r}; name one, "
                "as in FILE.py:FUNCTION"
            )
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # not everything written in C says what it takes
            return function
        try:
            signature.bind(**self.arguments)
        except TypeError as error:
            takes = ", ".join(signature.parameters) or "none"
            raise ConfigError(f"--corpus {self.name}: {error}; its arguments: {takes}") from None
        return function


def is_program(corpus: str) -> bool:
    """Whether a corpus's name is one of a program: not a file, a URL or a dataset of the Hub."""
    head = corpus.partition("(")[0]
    if is_built(corpus):
        return False
    if _ALIAS.fullmatch(corpus) or _MODULE.fullmatch(corpus):
        return True
    return "://" not in head and _FILE.fullmatch(corpus) is not None


def _arguments(shown: str, given: str | None) -> dict[str, Any]:
    """Those in parentheses, if any: keywords and literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings that Python does not know
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


def _load_file(path: Path) -> types.ModuleType:
    """Run a file, under a name of its own. It is read anew every time: there may be a newer one."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError(f"--corpus {path}: {error.strerror or error}") from None
    module = types.ModuleType(f"spile_program_{xxhash.xxh3_64_hexdigest(bytes(path))}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for it
    code = guarded(f"--corpus {path}", compile, source, str(path), "exec", dont_inherit=True)
    guarded(f"--corpus {path}", exec, code, module.__dict__)
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
    """Of the file in which a function is written; empty if it is not written in Python."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except (TypeError, ValueError):
        return ""
    return full_digest(Path(file)) if file else ""
