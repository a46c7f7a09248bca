"""Edges: sums of stored means, by writer and reader (e2e/test_edges.py makes real ones)."""

import numpy as np
import pytest

from spile.core.errors import ConfigError
from spile.dataset.read.edges import edges_of
from spile.dataset.read.reduced import ReducedRows

MEANS = {
    "resid_mid_edge.1": np.array([[1.0, 2.0], [3.0, 4.0]]),
    "resid_post_edge.1": np.array([[0.5, 0.0], [0.0, 0.25]]),
}
WRITERS = dict.fromkeys(MEANS, "embed,mlp_out.0")


def reduced(tap: str) -> ReducedRows:
    return ReducedRows(("a", "b"), np.array([10, 4]), MEANS[tap], None, None, tap)


def test_sums_are_means_times_counts_by_label_writer_and_reader() -> None:
    found = edges_of("acts", ["embed", *MEANS], WRITERS.get, reduced)
    assert found.writers == ("embed", "mlp_out.0")
    assert found.readers == ("resid_mid.1", "resid_post.1")
    assert found.labels == ("a", "b")
    assert found.sums.shape == (2, 2, 2)
    assert found.sums[0].tolist() == [[10.0, 5.0], [20.0, 0.0]]
    assert found.sums[1].tolist() == [[12.0, 0.0], [16.0, 1.0]]


def test_edges_of_other_lists_of_writers_make_no_matrix() -> None:
    with pytest.raises(ConfigError, match="several lists of --writers"):
        edges_of("acts", [*MEANS], _other, reduced)
    with pytest.raises(ConfigError, match="holds no edges"):
        edges_of("acts", ["embed"], WRITERS.get, reduced)


def _other(tap: str) -> str:
    return tap
