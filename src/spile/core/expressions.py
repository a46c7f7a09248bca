"""Which rows are kept: an expression over what is known of a token before the model runs.

`where` is a small part of Python's expressions, read by `ast` and never executed: the flags are
true or false, the columns of the index are integers, and the two do not mix. Bounds are followed
through all arithmetic, and what could leave 64 bits or divide by zero is refused when the filter
is made; what is accepted is therefore evaluated exactly. `every` then thins what `where` leaves.
"""

import ast
import difflib
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.index import FIRST, FLAGS

_MAX_CHARACTERS = 1000
_MAX_DEPTH = 32
_LIMIT = 1 << 62  # every integer, given or computed, is smaller than this, and greater than its -

# Each column's values are 0 or greater, and less than this.
_COLUMNS = {"token_id": 1 << 31, "doc": 1 << 40, "offset": 1 << 31, "pos": 1 << 31}

_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: operator.mod,
}
ORDER: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **ORDER,
    ast.In: np.isin,
    ast.NotIn: lambda left, right: ~np.isin(left, right),
}
_INSTEAD: Mapping[type[ast.AST], str] = {
    ast.BitAnd: "write 'and' instead of '&'",
    ast.BitOr: "write 'or' instead of '|'",
    ast.Invert: "write 'not' instead of '~'",
    ast.Div: "write '//' instead of '/'",
    ast.Is: "write '==' instead of 'is'",
    ast.IsNot: "write '!=' instead of 'is not'",
}
_LANGUAGE = (
    "only names, integers, and, or, not, comparisons, in, + - * // % and parentheses are understood"
)

_Bounds = tuple[int, int]  # least and greatest value


