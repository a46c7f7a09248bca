"""What logits say about the next token, against numpy in float64, and where they tie or are NaN."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from spile.models.forward.next_token import next_token

VOCAB, TOKENS, TOP = 1000, 40, 16
TOPS = {"top_token_ids": TOP, "top_logprobs": TOP}
WANTED = ("logprob", "entropy", "logsumexp", "next_rank", *TOPS)


def run(
    logits: np.ndarray, targets: np.ndarray, known: np.ndarray | None = None
) -> Mapping[str, np.ndarray]:
    known = np.ones(len(logits), bool) if known is None else known
    given = map(jnp.asarray, (logits, targets.astype(np.int32), known))
    return {name: np.asarray(a) for name, a in next_token(*given, WANTED, TOPS).items()}


def test_each_value_is_that_of_the_exact_distribution() -> None:
    rng = np.random.default_rng(0)
    logits = (8 * rng.standard_normal((TOKENS, VOCAB))).astype(np.float32)
    targets = rng.integers(0, VOCAB, TOKENS)
    found = run(logits, targets)
    wide = logits.astype(np.float64)
    total = np.log(np.exp(wide).sum(axis=1))
    order = np.argsort(-wide, axis=1, kind="stable")
    assert np.array_equal(found["top_token_ids"], order[:, :TOP])
    assert np.array_equal(found["next_rank"], np.argmax(order == targets[:, None], axis=1))
    logs = np.take_along_axis(wide - total[:, None], order[:, :TOP], axis=1)
    for name, wanted in (("top_logprobs", logs), ("logsumexp", total)):
        assert found[name].dtype == np.float32
        assert np.abs(found[name] - wanted).max() <= 2e-6 * np.abs(wanted).max(), name
    # What is left is the mass of the tail.
    assert (np.exp(found["top_logprobs"].astype(np.float64)).sum(axis=1) < 1).all()


def test_of_equal_logits_the_lower_id_comes_first() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, [700, 3, 41]] = 2.0
    found = run(logits, np.array([VOCAB - 1, 41]))
    assert found["top_token_ids"].tolist() == [
        [*range(TOP)], [3, 41, 700, *(n for n in range(TOP - 2) if n != 3)]
    ]  # fmt: skip
    assert found["next_rank"].tolist() == [VOCAB - 1, 1]


def test_a_small_difference_below_a_large_logit_still_decides() -> None:
    """Log-probabilities of the two round to one number; their order is that of the logits."""
    logits = np.full((1, VOCAB), -1e3, np.float32)
    logits[0, :3] = 40.0, 1e-9, 2e-9
    found = run(logits, np.array([1]))
    assert found["top_token_ids"][0, :3].tolist() == [0, 2, 1]
    assert found["next_rank"].tolist() == [2]


def test_the_end_of_a_context_has_no_next_token() -> None:
    logits = np.random.default_rng(1).standard_normal((2, VOCAB)).astype(np.float32)
    found = run(logits, np.array([500, 500]), np.array([True, False]))
    assert found["logprob"][1] == 0.0 and found["next_rank"][1] == 0
    assert found["logprob"][0] < 0.0 and found["next_rank"][0] > 0


def test_where_logits_are_nan_ids_and_rank_say_so() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, 7], logits[1, 7] = np.nan, np.inf
    logits[2, 7] = -np.inf  # a token that cannot come is no fault
    found = run(logits, np.array([1, 1, 1]))
    for row in (0, 1):
        assert (found["top_token_ids"][row] == -1).all() and found["next_rank"][row] == -1
        assert not np.isfinite(found["top_logprobs"][row]).any()
    assert (found["top_token_ids"][2] >= 0).all() and found["next_rank"][2] == 1
    assert np.isfinite(found["top_logprobs"][2]).all()
