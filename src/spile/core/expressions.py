"""User conditions that select the rows to store (`--where`) and the documents to read (`--filter`).

Both languages are a small part of Python's expressions, parsed by `ast` and never executed. One
parser and one evaluator handle `and`, `or`, `not` and chained comparisons. Each language adds the
meaning of names, the values that may be compared, and the wording of its errors.
"""

import ast
import difflib
import operator
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.index import FIRST, FLAGS, NAMED_FLAGS, SPECIALS
from spile.core.options import listed

_MAX_CHARACTERS = 1000

_Comparison = Callable[[Any, Any], Any]
# Comparisons may raise these: 'a' < 1, 300 in b'x', or a list nested too deeply.
_INCOMPARABLE = (TypeError, ValueError, ArithmeticError, RecursionError)
_ORDER: Mapping[type[ast.cmpop], _Comparison] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
# Operators of other languages and Python's equivalents. Those inside quotes are ignored.
_OTHER_SPELLINGS = {
    "&&": "and", "||": "or", "!": "not", "=": "==", "===": "==", "!==": "!=", "<>": "!=",
    "AND": "and", "OR": "or", "NOT": "not",
}  # fmt: skip
_OTHER_SPELLING = re.compile(
    r"""'[^']*'|"[^"]*"|(&&|\|\||<>|[=!]==|!(?!=)|(?<![=!<>:])=(?!=)|\b(?:AND|OR|NOT)\b)"""
)
_INSTEAD: Mapping[type[ast.AST], str] = {
    ast.BitAnd: "write 'and' instead of '&'",
    ast.BitOr: "write 'or' instead of '|'",
    ast.Invert: "write 'not' instead of '~'",
    ast.Div: "write '//' instead of '/'",
    ast.Is: "write '==' instead of 'is'",
    ast.IsNot: "write '!=' instead of 'is not'",
}


def _explained(error: SyntaxError, text: str) -> SyntaxError:
    """Return an error that suggests Python's operators if the text uses another language's.

    If the text uses none, return the given error.
    """
    found = [match for match in _OTHER_SPELLING.finditer(text) if match[1]]
    if not found:
        return error
    pairs = dict.fromkeys((_OTHER_SPELLINGS[match[1]], match[1]) for match in found)
    better = SyntaxError("write " + ", ".join(f"{new!r} instead of {old!r}" for new, old in pairs))
    better.offset = found[0].start() + 1
    return better


class _Parser(ABC):
    """Parser of a text into a checked tree. Each method returns its node in canonical form."""

    max_depth: int

    def parse(self, text: str) -> ast.expr:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some Pythons warn about `1and`
                tree = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise self.syntax_error(_explained(error, text)) from None
        except (ValueError, MemoryError, RecursionError) as error:
            raise self.error(f"cannot be read: {error or type(error).__name__}") from None
        level: list[ast.AST] = [tree]
        for _ in range(self.max_depth):
            level = [child for node in level for child in ast.iter_child_nodes(node)]
        if level:
            raise self.error(f"is nested too deeply: {self.max_depth} levels at most")
        return self.condition(tree)

    def condition(self, node: ast.expr) -> ast.expr:
        """Check a node that must be true or false."""
        match node:
            case ast.UnaryOp(op=ast.Not() as op, operand=operand):
                return ast.UnaryOp(op=op, operand=self.condition(operand))
            case ast.BoolOp(op=op, values=values):
                parts: list[ast.expr] = []
                for value in map(self.condition, values):
                    if isinstance(value, ast.BoolOp) and type(value.op) is type(op):
                        parts += value.values
                    else:
                        parts.append(value)
                return ast.BoolOp(op=op, values=parts)
            case ast.Compare():
                return self.comparison(node)
            case _:
                return self.switch(node)

    @abstractmethod
    def comparison(self, node: ast.Compare) -> ast.expr: ...

    @abstractmethod
    def switch(self, node: ast.expr) -> ast.expr:
        """Check a node that is true or false by itself: a name."""
        ...

    @abstractmethod
    def error(self, reason: str, node: ast.expr | None = None) -> ConfigError: ...

    @abstractmethod
    def syntax_error(self, error: SyntaxError) -> ConfigError: ...


