"""A Zarr (v3) group: an array per tap, and the index's columns; written without zarr."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from spile.core.tensors import as_bytes
from spile.interop.export.export_format import ExportFormat, write_json
from spile.interop.export.export_source import ExportSource

_CHUNK_BYTES = 8 << 20

_Read = Callable[[int, int], np.ndarray]


def _write(source: ExportSource, to: Path) -> int:
    group = {"zarr_format": 3, "node_type": "group"}
    write_json(to / "zarr.json", {**group, "attributes": {"spile": source.about()}})
    for tap in source.taps:
        shape = (source.rows, *source.dataset.shape(tap))

        def rows(start: int, stop: int, tap: str = tap) -> np.ndarray:
            return source.read(tap, start, stop)

        names = {"also_called": list(source.dataset.aliases(tap))}
        _write_array(to / tap, source.dtypes[tap], shape, rows, names)
    (to / "index").mkdir()
    write_json(to / "index" / "zarr.json", {**group, "attributes": {}})
    entries = source.dataset.index_dtype
    for name in entries.names or ():

        def column(start: int, stop: int, name: str = name) -> np.ndarray:
            return np.ascontiguousarray(source.dataset.index(start, stop)[name])

        _write_array(to / "index" / name, entries[name], (source.rows,), column, {})
    return source.rows


def _write_array(
    at: Path, dtype: np.dtype[Any], shape: tuple[int, ...], read: _Read, attributes: dict[str, Any]
) -> None:
    """Write a Zarr array in chunks of whole rows, uncompressed."""
    each = math.prod(shape[1:]) * dtype.itemsize
    step = min(shape[0], max(1, _CHUNK_BYTES // each))
    at.mkdir()
    write_json(
        at / "zarr.json",
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(shape),
            "data_type": dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [step, *shape[1:]]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "fill_value": 0,
            "attributes": attributes,
        },
    )
    for number, start in enumerate(range(0, shape[0], step)):
        values = read(start, min(start + step, shape[0]))
        path = _chunk(at, number, len(shape))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(as_bytes(values))
            file.truncate(step * each)  # chunks have one size; the last may end in padding


def _chunk(at: Path, number: int, axes: int) -> Path:
    return at.joinpath("c", str(number), *["0"] * (axes - 1))


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    index = min(
        _count_array(at / "index" / name) for name in source.dataset.index_dtype.names or ()
    )
    return {tap: min(index, _count_array(at / tap)) for tap in source.taps}


def _count_array(at: Path) -> int:
    """Rows of an array, up to the first chunk that is missing or incomplete."""
    stated = cast(dict[str, Any], json.loads((at / "zarr.json").read_bytes()))
    shape, chunk = stated["shape"], stated["chunk_grid"]["configuration"]["chunk_shape"]
    size = math.prod(chunk) * np.dtype(stated["data_type"]).itemsize
    for number, start in enumerate(range(0, shape[0], chunk[0])):
        path = _chunk(at, number, len(shape))
        if not path.is_file() or path.stat().st_size != size:
            return start
    return shape[0]


ZARR = ExportFormat(
    name="zarr",
    about="a Zarr v3 group: an array per tap, and the index's columns",
    write=_write,
    count=_count,
    integers=True,
)
