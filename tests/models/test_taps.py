"""The grammar of taps: the meaning and order of each spelling, and its errors."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spile.core.errors import ConfigError
from spile.models.config.arch import Arch
from spile.models.config.families import FAMILIES
from spile.models.config.hf_config import read_config
from spile.models.sites import AFTER_BLOCKS, SITES
from spile.models.taps import Tap, all_taps, describe_taps, parse_taps, parse_writers
from support import tiny

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
_, ARCH = read_config({**tiny.CONFIG, "num_hidden_layers": 28}, "test")


def _archs() -> dict[str, Arch]:
    """A published model of each family, cut to three layers; of hybrid ones, the last attends."""
    found: dict[str, Arch] = {}
    for path in sorted(CONFIGS.glob("*.json")):
        family, arch = read_config(json.loads(path.read_text()), path.name)
        # of those that are plain before others have experts, the last
        start = max(0, sum(layer.dense for layer in arch.layers) - 1)
        attend = [i for i, layer in enumerate(arch.layers) if layer.attends]
        if len(attend) < arch.num_layers:
            start = max(0, attend[0] - 2) if attend else 0
        found[family.name] = replace(arch, layers=arch.layers[start : start + 3])
    return found


ARCHS = _archs()
PARALLEL, LEARNED, DENSE, ROUTED, CAPPED = (
    ARCHS[family] for family in ("gpt_neox", "gpt2", "llama", "mixtral", "gemma2")
)
MIXED, HYBRIDS = ARCHS["glm4_moe"], ARCHS["qwen3_5"]
EXPERT_SITES = {"router_logits", "expert_weights", "expert_ids"}
UNROTATED = ("gpt2", "opt", "bloom", "gpt_neo", "gpt_bigcode", "mpt", "olmo_hybrid",
             "kimi_linear")  # fmt: skip
IN_PARALLEL = ("gpt_neox", "cohere", "cohere2", "phi", "gptj", "stablelm", "falcon",
               "falcon-grouped", "falcon-grouped-one-norm")  # fmt: skip
ROUTED_ALL = ("mixtral", "phimoe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "minimax_m2")
SHARED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe-multimodal", "llama4-multimodal",
          "kimi_linear")  # fmt: skip
# Two layers by the gated delta rule, then one that attends, in most of them with a gate.
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5-multimodal", "qwen3_5_moe", "qwen3_5_moe-multimodal",
          "olmo_hybrid", "kimi_linear")  # fmt: skip
DELTA_SITES = {"conv_out", "delta_state_norm"}
LOOKS = {"attn_pattern", "attn_top_keys", "attn_top_weights", "attn_summary"}
ATTENTION_SITES = {"q", "k", "v", "q_rot", "k_rot", *LOOKS}
SPACE_SITES = {"ssm_in", "ssm_read", "ssm_gate", "ssm_z", "ssm_out"}
CONVOLUTION_SITES = {"conv_in", "conv_gate"}
# The parts of each of three blocks, in families with state spaces or short convolutions.
BLOCKS = {
    "mamba2": ("space",) * 3,
    "bamba": ("space mlp", "space mlp", "attention rotary mlp"),
    "granitemoehybrid": ("space experts", "space experts", "attention experts"),
    "granitemoehybrid-dense": ("space mlp", "space mlp", "attention mlp"),
    "nemotron_h": ("mlp", "space", "attention"),
    "falcon_h1": ("attention rotary space mlp",) * 3,
    "lfm2": ("convolution mlp", "convolution mlp", "attention rotary mlp"),
}
SITES_OF = {
    "space": {*SPACE_SITES, "conv_out"},
    "attention": {"attn_in", "q", "k", "v", *LOOKS, "z", "attn_out"},
    "rotary": {"q_rot", "k_rot"},
    "convolution": {*CONVOLUTION_SITES, "attn_in", "conv_out", "attn_out"},
    "mlp": {"mlp_in", "mlp_hidden", "mlp_out"},
    "experts": {"mlp_in", *EXPERT_SITES, "shared_expert_out", "mlp_out"},
}
OWN_EMBEDDINGS = ("gemma4", "gemma4-multimodal")
APART = ("gemma4-experts", "gemma4-experts-multimodal")  # experts beside a plain MLP
LATENT = ("deepseek_v2", "deepseek_v2-greedy", "deepseek_v3", "glm4_moe_lite")
# One of three is a plain one.
MIXED_LAYERS = {**dict.fromkeys(("glm4_moe", "dots1", "ernie4_5_moe", *LATENT), 0), "llama4": 1}


# What TransformerLens hooks elsewhere, or not at all, where keys and values come from a latent.
LENS_OTHERWISE = r"attn\.(hook_q|hook_k|hook_rot_q|hook_rot_k|[qkv]\.hook_out)$"


def names(text: str, arch: Arch = ARCH) -> list[str]:
    return [tap.name for tap in parse_taps(text, arch)]


def layers(text: str) -> list[int | None]:
    return [tap.layer for tap in parse_taps(f"resid_post:{text}", ARCH)]


def test_every_family_is_tested() -> None:
    assert set(ARCHS) == {family.name for family in FAMILIES}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("5", [5]),
        ("0", [0]),
        ("27", [27]),
        ("20-27", list(range(20, 28))),
        ("3-3", [3]),
        ("all", list(range(28))),
        ("-1", [27]),
        ("-28", [0]),
        ("-4--2", [24, 25, 26]),
        ("25--1", [25, 26, 27]),
        ("-28-1", [0, 1]),
        ("0-27/4", [0, 4, 8, 12, 16, 20, 24]),
        ("1-10/3", [1, 4, 7, 10]),
        ("all/9", [0, 9, 18, 27]),
        ("0-3/99", [0]),
        ("1+5+3", [1, 3, 5]),
        ("0-2+2-4+-1", [0, 1, 2, 3, 4, 27]),
        ("4+4+4-4", [4]),
        (" 1 + 2 ", [1, 2]),
    ],
)
def test_layers_are_numbers_ranges_all_negatives_steps_and_sums(
    text: str, wanted: list[int]
) -> None:
    assert layers(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("resid_post.20", "resid_post.20"),
        ("resid_post.-1", "resid_post.27"),
        ("blocks.20.hook_resid_post", "resid_post.20"),
        ("blocks.20.hook_out", "resid_post.20"),
        ("blocks.0.hook_resid_pre", "resid_pre.0"),
        ("blocks.3.hook_resid_mid", "resid_mid.3"),
        ("blocks.3.hook_attn_out", "attn_out.3"),
        ("blocks.3.hook_mlp_out", "mlp_out.3"),
        ("blocks.3.attn.hook_q", "q.3"),
        ("blocks.3.attn.hook_rot_k", "k_rot.3"),
        ("blocks.3.attn.hook_pattern", "attn_pattern.3"),
        ("blocks.3.attn.hook_z", "z.3"),
        ("blocks.3.mlp.hook_post", "mlp_hidden.3"),
        ("hook_embed", "embed"),
        ("ln_final.hook_out", "final_norm"),
        ("unembed.hook_out", "logits"),
        ("hidden_states[0]", "resid_pre.0"),
        ("hidden_states[1]", "resid_post.0"),
        ("hidden_states[27]", "resid_post.26"),
        ("hidden_states[28]", "final_norm"),
        ("aux_hidden_states[0]", "resid_pre.0"),
        ("aux_hidden_states[1]", "resid_post.0"),
        ("aux_hidden_states[28]", "resid_post.27"),
        ("embed", "embed"),
        ("logits", "logits"),
        ("logprob", "logprob"),
        ("entropy", "entropy"),
    ],
)
def test_names_of_ours_and_of_other_tools_are_taps(text: str, wanted: str) -> None:
    assert names(text) == [wanted]


@pytest.mark.parametrize("family", ARCHS)
def test_an_alias_and_the_name_are_the_same_tap(family: str) -> None:
    """Except a stream between two blocks, which ends one block and begins the next."""
    arch = replace(ARCHS[family], layers=ARCHS[family].layers[:11])  # numbers of two digits, too
    owners: dict[str, list[Tap]] = {}
    for tap in all_taps(arch):
        assert parse_taps(tap.name, arch) == (tap,)
        for alias in tap.aliases(arch):
            owners.setdefault(alias, []).append(tap)
    for alias, taps in owners.items():
        (parsed,) = parse_taps(alias, arch)
        assert parsed in taps
        if len(taps) > 1:
            assert "hidden_states[" in alias
            assert [tap.site for tap in taps] == ["resid_post", "resid_pre"]
            assert parsed == taps[0]
            assert taps[1].layer == (taps[0].layer or 0) + 1
    hf = [alias for alias in owners if alias.startswith("hidden_states")]
    vllm = [alias for alias in owners if alias.startswith("aux_hidden_states")]
    assert len(hf) == len(vllm) == arch.num_layers + 1
    # every name by which other tools know a site of this model leads to one of its taps
    sites = {tap.site for tap in all_taps(arch)}
    last = {tap.site: tap.layer for tap in all_taps(arch)}  # of a hybrid model, it attends
    lens = {name.format(last[site]) for site in sites for name in SITES[site].lens}
    changed = arch.logit_softcap is not None or arch.logit_scale != 1.0
    capped = set(SITES["logits"].lens) if changed else set()
    others = {name for name in lens if re.search(LENS_OTHERWISE, name) and arch.latent}
    assert not others & set(owners)
    assert lens - capped - others <= set(owners)


def test_latents_have_sizes_and_names_of_their_own() -> None:
    arch = ARCHS["deepseek_v3"]
    (tap,) = parse_taps("blocks.1.attn.hook_kv_latent", arch)
    assert (tap.name, tap.shape(arch, 64), SITES["kv_latent"].shape) == (
        "kv_latent.1", (512,), ("latent",),
    )  # fmt: skip
    shapes = {site: Tap(site, 1).shape(arch, 64) for site in ("q", "k", "k_rot", "v", "z")}
    assert shapes == {**dict.fromkeys(("q", "k", "k_rot"), (128, 192)), "v": (128, 128),
                      "z": (128, 128)}  # fmt: skip
    with pytest.raises(ConfigError, match="attn.hook_q"):  # there, it is after the rotation
        parse_taps("blocks.1.attn.hook_q", arch)


def test_hidden_states_end_with_the_norm_and_aux_hidden_states_do_not() -> None:
    last = Tap("resid_post", 27)
    assert "hidden_states[28]" in Tap("final_norm").aliases(ARCH)
    assert "aux_hidden_states[28]" not in Tap("final_norm").aliases(ARCH)
    assert "aux_hidden_states[28]" in last.aliases(ARCH)
    assert "hidden_states[28]" not in last.aliases(ARCH)
    assert {"hidden_states[27]", "aux_hidden_states[27]"} <= set(Tap("resid_pre", 27).aliases(ARCH))
    assert "hidden_states[0]" not in Tap("embed").aliases(ARCH), "learned positions are in it"


def test_hidden_states_of_mamba_2_begin_behind_the_first_block() -> None:
    """As transformers returns them; vLLM's do not include it."""
    arch = ARCHS["mamba2"]
    listed = "hidden_states[0],hidden_states[2],hidden_states[3]"
    assert names(listed, arch) == ["resid_post.0", "resid_post.2", "final_norm"]
    assert names("aux_hidden_states[0],aux_hidden_states[3]", arch) == [
        "resid_pre.0",
        "resid_post.2",
    ]
    assert "hidden_states[2]" in Tap("resid_post", 2).aliases(arch)