class _Evaluator(ABC):
    """Evaluator of a checked tree."""

    def evaluate(self, node: ast.expr) -> Any:
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.negation(self.evaluate(operand))
            case ast.BoolOp(op=op, values=values):
                join = self.all if isinstance(op, ast.And) else self.any
                return join(self.evaluate(value) for value in values)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                sides = [self.value(side) for side in (left, *comparators)]
                pairs = zip(ops, sides, sides[1:], strict=False)
                return self.all(self.compare(op, a, b) for op, a, b in pairs)
            case _:
                return self.switch(node)

    @abstractmethod
    def switch(self, node: ast.expr) -> Any: ...

    @abstractmethod
    def value(self, node: ast.expr) -> Any:
        """Return the value of one side of a comparison."""
        ...

    @abstractmethod
    def compare(self, op: ast.cmpop, left: Any, right: Any) -> Any: ...

    def all(self, parts: Iterable[Any]) -> Any:
        return all(parts)

    def any(self, parts: Iterable[Any]) -> Any:
        return any(parts)

    def negation(self, part: Any) -> Any:
        return not part


# -- rows: --where and --every ---------------------------------------------------------------------

_LIMIT = 1 << 62  # every integer n, given or computed, satisfies -_LIMIT < n < _LIMIT

# Upper bounds (exclusive) of the columns; the lower bound is 0.
_COLUMNS = {"token_id": 1 << 31, "doc": 1 << 40, "offset": 1 << 31, "pos": 1 << 31}

_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: operator.mod,
}
_ROW_COMPARISONS: Mapping[type[ast.cmpop], _Comparison] = {
    **_ORDER,
    ast.In: np.isin,
    ast.NotIn: lambda left, right: ~np.isin(left, right),
}
_ROW_LANGUAGE = (
    "only names, integers, and, or, not, comparisons, in, + - * // % and parentheses are understood"
)

_Range = tuple[int, int]  # least and greatest value


@dataclass(frozen=True)
class RowFilter:
    """Selects the tokens that become stored rows. Filters of equal meaning and shape compare equal.

    Flags are booleans and columns of the index are integers; the two do not mix. The constructor
    follows the bounds of every value through all arithmetic, and refuses an expression that could
    overflow 64 bits or divide by zero. Evaluation is therefore exact.

    Attributes:
        where: the canonical text of the expression; None keeps every token.
        every: keep the first and then every N-th of the rows that `where` selects in each context;
            None keeps them all, and 1 becomes None.

    Raises:
        ConfigError: if the expression is invalid; the message gives the place in the text.
    """

    where: str | None
    every: int | None
    _tree: ast.expr | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if self.where is not None:
            tree = _parse_rows(self.where)
            object.__setattr__(self, "_tree", tree)
            object.__setattr__(self, "where", ast.unparse(tree))
        if self.every is not None:
            if type(self.every) is not int or not 1 <= self.every < _LIMIT:
                raise ConfigError(f"--every must be a whole number, 1 or more; got {self.every!r}")
            object.__setattr__(self, "every", None if self.every == 1 else self.every)

    @property
    def identity(self) -> dict[str, Any]:
        """The text of `where` and the flags that `special` stands for, as JSON."""
        named = {"special": SPECIALS} if "special" in self.flags else {}
        return {"where": self.where, **named}

    @property
    def keeps_all(self) -> bool:
        """Whether the filter keeps every row of any index."""
        return self.where is None and self.every is None

    @property
    def flags(self) -> dict[str, int]:
        """The flags that `where` names, with their bits in the index."""
        return {name: NAMED_FLAGS[name] for name in self._names if name in NAMED_FLAGS}

    @property
    def by_document(self) -> bool:
        """Whether `where` names the ordinals of documents, which depend on the whole corpus."""
        return "doc" in self._names

    @property
    def _names(self) -> list[str]:
        nodes = ast.walk(self._tree) if self._tree else ()
        return [node.id for node in nodes if isinstance(node, ast.Name)]

    def mask(self, index: np.ndarray) -> np.ndarray:
        """Return a mask of the kept entries; `index` must hold whole contexts, in order."""
        evaluator = _RowEvaluator(index)
        kept = True if self._tree is None else evaluator.evaluate(self._tree)
        mask = np.array(np.broadcast_to(kept, len(index)))
        if self.every is not None:
            context = np.cumsum(index["flags"] & FIRST != 0)
            (left,) = np.nonzero(mask)
            (begins,) = np.nonzero(np.diff(context[left], prepend=-1))
            rank = np.arange(len(left)) - np.repeat(begins, np.diff(begins, append=len(left)))
            mask[left[rank % self.every != 0]] = False
        return mask


