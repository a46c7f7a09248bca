"""Column types, the rows of Arrow tables as Python values, and zstd streams.

Token ids stay arrays. A column must hold the same kind of value in every file of a corpus; a
mismatch is found when the corpus is cut, not later.
"""

# Strict, but for values that pyarrow, which has no types, leaves unknown.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false

import difflib
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute

from spile.core.errors import InputError
from spile.core.options import listed
from spile.corpus.chats.messages import is_message, pairs_in
from spile.corpus.documents import OVERSIZED, Oversized
from spile.objects.paths import AnyPath

pc: Any = pyarrow.compute  # it makes its functions as it is imported
# Errors that Arrow raises about an invalid file: names that are not text, times out of range.
UNREADABLE = (pa.ArrowException, ValueError, OverflowError, LookupError, struct.error, OSError)
NULL = "null"  # fits every kind: the writer of the file saw no value


class ColumnKinds:
    """The column types of the files so far."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str, str]] = {}  # kind, its name in the file, the file

    def check(self, where: str, columns: Mapping[str, tuple[str, str]]) -> None:
        """Check a file's columns, each with its kind and the file's own name for that."""
        for name, (kind, called) in columns.items():
            if kind == NULL:
                continue
            known, before, first = self._known.setdefault(name, (kind, called, where))
            if kind != known:
                raise InputError(
                    f"{where}: {name!r} is {called} there, but {before} in {first}; a column must "
                    "be of one kind in all files: convert one of them, or give other files"
                )


def json_kind(value: Any) -> tuple[str, str]:
    """Return the kind of a JSON value, in the form used for columns."""
    match value:
        case None:
            return NULL, NULL
        case bool():
            return "boolean", "boolean"
        case int() | float():
            return "number", "number"
        case str():
            return "text", "string"
        case list():
            return "list", "list"
        case _:
            return "struct", "object"


def holds_chats(kind: pa.DataType) -> bool:
    """Return whether a column of this type seems to hold chats."""
    if not _is_list(kind) or not pa.types.is_struct(kind.value_type):
        return False
    return is_message({field.name for field in kind.value_type})


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def chats_in(chats: Sequence[str], columns: Sequence[str] = ()) -> str:
    """Return advice about columns of chats, else about pairs among all `columns`; or nothing."""
    if chats:
        return " or ".join(f"--messages {name}" for name in chats) + " reads its chats"
    return pairs_in(columns)


def is_text(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_dictionary(kind):
        return is_text(kind.value_type)
    known = (types.is_string, types.is_large_string, types.is_string_view,
             types.is_binary, types.is_large_binary)  # fmt: skip
    return any(is_kind(kind) for is_kind in known)


def is_ids(kind: pa.DataType) -> bool:
    """Return whether a column holds lists of integers."""
    return _is_list(kind) and pa.types.is_integer(kind.value_type)


def kinds_of(schema: Any) -> tuple[list[str], list[str]]:
    """Return the columns of strings, and those of lists of integers."""
    texts = [field.name for field in schema if is_text(field.type)]
    return texts, [field.name for field in schema if is_ids(field.type)]


def scalar_columns(schema: Any) -> tuple[str, ...]:
    """Return the columns of numbers, booleans and strings that can be chosen by name."""
    types = pa.types
    known = (types.is_integer, types.is_floating, types.is_boolean, types.is_string,
             types.is_large_string)  # fmt: skip
    names = Counter(schema.names)

    def is_scalar(kind: pa.DataType) -> bool:
        plain = kind.value_type if types.is_dictionary(kind) else kind
        return any(is_kind(plain) for is_kind in known)

    return tuple(
        field.name
        for field in schema
        if names[field.name] == 1 and "." not in field.name and is_scalar(field.type)
    )


def rows_of(batch: pa.RecordBatch, arrays: Collection[str]) -> list[dict[str, Any]]:
    """Return each row as a dict; lists of numbers in the columns `arrays` are arrays."""
    plain = [name for name in batch.schema.names if name not in arrays]
    rows: list[dict[str, Any]] = (
        batch.select(plain).to_pylist() if plain else [{} for _ in range(batch.num_rows)]
    )
    for name in batch.schema.names:
        if name in arrays:
            for row, value in zip(rows, _arrays(batch.column(name)), strict=True):
                row[name] = value
    return rows


def _arrays(column: pa.Array) -> Iterator[Any]:
    """Yield each list of numbers as an array, with NaN for nulls; others pass through unchanged."""
    floats = _is_list(column.type) and pa.types.is_floating(column.type.value_type)
    if not floats and (not is_ids(column.type) or column.flatten().null_count):
        yield from column.to_pylist()
        return
    flat = column.flatten().to_numpy(zero_copy_only=False)
    lengths = (
        pc.call_function("list_value_length", [column]).fill_null(0).to_numpy(zero_copy_only=False)
    )
    stops = np.cumsum(lengths, dtype=np.int64)
    for stop, length, valid in zip(stops, lengths, column.is_valid().to_pylist(), strict=True):
        yield flat[stop - length : stop] if valid else None


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return the first column of that name: there may be several."""
    return batch.column(batch.schema.names.index(name))


