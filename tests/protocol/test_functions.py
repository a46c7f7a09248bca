"""The models name the functions that their actions stand for: those are there."""

import importlib

import pytest

from protocol import copying, maintaining, merge, model, operations, passes

MODELS = (model, merge, passes, operations, copying, maintaining)


@pytest.mark.parametrize("function", sorted({name for each in MODELS for name in each.FUNCTIONS}))
def test_the_functions_that_actions_stand_for_are_there(function: str) -> None:
    module, _, name = function.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)
