"""The blocks of every family give the same values on a mesh as on one device."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.models.files.checkpoint import open_checkpoint
from spile.models.layout import Layout
from support import families, tiny
from support.meshes import make_batch, make_step

TAPS = "resid_post:all,final_norm"
LATENT_TAPS = ",kv_latent:all,k:all,v:all,z:all"
SPACE_TAPS = ",conv_out:0,ssm_read:all,ssm_gate:0,ssm_z:all,ssm_out:all"
CONVOLUTION_TAPS = ",conv_in:0,conv_out:all,conv_gate:0,attn_out:all"
DELTA_TAPS = ",conv_out:0,attn_gate:0,z:all"
CHOSEN = {
    "gemma2-gqa": Layout(2, 1, 2), "gpt2": Layout(1, 2, 2), "neox": Layout(1, 1, 4),
    "olmo2-gqa": Layout(2, 2, 2), "mixtral-gqa": Layout(2, 2, 2), "qwen3moe-gqa": Layout(1, 1, 3),
    "gptoss-gqa": Layout(1, 2, 2), "glm4moe-gqa": Layout(2, 2, 2), "bloom": Layout(1, 2, 3),
    "cohere-mha-qknorm": Layout(1, 2, 4), "falcon-gqa": Layout(2, 1, 2),
    "stablelm-mqa-parallel-qknorm": Layout(1, 1, 4), "qwen2moe-gqa": Layout(1, 1, 4),
    "dots1-gqa": Layout(1, 1, 8), "qwen35-gqa": Layout(2, 2, 2), "olmohybrid-gqa": Layout(1, 1, 4),
    "llama4-gqa": Layout(1, 2, 2), "gemma4-gqa": Layout(2, 2, 2), "gemma4-mha-plain":
    Layout(1, 1, 4), "gemma4-experts-all": Layout(1, 2, 2),
    "deepseek3": Layout(2, 2, 2), "deepseek2-greedy-own-queries": Layout(1, 1, 4),
    "glm4moelite": Layout(1, 1, 8), "mamba2": Layout(1, 2, 2), "mamba2-plain": Layout(1, 1, 6),
    "bamba-gqa": Layout(2, 2, 2), "granitehybrid-gqa": Layout(1, 1, 2),
    "bamba-mha-bias": Layout(1, 2, 3), "nemotronh-gqa": Layout(2, 2, 2),
    "falconh1-mha-normed": Layout(1, 2, 2), "lfm2-gqa": Layout(1, 2, 4),
    "kimilinear": Layout(2, 2, 2),
}  # fmt: skip


def compare(make: Callable[[], Any], layout: Layout, directory: Path) -> None:
    families.save(families.randomised(make), directory)
    tiny.write_tokenizer(directory)
    arch = open_checkpoint(str(directory)).arch
    taps = TAPS + (DELTA_TAPS if arch.delta else "") + (LATENT_TAPS if arch.latent else "")
    if arch.delta and not arch.delta.by_channel:  # else the rule runs token by token for them
        taps += ",delta_state_norm:all"
    taps += ",k_rot:all" if arch.latent and arch.ropes else ""
    taps += (SPACE_TAPS if arch.state_space else "") + (CONVOLUTION_TAPS * bool(arch.convolution))
    taps += ",z:all" if any(layer.attends for layer in arch.layers) else ""
    taps += ",layer_embed:1,layer_embed_out:all,k_rot:all" if arch.layer_embed else ""
    one, mesh = (make_step(directory, taps, each)(make_batch(8)) for each in (None, layout))
    for tap in one.batches[0].rows:
        wanted = one.rows_of(tap)
        np.testing.assert_allclose(
            mesh.rows_of(tap), wanted, atol=2e-5 * np.abs(wanted).max(), err_msg=tap
        )


FEW = ("mixtral-gqa", "glm4moe-gqa")


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(n, marks=pytest.mark.full) for n in CHOSEN if n not in FEW)]
)
def test_a_family_on_a_mesh_is_the_same_model(name: str, tmp_path: Path) -> None:
    compare(families.FAMILIES[name], CHOSEN[name], tmp_path)


@pytest.mark.parametrize(
    "layout", [Layout(1, 1, 4), pytest.param(Layout(2, 1, 2), marks=pytest.mark.full)], ids=str
)
def test_experts_that_cannot_be_shared_out_are_cut_themselves(
    layout: Layout, tmp_path: Path
) -> None:
    five = partial(families.FAMILIES["gptoss-gqa"], num_local_experts=5)
    compare(five, layout, tmp_path)