def leaf(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column, or a field of one."""
    if name in batch.schema.names:
        return column_of(batch, name)
    head, *path = name.split(".")
    return pc.struct_field(column_of(batch, head), path)


def text_values(column: pa.Array, most: int) -> list[bytes | Oversized | None]:
    """Return the bytes of texts; `OVERSIZED` for those of more than `most` bytes."""
    if pa.types.is_dictionary(column.type):  # equal values share one object
        values = text_values(column.dictionary, most)
        return [None if i is None else values[i] for i in column.indices.to_pylist()]
    # Through binary: Arrow requires strings to be UTF-8, but files may violate that.
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    data = column.cast(pa.large_binary() if wide else pa.binary())
    sizes = pc.binary_length(data)
    if (pc.max(sizes).as_py() or 0) <= most:
        return data.to_pylist()
    small = [size is None or size <= most for size in sizes.to_pylist()]
    kept = pc.if_else(pa.array(small), data, None).to_pylist()
    return [value if ok else OVERSIZED for value, ok in zip(kept, small, strict=True)]


def columns_holding(path: AnyPath, schema: Any, names: Sequence[str]) -> list[str]:
    """Return the columns that hold these names: `a` holds `a.b`, a field of the struct `a`."""
    refuse_missing(path, _kinds(schema), names)
    return [*dict.fromkeys(n if n in schema.names else n.partition(".")[0] for n in names)]


def refuse_missing(
    path: AnyPath, present: Collection[str], columns: Sequence[str], why: str = ""
) -> None:
    for name in columns:
        if name not in present:
            has = listed(sorted({*present}))
            near = difflib.get_close_matches(name, present, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"{path}: no column {name!r}{why}; it has {has}{hint}")


def kept_rows(path: AnyPath, batch: pa.RecordBatch, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the kept columns of each row."""
    columns = [_kept_values(path, name, column_of(batch, name)) for name in names]
    values = zip(*columns, strict=True) if names else [()] * batch.num_rows
    return [dict(zip(names, row, strict=True)) for row in values]


def _kept_values(path: AnyPath, name: str, column: pa.Array) -> list[Any]:
    """Return the values of a column; types without a counterpart in Python become text."""
    types = pa.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type) and not types.is_string_view(column.type):
        values = column.cast(pa.large_binary()).to_pylist()
        return [v if v is None else v.decode("utf-8", "backslashreplace") for v in values]
    try:
        if types.is_temporal(column.type) or types.is_decimal(column.type):
            column = column.cast(pa.string())
        return column.to_pylist()
    except (pa.ArrowException, ValueError) as error:
        raise InputError(
            f"{path}: column {name!r} cannot be kept ({str(error).splitlines()[0]}); leave it out "
            "of --keep"
        ) from error


