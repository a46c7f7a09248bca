"""The documents table: a row for every document of a unit, read or skipped.

    doc         its ordinal in the corpus
    tokens      the number of its tokens that the model read
    rows        the number of its rows that were stored
    first_row   the first of those, within the unit; null (stored as -1) if there are none, or if
                they are scattered over a shuffled dataset
    skipped     why it was skipped; null if it was read
    preview     the beginning of its text
    ...         the kept columns of the corpus: numbers, booleans, text

Readers get an Arrow table. It is stored as tensors, like everything else: the bytes do not depend
on the writer, and an untrusted file cannot exhaust memory (an invalid Parquet footer makes Arrow
abort the process). A column with nulls takes two tensors, `NAME` and `valid/NAME`. A column of
texts holds their bytes, and `ends/NAME` the end of each. Kept columns are called `kept/NAME`.
"""

import importlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spile.core.errors import CorruptError
from spile.core.index import DOCUMENT_COLUMNS, INDEX_DTYPE
from spile.dataset.codec.columns import columns_in
from spile.dataset.format import Shard
from spile.objects import Objects

_NUMBERS = {"doc": np.int64, "tokens": np.int32, "rows": np.int32, "first_row": np.int64}
_TEXTS = ("skipped", "preview")
_KEPT_DTYPES = (np.dtype(np.bool_), np.dtype(np.int64), np.dtype(np.float64))
_MOST_TEXT = (1 << 31) - 1  # most bytes in a column: Arrow counts them in int32
_TOGETHER = 256  # tables that are merged at a time


def encode_documents(
    *,
    docs: Sequence[int],
    tokens: Sequence[int],
    skipped: Sequence[str | None],
    previews: Sequence[str | None],
    kept: Mapping[str, Sequence[Any]],
    index: np.ndarray,
) -> dict[str, np.ndarray]:
    """Encode a unit's table as tensors.

    Args:
        kept: values of the kept columns: booleans, numbers, texts and None.
        index: the index of the unit's rows.
    """
    rows, first = rows_of(np.asarray(docs, np.int64), index["doc"])
    numbers = {"doc": docs, "tokens": tokens, "rows": rows, "first_row": first}
    tensors = {name: np.asarray(values, _NUMBERS[name]) for name, values in numbers.items()}
    for name, texts in zip(_TEXTS, (skipped, previews), strict=True):
        tensors |= _text_tensors(name, texts)
    for name, values in kept.items():
        tensors |= _kept_tensors(f"kept/{name}", values)
    # Widest first, so that all of them are aligned.
    return dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))


def with_columns(
    table: Mapping[str, np.ndarray], columns: Mapping[str, Sequence[Any]]
) -> dict[str, np.ndarray]:
    """Return a unit's tensors with other values of some kept columns."""
    old = {f"{prefix}kept/{name}" for name in columns for prefix in ("", "ends/", "valid/")}
    tensors = {name: tensor for name, tensor in table.items() if name not in old}
    for name, values in columns.items():
        tensors |= _kept_tensors(f"kept/{name}", values)
    return dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))


