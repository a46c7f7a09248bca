"""How many bytes a unit's files take, known before any is written: sizes follow from counts."""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from spile.core.index import INDEX_DTYPE
from spile.core.tensors import build_header
from spile.dataset.format import SCALE_DTYPE, TapInfo, scale_name
from spile.dataset.write.shard import TensorSpec
from spile.dataset.write.statistics import TapStats


def shard_specs(tap: str, rows: int, info: TapInfo) -> list[TensorSpec]:
    """The tensors of a shard of so many rows."""
    specs: list[TensorSpec] = [(tap, info.storage, (rows, *info.shape))]
    if info.scaled_by == "row":
        specs.append((scale_name(tap), SCALE_DTYPE, (rows,)))
    return specs


def unit_bytes(
    taps: Mapping[str, TapInfo],
    parts: Sequence[int],
    documents: Mapping[str, np.ndarray],
    shard_bytes: int,
) -> int:
    """Of all files of a unit, as long as nothing is compressed.

    Args:
        parts: rows that each process of the slice writes.
        documents: the table of them, as `encode_documents` makes it.
    """
    columns = INDEX_DTYPE.names or ()
    index = [(name, INDEX_DTYPE[name], (sum(parts),)) for name in columns]
    statistics = {
        name: array
        for tap, info in taps.items()
        for name, array in TapStats.empty(info.width).to_tensors(tap).items()
    }
    shards = sum(_shards(tap, info, parts, shard_bytes) for tap, info in taps.items())
    return shards + _file(index) + _file(_specs(statistics)) + _file(_specs(documents))


def _shards(tap: str, info: TapInfo, parts: Sequence[int], shard_bytes: int) -> int:
    each = max(1, shard_bytes // info.row_bytes)
    return sum(
        count * _file(shard_specs(tap, rows, info))
        for part in parts
        for count, rows in ((part // each, each), (1, part % each))
        if count and rows
    )


def _specs(tensors: Mapping[str, np.ndarray]) -> list[TensorSpec]:
    return [(name, array.dtype, array.shape) for name, array in tensors.items()]


def _file(specs: Sequence[TensorSpec]) -> int:
    return len(build_header(specs)) + sum(_sizes(specs))


def _sizes(specs: Sequence[TensorSpec]) -> Iterator[int]:
    return (np.dtype(dtype).itemsize * math.prod(shape) for _, dtype, shape in specs)
