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
        ({"objective": "logprob", "steps": 4}, None),
        ({"objective": "loss:assistant"}, None),
        ({"objective": "direction resid_post.3 12"}, None),
        ({"objective": "direction logits 12"}, "along a direction of logits"),
        ({"objective": "logprob", "splice": ("zero z.1",)}, None),
        ({"objective": "logprob", "compute_dtype": "float8_e4m3"}, "in float8_e4m3"),
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


def test_what_was_made_with_a_function_is_left_out_whole() -> None:
    recipe = dataclasses.replace(RESOLVED, taps=TAPS, objective="function total 12", splice=())
    taps, told = checkable(recipe)
    assert taps == ()
    assert "check runs no function of your own" in str(told)
