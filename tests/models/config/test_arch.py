"""Properties of a model's layers: their number, and the period of their kinds."""

from dataclasses import replace

import pytest

from spile.models.config.arch import Layer
from spile.models.config.hf_config import read_config
from spile.models.forward.weights import LayerSchedule
from support import tiny

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
        ([FULL, SLIDING, Layer(rope=1)], 3),
        ([FULL, Layer(rope=1)], 2),
        ([FULL] + [SLIDING] * 5, 1),  # the blocks before them are separate
    ],
)
def test_a_period_is_the_shortest_run_of_kinds_that_repeats(
    layers: list[Layer], period: int
) -> None:
    arch = replace(ARCH, layers=tuple(layers))
    assert (arch.num_layers, arch.period) == (len(layers), period)


@pytest.mark.parametrize(
    ("layers", "lead", "period"),
    [
        ([FULL] + [SLIDING] * 5, 1, 1),
        ([FULL] * 3 + [SLIDING, FULL] * 4, 2, 2),
        ([SLIDING, FULL] * 3, 0, 2),
        ([FULL, SLIDING, Layer(rope=1)], 0, 3),
        ([FULL, SLIDING, FULL, FULL] + [SLIDING] * 9, 4, 1),
    ],
)
def test_blocks_before_those_that_repeat_are_as_few_as_can_be(
    layers: list[Layer], lead: int, period: int
) -> None:
    arch = replace(ARCH, layers=tuple(layers))
    assert (arch.lead, arch.period) == (lead, period)
    repeated = layers[lead:]
    assert all(kind == repeated[i % period] for i, kind in enumerate(repeated))


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ([SLIDING, FULL] * 3, (0, 2, 0)),
        ([SLIDING, FULL, SLIDING], (0, 2, 0)),  # an incomplete period does not count
        ([FULL, FULL, SLIDING], (0, 1, 1)),
        ([SLIDING] * 3 + [FULL] + [SLIDING] * 3 + [FULL, SLIDING, FULL], (0, 4, 1)),
        ([FULL] * 9 + [SLIDING, FULL] * 4 + [SLIDING], (8, 2, 0)),
    ],
)
def test_blocks_after_those_that_repeat_stand_apart(
    layers: list[Layer], found: tuple[int, int, int]
) -> None:
    arch = replace(ARCH, layers=tuple(layers))
    assert (arch.lead, arch.period, arch.tail) == found
    schedule = LayerSchedule.of(arch, arch.num_layers, whole=True)
    assert arch.num_layers - arch.tail - arch.period < schedule.scanned
    assert schedule.scanned <= arch.num_layers - arch.tail
