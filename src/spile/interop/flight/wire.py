"""Convert batches to Arrow record batches and back.

Arrow has neither bfloat16 nor float8, and converting would copy. So a tap is a column of raw bytes,
one value per row, and the schema's metadata holds the dtypes.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.core.errors import StoreError
from spile.core.index import POOLED_INDEX_DTYPE, index_dtype
from spile.dataset.format import SCALE_DTYPE, TapInfo
from spile.dataset.read.dtypes import convert, given_dtype
from spile.dataset.read.window import Encoded, RowBatch, View

_VERSION = 1
_ABOUT = b"spile"
_INDEX = "index"


def pyarrow(name: str = "pyarrow") -> Any:
    """Import pyarrow on first use, since it imports slowly."""
    return importlib.import_module(name)


def schema_of(view: View) -> Any:
    """Return the schema of a view's batches, with rows in stored form."""
    pa = pyarrow()
    fields: list[Any] = []
    taps: dict[str, Any] = {}
    metadata: dict[bytes, bytes] = {}
    for name, tap in view.names.items():
        info = view.taps[tap]
        taps[name] = {"shape": list(info.shape), "dtype": info.dtype, "latents": info.latents}
        fields.append(pa.field(f"rows/{name}", pa.binary(info.width * info.storage.itemsize)))
        if info.scaled_by == "row":
            fields.append(pa.field(f"scale/{name}", pa.float32()))
        elif info.scaled_by == "channel":
            metadata[f"scale/{name}".encode()] = view.stored.scales[tap].tobytes()
    if view.entries is not None:
        fields.append(pa.field(_INDEX, pa.binary(view.entries.itemsize)))
    about = {"version": _VERSION, "taps": taps, "index": view.entries is not None}
    return pa.schema(fields, {_ABOUT: json.dumps(about).encode(), **metadata})


def to_arrow(batch: RowBatch, schema: Any) -> Any:
    """Return a record batch that refers to the arrays, without copies."""
    pa = pyarrow()
    columns: list[Any] = []
    for field in schema:
        kind, _, name = field.name.partition("/")
        found = batch[_INDEX if kind == _INDEX else name]
        if isinstance(found, Encoded):
            found = found.scale if kind == "scale" else found.codes
        array = np.ascontiguousarray(found)
        data = pa.py_buffer(array.reshape(-1).view(np.uint8))
        columns.append(pa.Array.from_buffers(field.type, len(array), [None, data]))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class Described:
    """The columns that a schema describes."""

    taps: Mapping[str, TapInfo]
    scales: Mapping[str, np.ndarray]  # one per channel, for taps that have them
    index: bool

    @classmethod
    def of(cls, schema: Any) -> "Described":
        metadata: Mapping[bytes, bytes] = schema.metadata or {}
        try:
            about = json.loads(metadata[_ABOUT])
            if about["version"] != _VERSION:
                raise StoreError(
                    f"the server speaks version {about['version']!r}, this client {_VERSION}; use "
                    "the same version of spile on both sides"
                )
            taps = {
                name: TapInfo.from_json({**info, "aliases": []})
                for name, info in about["taps"].items()
            }
            scales = {
                name: np.frombuffer(metadata[f"scale/{name}".encode()], SCALE_DTYPE).reshape(
                    info.shape
                )
                for name, info in taps.items()
                if info.scaled_by == "channel"
            }
            return cls(taps, scales, bool(about["index"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the server does not serve Spile's rows ({error})") from error

    def from_arrow(self, record: Any, dtype: npt.DTypeLike | None, encoded: bool) -> RowBatch:
        """Convert a record batch to a batch of `Dataset.batches`."""
        batch: RowBatch = {}
        for name, info in self.taps.items():
            stored = _column(record, f"rows/{name}", info.storage).reshape(-1, *info.shape)
            scale = self.scales.get(name)
            if info.scaled_by == "row":
                scale = _column(record, f"scale/{name}", SCALE_DTYPE)
            if scale is not None and encoded:
                batch[name] = Encoded(stored.copy(), scale.copy())
                continue
            batch[name] = np.empty(stored.shape, given_dtype(info, dtype))
            convert(stored, batch[name], scale)
        if self.index:
            pooled = record.column(_INDEX).type.byte_width == POOLED_INDEX_DTYPE.itemsize
            batch[_INDEX] = _column(record, _INDEX, index_dtype(pooled=pooled)).copy()
        return batch


def _column(record: Any, column: str, dtype: np.dtype[Any]) -> np.ndarray:
    """Return a view of a column's values."""
    array = record.column(column)
    each = array.type.bit_width // 8
    data = np.frombuffer(array.buffers()[1], np.uint8)[array.offset * each :]
    return data[: len(array) * each].view(dtype)
