"""Where heads look, from weights that are known."""

import numpy as np

from spile.check.attended import attended

WEIGHTS = np.array([[[1.0, 0, 0]], [[0.25, 0.75, 0]], [[0.5, 0.25, 0.25]]])


def test_keys_weights_and_summary_follow_from_the_weights() -> None:
    found = attended(WEIGHTS, 2, sink=False)
    assert found["attn_top_keys"].tolist() == [[[0, -1]], [[1, 0]], [[0, 1]]]
    assert found["attn_top_weights"].tolist() == [[[1, 0]], [[0.75, 0.25]], [[0.5, 0.25]]]
    entropy = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75)), 1.5 * np.log(2)
    wanted = [[0, 1, 1, 0, 0], [entropy[0], 0.25, 0.75, 0.25, 0.25],
              [entropy[1], 0.5, 0.25, 0.25, 1.25]]  # fmt: skip
    np.testing.assert_allclose(found["attn_summary"][:, 0], wanted, atol=1e-12)


def test_a_context_shorter_than_the_keys_is_filled_up() -> None:
    found = attended(WEIGHTS, 5, sink=False)
    assert found["attn_top_keys"][2, 0].tolist() == [0, 1, 2, -1, -1]
    assert found["attn_top_weights"].shape == (3, 1, 5)


def test_a_sink_is_an_outcome_without_a_distance() -> None:
    found = attended(WEIGHTS / 2, 2, sink=True)["attn_summary"][:, 0]
    assert np.isclose(found[0, 0], np.log(2)) and found[0, 1] == 0.5
    assert found[2, 4] == 1.25
