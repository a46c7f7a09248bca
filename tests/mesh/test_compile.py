"""A program compiled without weights is the one that runs with them, on a mesh."""

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from mesh.test_families import CHOSEN
from spile.cli.model import compile_text
from spile.compile.step import Question, compile_step, params_of, search
from spile.compile.targets import CompileTarget
from spile.core.config import Recipe, Runtime
from spile.corpus.pack import Batch
from spile.models.config.specs import array_axes
from spile.models.files.checkpoint import read_arch
from spile.models.forward.sharding import Shards, make_mesh
from spile.models.layout import Layout
from spile.run.step.resident import ResidentStep
from support import families
from support.meshes import make_step

TAPS = "resid_post:all,z:1"
LAYERS, WIDTH, SEQ = 3, 32, 24


def question(model: Path, taps: str = TAPS, devices: int = 8) -> Question:
    target = CompileTarget("test", None, jax.devices()[:devices], 1, "here")
    recipe = Recipe(model=str(model), taps=taps, seq_len=SEQ, compute_dtype="float32")
    return Question(read_arch(str(model)), recipe, Runtime(batch_tokens=2 * SEQ), target)


def instructions(program: Any) -> str:
    """Return instructions without their places in the source."""
    text = program.as_text()
    return re.sub(r"stack_frame_id=\d+", "", text[text.index("\n%") :])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(2, 2, 2),
        *(pytest.param(each, marks=pytest.mark.full) for each in (Layout(8), Layout(1, 8))),
    ],
    ids=str,
)
def test_the_program_without_weights_is_that_of_extraction(model: Path, layout: Layout) -> None:
    asked = question(model)
    work = asked.workload(layout)
    mesh = make_mesh(layout, asked.target.devices)
    shards = Shards(mesh, work.cuts, array_axes(asked.arch))
    real = make_step(model, TAPS, layout)
    abstract = ResidentStep(params_of(work, shards), real.settings)
    zeros, full = np.zeros((work.rows, SEQ), np.int32), np.full(work.rows, SEQ, np.int32)
    batch = Batch(zeros, zeros, zeros, full, None, full, contexts=16)
    for ours, theirs in zip(*abstract.compile(batch), *real.compile(batch), strict=True):
        assert instructions(ours) == instructions(theirs)
    leaves = jax.tree.leaves(real.params)
    assert work.weights == sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


@pytest.mark.full
@pytest.mark.parametrize("name", CHOSEN)
def test_the_step_of_any_family_is_compiled_for_its_mesh(name: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        made = families.FAMILIES[name]()
    config = {**made.config.to_dict(), "architectures": [type(made).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    layout = CHOSEN[name]
    asked = question(tmp_path, "resid_post:all,final_norm", layout.size)
    found = compile_step(asked, layout)
    shards = Shards(
        make_mesh(layout, asked.target.devices), asked.workload(layout).cuts, array_axes(asked.arch)
    )
    arrays = jax.tree.leaves(params_of(asked.workload(layout), shards))
    parts = [math.prod(each.sharding.shard_shape(each.shape)) for each in arrays]
    assert found.weights == 4 * sum(parts) < 4 * sum(math.prod(each.shape) for each in arrays)
    assert f"{layout.model} ways" in found.cut
    assert f"  cut           {found.cut}\n" in compile_text([found])


def test_sums_over_the_model_axis_are_counted_block_by_block(model: Path) -> None:
    found = compile_step(question(model, "resid_post:2"), Layout(4, 1, 2))
    stream = 2 * SEQ * WIDTH * 4  # of a group's rows, float32
    each = found.collectives["all-reduce"]
    assert each.count == 2 * LAYERS + 1  # attention's and the MLP's, and the embedding's
    assert each.sent == each.count * stream  # 2 (n - 1) / n of it, for two
    assert compile_step(question(model), Layout(8)).collectives == {}


def test_weights_are_gathered_once_for_each_block(model: Path) -> None:
    asked = question(model, "resid_post:2")
    found = compile_step(asked, Layout(1, 8))
    matrices = 7 * LAYERS
    assert found.collectives["all-gather"].count >= matrices
    block = 4 * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * 48)
    assert found.collectives["all-gather"].sent >= LAYERS * block * 7 / 8


def test_memory_is_that_of_one_device(model: Path) -> None:
    one = compile_step(question(model, devices=1), Layout())
    cut = compile_step(question(model), Layout(2, 2, 2))
    assert one.temporaries and cut.temporaries
    assert cut.weights < one.weights / 2
    assert cut.tokens == 4 * one.tokens
    assert one.fits is None and one.memory is None
    assert one.tokens_per_second is None
    assert any("unknown device" in note for note in one.notes)


def test_a_search_tries_every_mesh_that_the_model_can_be_cut_for(model: Path) -> None:
    asked = question(model, "resid_post:0")
    layouts = asked.layouts()
    assert {Layout(8), Layout(4, 1, 2), Layout(2, 1, 4), Layout(1, 1, 8)} == set(layouts)
    assert {each.mesh for each in search(asked)} == {str(layout) for layout in layouts}
