"""How many values taps keep, from the recipe."""

import pytest

from spile.core.config import Recipe
from spile.core.errors import ConfigError
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.demo import demo_model
from spile.plan.tapped import seq_len_of, taps_of

ARCH = open_checkpoint(str(demo_model())).arch


def shapes(**given: object) -> dict[str, tuple[int, ...]]:
    return {tap.name: tap.shape(ARCH, 64) for tap in taps_of(Recipe(**given), ARCH)}


def test_top_logits_stands_for_its_four_taps() -> None:
    assert shapes(taps="top_logits") == {
        "logsumexp": (), "next_rank": (), "top_token_ids": (64,), "top_logprobs": (64,)
    }  # fmt: skip
    assert shapes(taps="top_logits", top_logits=5)["top_logprobs"] == (5,)
    assert shapes(taps="top_token_ids,logprob", top_logits=5) == {
        "logprob": (), "top_token_ids": (5,)
    }  # fmt: skip


def test_attn_top_stands_for_keys_and_weights_of_some_heads() -> None:
    assert shapes(taps="attn_top:3.h0+h5,attn_summary:3", attn_top=4) == {
        "attn_top_keys.3.h0.h5": (2, 4), "attn_top_weights.3.h0.h5": (2, 4),
        "attn_summary.3": (ARCH.num_heads, 5),
    }  # fmt: skip
    assert shapes(taps="attn_top:3,top_logits", attn_top=4)["top_logprobs"] == (64,)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"taps": "logprob", "top_logits": 5},
         "--top-logits 5: no tap keeps the largest; add top_logits to --taps"),
        ({"taps": "logsumexp", "top_logits": 5}, "no tap keeps the largest"),
        ({"taps": "top_logits", "top_logits": ARCH.vocab_size + 1},
         f"--top-logits {ARCH.vocab_size + 1}: there are only {ARCH.vocab_size} tokens in the"),
        ({"taps": "top_logits:3"}, "has no layers"),
        ({"taps": "attn_top"}, "say which layers"),
        ({"taps": "attn_summary:3", "attn_top": 5}, "--attn-top 5: no tap keeps the largest"),
        ({"taps": "attn_top:3", "attn_top": 65, "seq_len": 64},
         "--attn-top 65: there are only 64 tokens in a context"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        taps_of(Recipe(**given), ARCH)


def test_a_context_is_no_longer_than_the_model_takes() -> None:
    assert seq_len_of(Recipe(seq_len=32), ARCH) == 32
    assert seq_len_of(Recipe(), ARCH) == min(2048, ARCH.max_positions)
    with pytest.raises(ConfigError, match=f"--seq-len must be at most {ARCH.max_positions}"):
        seq_len_of(Recipe(seq_len=ARCH.max_positions + 1), ARCH)
