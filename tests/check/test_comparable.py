"""Ids are compared by the values that they name, so that only ties may swap."""

import numpy as np

from spile.check.comparable import comparable, named_in

LOGITS = np.array([[0.0, 5.0, 3.0, 3.0 + 1e-9], [9.0, 1.0, 2.0, 0.0]])
BOTH = np.arange(2)
EXACT = {"logits": LOGITS}


def logs(row: int) -> np.ndarray:
    return LOGITS[row] - np.log(np.exp(LOGITS[row]).sum())


def test_ids_name_the_log_probabilities_of_their_tokens() -> None:
    assert named_in("top_token_ids") == "logits" and named_in("expert_ids.1") is None
    given = [[[1, 3], [0, 2]], [[1, 2], [0, 2]], [[1, 0], [0, 2]]]  # right, swapped and wrong
    found = [comparable("top_token_ids", np.array(ids), BOTH, EXACT) for ids in given]
    assert np.allclose(found[0], [logs(0)[[1, 3]], logs(1)[[0, 2]]])
    assert 0 < np.abs(found[0] - found[1]).max() < 1e-8
    assert np.abs(found[0] - found[2]).max() > 2


def test_a_rank_names_the_log_probability_that_has_it() -> None:
    found = comparable("next_rank", np.array([0, 3]), BOTH, EXACT)
    assert np.allclose(found, [logs(0).max(), logs(1).min()])


def test_what_names_no_token_is_nan() -> None:
    found = comparable("top_token_ids", np.array([[-1, 1], [0, 4]]), BOTH, EXACT)
    assert np.isnan(found).tolist() == [[True, False], [False, True]]


def test_rows_are_those_of_the_tokens_given() -> None:
    found = comparable("top_token_ids", np.array([[2]]), np.array([1]), EXACT)
    assert np.allclose(found, [[logs(1)[2]]])


def test_keys_name_the_weights_of_their_heads() -> None:
    weights = np.array([[[1.0, 0.0], [1.0, 0.0]], [[0.25, 0.75], [0.5, 0.5]]])
    tap, exact = "attn_top_keys.3", {"attn_pattern.3": weights}
    assert named_in("attn_top_keys.3.h0.h2") == "attn_pattern.3.h0.h2"
    keys = np.array([[[0, -1], [0, -1]], [[1, 0], [0, 1]]])  # -1: there is only one key
    assert comparable(tap, keys, BOTH, exact).tolist() == [
        [[1.0, 0.0], [1.0, 0.0]], [[0.75, 0.25], [0.5, 0.5]]
    ]  # fmt: skip
    keys[1, 0] = -2, 7
    assert np.isnan(comparable(tap, keys, BOTH, exact)[1, 0]).all()


def test_distances_do_not_hide_the_other_values_of_a_summary() -> None:
    rows = np.ones((2, 1, 5)) * [1.0, 1.0, 1.0, 1.0, 2.0]
    assert (comparable("attn_summary.0", rows, BOTH, EXACT) == 1.0).all()