def rows_of(docs: np.ndarray, of_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each document's number of rows and first row, or -1; `of_rows`: doc of each row."""
    rows, first = np.zeros(len(docs), np.int32), np.full(len(docs), -1, np.int64)
    found, firsts, counts = np.unique(of_rows, return_index=True, return_counts=True)
    order = np.argsort(docs)  # a merged unit of a permuted corpus is not sorted
    at = order[np.searchsorted(docs, found, sorter=order)]
    rows[at], first[at] = counts, firsts
    return rows, first


def _kept_tensors(name: str, values: Sequence[Any]) -> dict[str, np.ndarray]:
    """Encode a column in the type that all its values have, or as text."""
    kinds: set[type[Any]] = {type(value) for value in values if value is not None}
    dtype = np.bool_ if kinds == {bool} else np.int64 if kinds == {int} else np.float64
    if not kinds or not (kinds == {bool} or kinds <= {int, float}):
        return _text_tensors(name, [_spelled(value) for value in values])
    filled = [0 if value is None else value for value in values]
    return {name: np.array(filled, dtype), f"valid/{name}": _valid(values)}


def _text_tensors(name: str, texts: Sequence[str | None]) -> dict[str, np.ndarray]:
    data = [(text or "").encode() for text in texts]
    return {
        name: np.frombuffer(b"".join(data), np.uint8),
        f"ends/{name}": np.cumsum([len(each) for each in data], dtype=np.int64),
        f"valid/{name}": _valid(texts),
    }


def _valid(values: Sequence[Any]) -> np.ndarray:
    return np.array([value is not None for value in values], np.bool_)


def _spelled(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def kept_bytes(table: Mapping[str, np.ndarray]) -> int:
    """Return the bytes that the kept columns take in a unit's tensors."""
    own = {prefix + name for prefix in ("", "ends/", "valid/") for name in (*_NUMBERS, *_TEXTS)}
    return sum(tensor.nbytes for name, tensor in table.items() if name not in own)


def kept_of(table: Mapping[str, np.ndarray], doc: int) -> dict[str, Any]:
    """Return the kept columns of one document of a unit's tensors, then its preview."""
    (row,) = np.flatnonzero(table["doc"] == doc)
    names = [name for name in table if name.startswith("kept/")]
    return {name.removeprefix("kept/"): _cell(table, name, row) for name in (*names, "preview")}


def _cell(table: Mapping[str, np.ndarray], name: str, row: np.intp) -> Any:
    if not table[f"valid/{name}"][row]:
        return None
    ends = table.get(f"ends/{name}")
    if ends is None:
        return table[name][row].item()
    begin = int(ends[row - 1]) if row else 0
    return table[name][begin : int(ends[row])].tobytes().decode()


# -- reading ---------------------------------------------------------------------------------


def read_documents(objects: Objects, file: Shard, keep: Sequence[str]) -> Any:
    """Read a unit's table as a pyarrow.Table, and check it against its record.

    Raises:
        CorruptError: if it does not match; no more than its size is read into memory.
    """
    pa = importlib.import_module("pyarrow")  # on first use: a slow import
    # Not mapped: tables outlive this call, and a process may have few files open, or mapped.
    try:
        tensors = columns_in(file.key, bytes(objects.get_range(file.key, 0, file.bytes)))
    except FileNotFoundError:
        raise CorruptError(file.key, "is missing") from None
    for name, dtype in _NUMBERS.items():
        found = tensors.get(name)
        if found is None or (found.dtype, found.shape) != (np.dtype(dtype), (file.count,)):
            raise CorruptError(file.key, f"does not hold {name} of {file.count} documents")
    columns = {name: pa.array(tensors[name]) for name in _NUMBERS}
    first = np.asarray(tensors["first_row"])
    columns["first_row"] = pa.array(first, mask=first < 0)
    for name in (*_TEXTS, *(f"kept/{name}" for name in keep)):
        columns[name] = _column(pa, file, tensors, name)
    if len(columns) != len(_NUMBERS) + len(_TEXTS) + len(keep):
        raise CorruptError(file.key, "holds a column twice")
    return pa.table([*columns.values()], names=[*DOCUMENT_COLUMNS, *keep])


def _column(pa: Any, file: Shard, tensors: Mapping[str, np.ndarray], name: str) -> Any:
    count, none = (file.count,), np.zeros(0)
    values, valid = tensors.get(name, none), tensors.get(f"valid/{name}", none)
    if valid.dtype != np.bool_ or valid.shape != count:
        raise CorruptError(file.key, f"does not hold {name!r} of {file.count} documents")
    valid = _booleans(valid)
    if f"ends/{name}" in tensors:
        return _texts(pa, file, name, values, tensors[f"ends/{name}"], valid)
    if values.dtype not in _KEPT_DTYPES or values.shape != count or name in _TEXTS:
        raise CorruptError(file.key, f"does not hold {name!r} of {file.count} documents")
    return pa.array(_booleans(values) if values.dtype == np.bool_ else values, mask=~valid)


def _booleans(stored: np.ndarray) -> np.ndarray:
    """Return a byte as true unless it is 0; numpy itself accepts only 0 and 1."""
    return stored.view(np.uint8) != 0


def _texts(
    pa: Any, file: Shard, name: str, data: np.ndarray, ends: np.ndarray, valid: np.ndarray
) -> Any:
    if data.dtype != np.uint8 or data.ndim != 1 or len(data) > _MOST_TEXT:
        raise CorruptError(file.key, f"{name!r} holds no text")
    if ends.dtype != np.int64 or ends.shape != (file.count,):
        raise CorruptError(file.key, f"does not hold {name!r} of {file.count} documents")
    if not valid.any():
        return pa.nulls(file.count, pa.string() if name in _TEXTS else pa.null())
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    if (np.diff(offsets) < 0).any() or offsets[-1] != len(data):
        raise CorruptError(file.key, f"{name!r} ends where none of its texts does")
    content = data.tobytes()
    begins = np.frombuffer(content, np.uint8)[offsets[offsets < len(content)]]
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptError(file.key, f"{name!r} is not UTF-8") from error
    if (begins & 0xC0 == 0x80).any():
        raise CorruptError(file.key, f"{name!r} is cut within a character")
    bits = np.packbits(valid, bitorder="little")
    return pa.StringArray.from_buffers(
        file.count,
        pa.py_buffer(offsets.astype(np.int32).tobytes()),
        pa.py_buffer(content),
        pa.py_buffer(bits.tobytes()),
    )


# -- several units ---------------------------------------------------------------------------


def joined(tables: Iterable[Any]) -> Any:
    """Join the tables of several units; a column whose type differs among them becomes text.

    Tables of the same types are merged as they come: a chunk of a few documents takes more memory
    than the documents.
    """
    pa = importlib.import_module("pyarrow")

    def portion(numbered: tuple[int, Any]) -> tuple[int, Any]:
        return numbered[0] // _TOGETHER, numbered[1].schema

    runs = itertools.groupby(enumerate(tables), portion)
    merged = [pa.concat_tables([table for _, table in run]).combine_chunks() for _, run in runs]
    names = merged[0].column_names
    columns = [_joined(pa, [table.column(i) for table in merged]) for i in range(len(names))]
    return pa.table(columns, names=names)


def _joined(pa: Any, columns: Sequence[Any]) -> Any:
    kinds = {str(column.type) for column in columns} - {"null"}
    if kinds == {"int64", "double"}:
        columns = [column.cast(pa.float64(), safe=False) for column in columns]
    elif len(kinds) > 1:
        spelled = ([_spelled(value) for value in column.to_pylist()] for column in columns)
        columns = [pa.chunked_array([pa.array(texts, pa.string())]) for texts in spelled]
    kind = next((column.type for column in columns if str(column.type) != "null"), pa.null())
    chunks = [chunk for column in columns for chunk in column.cast(kind).chunks]
    return pa.chunked_array(chunks, kind)


def merge_documents(tables: Iterable[Any], index: np.ndarray | None) -> dict[str, np.ndarray]:
    """Merge the tables of consecutive units.

    Args:
        index: that of all their rows; None for a shuffled dataset, whose rows lie elsewhere.
    """
    whole = joined(tables)
    values = [column.to_pylist() for column in whole.columns]
    own = dict(zip(DOCUMENT_COLUMNS, values, strict=False))
    kept = zip(whole.column_names, values, strict=True)
    merged = encode_documents(
        docs=own["doc"],
        tokens=own["tokens"],
        skipped=own["skipped"],
        previews=own["preview"],
        kept=dict([*kept][len(DOCUMENT_COLUMNS) :]),
        index=np.empty(0, INDEX_DTYPE) if index is None else index,
    )
    if index is None:
        merged["rows"] = np.asarray(own["rows"], _NUMBERS["rows"])
    return merged