def test_capped_logits_have_no_name_in_transformer_lens() -> None:
    """TransformerLens hooks them before the cap."""
    assert Tap("logits").aliases(ARCH) == ("unembed.hook_out",)
    assert Tap("logits").aliases(CAPPED) == ()
    assert names("logits", CAPPED) == ["logits"]
    with pytest.raises(ConfigError, match="unembed.hook_out"):
        parse_taps("unembed.hook_out", CAPPED)


@pytest.mark.parametrize(
    "name",
    [
        "ln_final.hook_normalized",  # before the norm's weight
        "ln_final.hook_scale",
        "blocks.3.hook_mlp_in",
        "blocks.3.attn.hook_attn_scores",
        "blocks.3.mlp.hook_pre",
        "blocks.3.ln1.hook_normalized",
        "blocks.3.embed.hook_out",
        "blocks.3.hook_embed",
        "blocks..hook_resid_post",
        "blocks.-1.hook_resid_post",
        "blocks.{}.hook_resid_post",
        "hook_resid_post",
        "hook_pos_embed",
        "hidden_states[-1]",
        "hidden_states[]",
        "hidden_states",
        "aux_hidden_states[x]",
    ],
)
def test_a_name_of_something_else_is_no_tap(name: str) -> None:
    with pytest.raises(ConfigError, match="--taps"):
        parse_taps(name, ARCH)