def _parse_rows(text: str) -> ast.expr:
    """Parse and check a text, and return its canonical tree."""
    text = " ".join(text.split())  # in a TOML file it may span several lines
    if not text:
        raise ConfigError("--where is empty; leave it out to keep every token")
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(
            f"--where may have {_MAX_CHARACTERS} characters at most; this has {len(text)}"
        )
    for place, character in enumerate(text, 1):
        # A comment would swallow the following lines, which were joined above.
        if character == "#" or not (character.isascii() and character.isprintable()):
            raise ConfigError(f"--where, character {place}: {character!r} is not understood")
    tree = _RowParser(text).parse(text)
    if (length := len(ast.unparse(tree))) > _MAX_CHARACTERS:  # so that it can be read back
        raise ConfigError(
            f"--where may have {_MAX_CHARACTERS} characters at most; this has {length}, with the "
            "usual spaces"
        )
    return tree


_BY_COLUMN = "to choose documents by a column, use --filter"


class _RowParser(_Parser):
    """Parser of `--where`: conditions and integers are checked by methods that call each other."""

    max_depth = 32

    def __init__(self, text: str) -> None:
        self._text = text

    def condition(self, node: ast.expr) -> ast.expr:
        """Check a node that must be true or false."""
        if not self._is_boolean(node):
            raise self.error(
                "is an integer where true or false is needed; compare it, as in pos > 0", node
            )
        return super().condition(node)

    def switch(self, node: ast.expr) -> ast.expr:
        return node  # a flag

    def integer(self, node: ast.expr) -> tuple[ast.expr, _Range]:
        """Check a node that must be an integer; also return the range of its values."""
        if self._is_boolean(node):
            raise self.error("is true or false where an integer is needed", node)
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
                    raise self.error(
                        "could reach 2**62; make it smaller first, as in doc % 1000 * pos", node
                    )
                return ast.BinOp(left=left, op=op, right=right), bounds
            case _:
                value = self._literal(node)
                return node, (value, value)

    def comparison(self, node: ast.Compare) -> ast.expr:
        comparators: list[ast.expr] = []
        for number, (op, right) in enumerate(zip(node.ops, node.comparators, strict=True), 1):
            if type(op) not in _ROW_COMPARISONS:
                raise self.error(_INSTEAD[type(op)], node)
            if not isinstance(op, ast.In | ast.NotIn):
                comparators.append(self.integer(right)[0])
                continue
            if number < len(node.ops):
                raise self.error(
                    "a list cannot be compared with anything; join two conditions with 'and'", node
                )
            comparators.append(self._members(right))
        return ast.Compare(left=self.integer(node.left)[0], ops=node.ops, comparators=comparators)

    def _members(self, node: ast.expr) -> ast.expr:
        """Check the list after `in`; its canonical form is a sorted tuple without repetitions."""
        if not isinstance(node, ast.Tuple | ast.List | ast.Set) or not node.elts:
            raise self.error("'in' needs a list of integers, as in pos in (1, 2) or (1,)", node)
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
            raise self.error("is not an integer literal", node)
        if plain.value >= _LIMIT:
            raise self.error("integers must be less than 2**62", node)
        return sign * plain.value

    def _is_boolean(self, node: ast.expr) -> bool:
        """Return whether a node is a boolean, by its outermost form; refuse unknown syntax."""
        match node:
            case ast.Name(id=name) if name in FLAGS:
                return True
            case ast.Name(id=name) if name in _COLUMNS:
                return False
            case ast.Name(id=name):
                known = [*FLAGS, *_COLUMNS]
                close = difflib.get_close_matches(name.lower(), known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else _BY_COLUMN
                raise self.error(f"no such name (known: {', '.join(known)}); {hint}", node)
            case ast.UnaryOp(op=ast.Not()) | ast.BoolOp() | ast.Compare():
                return True
            case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
                return False
            case ast.BinOp(op=op) if type(op) in _ARITHMETIC:
                return False
            case ast.BinOp(op=op) | ast.UnaryOp(op=op):
                raise self.error(_INSTEAD.get(type(op), _ROW_LANGUAGE), node)
            case ast.Constant(value=value) if type(value) is int:
                return False
            case ast.Constant(value=str()):
                raise self.error(f"{_ROW_LANGUAGE}; {_BY_COLUMN}", node)
            case _:
                raise self.error(_ROW_LANGUAGE, node)

    def _refuse_zero(self, node: ast.expr, bounds: _Range) -> None:
        if bounds == (0, 0):
            raise self.error("division by zero", node)
        if bounds[0] <= 0 <= bounds[1]:
            raise self.error("the divisor could be zero; divide by a number, or add 1", node)

    def error(self, reason: str, node: ast.expr | None = None) -> ConfigError:
        if node is None:
            return ConfigError(f"--where {reason}")
        part = _shown(self._text[node.col_offset : node.end_col_offset])
        return ConfigError(f"--where, character {node.col_offset + 1}, {part}: {reason}")

    def syntax_error(self, error: SyntaxError) -> ConfigError:
        place = min(error.offset or 0, len(self._text))
        near = f"character {place}, {_shown(self._text[place - 1 :])}" if place else "at its end"
        return ConfigError(f"--where, {near}: {error.msg}")


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:39] + "…")