@dataclass(frozen=True)
class RowFilter:
    """Which tokens become stored rows. Two filters of one meaning and shape compare equal.

    Attributes:
        where: the canonical text of the expression; None keeps every token.
        every: of each context's rows that `where` leaves, the first and every N-th after it;
            None (as 1 becomes) keeps them all.
    """

    where: str | None
    every: int | None
    _tree: ast.expr | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.where is not None:
            tree = _parsed(self.where)
            object.__setattr__(self, "_tree", tree)
            object.__setattr__(self, "where", ast.unparse(tree))
        if self.every is not None:
            if type(self.every) is not int or not 1 <= self.every < _LIMIT:
                raise ConfigError(f"--every must be a whole number, 1 or more; got {self.every!r}")
            object.__setattr__(self, "every", None if self.every == 1 else self.every)

    @classmethod
    def parse(cls, where: str | None, every: int | None) -> "RowFilter":
        """Check what the user gave.

        Raises:
            ConfigError: says what is wrong, and where in the text.
        """
        return cls(where, every)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing was asked for: every row of any index is kept."""
        return self.where is None and self.every is None

    def mask(self, index: np.ndarray) -> np.ndarray:
        """True for each entry that is kept; `index` holds whole contexts, in order."""
        kept = True if self._tree is None else _evaluate(self._tree, index)
        mask = np.array(np.broadcast_to(kept, len(index)))
        if self.every is not None:
            context = np.cumsum(index["flags"] & FIRST != 0)
            (left,) = np.nonzero(mask)
            (begins,) = np.nonzero(np.diff(context[left], prepend=-1))
            rank = np.arange(len(left)) - np.repeat(begins, np.diff(begins, append=len(left)))
            mask[left[rank % self.every != 0]] = False
        return mask


def _parsed(text: str) -> ast.expr:
    """The checked tree, in canonical form."""
    text = " ".join(text.split())  # it may be spread over lines, in a TOML file
    if not text:
        raise ConfigError("--where is empty; leave it out to keep every token")
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(
            f"--where may have {_MAX_CHARACTERS} characters at most; this has {len(text)}"
        )
    for place, character in enumerate(text, 1):
        # A comment would reach over the line ends that were just taken out.
        if character == "#" or not (character.isascii() and character.isprintable()):
            raise ConfigError(f"--where, character {place}: {character!r} is not understood")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of `1and`, which some Pythons dislike
            tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        place = min(error.offset or 0, len(text))
        near = f"character {place}, {_shown(text[place - 1 :])}" if place else "at its end"
        raise ConfigError(f"--where, {near}: {error.msg}") from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise ConfigError(f"--where cannot be read: {error or type(error).__name__}") from None
    level: list[ast.AST] = [tree]
    for _ in range(_MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ConfigError(f"--where is nested too deeply: {_MAX_DEPTH} levels at most")
    tree = _Checker(text).boolean(tree)
    if (length := len(ast.unparse(tree))) > _MAX_CHARACTERS:  # so that it can be read back
        raise ConfigError(
            f"--where may have {_MAX_CHARACTERS} characters at most; this has {length}, with the "
            "usual spaces"
        )
    return tree


class _Checker:
    """Two walks that call each other, one for each type; both return canonical nodes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def boolean(self, node: ast.expr) -> ast.expr:
        """A node that is true or false."""
        if not self._is_boolean(node):
            raise self._refused(
                node, "is an integer where true or false is needed; compare it, as in pos > 0"
            )
        match node:
            case ast.UnaryOp(op=op, operand=operand):
                return ast.UnaryOp(op=op, operand=self.boolean(operand))
            case ast.BoolOp(op=op, values=values):
                parts: list[ast.expr] = []
                for value in map(self.boolean, values):
                    if isinstance(value, ast.BoolOp) and type(value.op) is type(op):
                        parts += value.values
                    else:
                        parts.append(value)
                return ast.BoolOp(op=op, values=parts)
            case ast.Compare():
                return self._comparison(node)
            case _:
                return node

    def integer(self, node: ast.expr) -> tuple[ast.expr, _Bounds]:
        """A node that is an integer, and the values it can have."""
        if self._is_boolean(node):
            raise self._refused(node, "is true or false where an integer is needed")
        match node:
            case ast.Name(id=name):
                return node, (0, _COLUMNS[name] - 1)
            case ast.UnaryOp(op=op, operand=operand):
                checked, (low, high) = self.integer(operand)
                if isinstance(op, ast.UAdd):
                    return checked, (low, high)
                return ast.UnaryOp(op=op, operand=checked), (-high, -low)
            case ast.BinOp(op=op):
                left, left_bounds = self.integer(node.left)
                right, right_bounds = self.integer(node.right)
                if isinstance(op, ast.FloorDiv | ast.Mod):
                    self._refuse_zero(node.right, right_bounds)
                bounds = _bounds(op, left_bounds, right_bounds)
                if not -_LIMIT < bounds[0] <= bounds[1] < _LIMIT:
                    raise self._refused(
                        node, "could reach 2**62; make it smaller first, as in doc % 1000 * pos"
                    )
                return ast.BinOp(left=left, op=op, right=right), bounds
            case _:
                value = self._literal(node)
                return node, (value, value)

    def _comparison(self, node: ast.Compare) -> ast.expr:
        comparators: list[ast.expr] = []
        for number, (op, right) in enumerate(zip(node.ops, node.comparators, strict=True), 1):
            if type(op) not in _COMPARISONS:
                raise self._refused(node, _INSTEAD[type(op)])
            if not isinstance(op, ast.In | ast.NotIn):
                comparators.append(self.integer(right)[0])
                continue
            if number < len(node.ops):
                raise self._refused(
                    node, "nothing can be compared with a list; join two with 'and'"
                )
            comparators.append(self._members(right))
        return ast.Compare(left=self.integer(node.left)[0], ops=node.ops, comparators=comparators)

    def _members(self, node: ast.expr) -> ast.expr:
        """The list after `in`: in canonical form a tuple, sorted, without repetitions."""
        if not isinstance(node, ast.Tuple | ast.List | ast.Set) or not node.elts:
            raise self._refused(node, "'in' needs a list of integers, as in pos in (1, 2) or (1,)")
        values = {self._literal(element) for element in node.elts}
        elements: list[ast.expr] = [ast.Constant(value=value) for value in sorted(values)]
        return ast.Tuple(elts=elements, ctx=ast.Load())

    def _literal(self, node: ast.expr) -> int:
        sign = 1
        plain = node
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            sign = -1 if isinstance(node.op, ast.USub) else 1
            plain = node.operand
        if not isinstance(plain, ast.Constant) or type(plain.value) is not int:
            raise self._refused(node, "is not an integer written out")
        if plain.value >= _LIMIT:
            raise self._refused(node, "integers must be less than 2**62")
        return sign * plain.value

    def _is_boolean(self, node: ast.expr) -> bool:
        """The type of a node by its outermost form; refuses what is not of the language."""
        match node:
            case ast.Name(id=name) if name in FLAGS:
                return True
            case ast.Name(id=name) if name in _COLUMNS:
                return False
            case ast.Name(id=name):
                known = [*FLAGS, *_COLUMNS]
                close = difflib.get_close_matches(name.lower(), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise self._refused(node, f"no such name (known: {', '.join(known)}){hint}")
            case ast.UnaryOp(op=ast.Not()) | ast.BoolOp() | ast.Compare():
                return True
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                return False
            case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
                return False
            case ast.BinOp(op=op) | ast.UnaryOp(op=op):
                raise self._refused(node, _INSTEAD.get(type(op), _LANGUAGE))
            case ast.Constant(value=value) if type(value) is int:
                return False
            case _:
                raise self._refused(node, _LANGUAGE)

    def _refuse_zero(self, node: ast.expr, bounds: _Bounds) -> None:
        if bounds == (0, 0):
            raise self._refused(node, "division by zero")
        if bounds[0] <= 0 <= bounds[1]:
            raise self._refused(
                node, "division by what could be zero; divide by a number, or add 1"
            )

    def _refused(self, node: ast.expr, reason: str) -> ConfigError:
        part = _shown(self._text[node.col_offset : node.end_col_offset])
        return ConfigError(f"--where, character {node.col_offset + 1}, {part}: {reason}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:39] + "…")


def _bounds(op: ast.operator, left: _Bounds, right: _Bounds) -> _Bounds:
    """Of the result; a divisor's bounds are on one side of zero."""
    if isinstance(op, ast.Mod):
        if right[0] < 0:
            return right[0] + 1, 0
        return 0, min(left[1], right[1] - 1) if left[0] >= 0 else right[1] - 1
    # The others are monotonic in each operand, so their extremes lie at the corners.
    corners = [_ARITHMETIC[type(op)](a, b) for a in left for b in right]
    return min(corners), max(corners)


def _evaluate(node: ast.expr, index: np.ndarray) -> Any:
    """An array with a value for each entry, or one value for all; the node has been checked."""
    match node:
        case ast.Name(id=name) if name in FLAGS:
            return index["flags"] & FLAGS[name] != 0
        case ast.Name(id=name):
            values = index[name].astype(np.int64)
            assert ((values >= 0) & (values < _COLUMNS[name])).all(), name
            return values
        case ast.UnaryOp(op=op, operand=operand):
            value = _evaluate(operand, index)
            return np.logical_not(value) if isinstance(op, ast.Not) else -value
        case ast.BoolOp(op=op, values=values):
            join = np.logical_and if isinstance(op, ast.And) else np.logical_or
            return reduce(join, (_evaluate(value, index) for value in values))
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_evaluate(left, index), _evaluate(right, index))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            sides = [_evaluate(side, index) for side in (left, *comparators)]
            pairs = zip(sides, ops, sides[1:], strict=False)
            return reduce(np.logical_and, (_COMPARISONS[type(op)](a, b) for a, op, b in pairs))
        case ast.Tuple(elts=elements):
            return [_evaluate(element, index) for element in elements]
        case ast.Constant(value=value):
            return value
        case _:
            raise AssertionError(ast.dump(node))