@pytest.mark.parametrize("name", ["hidden_states[29]", "aux_hidden_states[29]"])
def test_streams_beyond_the_last_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"the last one is \[28\]"):
        parse_taps(name, ARCH)


@pytest.mark.parametrize("family", BLOCKS)
def test_a_block_has_the_taps_of_its_parts(family: str) -> None:
    arch = ARCHS[family]
    for layer, made in enumerate(BLOCKS[family]):
        parts = made.split()
        wanted = {"resid_pre", "resid_post"}.union(*(SITES_OF[part] for part in parts))
        if len({"mlp", "experts"} & {*parts}) and len(parts) > 1:
            wanted.add("resid_mid")
        assert {tap.site for tap in all_taps(arch) if tap.layer == layer} == wanted
        for site in set(SITES) - wanted - {tap.site for tap in all_taps(arch)}:
            with pytest.raises(ConfigError, match=f"a {family} model has no {site}: "):
                parse_taps(f"{site}:{layer}", arch)


@pytest.mark.parametrize("family", [family for family in ARCHS if family not in BLOCKS])
def test_a_model_has_the_taps_of_what_it_is_made_of(family: str) -> None:
    arch = ARCHS[family]
    absent = {*SPACE_SITES, *CONVOLUTION_SITES}
    if family in UNROTATED:
        absent |= {"q_rot", "k_rot"}
    if family in IN_PARALLEL:
        absent |= {"resid_mid"}
    routed = {*ROUTED_ALL, *SHARED, *MIXED_LAYERS}
    absent |= {"mlp_hidden"} if family in routed else set() if family in APART else EXPERT_SITES
    absent |= set() if family in (*SHARED, *MIXED_LAYERS, *APART) else {"shared_expert_out"}
    absent |= set() if family in OWN_EMBEDDINGS else {"layer_embed", "layer_embed_out"}
    absent |= set() if family in (*LATENT, "kimi_linear") else {"kv_latent"}
    absent |= set() if family in HYBRID else DELTA_SITES
    absent |= set() if family in (*HYBRID, "muse_glimmer") else {"attn_gate"}
    taps = all_taps(arch)
    mixed: dict[str, list[int]] = {}
    if family in HYBRID:
        gated = [0, 1] if family in ("olmo_hybrid", "kimi_linear") else [0, 1, 2]
        mixed = {**dict.fromkeys(DELTA_SITES, [0, 1]), "attn_gate": gated}
        mixed |= dict.fromkeys({*ATTENTION_SITES, "kv_latent"} - absent, [2])
    if family in MIXED_LAYERS:
        plain = MIXED_LAYERS[family]
        routed_here = [layer for layer in range(3) if layer != plain]
        mixed = dict.fromkeys((*EXPERT_SITES, "shared_expert_out"), routed_here)
        mixed["mlp_hidden"] = [plain]
    assert {tap.site for tap in taps} == set(SITES) - absent | set(mixed)
    assert len(taps) == len(set(taps))
    for site in {tap.site for tap in taps}:
        found = [tap.layer for tap in taps if tap.site == site]
        usual = list(range(arch.num_layers)) if SITES[site].layered else [None]
        assert found == mixed.get(site, usual)
        if SITES[site].layered:
            assert [tap.layer for tap in parse_taps(f"{site}:all", arch)] == found
    for site in absent - set(mixed):
        with pytest.raises(ConfigError, match=f"a {family} model has no {site}: "):
            parse_taps(f"{site}:0", arch)


