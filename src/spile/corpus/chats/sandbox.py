"""Jinja sandbox for untrusted chat templates: no side effects, bounded work.

It is configured as in `transformers`, so that the text is the same. In addition it tracks the
owners of texts (see `provenance.py`), counts most operations, and refuses what is random or cannot
be tracked. Work that is not counted (comparisons, slices, filters of long texts) is bounded by the
limits of the rendering process (`pool.py`).
"""

import datetime
import functools
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from jinja2 import Undefined, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from spile.core.errors import InputError
from spile.corpus.chats.provenance import (
    ASKED,
    FOLLOWED,
    OwnedText,
    joined,
    lifted,
    owned_whole,
    sole_owner,
)
from spile.corpus.chats.template import TemplateLimit

if [int(number) for number in re.findall(r"\d+", importlib.metadata.version("jinja2"))] < [3, 1, 6]:
    raise ImportError("the sandbox of older versions can be left")

GENERATED = (-1, 0)  # the owner of text inside `{% generation %}`

# Limits of one rendering, each with an allowance for every character of input. Published templates
# need a small part of them.
_STEPS, _MORE_STEPS = 200_000, 1  # iterations, calls and operations
_CHARACTERS, _MORE_CHARACTERS = 1 << 26, 64  # in all intermediate texts
_TEXT, _MORE_TEXT = 1 << 20, 64  # characters of the output
_BITS = 4096  # of the largest integer
_WIDTH = 100  # longest indent or separator

# fmt: off
_FILTERS = frozenset({
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby",
    "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "reverse", "select", "selectattr", "sort", "trim", "unique", "upper",
})
# fmt: on


@dataclass
class _Run:
    """One rendering: its remaining budget, and whether texts are tracked."""

    following: bool
    steps: int
    characters: int

    def spend(self, steps: int, characters: int = 0) -> None:
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0:
            raise TemplateLimit("it takes too many steps: it seems to have no end")
        if self.characters < 0:
            raise TemplateLimit("it makes too many characters: it seems to have no end")


_run: ContextVar[_Run] = ContextVar("run")


class CompiledTemplate:
    """A compiled template.

    Attributes:
        marks_assistant: whether it marks the assistant's text itself (`{% generation %}`).
    """

    def __init__(self, source: str, date: datetime.date | None) -> None:
        _run.set(_Run(False, _STEPS, _CHARACTERS))
        environment = _Environment(date)
        tree = _Rewriter().visit(environment.parse(source))
        tree.set_environment(environment)
        extensions = tree.find_all(nodes.ExtensionAttribute)
        self.marks_assistant = any(node.identifier == _Generation.identifier for node in extensions)
        self._template = environment.from_string(tree)

    def render(self, variables: Mapping[str, Any], size: int, following: bool) -> str:
        """Return the text; `size` is the number of characters of input."""
        steps, characters = _STEPS + _MORE_STEPS * size, _CHARACTERS + _MORE_CHARACTERS * size
        _run.set(_Run(following, steps, characters))
        text = self._template.render(variables)
        if len(text) > _TEXT + _MORE_TEXT * size:
            raise TemplateLimit(f"it makes {len(text)} characters of a chat of {size}")
        return text


class _Rewriter(NodeTransformer):
    """Rewrites loops so that they are counted, and `~` so that it is tracked, both as filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise InputError("it has a recursive loop, which cannot be bounded")
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier) -> NoReturn:
        raise InputError("it sets autoescape, under which texts cannot be followed")

    visit_ScopedEvalContextModifier = visit_EvalContextModifier


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`: marks the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("generated"), [], [], body).set_lineno(line)

    def generated(self, caller: Callable[[], str]) -> str:
        text = caller()
        return owned_whole(text, GENERATED) if _run.get().following else text


class _Namespace(Namespace):
    """Variables of a template. Names with an underscore could reach Python's own attributes."""

    def __init__(self, /, *given: Any, **variables: Any) -> None:
        values: dict[str, Any] = dict(*given, **variables)
        for name in values:
            _refuse_private(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, date: datetime.date | None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_text,
        )
        self.concat = functools.partial(_concat, "")
        self.filters = {name: _counting(self.filters[name]) for name in _FILTERS} | {
            "counted": _counted,
            "join": _join,
            "replace": _replace,
            "safe": _safe,
            "string": _text,
            "tojson": _tojson,
        }
        names: dict[str, Any] = vars(self)["globals"]
        del names["lipsum"]  # random
        names |= {"dict": _dict, "namespace": _Namespace, "raise_exception": _raise}
        if date is not None:
            names["strftime_now"] = functools.partial(_strftime, date)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, str):
            return self._of_text(obj, attribute)
        if isinstance(obj, int | float):  # their methods can make very long values
            return self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str | int | float) and isinstance(argument, str):
            return self.getattr(obj, argument)
        return super().getitem(obj, argument)

    def _of_text(self, text: str, name: str) -> Any:
        markup = isinstance(text, Markup)  # its methods escape
        if name == "join" and not markup:
            return functools.partial(_concat, text)
        if name == "replace" and not markup:
            return functools.partial(_replace, text)
        if name in ASKED or (name in FOLLOWED and not markup):
            return getattr(text, name)
        if hasattr(str, name) and not name.startswith("_"):
            return functools.partial(_refuse_method, name)
        return super().getattr(str.__str__(text), name)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _run.get().spend(1)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        run = _run.get()
        run.spend(1)
        if operator == "+":
            run.spend(0, _size(left) + _size(right))
            texts = isinstance(left, str) and isinstance(right, str)
            if texts and (isinstance(left, OwnedText) or isinstance(right, OwnedText)):
                return joined((left, right))
        elif operator == "%":
            if isinstance(left, str):
                raise InputError("it formats texts with %, which cannot be followed")
        elif isinstance(left, int) and isinstance(right, int):
            bits, more = left.bit_length(), right.bit_length()
            if (bits * abs(right) if operator == "**" else bits + more) > _BITS:
                raise TemplateLimit("it computes with too large numbers")
        elif isinstance(left, int) or isinstance(right, int):
            count = left if isinstance(left, int) else right
            run.spend(0, (_size(left) + _size(right)) * max(count, 0))
        return super().call_binop(context, operator, left, right)


