"""The parts of a run, and how they cut units into steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from spile.models.layout import ONE_DEVICE
from spile.run.assembly import Assembly


@pytest.mark.parametrize(("platform", "fewest"), [("cpu", 16), ("gpu", 2), ("tpu", 2)])
def test_a_last_step_may_be_smaller_where_compiling_it_pays(platform: str, fewest: int) -> None:
    context: Any = SimpleNamespace(world=SimpleNamespace(processes=1))
    cost: Any = SimpleNamespace(batch_rows=16, residency=SimpleNamespace(streams=False))
    device, job = SimpleNamespace(platform=platform), object()
    cut: Any = Assembly(context, job, device, ONE_DEVICE, cost).batches  # type: ignore[arg-type]
    assert (cut.keywords["rows"], cut.keywords["fewest"]) == (16, fewest)