@pytest.mark.full
def test_what_is_listed_of_every_published_model_is_what_it_has() -> None:
    """One line for each site and shape, as `spile taps` prints it and `--taps` takes it."""
    for path in sorted(CONFIGS.glob("*.json")):
        _, arch = read_config(json.loads(path.read_text()), path.name)
        listed = [entry["name"] for entry in describe_taps(arch, 9, "bfloat16", each_layer=False)]
        assert set(parse_taps(",".join(listed), arch)) == set(all_taps(arch)), path.stem


@pytest.mark.parametrize(
    ("arch", "text", "said"),
    [
        (PARALLEL, "resid_mid:0", "gpt_neox model has no resid_mid: attention and MLP run in para"),
        (PARALLEL, "blocks.0.hook_resid_mid", "has no resid_mid"),
        (LEARNED, "q_rot:0", "a gpt2 model has no q_rot: it rotates nothing"),
        (LEARNED, "embed,k_rot:all", "has no k_rot: it rotates nothing"),
        (MIXED, "router_logits:0-1", "a glm4_moe model has no router_logits in layer 0: it has no"),
        (MIXED, "mlp_hidden:1", "has no mlp_hidden in layer 1: its MLP is a mixture of experts"),
        (ROUTED, "shared_expert_out:0", "has no shared_expert_out: it has no shared expert"),
        (DENSE, "router_logits:0", "a llama model has no router_logits: it has no experts"),
        (DENSE, "expert_ids:0", "has no expert_ids: it has no experts"),
        (DENSE, "expert_weights:0", "has no expert_weights: it has no experts"),
        (ROUTED, "mlp_hidden:0", "a mixtral model has no mlp_hidden: its MLP is a mixture of exp"),
        (ROUTED, "blocks.0.mlp.hook_post", "has no mlp_hidden"),
        (HYBRIDS, "q:2+0", "a qwen3_5 model has no q in layer 0: it mixes tokens by the gated "
         "delta rule; write q:all, or choose from 2"),
        (HYBRIDS, "delta_state_norm:2", "in layer 2: it mixes tokens by attention; write delta_"),
        (ARCHS["mamba2"], "mlp_out:0", "a mamba2 model has no mlp_out: the block has no MLP"),
        (ARCHS["mamba2"], "attn_in:1", "a mamba2 model has no attn_in: it mixes tokens by a state"),
        (ARCHS["nemotron_h"], "attn_out:0", "no attn_out in layer 0: the block is an MLP alone"),
        (ARCHS["lfm2"], "z:0", "in layer 0: it mixes tokens by a short convolution; write z:all"),
        (DENSE, "conv_out:0", "a llama model has no conv_out: it mixes tokens by attention"),
        (DENSE, "attn_gate:0", "a llama model has no attn_gate: what it mixes is not gated"),
        (HYBRIDS, "blocks.0.attn.hook_z", "the qwen3_5 model differs there; see `spile taps`"),
        (HYBRIDS, "delta_state:0", "whole states are too large to store (786,432 values for each"),
    ],
)  # fmt: skip
def test_a_tap_that_the_model_does_not_have_is_refused_with_the_reason(
    arch: Arch, text: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_taps(text, arch)
    assert str(caught.value).startswith("--taps")
    assert said in str(caught.value)


def test_shapes_are_those_of_the_layer() -> None:
    """Attention has 24 heads of 256; the gated delta rule 48 heads of 128, and 16 of keys."""
    shapes = {tap.name: tap.shape(HYBRIDS, 9) for tap in all_taps(HYBRIDS)}
    assert shapes["z.0"] == shapes["attn_gate.1"] == (48, 128)
    assert shapes["z.2"] == shapes["q.2"] == shapes["attn_gate.2"] == (24, 256)
    assert (shapes["delta_state_norm.0"], shapes["conv_out.0"]) == ((48,), (10_240,))
    assert names("z:0.h47,z:2.h23", HYBRIDS) == ["z.0.h47", "z.2.h23"]
    with pytest.raises(ConfigError, match="head h24 does not exist; z has 24 heads"):
        parse_taps("z:2.h24", HYBRIDS)


def test_heads_of_a_state_space_are_those_of_its_own_beside_attention() -> None:
    """Attention has 8 heads of 64; the state space 24 heads of 64, and states of 128."""
    arch = ARCHS["falcon_h1"]
    shapes = {tap.name: tap.shape(arch, 9) for tap in all_taps(arch)}
    assert shapes["z.0"] == shapes["q.0"] == (8, 64)
    assert shapes["ssm_read.0"] == shapes["ssm_gate.0"] == shapes["ssm_z.0"] == (24, 64)
    assert (shapes["ssm_out.0"], shapes["conv_out.0"]) == ((1024,), (24 * 64 + 2 * 128,))
    assert names("ssm_z:0.h23,z:0.h7", arch) == ["z.0.h7", "ssm_z.0.h23"]
    mixer = "blocks.2.mixer.hook_ssm_out,blocks.1.mixer.hook_in,backbone.layers.0.mixer.out_proj"
    assert names(mixer, ARCHS["mamba2"]) == ["ssm_out.0", "ssm_in.1", "ssm_out.2"]
    with pytest.raises(ConfigError, match="the model scales it afterwards"):
        parse_taps("model.layers.0.mamba.out_proj", arch)


def test_layers_of_a_kind_are_told_as_taps_takes_them() -> None:
    whole = read_config(json.loads((CONFIGS / "Qwen3.5-27B.json").read_text()), "test")[1]
    told = describe_taps(whole, 9, "float32", each_layer=False)
    named = {entry["name"]: entry["shape"] for entry in told}
    linear = "0-60/4+1-61/4+2-62/4"
    assert named["q:3-63/4"] == named["z:3-63/4"] == [24, 256]
    assert named[f"z:{linear}"] == [48, 128]
    assert named["resid_post:0-63"] == [5120]
    for entry in told:
        taps = parse_taps(entry["name"], whole)
        assert {tap.shape(whole, 9) for tap in taps} == {tuple(entry["shape"])}
    every = [tap for entry in told for tap in parse_taps(entry["name"], whole)]
    assert sorted(every, key=str) == sorted(all_taps(whole), key=str)


def test_taps_come_in_the_order_in_which_the_model_meets_them() -> None:
    text = "logits,final_norm,resid_post:27+0,mlp_out:0,resid_mid:0,attn_out:0+27,resid_pre:0+1"
    assert names(f"{text},entropy,q:1,embed") == [
        "embed",
        "resid_pre.0",
        "attn_out.0",
        "resid_mid.0",
        "mlp_out.0",
        "resid_post.0",
        "resid_pre.1",
        "q.1",
        "attn_out.27",
        "resid_post.27",
        "final_norm",
        "logits",
        "entropy",
    ]


@pytest.mark.parametrize("family", ARCHS)
def test_all_taps_come_block_by_block(family: str) -> None:
    arch = ARCHS[family]
    taps = all_taps(arch)
    order = list(SITES)
    assert taps[0] == Tap("embed")
    after = len(AFTER_BLOCKS)
    assert [tap.site for tap in taps[-after:]] == list(AFTER_BLOCKS)
    between = taps[1:-after]
    assert all(tap.layer is not None for tap in between)
    assert list(between) == sorted(between, key=lambda t: (t.layer, order.index(t.site)))
    assert parse_taps(",".join(tap.name for tap in reversed(taps)), arch) == taps


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("z:5.h0", ["z.5.h0"]),
        ("attn_pattern:3.h3+h2", ["attn_pattern.3.h2.h3"]),
        ("z:0-1.h3+h3,q:7.h1", ["z.0.h3", "z.1.h3", "q.7.h1"]),
        ("z:1.h0+3+5.h1+h2", ["z.1.h0", "z.3", "z.5.h1.h2"]),
        ("z:5.h0,z:5.h1,z:5", ["z.5", "z.5.h0", "z.5.h1"]),
        ("k:5.h0+h1", ["k.5"]),
        ("z.5.h0.h3", ["z.5.h0.h3"]),
    ],
)
def test_heads_follow_their_layers(text: str, wanted: list[str]) -> None:
    taps = parse_taps(text, ARCH)
    assert [tap.name for tap in taps] == wanted
    assert [Tap.from_name(name) for name in wanted] == list(taps)
    assert parse_taps(",".join(wanted), ARCH) == taps
    for tap in taps:
        whole = Tap(tap.site, tap.layer)
        count, *rest = whole.shape(ARCH, 64)
        assert tap.shape(ARCH, 64) == (len(tap.heads) or count, *rest)
        assert tap.aliases(ARCH) == (() if tap.heads else whole.aliases(ARCH))


