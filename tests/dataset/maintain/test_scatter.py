"""Sums of rows: equal for the same rows in any order, and for no other rows."""

import numpy as np
import pytest

from spile.core.index import INDEX_DTYPE
from spile.dataset.maintain.scatter import RowSums, entry_hashes

COUNT = 50


def made(count: int = COUNT) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """An index, rows of eight bytes, and a scale for each."""
    random = np.random.default_rng(0)
    index = np.zeros(count, INDEX_DTYPE)
    index["doc"], index["offset"] = np.arange(count) // 7, np.arange(count) % 7
    rows = random.integers(0, 256, (count, 8)).astype(np.uint8)
    return index, rows, random.random(count).astype(np.float32)


def sums(index: np.ndarray, rows: np.ndarray, scales: np.ndarray | None) -> RowSums:
    found = RowSums()
    found.add_entries(index)
    found.add_rows("z.0", rows, scales, entry_hashes(index).tolist())
    return found


@pytest.mark.parametrize("scaled", [False, True])
def test_the_order_and_the_grouping_do_not_matter(scaled: bool) -> None:
    index, rows, scales = made()
    beside = scales if scaled else None
    whole = sums(index, rows, beside)
    order = np.random.default_rng(1).permutation(COUNT)
    assert sums(index[order], rows[order], scales[order] if scaled else None) == whole
    parts = RowSums()
    for part in (slice(0, 0), slice(0, 20), slice(20, COUNT)):
        parts.merge(sums(index[part], rows[part], scales[part] if scaled else None))
    assert parts == whole == RowSums.from_json(whole.to_json())


def test_a_change_of_a_row_a_scale_or_an_entry_is_noticed() -> None:
    index, rows, scales = made()
    whole = sums(index, rows, scales)
    other = rows.copy()
    other[3, 5] ^= 1
    assert sums(index, other, scales) != whole
    more = scales.copy()
    more[3] *= 2
    assert sums(index, rows, more) != whole
    moved = index.copy()
    moved["pos"][3] += 1
    assert sums(moved, rows, scales) != whole


def test_rows_that_change_places_without_their_entries_are_noticed() -> None:
    index, rows, _ = made()
    exchanged = rows.copy()
    exchanged[[3, 4]] = rows[[4, 3]]
    found = sums(index, exchanged, None)
    assert found != sums(index, rows, None)
    assert found.entries == sums(index, rows, None).entries
