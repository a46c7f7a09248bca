"""Which documents are read: by their columns, their own hash, their length. No order matters.

Every rule looks at one document alone, so that it is the same wherever and whenever it is read;
what is left out is counted by reason.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from spile.core.errors import ConfigError
from spile.core.expressions import ORDER
from spile.core.recipe import ResolvedRecipe

FILTERED = "left out by --filter"
TOO_LARGE = "over --max-doc-bytes"
_MAX_CHARACTERS = 1000
_SCALE = 1 << 64

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **ORDER,
    ast.In: lambda value, options: value in options,
    ast.NotIn: lambda value, options: value not in options,
}
_LANGUAGE = (
    "columns, numbers, texts, lists of them, and, or, not, comparisons, in, is None and "
    "parentheses are understood"
)


class ColumnFilter:
    """A condition over a row's columns: a small part of Python, read by `ast`, never executed.

    What a missing value is compared with is not so: `score >= 3` is false where there is none.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            if len(text) > _MAX_CHARACTERS:
                raise ValueError("it is too long")
            self._root = ast.parse(text.strip(), mode="eval").body
            self.columns = tuple(dict.fromkeys(self._check(self._root)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = error.msg if isinstance(error, SyntaxError) else error
            raise ConfigError(f"--filter {text!r}: {line}; {_LANGUAGE}") from None
        if not self.columns:
            raise ConfigError(f"--filter {text!r}: names no column")

    def _check(self, node: ast.expr) -> Iterator[str]:
        """The columns that a condition names; ValueError for what is no condition."""
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self._check(value)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from self._check(node.operand)
        elif isinstance(node, ast.Name):
            yield node.id  # a column of booleans
        elif isinstance(node, ast.Compare):
            for kind in node.ops:
                if type(kind) not in (*_COMPARISONS, ast.Is, ast.IsNot):
                    raise ValueError(f"{type(kind).__name__} is not understood")
            for value, kind in zip(node.comparators, node.ops, strict=True):
                if isinstance(kind, ast.Is | ast.IsNot) and not _is_none(value):
                    raise ValueError("only None follows is")
            for value in (node.left, *node.comparators):
                if isinstance(value, ast.Name):
                    yield value.id
                else:
                    ast.literal_eval(value)
        else:
            raise ValueError(f"{ast.unparse(node)[:80]!r} is no condition")

    def matches(self, row: Mapping[str, Any]) -> bool:
        return self._holds(self._root, row)

    def may_match(self, bounds: Mapping[str, tuple[Any, Any]]) -> bool:
        """Whether a row may match whose columns lie within bounds."""
        return self._may_hold(self._root, bounds)

    def _may_hold(self, node: ast.expr, bounds: Mapping[str, tuple[Any, Any]]) -> bool:
        if isinstance(node, ast.BoolOp):
            every = all if isinstance(node.op, ast.And) else any
            return every(self._may_hold(value, bounds) for value in node.values)
        if not isinstance(node, ast.Compare) or len(node.ops) > 1:
            return True
        if not isinstance(node.left, ast.Name) or node.left.id not in bounds:
            return True
        if isinstance(node.comparators[0], ast.Name):
            return True
        (least, greatest), value = bounds[node.left.id], ast.literal_eval(node.comparators[0])
        try:
            match node.ops[0]:
                case ast.Eq():
                    return least <= value <= greatest
                case ast.Lt():
                    return least < value
                case ast.LtE():
                    return least <= value
                case ast.Gt():
                    return greatest > value
                case ast.GtE():
                    return greatest >= value
                case _:
                    return True
        except TypeError:
            return True

    def _holds(self, node: ast.expr, row: Mapping[str, Any]) -> bool:
        if isinstance(node, ast.BoolOp):
            every = all if isinstance(node.op, ast.And) else any
            return every(self._holds(value, row) for value in node.values)
        if isinstance(node, ast.UnaryOp):
            return not self._holds(node.operand, row)
        if isinstance(node, ast.Name):
            return row.get(node.id) is True
        assert isinstance(node, ast.Compare)
        left = _value(node.left, row)
        for kind, comparator in zip(node.ops, node.comparators, strict=True):
            right = _value(comparator, row)
            if not _compared(kind, left, right):
                return False
            left = right
        return True


def _value(node: ast.expr, row: Mapping[str, Any]) -> Any:
    return row.get(node.id) if isinstance(node, ast.Name) else ast.literal_eval(node)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _compared(kind: ast.cmpop, left: Any, right: Any) -> bool:
    if isinstance(kind, ast.Is | ast.IsNot):
        return (left is None) is isinstance(kind, ast.Is)
    if left is None or right is None:
        return False
    try:
        return bool(_COMPARISONS[type(kind)](left, right))
    except TypeError:  # a text is not less than a number
        return False


@dataclass(frozen=True)
class Selection:
    """The rules of a recipe."""

    fraction: float | None = None
    holdout: float | None = None
    part: str = "rest"
    min_tokens: int | None = None
    max_doc_tokens: int | None = None

    @property
    def share(self) -> float:
        """Of the documents, that hashes leave."""
        held = self.holdout or 0.0
        rest = held if self.part == "holdout" else 1 - held
        return (self.fraction or 1.0) * rest

    @property
    def by_hash(self) -> bool:
        """Whether what documents hold decides."""
        return self.fraction is not None or self.holdout is not None

    def refuses_content(self, content: bytes) -> str:
        """Why a document is left out; empty if it is not."""
        if self.fraction is not None and _share_of(content, "fraction") >= self.fraction:
            return "beyond --fraction"
        if self.holdout is not None:
            held_out = _share_of(content, "holdout") < self.holdout
            if held_out is not (self.part == "holdout"):
                return "held out" if held_out else "not held out"
        return ""

    def refuses_length(self, tokens: int) -> str:
        if not tokens:
            return "no tokens"
        if self.min_tokens is not None and tokens < self.min_tokens:
            return "under --min-tokens"
        if self.max_doc_tokens is not None and tokens > self.max_doc_tokens:
            return "over --max-doc-tokens"
        return ""


def selection_of(recipe: ResolvedRecipe) -> Selection:
    return Selection(
        recipe.fraction, recipe.holdout, recipe.part, recipe.min_tokens, recipe.max_doc_tokens
    )


def _share_of(content: bytes, rule: str) -> float:
    """A number from 0 to 1 that is a document's own, and another for each rule."""
    return xxhash.xxh3_64_intdigest(rule.encode() + b"\0" + content) / _SCALE
