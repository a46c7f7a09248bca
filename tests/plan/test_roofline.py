"""A step's arithmetic, traffic and room, by formula."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.compile.step import params_of
from spile.corpus.pack import Batch
from spile.models.config.arch import Arch
from spile.models.config.hf_config import read_config
from spile.models.config.specs import axis_sizes, block_specs, outer_specs
from spile.models.forward.decoder import needs_whole_block
from spile.models.forward.mixers import state_space
from spile.models.forward.mixers.gated_delta import chunked
from spile.models.forward.weights import LayerSchedule, Params
from spile.models.layout import ONE_DEVICE, Cuts, Layout
from spile.models.taps import parse_taps
from spile.plan.chips import CHIPS
from spile.plan.roofline import Roofline, Workload, cpu_unit_tokens
from spile.run.step.devices import StepDevices
from spile.run.step.resident import ResidentStep
from spile.run.step.settings import StepSettings
from support import tiny
from support.marks import some

CONFIGS = Path(__file__).parent.parent / "fixtures/configs"
QWEN_14B = {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
    "num_attention_heads": 40, "num_key_value_heads": 8, "max_window_layers": 48,
}  # fmt: skip


def arch_of(name: str, **changes: Any) -> Arch:
    return read_config({**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}, name)[1]


def workload(arch: Arch, taps: str, cuts: Cuts = ONE_DEVICE, **given: Any) -> Workload:
    chosen = parse_taps(taps, arch)
    depth = max(tap.layers_needed(arch) for tap in chosen)
    settings = {
        "seq_len": 2048, "rows": 8, "compute_dtype": "bfloat16", "store_dtype": "bfloat16",
    }  # fmt: skip
    return Workload(
        arch=arch, taps=chosen, cuts=cuts, whole=needs_whole_block(chosen, depth),
        **{**settings, **given},
    )  # fmt: skip


def cut(arch: Arch, layout: Layout) -> Cuts:
    return Cuts.of(layout, axis_sizes(arch), quiet=True)


@pytest.mark.parametrize(
    ("changes", "measured"), [({}, 47_160), (QWEN_14B, 23_819)], ids=["7B", "14B"]
)
def test_the_estimate_for_an_h200_is_what_was_measured(
    changes: dict[str, Any], measured: int
) -> None:
    arch = arch_of("Qwen2.5-7B", **changes)
    work = workload(arch, "resid_post:-1")
    roofline = Roofline.of(work, 0, CHIPS["h200"])
    assert work.tokens / roofline.seconds == pytest.approx(measured, rel=0.15)
    assert roofline.limit == "compute"


WIDE = {
    "hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "num_hidden_layers": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    "taps",
    some(
        ["resid_post:2,attn_pattern:0", "attn_out:2,attn_pattern:1", "z:2,attn_pattern:1",
         "mlp_hidden:1,attn_pattern:0", "attn_pattern:2", "q:1+2,attn_pattern:0",
         "logits,attn_pattern:0"],
        "logits,attn_pattern:0",
    ),
)  # fmt: skip
def test_the_formula_counts_what_the_compiler_counts_without_loops(taps: str) -> None:
    """If patterns are tapped, every pair is scored in one product, which the compiler counts."""
    arch = read_config({**tiny.CONFIG, **WIDE}, "test")[1]
    given = {"seq_len": 64, "rows": 4, "compute_dtype": "float32", "store_dtype": "float32"}
    work = workload(arch, taps, **given)
    unrolled = LayerSchedule(work.depth, 1, 0)
    scanned = params_of(replace(work, whole=True), None)
    block = {
        name: jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
        for name, array in scanned.cycle[0].items()
    }
    params = Params(scanned.outer, (), (block,) * work.depth)
    settings = StepSettings(
        arch=arch, taps=work.taps, schedule=unrolled, place=StepDevices(jax.devices()[0]),
        compute_dtype="float32", store_dtype="float32",
    )  # fmt: skip
    step = ResidentStep(params, settings)
    zeros, full = np.zeros((4, 64), np.int32), np.full(4, 64, np.int32)
    ((run, _),) = step.compile(Batch(zeros, zeros, zeros, full, None, full, contexts=16))
    assert run.cost_analysis()["flops"] == pytest.approx(work.flops, rel=0.06)


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen3-30B-A3B"])
def test_weights_in_float8_are_counted_as_they_are_held(name: str) -> None:
    """Experts stay in bfloat16, and each output channel has a scale."""
    arch = arch_of(name)
    narrow, half = (
        workload(arch, "resid_post:3", compute_dtype=dtype) for dtype in ("float8_e4m3", "bfloat16")
    )
    held = jax.tree.leaves(params_of(narrow, None))
    assert narrow.weights == sum(array.size * array.dtype.itemsize for array in held)
    assert narrow.weights < half.weights


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen3-30B-A3B"])
def test_weights_in_float16_are_counted_as_they_are_held(name: str) -> None:
    """Matrices take two bytes a value; norms and biases, and all that is computed, four."""
    arch = arch_of(name)
    narrow, wide = (
        workload(arch, "resid_post:3", compute_dtype=dtype) for dtype in ("float16", "float32")
    )
    held = jax.tree.leaves(params_of(narrow, None))
    assert narrow.weights == sum(array.size * array.dtype.itemsize for array in held)
    assert 0.5 < narrow.weights / wide.weights < 0.51
    assert (narrow.temporaries, narrow.flops) == (wide.temporaries, wide.flops)


def test_attention_is_counted_for_the_keys_a_query_sees() -> None:
    arch = arch_of("Qwen2.5-0.5B")
    causal = workload(arch, "z:0")
    every = workload(arch, "z:0,attn_pattern:0")  # which scores them all
    pairs = 4 * arch.num_heads * arch.head_dim
    assert every.flops - causal.flops == pytest.approx(
        causal.tokens * pairs * (2048 - 2049 / 2), rel=1e-9
    )
    local = arch_of("gemma-3-1b-it")
    window = local.layers[0].window
    assert window and window < 2048
    seen = sum(min(i + 1, window) for i in range(2048)) / 2048
    short, long = (workload(local, taps).flops for taps in ("z:0", "z:0,attn_pattern:0"))
    pairs = 4 * local.num_heads * local.head_dim
    assert long - short == pytest.approx(8 * 2048 * pairs * (2048 - seen), rel=1e-6)


def test_of_chunks_only_pairs_within_one_are_counted() -> None:
    arch = arch_of("Llama-4-Maverick-17B-128E-text")
    chunk, seq = 8192, 20_000
    seen = sum(i % chunk + 1 for i in range(seq)) / seq
    pairs = 4 * arch.num_heads * arch.head_dim
    short, long = (workload(arch, taps, seq_len=seq) for taps in ("z:0", "z:0,attn_pattern:0"))
    assert (long.flops - short.flops) / short.tokens == pytest.approx(pairs * (seq - seen))


def test_the_gated_delta_rule_is_counted_by_chunks_and_states() -> None:
    arch = arch_of("Qwen3.5-27B-text")
    assert arch.delta
    heads, dim, chunk = (16, 48), 128, 64
    by_pairs = 2 * 2 * chunk * dim * heads[0]
    by_head = 2 * chunk * 3 * dim + 3 * 2 * dim * dim
    matrices = 5120 * (2 * 2048 + 3 * 6144 + 2 * 48)
    whole, read = (workload(arch, taps) for taps in ("attn_out:0", "attn_in:0"))
    wanted = 2 * matrices + by_pairs + heads[1] * by_head
    assert (whole.flops - read.flops) / whole.tokens == pytest.approx(wanted, rel=1e-9)
    assert workload(arch, "conv_out:0").flops < workload(arch, "delta_state_norm:0").flops
    seq = 2 * chunk  # of the loop over them, the compiler counts one
    given = [jax.ShapeDtypeStruct((1, seq, *shape), "float32") for shape in
             ((16, dim), (16, dim), (48, dim), (48,), (48,))]  # fmt: skip
    segments = jax.ShapeDtypeStruct((1, seq), "int32")
    counted: Any = jax.jit(chunked).lower(*given, segments).compile().cost_analysis()
    in_loop = heads[1] * (2 * chunk * dim + 3 * 2 * dim * dim)
    ours = seq * (by_pairs + heads[1] * by_head) - chunk * in_loop
    assert counted["flops"] == pytest.approx(ours, rel=0.2)  # it counts sums and decays, too


def test_latent_attention_is_counted_by_latents_and_head_sizes() -> None:
    arch = arch_of("DeepSeek-V3")

    def per_token(site: str) -> float:
        work = workload(arch, f"{site}:0")
        return work.flops / work.tokens

    latent, shared, heads = 7168 * 512, 7168 * 64, 128
    queries = 7168 * 1536 + 1536 * heads * 192
    keys, values = latent + shared + 512 * heads * 128, latent + 512 * heads * 128
    assert per_token("kv_latent") == 2 * latent
    assert per_token("q") == 2 * queries
    assert per_token("k_rot") == 2 * keys
    assert per_token("v") == 2 * values
    scored = 2 * heads * (192 + 128) * 2049 / 2
    wanted = 2 * (queries + keys + 512 * heads * 128) + scored
    assert per_token("z") == pytest.approx(wanted, rel=1e-9)
    by_four = workload(arch, "z:0", cut(arch, Layout(1, 1, 4))).flops
    whole = 2 * (latent + shared + 7168 * 1536)  # the latents are on every device
    assert by_four / workload(arch, "z:0").tokens == pytest.approx(whole + (wanted - whole) / 4)


def test_a_state_space_is_counted_by_chunks_and_states() -> None:
    arch = arch_of("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    heads, dim, groups, state, chunk = 64, 64, 8, 128, 64
    by_group = 2 * chunk * state
    near, far = 2 * chunk * dim, 4 * state * dim
    matrices = 2688 * (3 * heads * dim + 2 * groups * state + heads)
    whole, read = (workload(arch, taps) for taps in ("ssm_out:0", "ssm_in:0"))
    wanted = 2 * matrices + groups * by_group + heads * (near + far)
    assert (whole.flops - read.flops) / whole.tokens == pytest.approx(wanted, rel=1e-9)
    assert workload(arch, "conv_out:0").flops < workload(arch, "ssm_read:0").flops
    cut_in_8 = workload(arch, "ssm_out:0", cut(arch, Layout(1, 1, 8))).flops
    assert cut_in_8 == pytest.approx(whole.flops / 8)
    seq = 2 * chunk  # of the loop over them, the compiler counts one
    shapes = ((groups, state), (groups, state), (heads, dim), (heads,))
    given = [jax.ShapeDtypeStruct((1, seq, *shape), "float32") for shape in shapes]
    segments = jax.ShapeDtypeStruct((1, seq), "int32")
    counted: Any = jax.jit(state_space.chunked).lower(*given, segments).compile().cost_analysis()
    ours = seq * (groups * by_group + heads * near) + chunk * heads * far
    assert counted["flops"] == pytest.approx(ours, rel=0.35)  # it counts sums and decays, too


def test_keys_of_a_single_group_are_counted_whole_on_every_device() -> None:
    arch = arch_of("granite-4.0-h-tiny")
    one, cut_in_8 = (
        workload(arch, "ssm_read:0", cut(arch, Layout(1, 1, ways))).flops for ways in (1, 8)
    )
    keys = 2 * 2 * 128 * 1536 + 2 * 64 * 128
    tokens = workload(arch, "ssm_read:0").tokens
    assert cut_in_8 == pytest.approx((one - tokens * keys) / 8 + tokens * keys)


def test_a_mesh_cuts_the_gated_delta_rule_by_key_heads() -> None:
    arch = arch_of("Qwen3.5-27B-text")
    one = workload(arch, "attn_out:0").flops
    assert workload(arch, "attn_out:0", cut(arch, Layout(1, 1, 8))).flops == pytest.approx(one / 8)


def test_of_experts_only_the_chosen_ones_are_counted() -> None:
    arch = arch_of("Qwen3-30B-A3B")
    assert arch.experts
    work = workload(arch, "resid_post:0")
    expert = 3 * arch.width * arch.mlp_width
    others = sum(
        math.prod(spec.shape)
        for spec in block_specs(arch)
        if spec.name in ("wq", "wk", "wv", "wo", "w_router")
    )
    attention = 4 * arch.num_heads * arch.head_dim * 2049 // 2
    wanted = 2 * (arch.experts.chosen * expert + others) + attention
    assert work.flops == pytest.approx(work.tokens * wanted, rel=1e-6)


def test_shared_experts_and_plain_layers_are_counted_where_they_are() -> None:
    arch = arch_of("GLM-4.5-Air")
    assert arch.experts
    first, second = (workload(arch, f"resid_post:{layer}").flops for layer in (0, 1))
    tokens = workload(arch, "resid_post:0").tokens
    attention = 4 * arch.num_heads * arch.head_dim * 2049 // 2
    heads = (2 * arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim * arch.width
    plain = 3 * arch.width * arch.dense_width
    assert first == pytest.approx(tokens * (2 * (heads + plain) + attention), rel=1e-6)
    inner = arch.experts.chosen * arch.mlp_width + arch.experts.shared
    routed = 3 * arch.width * inner + arch.experts.count * arch.width
    assert second - first == pytest.approx(tokens * (2 * (heads + routed) + attention), rel=1e-6)
    inside = workload(arch, "shared_expert_out:1").flops - first
    used = heads + 3 * arch.width * arch.experts.shared
    assert inside == pytest.approx(tokens * (2 * used + attention), rel=1e-6)


def test_a_mesh_shares_the_work_unless_heads_cannot_be_cut() -> None:
    arch = arch_of("Qwen2.5-7B")
    one = workload(arch, "resid_post:-1")
    for layout in (Layout(4), Layout(1, 4), Layout(1, 1, 4), Layout(2, 1, 2)):
        assert workload(arch, "resid_post:-1", cut(arch, layout)).flops == pytest.approx(
            one.flops / 4, rel=1e-3
        )
    # Eight devices divide neither 28 heads nor 4 keys: all of them do all of that.
    eight = workload(arch, "resid_post:-1", cut(arch, Layout(1, 1, 8)))
    assert eight.flops > 1.4 * one.flops / 8


@pytest.mark.parametrize(
    "name",
    [
        "Qwen2.5-0.5B",
        "Qwen3-30B-A3B",
        "gpt2",
        "gemma-2-2b",
        "GLM-4.5-Air",
        "bloom-560m",
        "DeepSeek-V2-Lite",
    ],
)
@pytest.mark.parametrize("taps", ["resid_post:0-1", "attn_out:2", "logprob"])
def test_the_weights_are_those_that_are_loaded(name: str, taps: str) -> None:
    arch = arch_of(name)
    work = workload(arch, taps, seq_len=1024)
    leaves = jax.tree.leaves(params_of(work, None))
    assert work.weights == sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    wide = {leaf.shape[-1:] for leaf in leaves if leaf.dtype != jnp.bfloat16}
    assert wide <= {(128,)}, "what corrects the choice of experts"


def test_each_device_has_its_share_of_weights_and_rows() -> None:
    arch = arch_of("Llama-3.3-70B-Instruct")
    one = workload(arch, "resid_post:-1", rows=64)
    cut_up = workload(arch, "resid_post:-1", cut(arch, Layout(2, 4, 8)), rows=64)
    embedding = math.prod(outer_specs(arch)[0].shape) * 2
    assert cut_up.weights == pytest.approx((one.weights - embedding) / 32 + embedding / 8, rel=1e-3)
    assert cut_up.stored == one.stored // 64
    assert cut_up.taps_bytes == one.taps_bytes // 64
    assert cut_up.temporaries < one.temporaries


@pytest.mark.parametrize(("dtype", "row"), [("bfloat16", 7168), ("float8_e4m3", 3588)])
def test_stored_rows_have_the_bytes_of_their_dtype(dtype: str, row: int) -> None:
    work = workload(arch_of("Qwen2.5-7B"), "resid_post:-1", store_dtype=dtype)
    assert work.stored == work.tokens * row
    assert work.taps_bytes == work.tokens * (row + 7168)


def test_what_takes_longest_is_the_limit() -> None:
    roofline = Roofline(0.2, 0.1, 0.5, 0.3)
    assert (roofline.limit, roofline.seconds) == ("interconnect", 0.5)
    assert roofline.one_by_one == 0.5 and Roofline(0.4, 0.3, 0.5, 0).one_by_one == 0.7
    many = workload(arch_of("Qwen2.5-0.5B"), "resid_post:all,mlp_hidden:all")
    assert Roofline.of(many, 0, CHIPS["v5e"]).limit == "host_link"


@pytest.mark.parametrize(
    ("name", "taps", "tokens"),
    [
        ("gpt2", "embed", 64_000),
        ("gpt2", "resid_post:5", 35_000),
        ("gpt2", "resid_post:11", 17_000),
        ("gpt2", "logits", 12_000),
        ("Llama-3.1-8B", "resid_post:20", 2048),
    ],
)
def test_a_unit_on_a_cpu_is_half_a_minute_at_a_nominal_rate(
    name: str, taps: str, tokens: int
) -> None:
    arch = arch_of(name)
    assert cpu_unit_tokens(arch, parse_taps(taps, arch), min(2048, arch.max_positions)) == tokens


def test_covariances_count_a_product_for_each_label_and_tap() -> None:
    arch = arch_of("Qwen2.5-7B")
    pooled: dict[str, Any] = {"store_dtype": "float32", "slots": 4}
    means = workload(arch, "resid_post:0+1", pool="mean", **pooled)
    both = workload(arch, "resid_post:0+1", pool="covariance", labels=2, **pooled)
    square = arch.width**2
    assert both.stored - means.stored == 2 * 2 * square * 4
    assert both.flops - means.flops == 2 * 2 * square * both.tokens
    assert both.taps_bytes > means.taps_bytes + 2 * 2 * square * 4
