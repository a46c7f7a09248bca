"""Gradients agree with HF's autograd: packed and alone, at once and block by block."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models.forward.test_decoder import BLOCKED, CONTEXTS, LENGTHS, QUICK, batch, error, saved
from spile.check.hf_gradients import gradients, logprob
from spile.check.reference import Reference
from spile.models.files.checkpoint import Checkpoint
from spile.models.forward.decoder import (
    AFTER,
    Decoder,
    Inputs,
    by_stage,
    of_any_block,
    stage_kinds,
)
from spile.models.forward.gradient import Cotangents, linearized, stage_pulled_back
from spile.models.forward.streamed import Passing
from spile.models.forward.weight_loader import load_params
from spile.models.forward.weights import LayerSchedule
from spile.models.sites import SPLICED
from spile.models.taps import Tap, all_taps, parse_taps
from support.families import FAMILIES
from support.marks import some

TOLERANCE = 2e-5  # of the tap's largest value
_, BATCH = batch(LENGTHS)
AIM = Tap("logprob")
# One with experts and sinks, one that is recurrent, one with soft caps, and a plain one.
FOUR = ("llama-gqa", "gemma2-gqa", "gptoss-gqa", "qwen3next-gqa")
DEPTH = 2


def sites_of(checkpoint: Checkpoint) -> tuple[Tap, ...]:
    return tuple(tap for tap in all_taps(checkpoint.arch) if tap.site in SPLICED)


def truth_of(model: Any) -> list[dict[str, np.ndarray]]:
    reference = Reference(model)
    return [
        gradients(model, reference.points, torch.tensor(context.ids), logprob)
        for context in CONTEXTS
    ]


def whole(
    checkpoint: Checkpoint,
    sites: tuple[Tap, ...],
    columns: np.ndarray | None = None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """The gradients of a model that runs at once, [rows, kept, ...] by name."""
    arch = checkpoint.arch
    schedule = LayerSchedule.of(arch, arch.num_layers, whole=True)
    assert schedule.cycles
    params, _ = load_params(checkpoint, schedule, head=True, dtype=jnp.dtype("float32"))
    decoder = Decoder(arch, (), "float32", BLOCKED, sites=sites, aims=(AIM,), **options)

    def step(params: Any, inputs: Inputs) -> Any:
        _, aims, pullback = linearized(decoder, params, inputs, schedule)
        return pullback({AIM.name: jnp.ones_like(aims[AIM.name])})

    found = jax.jit(step, compiler_options=QUICK)(params, given(columns))
    return shaped(found, columns)


def given(columns: np.ndarray | None) -> Inputs:
    return jax.tree.map(jnp.asarray, Inputs(*BATCH, columns))


def shaped(found: dict[str, Any], columns: np.ndarray | None = None) -> dict[str, np.ndarray]:
    lead = BATCH[0].shape if columns is None else columns.shape
    return {n: np.asarray(a).reshape(*lead, *a.shape[1:]) for n, a in found.items()}


def block_by_block(checkpoint: Checkpoint, sites: tuple[Tap, ...]) -> dict[str, np.ndarray]:
    """The same of a model that runs block by block, each block once more on the way back."""
    arch, inputs = checkpoint.arch, given(None)
    depth = arch.num_layers
    schedule = LayerSchedule.of(arch, depth, whole=True).one_by_one
    params, _ = load_params(checkpoint, schedule, head=True, dtype=jnp.dtype("float32"))
    kinds, of_stage = stage_kinds(arch, depth), by_stage(sites, depth)
    plain = Decoder(arch, (), "float32", BLOCKED)
    weights = [params.outer, *params.tail, params.outer]
    passing, entered = Passing(), list[Any]()
    for stage, kind in enumerate(kinds[:-1], -1):
        beside = passing.beside(stage, kind)
        entered.append((passing.stream, beside))
        forth = jax.jit(partial(plain.stage, kind), compiler_options=QUICK)
        stream, onward, _ = forth(weights[stage + 1], *entered[-1], inputs)
        passing.stream = stream
        passing.keep(kind, onward)
    entered.append((passing.stream, (None, None)))
    found: dict[str, np.ndarray] = {}
    stream = None
    for stage in range(depth, -2, -1):
        kind, own = kinds[stage + 1], of_stage[stage]
        local = tuple(dict.fromkeys(map(of_any_block, own)))
        aims = (AIM,) if kind == AFTER else ()
        decoder = replace(plain, sites=local, aims=aims)
        back = partial(stage_pulled_back, decoder, kind)
        cotangents = Cotangents(stream, None, {AIM.name: jnp.ones(BATCH[0].shape)} if aims else {})
        stream, _, values, _ = jax.jit(back, compiler_options=QUICK)(
            weights[stage + 1], entered[stage + 1], inputs, cotangents
        )
        found |= {tap.name: values[of_any_block(tap).name] for tap in own}
    return shaped(found)


def assert_agrees(found: dict[str, np.ndarray], truth: list[dict[str, np.ndarray]]) -> None:
    compared = set[str]()
    for context, wanted in zip(CONTEXTS, truth, strict=True):
        for name in found.keys() & wanted.keys():
            assert error(context.of(found[name]), wanted[name]) < TOLERANCE, name
            compared.add(name)
    assert {name.partition(".")[0] for name in compared} >= {
        "embed", "resid_pre", "attn_in", "attn_out", "z", "resid_mid", "mlp_in", "mlp_out",
        "resid_post",
    }  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Checkpoint]]:
    made: dict[str, tuple[Any, Checkpoint]] = {}

    def get(name: str) -> tuple[Any, Checkpoint]:
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            made[name] = saved(FAMILIES[name], directory, num_hidden_layers=DEPTH)
        return made[name]

    return get


@pytest.mark.parametrize("name", some(FOUR, "gemma2-gqa"))
def test_gradients_at_every_site_agree_with_hf(
    name: str, models: Callable[[str], tuple[Any, Checkpoint]]
) -> None:
    """Contexts are packed here, and alone in HF."""
    model, checkpoint = models(name)
    assert_agrees(block_by_block(checkpoint, sites_of(checkpoint)), truth_of(model))


@pytest.mark.parametrize("remat", some((False, True), True))
def test_a_model_that_runs_at_once_has_the_same_gradients(
    remat: bool, models: Callable[[str], tuple[Any, Checkpoint]]
) -> None:
    model, checkpoint = models("llama-gqa")
    assert_agrees(whole(checkpoint, sites_of(checkpoint), remat=remat), truth_of(model))


@pytest.mark.full
def test_only_the_wanted_layers_heads_and_columns_leave_the_backward_pass(
    models: Callable[[str], tuple[Any, Checkpoint]],
) -> None:
    _, checkpoint = models("llama-gqa")
    sites = parse_taps("embed,resid_pre:0,resid_post:1,z:1.h1+h3", checkpoint.arch)
    every = block_by_block(checkpoint, sites_of(checkpoint))
    columns = np.array([[3, 40], [63, 0]], np.int32)
    found = whole(checkpoint, sites, columns)
    rows = np.arange(2)[:, None]
    assert {*found} == {tap.name for tap in sites}
    for tap in sites:
        wanted = every[replace(tap, heads=()).name][rows, columns]
        wanted = wanted[:, :, list(tap.heads)] if tap.heads else wanted
        assert error(found[tap.name], wanted) < TOLERANCE, tap.name
