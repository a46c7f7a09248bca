"""What follows from a model's layers: how many, and after how many their kinds repeat."""

from dataclasses import replace

import pytest

import tiny
from spile.models.config.arch import Layer
from spile.models.config.hf_config import read_config

_, ARCH = read_config(tiny.CONFIG, "test")
FULL, SLIDING = Layer(), Layer(window=8)


@pytest.mark.parametrize(
    ("layers", "period"),
    [
        ([FULL], 1),
        ([FULL] * 7, 1),
        ([SLIDING, FULL] * 3, 2),
        ([SLIDING, FULL, SLIDING], 2),  # the last period may be begun only
        ([SLIDING, SLIDING, FULL] * 2 + [SLIDING], 3),
        ([FULL, FULL, SLIDING], 3),
        ([FULL, Layer(rope=1)], 2),
    ],
)
def test_a_period_is_the_shortest_run_of_kinds_that_repeats(
    layers: list[Layer], period: int
) -> None:
    arch = replace(ARCH, layers=tuple(layers))
    assert (arch.num_layers, arch.period) == (len(layers), period)
