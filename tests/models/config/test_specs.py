"""Declared arrays: their number, sizes and places agree with the models of every family."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spile.models.config.arch import Arch, Experts, Layer
from spile.models.config.hf_config import read_config
from spile.models.config.specs import axis_sizes, block_specs, head_specs, outer_specs
from support import families, tiny
from support.marks import some

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"
AXES = {
    "width", "heads", "kv_heads", "head_dim", "mlp", "vocab", "seq", "experts", "routes", "one",
    "delta_heads", "kernel",
    "latent", "ssm_heads", "ssm_groups", "channels", "layer_embed",
}  # fmt: skip
ROUTES = ("w_router", "b_router", "correction", "expert_scale")
_, ARCH = read_config(tiny.CONFIG, "test")
VARIANTS = [name for name in families.FAMILIES if name not in families.REFUSED]


def published(name: str) -> Arch:
    return read_config(json.loads((CONFIGS / f"{name}.json").read_text()), name)[1]


def shapes(arch: Arch) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in (*outer_specs(arch), *block_specs(arch))}


def changed(**changes: Any) -> set[str]:
    """Return the arrays that a plain Llama lacks, and, with a minus, those that only it has."""
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
        ({"experts": Experts(6, 2, True, corrected=True)}, {"w_router", "correction"}),
        ({"experts": Experts(6, 2, True, shared=24, shared_gate=True)},
         {"w_router", "ws_gate", "ws_up", "ws_down", "ws_router"}),
        ({"experts": Experts(6, 2, True), "layers": (Layer(), Layer(dense=True)),
          "dense_width": 56}, {"w_router", "wd_gate", "wd_up", "wd_down"}),
        ({"parallel": True, "shared_norm": True}, {"-mlp_norm"}),
        ({"norm": "layer_weight"}, set()),
        ({"norm": "layer_bare"}, {"-attn_norm", "-mlp_norm", "-final_norm"}),
        ({"embed_norm": True}, {"embed_norm"}),
        ({"head_bias": True}, {"head_bias"}),
        ({"ropes": (), "alibi": (0.5, 0.25, 0.125, 0.0625)}, set()),
        ({"qk_norm": "heads"}, {"q_norm", "k_norm"}),
        ({"qk_norm": "bare"}, set()),
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
    assert shapes(replace(arch, qk_norm="heads"))["k_norm"] == (2, 5)
    assert shapes(replace(arch, position_offset=2))["positions"] == (79, 32)


def test_blocks_have_the_arrays_of_their_kind() -> None:
    plain, routed = Layer(dense=True), Layer()
    experts = Experts(6, 2, True, shared=24)
    arch = replace(ARCH, layers=(plain, routed, routed), experts=experts, dense_width=56)
    found = {spec.name: spec.shape for spec in block_specs(arch, plain)}
    assert found["wd_up"] == (56, 32)
    assert not {"w_up", "w_router", "ws_up"} & set(found)
    found = {spec.name: spec.shape for spec in block_specs(arch, routed)}
    assert (found["w_up"], found["ws_up"]) == ((6, 48, 32), (24, 32))
    assert "wd_up" not in found
    both = [spec.name for spec in block_specs(arch)]
    assert set(both) == {spec.name for kind in (plain, routed) for spec in block_specs(arch, kind)}
    assert len(set(both)) == len(both)
    assert axis_sizes(arch)["mlp"] == 8, "what divides every width"


def test_heads_and_mlps_may_differ_between_blocks() -> None:
    plain, wide = Layer(), Layer(head_dim=24, kv_heads=1, keys_as_values=True)
    borrows = Layer(borrows=True, mlp_width=80)
    arch = replace(ARCH, layers=(plain, wide, borrows), num_heads=4, num_kv_heads=2, head_dim=8,
                   qk_norm="head")  # fmt: skip
    found = [{s.name: s.shape for s in block_specs(arch, layer)} for layer in arch.layers]
    assert [block["wq"] for block in found] == [(32, 32), (96, 32), (32, 32)]
    assert [block.get("wk") for block in found] == [(16, 32), (24, 32), None]
    assert [block.get("wv") for block in found] == [(16, 32), None, None]
    assert [block["q_norm"] for block in found] == [(8,), (24,), (8,)]
    assert [block.get("k_norm") for block in found] == [(8,), (24,), None]
    assert [block["w_up"][0] for block in found] == [48, 48, 80]
    every = {spec.name: spec.shape for spec in block_specs(arch)}
    assert every == found[0], "of the first that has it"
    sizes = axis_sizes(arch)
    assert (sizes["kv_heads"], sizes["mlp"]) == (1, 16), "what divides every number"


def test_blocks_may_have_embeddings_of_their_own() -> None:
    arch = replace(ARCH, layers=(Layer(),) * 3, layer_embed=5, block_scale=True)
    outer = {spec.name: spec.shape for spec in outer_specs(arch)}
    assert outer["layer_embeds"] == (arch.vocab_size, 15)
    assert outer["layer_embeds_from"] == (15, 32) and outer["layer_embeds_norm"] == (5,)
    block = {spec.name: spec.shape for spec in block_specs(arch)}
    assert (block["wlg"], block["wlo"], block["block_scale"]) == ((5, 32), (32, 5), (1,))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_axis_of_every_array_has_a_name_and_its_length(path: Path) -> None:
    _, arch = read_config(json.loads(path.read_text()), path.name)
    lengths = {
        "width": arch.width, "heads": arch.num_heads, "kv_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim, "mlp": arch.mlp_width, "vocab": arch.vocab_size,
        "seq": arch.max_positions + arch.position_offset, "one": 1,
        **dict.fromkeys(("experts", "routes"), arch.experts.count if arch.experts else 0),
    }  # fmt: skip
    specs = (*outer_specs(arch), *block_specs(arch))
    assert len({spec.name for spec in specs}) == len(specs)
    for spec in specs:
        if "layer_embed" in spec.axes:
            continue  # see `test_blocks_may_have_embeddings_of_their_own`
        if "delta_heads" in spec.axes or spec.name == "delta_norm":
            continue  # see `test_the_arrays_of_the_gated_delta_rule`
        if {"ssm_heads", "ssm_groups", "channels"} & set(spec.axes):
            continue  # see `test_the_arrays_of_a_state_space`
        if arch.latent and {"latent", "heads", "kv_heads"} & set(spec.axes):
            continue  # see `test_the_arrays_of_latent_attention`
        assert len(spec.axes) == len(spec.shape)
        assert len(set(spec.axes)) == len(spec.axes), "one mesh axis cannot shard two"
        inner = {"d": arch.dense_width, "s": arch.experts.shared if arch.experts else 0}
        for axis, size in zip(spec.axes, spec.shape, strict=True):
            whole = axis in ("heads", "kv_heads") and "head_dim" not in spec.axes
            length = lengths[axis] * (arch.head_dim if whole and spec.name != "sinks" else 1)
            if axis == "mlp":
                length = inner.get(spec.name[1], length)
            assert size == length, (spec.name, axis)


def test_the_arrays_of_latent_attention() -> None:
    """Heads are split; latents, which all heads read, are not."""
    specs = {spec.name: spec for spec in block_specs(published("DeepSeek-V3"))}
    down, up = ("latent", "width"), "latent"
    wanted = {
        "wqa": ((1536, 7168), down), "wka": ((512, 7168), down), "wkr": ((64, 7168), down),
        "wqb": ((128 * 192, 1536), ("heads", up)), "wk": ((128 * 128, 512), ("kv_heads", up)),
        "wv": ((128 * 128, 512), ("kv_heads", up)), "wo": ((7168, 128 * 128), ("width", "heads")),
        "kv_latent_norm": ((512,), (up,)), "q_latent_norm": ((1536,), (up,)),
    }  # fmt: skip
    found = {name: (spec.shape, spec.axes) for name, spec in specs.items() if name in wanted}
    assert found == wanted and "wq" not in specs
    lite = {spec.name: spec for spec in block_specs(published("DeepSeek-V2-Lite"))}
    assert (lite["wq"].shape, lite["wq"].axes) == ((16 * 192, 2048), ("heads", "width"))
    assert not {"wqa", "wqb", "q_latent_norm"} & set(lite)


def test_the_arrays_of_the_gated_delta_rule() -> None:
    """16 heads of 128 for queries and keys, 32 for values; all are split by key heads."""
    arch = published("Qwen3-Next-80B-A3B-Instruct")
    linear, full = (block_specs(arch, arch.layers[layer]) for layer in (0, 3))
    own = {spec.name: spec for spec in linear}
    assert {n: spec.shape for n, spec in own.items() if n not in {spec.name for spec in full}} == {
        "wdq": (2048, 2048), "wdk": (2048, 2048), "wdv": (4096, 2048), "wdg": (4096, 2048),
        "wda": (32, 2048), "wdb": (32, 2048), "wdo": (2048, 4096), "conv_q": (2048, 1, 4),
        "conv_k": (2048, 1, 4), "conv_v": (4096, 1, 4), "decay": (32,), "decay_bias": (32,),
        "delta_norm": (128,),
    }  # fmt: skip
    assert {spec.name for spec in full} - set(own) == {
        "wq", "wk", "wv", "wg", "wo", "q_norm", "k_norm",
    }  # fmt: skip
    cut = {n for n, spec in own.items() if "delta_heads" in spec.axes}
    assert cut == {*(f"wd{n}" for n in "qkvgabo"), "conv_q", "conv_k", "conv_v", "decay",
                   "decay_bias"}  # fmt: skip
    assert axis_sizes(arch)["delta_heads"] == 16
    assert all(own[n].shape[own[n].axes.index("delta_heads")] % 16 == 0 for n in cut)


def test_the_arrays_of_a_rule_whose_channels_decay() -> None:
    """32 heads of 128; arrays that all heads read are not split, and the file has the decay."""
    arch = published("Kimi-Linear-48B-A3B-Instruct")
    found = {spec.name: (spec.shape, spec.axes) for spec in block_specs(arch, arch.layers[1])}
    cut, narrow = "delta_heads", ("latent", "width")
    names = ("wdan", "wda", "wdgn", "wdg", "decay", "decay_bias")
    assert {name: found[name] for name in names} == {
        "wdan": ((128, 2304), narrow), "wda": ((4096, 128), (cut, "latent")),
        "wdgn": ((128, 2304), narrow), "wdg": ((4096, 128), (cut, "latent")),
        "decay": ((1, 1, 32, 1), ("one", "one", cut, "one")), "decay_bias": ((4096,), (cut,)),
    }  # fmt: skip


def test_the_arrays_of_a_state_space() -> None:
    """Split by groups; a single group is split by heads, except its keys and queries."""
    arch = published("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    own = {spec.name: spec for spec in block_specs(arch, arch.layers[0])}
    assert {name: spec.shape for name, spec in own.items()} == {
        "wmz": (4096, 2688), "wmx": (4096, 2688), "wmb": (1024, 2688), "wmc": (1024, 2688),
        "wmt": (64, 2688), "conv_x": (4096, 1, 4), "conv_b": (1024, 1, 4), "conv_c": (1024, 1, 4),
        "conv_bias_x": (4096,), "conv_bias_b": (1024,), "conv_bias_c": (1024,), "decay": (64,),
        "step_bias": (64,), "skip": (64,), "ssm_norm": (4096,), "wmo": (2688, 4096),
        "attn_norm": (2688,),
    }  # fmt: skip
    sizes = axis_sizes(arch)
    assert (sizes["ssm_heads"], sizes["ssm_groups"], sizes["experts"]) == (8, 8, 128)
    keys = {name for name, spec in own.items() if "ssm_groups" in spec.axes}
    assert keys == {f"{stem}{n}" for stem in ("wm", "conv_", "conv_bias_") for n in "bc"}
    assert {name for name, spec in own.items() if "ssm_heads" in spec.axes} == (
        {*own} - keys - {"attn_norm"}
    )
    single = axis_sizes(published("granite-4.0-h-tiny"))
    assert single["ssm_heads"] == 48 and "ssm_groups" not in single


def test_blocks_without_a_mixer_or_an_mlp_have_no_arrays_of_it() -> None:
    arch = published("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    names = [{spec.name for spec in block_specs(arch, arch.layers[i])} for i in (1, 5)]
    assert names == [
        {"mlp_norm", "w_up", "w_down", "w_router", "correction", "ws_up", "ws_down"},
        {"attn_norm", "wq", "wk", "wv", "wo"},
    ]
    alone = published("Mamba-Codestral-7B-v0.1")
    assert not {"heads", "kv_heads", "mlp"} & set(axis_sizes(alone))
    plain = published("Nemotron-H-8B-Base-8K")
    assert plain.experts is None and axis_sizes(plain)["mlp"] == 21504
    assert {spec.name for spec in block_specs(plain, plain.layers[1])} == {
        "mlp_norm", "wd_up", "wd_down",
    }  # fmt: skip


def test_the_arrays_of_a_short_convolution() -> None:
    arch = published("LFM2-1.2B")
    own = {spec.name: spec for spec in block_specs(arch, arch.layers[0])}
    square = {f"wc{n}": (2048, 2048) for n in "bcxo"}
    assert {n: s.shape for n, s in own.items() if n[:2] == "wc"} == square
    assert (own["conv"].shape, own["conv"].axes[0]) == ((2048, 1, 3), "channels")
    assert axis_sizes(arch)["channels"] == 2048


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


@pytest.mark.parametrize("name", some(VARIANTS, *families.one_of_each(VARIANTS)))
def test_a_model_of_every_variant_has_as_many_parameters_as_are_declared(name: str) -> None:
    with torch.device("meta"):
        model = families.FAMILIES[name]()
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    _, arch = read_config(config, name)
    declared = tiny.num_params(arch, arch.num_layers, head=True)
    learned = ("correction_bias", "layer_scalar")
    buffers = [b for n, b in model.named_buffers() if n.endswith(learned)]
    assert declared == sum(tensor.numel() for tensor in (*model.parameters(), *buffers))


def test_axes_are_the_ones_a_mesh_knows() -> None:
    for path in CONFIGS.glob("*.json"):
        _, arch = read_config(json.loads(path.read_text()), path.name)
        specs = (*outer_specs(arch), *block_specs(arch))
        assert {axis for spec in specs for axis in spec.axes} <= AXES
        inside = {"w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"} if arch.experts else set()
        for spec in specs:
            # experts may be apart, but each device needs the whole router
            assert (spec.axes[0] == "experts") is (spec.name in inside)
            assert ("routes" in spec.axes) is (spec.name in ROUTES)