def text_column(path: AnyPath, schema: Any, wanted: str | None) -> str:
    """Return the requested column, `text`, or the only column of strings."""
    kinds = _kinds(schema)
    strings = [name for name, kind in kinds.items() if is_text(kind)]
    # (If all values of a column are null, the writer of the file could not tell its type.)
    for name in [wanted] if wanted else ["text"]:
        if name in strings or (name in kinds and pa.types.is_null(kinds[name])):
            return name
    top = [name for name in strings if name in schema.names]
    if wanted is None and len(top) == 1:
        return top[0]
    those = listed(strings)
    if wanted is None:
        raise _choice_error(path, schema)
    found = f" but {kinds[wanted]}" if wanted in kinds else ""
    chats = f"; {chats_in([wanted])}" if found and holds_chats(kinds[wanted]) else ""
    raise InputError(
        f"{path}: --text-column {wanted!r} is not a column of strings there{found} "
        f"(those are: {those}){chats}"
    )


def _choice_error(path: AnyPath, schema: pa.Schema) -> InputError:
    """Return the error for a table whose text column is ambiguous."""
    strings = [name for name, kind in _kinds(schema).items() if is_text(kind)]
    chats = chats_in([field.name for field in schema if holds_chats(field.type)], strings)
    if not strings and not chats:
        every = listed(f"{field.name}: {field.type}" for field in schema)
        return InputError(
            f"{path}: no column holds strings, to be read as texts; it has {every}. Token ids are "
            "read by --tokens-column, chats by --messages"
        )
    return InputError(
        f"{path}: which column is the text? Choose one with --text-column "
        f"(columns of strings: {listed(strings)})" + (f"; {chats}" if chats else "")
    )


def _kinds(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Return the columns and their types; fields of structs are included as `column.field`."""
    found: dict[str, pa.DataType] = {}

    def add(name: str, kind: pa.DataType) -> None:
        found.setdefault(name, kind)
        for field in kind if pa.types.is_struct(kind) else ():
            add(f"{name}.{field.name}", field.type)

    for field in schema:  # (first, because a column may have a dot in its name)
        found[field.name] = field.type
    for field in schema:
        add(field.name, field.type)
    return found


def with_names(schema: Any) -> Any:
    """Return the schema; raise ValueError now if a name is not valid text, and not on first use."""
    _kinds(schema)
    return schema


def check_columns(
    path: AnyPath,
    schema: Any,
    wanted: str | None,
    columns: Sequence[str],
    keep: Sequence[str],
    *,
    also: Sequence[str],
    known: ColumnKinds | None,
) -> None:
    """Refuse a file that lacks a column, or whose columns differ in type from other files."""
    kinds = _kinds(schema)
    if known:
        named = [*(columns or [wanted or "text"]), *also]
        found = {name: kinds[name] for name in named if name in kinds}
        known.check(str(path), {name: (_word(k), str(k)) for name, k in found.items()})
    if not columns:
        found = text_column(path, schema, wanted)
        # (Only when a corpus is cut: existing datasets with such a column remain readable.)
        guessed = known is not None and not wanted and found != "text"
        if guessed and any(holds_chats(field.type) for field in schema):
            raise _choice_error(path, schema)
    refuse_missing(path, kinds, columns)
    refuse_missing(path, schema.names, also, ", which --filter names")
    refuse_missing(path, schema.names, keep, ", which --keep or --by names")


def _word(kind: pa.DataType) -> str:
    """Return the kind of a column, whichever Arrow type it has."""
    types = pa.types
    if is_text(kind):
        return "text"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if _is_list(kind):
        return "list"
    words = {types.is_null: NULL, types.is_boolean: "boolean", types.is_struct: "struct"}
    return next((word for is_kind, word in words.items() if is_kind(kind)), str(kind))


def open_zstd(path: AnyPath) -> BinaryIO:
    """Open a zstd file; unlike with zstandard's reader, a truncated file is an error."""
    local = isinstance(path, Path)
    stream = pa.OSFile(str(path)) if local else pa.PythonFile(path.open("rb"), mode="r")
    return pa.CompressedInputStream(stream, "zstd")
