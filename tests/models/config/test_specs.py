"""Declared arrays: as many, as large and as placed as the models of every family have them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import families
import tiny
from spile.models.config.arch import Arch, Experts
from spile.models.config.hf_config import read_config
from spile.models.config.specs import block_specs, head_specs, outer_specs

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
AXES = {
    "width", "heads", "kv_heads", "head_dim", "mlp", "vocab", "seq", "experts", "routes",
}  # fmt: skip
_, ARCH = read_config(tiny.CONFIG, "test")
# tests/models/forward/test_decoder.py says why the others are refused
REFUSED = ("gpt2-layer-scaled", "qwen3moe-mqa-mixed", "stablelm")
VARIANTS = [name for name in families.FAMILIES if not name.startswith(REFUSED)]


def published(name: str) -> Arch:
    return read_config(json.loads((CONFIGS / f"{name}.json").read_text()), name)[1]


def shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in (*outer_specs(arch), *block_specs(arch))}


def changed(**changes: Any) -> set[str]:
    """Which arrays are there, and not in a plain Llama; those that are missing have a minus."""
    before, after = set(shapes(ARCH)), set(shapes(replace(ARCH, **changes)))
    return (after - before) | {f"-{name}" for name in before - after}


def test_the_arrays_of_a_llama() -> None:
    assert shapes(ARCH) == {
        "embed": (260, 32), "final_norm": (32,), "wq": (32, 32), "wk": (16, 32), "wv": (16, 32),
        "wo": (32, 32), "attn_norm": (32,), "mlp_norm": (32,), "w_gate": (48, 32),
        "w_up": (48, 32), "w_down": (32, 48),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"tied_head": False}, {"head"}),
        ({"ropes": ()}, {"positions"}),
        ({"qkv_bias": True}, {"bq", "bk", "bv"}),
        ({"out_bias": True}, {"bo"}),
        ({"mlp_bias": True}, {"b_gate", "b_up", "b_down"}),
        ({"mlp_bias": True, "gated": False}, {"b_up", "b_down", "-w_gate"}),
        ({"gated": False}, {"-w_gate"}),
        ({"sinks": True}, {"sinks"}),
        ({"qk_norm": "head"}, {"q_norm", "k_norm"}),
        ({"qk_norm": "full"}, {"q_norm", "k_norm"}),
        ({"post_norm": True}, {"attn_post_norm", "mlp_post_norm"}),
        ({"post_norm": True, "pre_norm": False},
         {"attn_post_norm", "mlp_post_norm", "-attn_norm", "-mlp_norm"}),
        ({"norm": "layer"}, {"final_norm_bias", "attn_norm_bias", "mlp_norm_bias"}),
        ({"experts": Experts(6, 2, True)}, {"w_router"}),
        ({"experts": Experts(6, 2, True), "mlp_bias": True},
         {"w_router", "b_router", "b_gate", "b_up", "b_down"}),
    ],
)  # fmt: skip
def test_a_switch_adds_its_arrays_and_no_others(changes: dict[str, Any], names: set[str]) -> None:
    assert changed(**changes) == names


def test_sizes_follow_the_architecture() -> None:
    arch = replace(
        ARCH, head_dim=5, experts=Experts(6, 2, True), mlp_bias=True, qk_norm="full", sinks=True,
        ropes=(), max_positions=77,
    )  # fmt: skip
    found = shapes(arch)
    assert found["wq"] == (20, 32)
    assert found["wk"] == (10, 32)
    assert found["wo"] == (32, 20)
    assert found["q_norm"] == (20,)
    assert found["k_norm"] == (10,)
    assert found["sinks"] == (4,)
    assert found["positions"] == (77, 32)
    assert found["w_gate"] == (6, 48, 32)
    assert found["w_down"] == (6, 32, 48)
    assert found["b_up"] == (6, 48)
    assert found["b_down"] == (6, 32)
    assert found["w_router"] == (6, 32)
    assert found["b_router"] == (6,)
    assert shapes(replace(arch, qk_norm="head"))["k_norm"] == (5,)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_axis_of_every_array_has_a_name_and_its_length(path: Path) -> None:
    _, arch = read_config(json.loads(path.read_text()), path.name)
    lengths = {
        "width": arch.width, "heads": arch.num_heads, "kv_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim, "mlp": arch.mlp_width, "vocab": arch.vocab_size,
        "seq": arch.max_positions,
        **dict.fromkeys(("experts", "routes"), arch.experts.count if arch.experts else 0),
    }  # fmt: skip
    specs = (*outer_specs(arch), *block_specs(arch))
    assert len({spec.name for spec in specs}) == len(specs)
    for spec in specs:
        assert len(spec.axes) == len(spec.shape)
        assert len(set(spec.axes)) == len(spec.axes), "one mesh axis cannot shard two"
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            whole = axis in ("heads", "kv_heads") and spec.name != "sinks"
            assert size == lengths[axis] * (arch.head_dim if whole else 1), (spec.name, axis)


def test_the_head_is_what_comes_after_the_blocks() -> None:
    assert [spec.name for spec in head_specs(ARCH)] == ["final_norm"]
    assert [s.name for s in head_specs(replace(ARCH, tied_head=False))] == ["final_norm", "head"]
    assert {spec.name for spec in head_specs(published("gpt2"))} == {
        "final_norm",
        "final_norm_bias",
    }


def test_parameters_are_counted_as_deep_as_they_are_loaded() -> None:
    arch = published("TinyLlama-1.1B")
    whole = tiny.num_params(arch, 22, head=True)
    without_head = tiny.num_params(arch, 22, head=False)
    assert whole == 1_100_048_384
    assert whole - without_head == 32000 * 2048 + 2048
    assert without_head - tiny.num_params(arch, 21, head=False) == 44_044_288
    assert tiny.num_params(arch, 0, head=False) == 32000 * 2048
    gpt2 = published("gpt2")
    assert tiny.num_params(gpt2, 0, head=False) == (50257 + 1024) * 768
    assert tiny.num_params(gpt2, 12, head=True) - tiny.num_params(gpt2, 12, head=False) == 2 * 768


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_of_every_variant_has_as_many_parameters_as_are_declared(name: str) -> None:
    with torch.device("meta"):
        model = families.FAMILIES[name]()
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    _, arch = read_config(config, name)
    declared = tiny.num_params(arch, arch.num_layers, head=True)
    assert declared == sum(parameter.numel() for parameter in model.parameters())
    assert declared == sum(math.prod(shape) for shape in shapes(arch).values()) + (
        arch.num_layers - 1
    ) * sum(math.prod(spec.shape) for spec in block_specs(arch))


def test_axes_are_the_ones_a_mesh_knows() -> None:
    for path in CONFIGS.glob("*.json"):
        _, arch = read_config(json.loads(path.read_text()), path.name)
        specs = (*outer_specs(arch), *block_specs(arch))
        assert {axis for spec in specs for axis in spec.axes} <= AXES
        inside = {"w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"} if arch.experts else set()
        for spec in specs:
            # experts may be apart, but each device needs the whole router
            assert (spec.axes[0] == "experts") is (spec.name in inside)
            assert ("routes" in spec.axes) is spec.name.endswith("_router")
