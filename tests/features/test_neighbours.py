"""The sample of rows: the same whatever pieces it is merged from."""

import numpy as np
import pytest

from spile.core.errors import CorruptError
from spile.features.neighbours import RowSample
from spile.features.ranked import hashes


def test_drawn_rows_do_not_depend_on_the_pieces() -> None:
    places = np.arange(500)
    ids = np.arange(1000).reshape(500, 2)
    whole, parts = RowSample(40, 2), RowSample(40, 2)
    whole.add(places, hashes(places), ids)
    for at in range(0, 500, 13):
        piece = RowSample(40, 2)
        part = slice(at, at + 13)
        piece.add(places[part], hashes(places[part]), ids[part])
        parts.merge("part", piece.columns())
    one, other = whole.columns(), parts.columns()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    best = np.argsort(hashes(places), kind="stable")[:40]
    assert one["row"].tolist() == best.tolist()
    with pytest.raises(CorruptError, match="part: does not hold rows of 3 latents"):
        RowSample(40, 3).merge("part", one)
