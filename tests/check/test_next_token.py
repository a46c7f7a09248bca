"""HF's logits, by a full sort in numpy."""

import numpy as np
import torch

from spile.check.next_token import next_token

TOPS = {"top_token_ids": 4, "top_logprobs": 4}


def test_values_are_those_of_a_sort_with_the_lower_id_first() -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 6, (9, 30)).astype(np.float64)  # with ties
    logits[:, 20] = 7.0
    ids = rng.integers(0, 30, 9)
    found = {n: v.numpy() for n, v in
             next_token(torch.from_numpy(logits), torch.from_numpy(ids), TOPS).items()}  # fmt: skip
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    order = np.argsort(-logits, axis=1, kind="stable")
    assert np.array_equal(found["top_token_ids"][:, 0], order[:, 0])
    assert np.allclose(found["top_logprobs"], -np.sort(-logs, axis=1)[:, :4], atol=1e-12)
    assert np.allclose(found["logsumexp"], (logits - logs)[:, 0])
    for token, following in enumerate(ids[1:]):
        assert found["next_rank"][token] == order[token].tolist().index(following)
        assert np.isclose(found["logprob"][token], logs[token, following], rtol=1e-12)
    assert found["next_rank"][-1] == 0 and found["logprob"][-1] == 0
    for own, sorted_ids in zip(found["top_token_ids"], found["top_logprobs"], strict=True):
        same = np.diff(sorted_ids) == 0
        assert (np.diff(own)[same] > 0).all(), "of ties the lower id first"
