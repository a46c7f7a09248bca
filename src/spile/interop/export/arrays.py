"""Plain arrays: one .npy file per tap, or a Zarr (v3) group. Both are written by hand."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from spile.core.index import INDEX_DTYPE
from spile.core.tensors import as_bytes
from spile.interop.export.format import Format, write_json
from spile.interop.export.source import Source

_CHUNK_BYTES = 8 << 20

Read = Callable[[int, int], np.ndarray]


def write_npy(
    path: Path, dtype: np.dtype[Any], shape: Sequence[int], pieces: Iterable[np.ndarray]
) -> None:
    """A .npy file whose rows stream after its header."""
    header = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": tuple(shape),
    }
    with path.open("xb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in pieces:
            file.write(as_bytes(piece))


def _write_npy(source: Source, to: Path) -> int:
    for tap in source.taps:
        windows = source.windows(0, source.rows, source.row_bytes(tap))
        shape = (source.rows, *source.dataset.shape(tap))
        pieces = (source.read(tap, a, b) for a, b in windows)
        write_npy(to / f"{tap}.npy", source.dtypes[tap], shape, pieces)
    windows = source.windows(0, source.rows, INDEX_DTYPE.itemsize)
    pieces = (source.dataset.index(a, b) for a, b in windows)
    write_npy(to / "index.npy", INDEX_DTYPE, (source.rows,), pieces)
    write_json(to / "spile.json", source.about())
    return source.rows


def _count_npy(source: Source, at: Path) -> Mapping[str, int]:
    index = len(np.load(at / "index.npy", mmap_mode="r"))
    # A map of a file that is too short cannot be opened.
    return {tap: min(index, len(np.load(at / f"{tap}.npy", mmap_mode="r"))) for tap in source.taps}


def _write_zarr(source: Source, to: Path) -> int:
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
    for name in INDEX_DTYPE.names or ():

        def column(start: int, stop: int, name: str = name) -> np.ndarray:
            return np.ascontiguousarray(source.dataset.index(start, stop)[name])

        _write_array(to / "index" / name, INDEX_DTYPE[name], (source.rows,), column, {})
    return source.rows


def _write_array(
    at: Path, dtype: np.dtype[Any], shape: tuple[int, ...], read: Read, attributes: dict[str, Any]
) -> None:
    """A Zarr array cut into chunks of whole rows, uncompressed."""
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
            file.truncate(step * each)  # chunks are of one size; the last may end in nothing


def _chunk(at: Path, number: int, axes: int) -> Path:
    return at.joinpath("c", str(number), *["0"] * (axes - 1))


def _count_zarr(source: Source, at: Path) -> Mapping[str, int]:
    index = min(_count_array(at / "index" / name) for name in INDEX_DTYPE.names or ())
    return {tap: min(index, _count_array(at / tap)) for tap in source.taps}


def _count_array(at: Path) -> int:
    """Rows of an array, as far as its chunks are there and whole."""
    stated = cast(dict[str, Any], json.loads((at / "zarr.json").read_bytes()))
    shape, chunk = stated["shape"], stated["chunk_grid"]["configuration"]["chunk_shape"]
    size = math.prod(chunk) * np.dtype(stated["data_type"]).itemsize
    for number, start in enumerate(range(0, shape[0], chunk[0])):
        path = _chunk(at, number, len(shape))
        if not path.is_file() or path.stat().st_size != size:
            return start
    return shape[0]


NPY = Format(
    name="npy",
    about="one .npy file per tap, and index.npy",
    write=_write_npy,
    count=_count_npy,
    integers=True,
)
ZARR = Format(
    name="zarr",
    about="a Zarr v3 group: an array per tap, and the index's columns",
    write=_write_zarr,
    count=_count_zarr,
    integers=True,
)
