"""Ids are compared by the values that they name, so that only ties may swap."""

import numpy as np

from spile.check.named import named_values, values_named_in

LOGITS = np.array([[0.0, 5.0, 3.0, 3.0 + 1e-9], [9.0, 1.0, 2.0, 0.0]])
BOTH = np.arange(2)


def logs(row: int) -> np.ndarray:
    return LOGITS[row] - np.log(np.exp(LOGITS[row]).sum())


def test_ids_name_the_log_probabilities_of_their_tokens() -> None:
    assert values_named_in("top_token_ids") == "logits" and values_named_in("expert_ids.1") is None
    given = [[[1, 3], [0, 2]], [[1, 2], [0, 2]], [[1, 0], [0, 2]]]  # right, swapped and wrong
    found = [named_values("top_token_ids", np.array(ids), BOTH, LOGITS) for ids in given]
    assert np.allclose(found[0], [logs(0)[[1, 3]], logs(1)[[0, 2]]])
    assert 0 < np.abs(found[0] - found[1]).max() < 1e-8
    assert np.abs(found[0] - found[2]).max() > 2


def test_a_rank_names_the_log_probability_that_has_it() -> None:
    found = named_values("next_rank", np.array([0, 3]), BOTH, LOGITS)
    assert np.allclose(found, [logs(0).max(), logs(1).min()])


def test_what_names_no_token_is_nan() -> None:
    found = named_values("top_token_ids", np.array([[-1, 1], [0, 4]]), BOTH, LOGITS)
    assert np.isnan(found).tolist() == [[True, False], [False, True]]


def test_rows_are_those_of_the_tokens_given() -> None:
    found = named_values("top_token_ids", np.array([[2]]), np.array([1]), LOGITS)
    assert np.allclose(found, [[logs(1)[2]]])
