"""How fast text becomes tokens, and how many cores devices of a known kind need for it."""

from pathlib import Path

import pytest

from chaos.harness import Work, run
from spile.core.config import Recipe, Runtime
from spile.dataset.records.ledger import Ledger
from spile.objects import MemoryObjects
from spile.plan.chips import CHIPS
from spile.plan.estimate import Throughput, measure_throughput
from spile.plan.residency import Machine
from spile.plan.resolve import resolve
from support import tiny


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_rate_of_text_is_measured_and_that_of_known_chips_computed(
    dtype: str, model: Path, tmp_path: Path
) -> None:
    recipe = Recipe(
        model=str(model), corpus=str(tiny.write_corpus(tmp_path / "c.txt")), taps="resid_post:0",
        compute_dtype=dtype,
    )  # fmt: skip
    job = resolve(recipe, Ledger(MemoryObjects("memory://pace")), "gpu")
    found = measure_throughput(job, Runtime(), Machine("gpu", chip=CHIPS["h200"]))
    assert found.text_rate_per_core and found.text_rate_per_core > 1000
    assert (found.device_rate is None) == (dtype == "float32"), "nothing is known of that"
    assert measure_throughput(job, Runtime(), Machine("cpu")).device_rate is None


def test_the_cores_that_devices_need_are_shown() -> None:
    shown = Throughput(250_000.0, 50_000.0, 16).rows()
    assert shown[0] == ("text to tokens", "250,000 tok/s a core")
    assert shown[1][1] == "0.2 cores (of 16 here) at 50,000 tok/s"
    assert len(Throughput(250_000.0, None, 16).rows()) == 1
    assert (
        Throughput(None, 50_000.0, 16).rows() == []
        and Throughput(None, 1.0, 1).cores_needed is None
    )


@pytest.mark.full
def test_a_plan_and_a_run_say_how_fast_text_comes(model: Path, tmp_path: Path) -> None:
    work = Work(model, tiny.write_corpus(tmp_path / "c.txt"))
    plan = run("plan", *work.flags(tmp_path / "out"))
    assert plan.code == 0 and "tok/s a core" in plan.out
    found = run("plan", *work.flags(tmp_path / "out"), "--json").json
    assert found["text_rate_per_core"] > 0 and found["cores_needed"] is None
    made = run("extract", *work.flags(tmp_path / "out"))
    assert " and waited for text for " in made.out and "; text came at " in made.out
