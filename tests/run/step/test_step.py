"""What both forms of a step share: their programs, and when those of two steps are equal."""

import logging
from collections.abc import Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.models.forward.forward_pass import copied
from spile.models.objectives import LOGPROB, Objective
from spile.run.step.devices import StepDevices
from spile.run.step.settings import StepSettings
from support import tiny
from support.meshes import make_batch, make_step


def test_steps_that_compile_equal_programs_have_equal_identities(
    model: Path, tmp_path: Path
) -> None:
    def identity(directory: Path, taps: str, dtype: str = "float32", scale: int = 1) -> Hashable:
        scales = {"embed": np.full(64, scale, np.float32)} if dtype == "int8" else None
        return make_step(directory, taps, None, dtype, scales=scales).programs.identity

    other = tiny.write_model(tmp_path / "other", seed=1)
    assert identity(model, "embed") == identity(other, "embed"), "weights are arguments"
    assert hash(identity(model, "embed")) == hash(identity(other, "embed"))
    assert identity(model, "embed", "int8", 1) == identity(model, "embed", "int8", 2)
    distinct = {
        identity(model, "embed"),
        identity(model, "resid_post:0"),
        identity(model, "embed", "float16"),
        identity(model, "embed", "int8"),
    }
    assert len(distinct) == 4


def test_a_program_with_room_for_more_contexts_serves_fewer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepSettings, "contexts", lambda _, batch: batch.contexts)  # as for cuDNN
    step, batch = make_step(model, "embed", None), make_batch(3)

    def program(contexts: int) -> object:
        return step.compile(replace(batch, contexts=contexts))[0].run

    few, many = program(16), program(64)
    assert few is not many
    assert [program(n) for n in (16, 32, 64)] == [few, many, many]
    assert program(256) not in (few, many)
    assert program(32) is many, "decided once: other processes may have met them at other moments"


def test_threads_that_meet_a_new_shape_together_compile_it_once(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step, batch = make_step(model, "embed", None), make_batch(9)
    with caplog.at_level(logging.DEBUG, "spile"), ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(step.compile, batch) for _ in range(3)]:
            done.result()
    # (jax, asked twice for the very same, would compile it once.)
    said = [line for line in caplog.messages if line.startswith("compiled a step")]
    assert len(said) == 2


def test_a_gpu_does_not_store_a_product_by_computing_it_again(model: Path) -> None:
    """Measured on a GPU (docs/benchmarks.md); here, what XLA is told."""
    settings, *_ = make_step(model, "resid_post:1", None).programs.identity  # type: ignore[misc]
    on_gpu = StepDevices(SimpleNamespace(platform="gpu"), None)
    backward = replace(settings, objective=Objective(kind=LOGPROB, identity=LOGPROB, aims=()))
    assert not settings.compiler_options and not backward.compiler_options
    assert not replace(settings, place=on_gpu).compiler_options
    assert replace(backward, place=on_gpu).compiler_options

    def lowered(platform: str) -> str:
        traced = jax.jit(copied).trace(jnp.zeros(3), jnp.zeros((), jnp.int32))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "stablehlo.select" in lowered("cuda")
    assert "stablehlo.select" not in lowered("cpu")