def _bounds(op: ast.operator, left: _Range, right: _Range) -> _Range:
    """Return the bounds of a result. The bounds of a divisor lie on one side of zero."""
    if isinstance(op, ast.Mod):
        if right[0] < 0:
            return right[0] + 1, 0
        return 0, min(left[1], right[1] - 1) if left[0] >= 0 else right[1] - 1
    # The others are monotonic in each operand, so their extremes lie at the corners.
    corners = [_ARITHMETIC[type(op)](a, b) for a in left for b in right]
    return min(corners), max(corners)


class _RowEvaluator(_Evaluator):
    """Evaluates to an array with one value for each entry of the index, or to a single value."""

    def __init__(self, index: np.ndarray) -> None:
        self._index = index

    def switch(self, node: ast.expr) -> Any:
        assert isinstance(node, ast.Name), ast.dump(node)
        return self._index["flags"] & NAMED_FLAGS[node.id] != 0

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Name(id=name):
                values = self._index[name].astype(np.int64)
                assert ((values >= 0) & (values < _COLUMNS[name])).all(), name
                return values
            case ast.UnaryOp(operand=operand):
                return -self.value(operand)
            case ast.BinOp(left=left, op=op, right=right):
                return _ARITHMETIC[type(op)](self.value(left), self.value(right))
            case ast.Tuple(elts=elements):
                return [self.value(element) for element in elements]
            case ast.Constant(value=value):
                return value
            case _:
                raise AssertionError(ast.dump(node))

    def compare(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        return _ROW_COMPARISONS[type(op)](left, right)

    def all(self, parts: Iterable[Any]) -> Any:
        return reduce(np.logical_and, parts)

    def any(self, parts: Iterable[Any]) -> Any:
        return reduce(np.logical_or, parts)

    def negation(self, part: Any) -> Any:
        return np.logical_not(part)


def split_condition(text: str, columns: Collection[str]) -> tuple[str | None, str | None]:
    """Split a condition at its outer `and`s into one about rows and one about documents' columns.

    "topic == 'law' and pos >= 1" gives ("pos >= 1", "topic == 'law'") if there is a column `topic`.
    A condition that cannot be parsed is returned as one about rows, so that `RowFilter` reports the
    error.
    """
    own = {*columns} - {*_COLUMNS, *FLAGS}
    if len(text) > _MAX_CHARACTERS:
        return text, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(" ".join(text.split()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text, None
    parts = [tree]
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        parts = tree.values
    named = [{n.id for n in ast.walk(part) if isinstance(n, ast.Name)} for part in parts]
    for names in named:
        if names & own and (others := names & {*_COLUMNS, *FLAGS} - {*columns}):
            raise ConfigError(
                f"where {text!r}: join conditions on rows ({min(others)}) and on documents "
                f"({min(names & own)}) with `and` only"
            )
    rows = [part for part, names in zip(parts, named, strict=True) if not names & own]
    documents = [part for part, names in zip(parts, named, strict=True) if names & own]
    if not documents:
        return text, None
    return _joined(rows), _joined(documents)


def _joined(parts: Sequence[ast.expr]) -> str | None:
    if len(parts) < 2:
        return ast.unparse(parts[0]) if parts else None
    return ast.unparse(ast.BoolOp(op=ast.And(), values=[*parts]))


# -- documents: --filter ---------------------------------------------------------------------------

_COLUMN_COMPARISONS: Mapping[type[ast.cmpop], _Comparison] = {
    **_ORDER,
    ast.In: lambda value, options: value in options,
    ast.NotIn: lambda value, options: value not in options,
}
_COLUMN_LANGUAGE = (
    "columns, numbers, texts, lists of them, and, or, not, comparisons, in, is None and "
    "parentheses are understood"
)
_WORDS = {"true": "True", "false": "False", "none": "None", "null": "None", "nan": "None"}


class DocumentFilter:
    """Selects the documents to read, by a condition over the columns of a document's row.

    A comparison with a missing value is false: `score >= 3` where there is no score.

    Attributes:
        columns: the columns that the condition names, each once.
        flag: the name of the condition in error messages.
    """

    def __init__(self, text: str, flag: str = "--filter") -> None:
        self.text, self.flag = text, flag
        parser = _ColumnParser(text, flag)
        if len(text) > _MAX_CHARACTERS:
            raise parser.error("it is too long")
        self._tree = parser.parse(text.strip())
        self.columns = tuple(dict.fromkeys(parser.columns))
        if not self.columns:
            raise ConfigError(f"{flag} {text!r}: names no column")

    def missing(self, where: str, column: str, known: Iterable[str]) -> str:
        """Return the error message for a missing column; `known` are the columns that exist."""
        names = sorted({*known})
        if near := difflib.get_close_matches(column, names, n=1):
            hint = f"did you mean {near[0]!r}?"
        elif column.lower() in _WORDS:
            hint = f"write {_WORDS[column.lower()]}"
        else:
            hint = f'a text needs quotes: "{column}"'
        has = listed(names, "no columns")
        return f"{where}: no column {column!r}, which {self.flag} names; there are {has}; {hint}"

    def matches(self, row: Mapping[str, Any], *, untyped: bool = False) -> bool:
        """Return whether a row satisfies the condition.

        Args:
            untyped: whether the row's values come from an untyped format (CSV). A text that is
                compared with a number or a boolean is then converted if it is spelled like one; two
                columns are converted only if both are spelled like numbers.
        """
        return _ColumnEvaluator(row, untyped=untyped).evaluate(self._tree)

    def may_match(self, bounds: Mapping[str, tuple[Any, Any]]) -> bool:
        """Return whether a row could match if its columns lie within bounds."""
        return _BoundsEvaluator(bounds).evaluate(self._tree)


class _ColumnParser(_Parser):
    """Parser of `--filter`: each side of a comparison becomes a name or a Python literal."""

    max_depth = 256  # more than the longest text can hold

    def __init__(self, text: str, flag: str) -> None:
        self._text, self._flag = text, flag
        self.columns: list[str] = []

    def switch(self, node: ast.expr) -> ast.expr:
        if not isinstance(node, ast.Name):
            raise self._near(node) or self.error(f"{ast.unparse(node)[:80]!r} is not a condition")
        self.columns.append(node.id)
        return node  # a column of booleans

    def comparison(self, node: ast.Compare) -> ast.expr:
        for op in node.ops:
            if type(op) not in (*_COLUMN_COMPARISONS, ast.Is, ast.IsNot):
                raise self.error(f"{type(op).__name__} is not understood")
        for op, value in zip(node.ops, node.comparators, strict=True):
            none = isinstance(value, ast.Constant) and value.value is None
            if isinstance(op, ast.Is | ast.IsNot) and not none:
                raise self.error("only None may follow `is`")
        left, *others = [self._side(side) for side in (node.left, *node.comparators)]
        return ast.Compare(left=left, ops=node.ops, comparators=others)

    def _side(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Name):
            self.columns.append(node.id)
            return node
        try:
            return ast.Constant(value=ast.literal_eval(node))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            part = ast.unparse(node)[:80]
            raise self._near(node) or self.error(
                f"{part!r} is neither a column nor a literal"
            ) from None

    def _near(self, node: ast.expr) -> ConfigError | None:
        """Suggest a fix for `a == 1 & b`, which Python reads as `a == (1 & b)`."""
        for part in ast.walk(node):
            if isinstance(part, ast.BitAnd | ast.BitOr | ast.Invert):
                return self.error(_INSTEAD[type(part)])
        return None

    def error(self, reason: str, node: ast.expr | None = None) -> ConfigError:
        return ConfigError(f"{self._flag} {self._text!r}: {reason}; {_COLUMN_LANGUAGE}")

    def syntax_error(self, error: SyntaxError) -> ConfigError:
        return self.error(error.msg)


_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MOST_DIGITS = 400
_BOOLEANS = {"true": True, "false": False}


class _Untyped(str):
    """A text that may stand for a number or a boolean."""

    __slots__ = ()

    def meant_by(self, other: Any) -> Any:
        """Convert to the type of `other` if the text is spelled like one, else return the text."""
        if isinstance(other, bool):
            return _BOOLEANS.get(self.strip().lower(), self)
        text = self.strip() if len(self) <= _MOST_DIGITS else ""
        if isinstance(other, int | float | _Untyped) and _NUMBER.fullmatch(text):
            return int(text) if text.lstrip("+-").isdigit() else float(text)
        return self


def _typed(left: Any, right: Any) -> tuple[Any, Any]:
    """Convert the untyped side or sides of a comparison."""
    if isinstance(left, _Untyped) and isinstance(right, _Untyped):
        pair = left.meant_by(right), right.meant_by(left)
        return (left, right) if any(isinstance(side, _Untyped) for side in pair) else pair
    if isinstance(left, _Untyped):
        return left.meant_by(right), right
    return left, right.meant_by(left)


class _ColumnEvaluator(_Evaluator):
    """Evaluates to true or false for one row."""

    def __init__(self, row: Mapping[str, Any], *, untyped: bool) -> None:
        self._row, self._untyped = row, untyped

    def switch(self, node: ast.expr) -> bool:
        value = self.value(node)
        return value is True or (isinstance(value, _Untyped) and value.meant_by(True) is True)

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            value = self._row.get(node.id)
            return _Untyped(value) if self._untyped and isinstance(value, str) else value
        assert isinstance(node, ast.Constant), ast.dump(node)
        return node.value

    def compare(self, op: ast.cmpop, left: Any, right: Any) -> bool:
        if isinstance(op, ast.Is | ast.IsNot):
            return (left is None) is isinstance(op, ast.Is)
        if left is None or right is None:
            return False
        try:
            if isinstance(op, ast.In | ast.NotIn) and isinstance(left, _Untyped):
                found = left in right or any(left.meant_by(each) == each for each in right)
                return found is isinstance(op, ast.In)
            if isinstance(left, _Untyped) or isinstance(right, _Untyped):
                left, right = _typed(left, right)
            return bool(_COLUMN_COMPARISONS[type(op)](left, right))
        except _INCOMPARABLE:
            return False


@dataclass(frozen=True)
class _Bounds:
    least: Any
    greatest: Any


class _BoundsEvaluator(_Evaluator):
    """Evaluates to false only if no row within bounds can match."""

    def __init__(self, bounds: Mapping[str, tuple[Any, Any]]) -> None:
        self._bounds = bounds

    def switch(self, node: ast.expr) -> bool:
        return True

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        assert isinstance(node, ast.Name), ast.dump(node)
        return _Bounds(*self._bounds[node.id]) if node.id in self._bounds else None

    def compare(self, op: ast.cmpop, left: Any, right: Any) -> bool:
        if not isinstance(left, _Bounds) or isinstance(right, _Bounds):
            return True
        try:
            match op:
                case ast.Eq():
                    return left.least <= right <= left.greatest
                case ast.Lt():
                    return left.least < right
                case ast.LtE():
                    return left.least <= right
                case ast.Gt():
                    return left.greatest > right
                case ast.GtE():
                    return left.greatest >= right
                case _:
                    return True
        except _INCOMPARABLE:
            return True

    def negation(self, part: Any) -> bool:
        return True