def test_spelling_and_order_do_not_change_the_taps() -> None:
    same = ["resid_post:1-2,embed", "embed, resid_post:2+1 ,", "resid_post.2,hook_embed,"
            "blocks.1.hook_resid_post,resid_post:1-2,embed", "hidden_states[2],embed,"
            "aux_hidden_states[3]"]  # fmt: skip
    assert {parse_taps(text, ARCH) for text in same} == {parse_taps(same[0], ARCH)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("resid_pots:3", ["'resid_pots'", "did you mean resid_post?", "known: embed"]),
        ("mlp_outs.3", ["'mlp_outs'", "did you mean mlp_out?"]),
        ("zzz", ["'zzz'", "known: embed, resid_pre"]),
        ("blocks.3.hook_zzz", ["blocks.3.hook_zzz"]),
        ("blocks.3.hook_resid_pots", ["did you mean blocks.3.hook_resid_post?"]),
        ("blocks.3.ln1.hook_normalized", ["before the norm's weight; attn_in is after it"]),
        ("blocks.3.hook_mlp_in", ["no site has these values", "which is resid_mid"]),
        ("blocks.3.attn.hook_attn_scores", ["before the softmax; attn_pattern"]),
        ("ln_final.hook_normalized", ["final_norm is after it"]),
        ("resid_post:3,4", ["joined by +", "resid_post:3+4"]),
        ("embed,resid_post:0-3,8-9", ["resid_post:0-3+8-9"]),
        ("model.layers.28", ["layer 28 does not exist"]),
        ("embed:0", ["embed has no layers", "write just embed"]),
        ("logits.3", ["logits has no layers"]),
        ("entropy:all", ["entropy has no layers"]),
        ("resid_post", ["say which layers", "resid_post:0-3"]),
        ("resid_post:", ["say which layers"]),
        ("resid_post:28", ["layer 28 does not exist", "28 layers, 0 to 27"]),
        ("resid_post:-29", ["layer -29 does not exist"]),
        ("resid_post:20-28", ["layer 28 does not exist"]),
        ("blocks.28.hook_resid_post", ["layer 28 does not exist"]),
        ("resid_post:5-2", ["'5-2' is an empty range"]),
        ("resid_post:-1-0", ["'-1-0' is an empty range"]),
        ("resid_post:0-5/0", ["'0-5/0' is an empty range"]),
        ("resid_post:1.5", ["'1.5' is not a layer", "0-27/4"]),
        ("resid_post:one", ["'one' is not a layer"]),
        ("resid_post:1++2", ["'' is not a layer"]),
        ("resid_post:1:2", ["'1:2' is not a layer"]),
        ("resid_post:0-27/-1", ["is not a layer"]),
        ("z:5.h0,h3", ["heads of one layer are joined by +", "z:5.h0+h3"]),
        ("z:h3", ["heads follow a layer, as in 5.h0+h3"]),
        ("z:5+h3", ["heads follow a layer"]),
        ("z:5.h12", ["head h12 does not exist", "4 heads, h0 to h3"]),
        ("k:5.h2", ["head h2 does not exist", "2 heads, h0 to h1"]),
        ("z:5.h", ["head h does not exist"]),
        ("z:5.hx", ["head hx does not exist"]),
        ("resid_post:5.h0", ["resid_post has no heads", "k_rot, attn_pattern, attn_top_keys"]),
        ("", ["names no tap"]),
        (" , ,", ["names no tap"]),
    ],
)
def test_a_tap_that_cannot_be_is_refused_with_a_hint(text: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_taps(text, ARCH)
    message = str(caught.value)
    assert message.startswith("--taps")
    assert "\n" not in message
    assert all(part in message for part in said), message


PARTS = st.sampled_from([*SITES, "blocks.", ".hook_resid_post", ".attn.hook_q", "hidden_states[",
                         "aux_hidden_states[", "]", ":", "-", "+", "/", ",", ".", "all", " ", "0",
                         "3", "27", "28", "99", "x", "h0", ".h3", "\n", "²", "٣"])  # fmt: skip


@given(st.lists(PARTS, max_size=8).map("".join), st.sampled_from([ARCH, *ARCHS.values()]))
@example("resid_post:" + "9" * 5000, ARCH)
@example("resid_post." + "9" * 5000, ARCH)
@example("blocks." + "9" * 5000 + ".hook_resid_post", ARCH)
@example("hidden_states[" + "9" * 5000 + "]", ARCH)
@example("blocks.²." + "hook_resid_post", ARCH)
@example("hidden_states[²]", ARCH)
def test_any_text_gives_taps_of_this_model_or_a_config_error(text: str, arch: Arch) -> None:
    try:
        taps = parse_taps(text, arch)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert taps
    assert set(taps) <= set(all_taps(arch))
    for tap in taps:
        assert parse_taps(tap.name, arch) == (tap,)


NEEDED = {
    "embed": 0, "resid_pre.0": 0, "resid_pre.5": 5, "attn_in.5": 6, "q.0": 1, "k_rot.5": 6,
    "attn_pattern.5": 6, "z.5": 6, "attn_out.5": 6, "resid_mid.5": 6, "mlp_in.5": 6,
    "mlp_hidden.5": 6, "mlp_out.5": 6, "resid_post.5": 6, "resid_post.27": 28, "final_norm": 28,
    "logits": 28, "logprob": 28, "entropy": 28,
}  # fmt: skip


@pytest.mark.parametrize("tap", NEEDED)
def test_no_more_layers_are_needed_than_lie_below_the_tap(tap: str) -> None:
    (met,) = parse_taps(tap, ARCH)
    assert met.layers_needed(ARCH) == NEEDED[tap]


def test_shapes_and_dtypes_are_those_of_the_values() -> None:
    """4 heads of 8, 2 of them for keys, a width of 32, an MLP of 48, contexts of 100."""
    shapes = {tap.site: tap.shape(ARCH, 100) for tap in all_taps(ARCH)}
    for site in ("q", "q_rot", "z"):
        assert shapes.pop(site) == (4, 8)
    for site in ("k", "k_rot", "v"):
        assert shapes.pop(site) == (2, 8)
    assert shapes.pop("attn_pattern") == (4, 100)
    assert shapes.pop("attn_top_keys") == shapes.pop("attn_top_weights") == (4, 8)
    assert shapes.pop("attn_summary") == (4, 5)
    assert Tap("attn_top_keys", 1, (0, 2), top=3).shape(ARCH, 100) == (2, 3)
    assert Tap("attn_top_keys", 1).shape(ARCH, 5) == (4, 5), "a context has no more"
    assert shapes.pop("mlp_hidden") == (48,)
    assert shapes.pop("logits") == (tiny.VOCAB,)
    for site in ("logprob", "entropy", "logsumexp", "next_rank"):
        assert shapes.pop(site) == ()
    assert shapes.pop("top_token_ids") == shapes.pop("top_logprobs") == (64,)
    assert Tap("top_logprobs", top=5).shape(ARCH, 100) == (5,)
    assert set(shapes.values()) == {(32,)}
    assert len(shapes) == 9
    widths = {tap.site: tap.width(ARCH, 100) for tap in all_taps(ARCH)}
    assert (widths["q"], widths["attn_pattern"], widths["logprob"]) == (32, 400, 1)
    dtypes = {tap.site: tap.dtype("bfloat16") for tap in all_taps(ARCH)}
    for site in ("attn_top_weights", "attn_summary", "logprob", "entropy", "logsumexp",
                 "top_logprobs"):  # fmt: skip
        assert dtypes.pop(site) == "float32"
    for site in ("attn_top_keys", "next_rank", "top_token_ids"):
        assert dtypes.pop(site) == "int32"
    assert set(dtypes.values()) == {"bfloat16"}


def test_what_a_router_gives_has_its_own_shapes_and_dtypes() -> None:
    sites = {site: Tap(site, 0) for site in EXPERT_SITES}
    assert sites["router_logits"].shape(ROUTED, 100) == (8,)
    assert sites["expert_weights"].shape(ROUTED, 100) == (2,)
    assert sites["expert_ids"].shape(ROUTED, 100) == (2,)
    assert {site: tap.dtype("float16") for site, tap in sites.items()} == {
        "router_logits": "float16", "expert_weights": "float16", "expert_ids": "int16",
    }  # fmt: skip


def test_a_description_has_one_entry_for_each_site_or_one_for_each_tap() -> None:
    few = describe_taps(ROUTED, 100, "bfloat16", each_layer=False)
    many = describe_taps(ROUTED, 100, "bfloat16", each_layer=True)
    taps = all_taps(ROUTED)
    assert [entry["name"] for entry in many] == [tap.name for tap in taps]
    assert len(few) == len({tap.site for tap in taps})
    assert json.loads(json.dumps(many)) == many, "plain data"
    for entry in few:
        assert {tap.site for tap in parse_taps(entry["name"], ROUTED)} == {
            entry["name"].split(":")[0]
        }
    for tap, entry in zip(taps, many, strict=True):
        assert entry["shape"] == list(tap.shape(ROUTED, 100))
        assert entry["aliases"] == list(tap.aliases(ROUTED))
    sizes = {entry["name"]: entry["bytes"] for entry in many}
    assert (sizes["embed"], sizes["expert_ids.0"], sizes["logprob"]) == (2 * 4096, 2 * 2, 4)
    assert sizes["attn_pattern.0"] == 2 * 32 * 100


def test_each_head_is_a_writer_unless_heads_are_normalised_together() -> None:
    arch = DENSE
    edges = parse_taps("resid_post_edge:1", arch)
    found = parse_writers("mlp_out:0,z:0.h3,z:0-2,embed", edges, arch)
    heads = [Tap("z", layer, (head,)) for layer in (0, 1) for head in range(arch.num_heads)]
    first, second = heads[: arch.num_heads], heads[arch.num_heads :]
    assert found == (Tap("embed"), *first, Tap("mlp_out", 0), *second)
    assert parse_writers(",".join(tap.name for tap in found), edges, arch) == found
    with pytest.raises(ConfigError, match="normalises what all heads of layer 0 add together"):
        parse_writers("z:0", edges, CAPPED)