def _concat(separator: str, parts: Iterable[Any]) -> str:
    """Join texts; `separator` comes first, as in Python."""
    run = _run.get()
    pieces: list[str] = []
    for part in parts:
        run.spend(1, len(separator) + len(part))
        pieces.append(part)
    return lifted(separator).join(pieces) if run.following else separator.join(pieces)


def _join(parts: Iterable[Any], separator: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        raise InputError("it joins by attribute, which cannot be followed; write map() and join()")
    return _concat(str(_text(separator)), (str(_text(part)) for part in parts))


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    run = _run.get()
    text, old, new = str(_text(text)), str(_text(old)), str(_text(new))
    run.spend(1, len(text) + (text.count(old) + 1) * len(new))
    if run.following:
        text = lifted(text)
    return text.replace(old, new, -1 if count is None else count)


def _text(value: Any) -> str:
    """Return any value as it is printed."""
    if isinstance(value, str):
        return value
    return _described(value, str)


def _described(value: Any, write: Callable[[Any], str]) -> str:
    """Write out a whole value; the text gets the owner of all texts in the value."""
    owner = sole_owner(_texts(value), "writes out")
    text = write(value)
    return text if owner is None else owned_whole(text, owner)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a value and count each: a list may contain itself a million times."""
    waiting: list[Any] = [value]
    while waiting:
        each = waiting.pop()
        _run.get().spend(1)
        if isinstance(each, str):
            _run.get().spend(0, len(each))
            yield each
        elif isinstance(each, Mapping):
            items = cast(Mapping[Any, Any], each)
            waiting += [*items.keys(), *items.values()]
        elif isinstance(each, list | tuple):
            waiting += cast(Sequence[Any], each)
        elif not isinstance(each, int | float | Undefined | None):
            raise InputError(f"it writes out a {type(each).__name__}, which cannot be followed")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    widths = [indent if isinstance(indent, int) else len(indent or ""), *map(len, separators or ())]
    if max(widths) > _WIDTH:
        raise TemplateLimit(f"it writes JSON with spaces of more than {_WIDTH} characters")

    def write(value: Any) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    return _described(value, write)


def _safe(value: Any) -> Any:
    # Only text added to a Markup is escaped; then the two renderings differ.
    return value if isinstance(value, OwnedText) else Markup(value)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    run = _run.get()
    for item in items:
        run.spend(1)
        yield item


def _counting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter of Jinja's that goes through its arguments, so that it is counted."""

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        _run.get().spend(1 + sum(_size(arg) for arg in args if not isinstance(arg, str)))
        return function(*args, **kwargs)

    return counting


def _size(value: Any) -> int:
    if isinstance(value, str | list | tuple | dict | range):
        return len(cast(Sequence[Any], value))
    return 0


def _strftime(date: datetime.date, form: str) -> str:
    text = lifted(form).unowned("takes a date's form from")
    return datetime.datetime.combine(date, datetime.time()).strftime(text)


def _dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


def _raise(message: Any) -> NoReturn:
    raise TemplateError(str(message))


def _refuse_method(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise InputError(f"it calls .{name}() of a text, which cannot be followed")


def _refuse_private(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"{name!r}: names of a namespace may not begin with _")
