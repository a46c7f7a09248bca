"""Which gradients `spile check` leaves out, and what it says of them."""

import dataclasses
from typing import Any

import pytest

from core.test_recipe import RESOLVED
from spile.check.backward import checkable

TAPS = ("resid_post.1", "resid_post_grad.1", "z_attr.0.h1")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, None),
        ({"objective": "logprob"}, None),
        ({"objective": "logprob", "steps": 4}, "integrated gradients"),
        ({"objective": "direction embed 12"}, "these are of direction embed 12"),
        ({"objective": "logprob", "splice": ("zero z.1",)}, "with --splice"),
    ],
)
def test_gradients_that_hf_cannot_give_are_left_out_by_name(
    options: dict[str, Any], why: str | None
) -> None:
    recipe = dataclasses.replace(RESOLVED, taps=TAPS, **{"splice": (), **options})
    taps, told = checkable(recipe)
    if why is None:
        assert (taps, told) == (TAPS, None)
        return
    assert taps == TAPS[:1]
    assert told
    assert why in told
    assert told.endswith(": resid_post_grad.1, z_attr.0.h1 left out")
