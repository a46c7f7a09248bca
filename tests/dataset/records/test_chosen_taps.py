"""Taps are chosen by any of their names; other names are refused."""

import pytest

from spile.core.errors import ConfigError
from spile.dataset.records.chosen_taps import choose_taps

TAPS = {
    "resid_post.0": ("blocks.0.hook_resid_post", "hidden_states[1]"),
    "resid_post.1": (),
    "resid_post.2": (),
    "q.1": ("blocks.1.attn.hook_q",),
    "expert_ids.1": (),
    "logprob": (),
}


@pytest.mark.parametrize(
    ("text", "taps"),
    [
        (None, ["resid_post.0", "resid_post.1", "resid_post.2", "q.1", "expert_ids.1", "logprob"]),
        ("logprob,resid_post.2", ["resid_post.2", "logprob"]),
        ("blocks.1.attn.hook_q,hidden_states[1]", ["resid_post.0", "q.1"]),
        ("resid_post:1-2", ["resid_post.1", "resid_post.2"]),
        ("resid_post:0+2,q:all", ["resid_post.0", "resid_post.2", "q.1"]),
        ("resid_post:all/2", ["resid_post.0", "resid_post.2"]),
        (["q.1", "q.1"], ["q.1"]),
    ],
)
def test_taps_are_chosen_by_any_of_their_names(
    text: str | list[str] | None, taps: list[str]
) -> None:
    assert list(choose_taps("acts", TAPS, text)) == taps


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("z.9", "no tap 'z.9' in acts; it has resid_post.0"),
        ("resid_post:5", "no tap 'resid_post.5'"),
        ("resid_post:x", "'x' is not a layer"),
        (" , ", "names no tap"),
    ],
)
def test_what_names_no_tap_is_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        choose_taps("acts", TAPS, text)
