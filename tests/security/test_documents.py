"""Hostile documents files."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from security.hostile import damaged, fuzz, only_our_errors
from spile.core.index import INDEX_DTYPE
from spile.dataset.codec.documents import encode_documents, read_documents
from spile.dataset.codec.shard import ShardWriter
from spile.dataset.format import Shard
from spile.objects import MemoryObjects

COUNT = 40
_pools: list[pa.MemoryPool] = []  # never freed, since its allocations may outlive the test


@pytest.fixture(scope="module")
def table() -> bytes:
    index = np.zeros(COUNT, INDEX_DTYPE)
    index["doc"] = np.arange(COUNT)
    texts = [f"document é {doc}" for doc in range(COUNT)]
    tensors = encode_documents(
        docs=range(COUNT), tokens=[1] * COUNT, skipped=[None] * COUNT, previews=texts,
        kept={"id": [*range(COUNT)], "url": texts}, index=index,
    )  # fmt: skip
    objects = MemoryObjects("memory://table")
    writer = ShardWriter(objects, "k", [(n, a.dtype, a.shape) for n, a in tensors.items()])
    for array in tensors.values():
        writer.write(array)
    writer.close()
    return objects.get("k")


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Fail if Arrow ever had more memory than that."""
    usual = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(usual)
    _pools.append(counted)
    pa.set_memory_pool(counted)
    try:
        yield
    finally:
        pa.set_memory_pool(usual)
    assert counted.max_memory() < size, f"{counted.max_memory()} bytes"


def read(data: bytes, count: int) -> None:
    """Read all of a table, to the last character."""
    objects = MemoryObjects("memory://table")
    objects.create("k", data)
    found = read_documents(objects, Shard("documents", "k", 0, count, len(data), ""), ["id", "url"])
    found.validate(full=True)
    assert len(found.to_pylist()) == count


@fuzz(100)
@given(data=st.data())
def test_a_table_of_any_bytes_is_refused_or_read_within_bounds(
    table: bytes, data: st.DataObject
) -> None:
    count = data.draw(st.sampled_from([COUNT, COUNT, 0, COUNT + 1, 1 << 40]))
    with only_our_errors(), at_most(1 << 20):
        read(data.draw(damaged(table) | st.binary(max_size=100)), count)


@fuzz(200)
@given(data=st.data())
def test_columns_with_anything_in_them_are_refused_or_read_within_bounds(
    table: bytes, data: st.DataObject
) -> None:
    changed = bytearray(table)
    start = struct.unpack("<Q", table[:8])[0] + 8
    for _ in range(data.draw(st.integers(1, 9))):
        at = data.draw(st.integers(start, len(table) - 1))
        changed[at] = data.draw(st.sampled_from([0, 1, 2, 127, 128, 195, 255]))
    with only_our_errors(), at_most(1 << 20):
        read(bytes(changed), COUNT)
