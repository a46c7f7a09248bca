"""Parity with HF transformers: the ground truth for every tap of every family."""

import json
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import spile
from spile.check.comparable import comparable, named_in
from spile.check.reference import Reference
from spile.core.errors import InputError
from spile.models.config.arch import Arch
from spile.models.config.families import FAMILIES as KNOWN
from spile.models.config.family import Family
from spile.models.config.hf_config import read_config
from spile.models.files.checkpoint import Checkpoint, open_checkpoint
from spile.models.files.demo import demo_model
from spile.models.forward import ends
from spile.models.forward.attention import Attention, blocked, masked, narrowed
from spile.models.forward.decoder import Decoder, Inputs, needs_whole_block
from spile.models.forward.kernels.attention import for_platform
from spile.models.forward.mixers import gated_delta, state_space
from spile.models.forward.weight_loader import load_params
from spile.models.forward.weights import LayerSchedule
from spile.models.sites import AFTER_BLOCKS, SITES
from spile.models.taps import Tap, all_taps, parse_taps, with_tops
from support import quick, tiny
from support.families import (
    FAMILIES,
    REFUSED,
    WINDOW,
    gemma3_multimodal,
    gemma4_multimodal,
    llama4_multimodal,
    mistral3_multimodal,
    muse_glimmer,
    qwen35_multimodal,
    randomised,
    save,
)
from support.marks import some

TOLERANCE = 2e-5  # of the tap's largest value
SUPPORTED: dict[str, Callable[..., Any]] = {
    **{name: make for name, make in FAMILIES.items() if name not in REFUSED},
    "gemma3-multimodal": gemma3_multimodal,
    "gemma4-multimodal": gemma4_multimodal,
    "gemma4-experts-multimodal": partial(gemma4_multimodal, experts=True),
    "llama4-multimodal": llama4_multimodal,
    "mistral3": mistral3_multimodal,
    "mistral3-ministral3": partial(mistral3_multimodal, text="ministral3"),
    "museglimmer-gqa": muse_glimmer,
    "museglimmer-mha": partial(muse_glimmer, num_key_value_heads=4),
    "museglimmer-mqa": partial(muse_glimmer, num_key_value_heads=1),
    "qwen35-multimodal": qwen35_multimodal,
    "qwen35moe-multimodal": partial(qwen35_multimodal, experts=True),
    "gemma3-three-blocks": partial(  # what does not fill a period stands behind the scan
        FAMILIES["gemma3-gqa"],
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}

# One batch for all: a row that packs several contexts and ends in padding, and one that is a
# single context, as long as the row. The long ones reach beyond the window.
LENGTHS = ((33, 9, 14), (64,))
ROWS, SEQ = 2, 64
assert WINDOW < 33
BLOCKED = partial(blocked, block=24)  # blocks lie across contexts and rows; several look back
# What the defaults make is tested through `spile check`.
QUICK = quick.OPTIONS if jax.default_backend() == "cpu" else {}


FULL = pytest.mark.full
STORED_TOO = ("llama-gqa", "gemma3-gqa", "gptoss-gqa", "neox")
# The suite tries every tap of the models that differ as programs, and of others the logits: every
# switch is in one of them. Heads are the same for all, and frequencies are compared with HF's in
# tests/models/config/test_rope.py. All families are tried with --chaos-full.
KINDS = ("llama-gqa", "gemma2-gqa", "gpt2", "neox", "gptoss-gqa", "deepseek3", "nemotronh-gqa")
ALIKE = ("qwen2", "qwen3-gqa", "olmo2-gqa", "phi3-gqa", "granite-gqa", "olmo-mha-clipped",
         "stablelm-mqa-parallel-qknorm", "gptj", "opt", "bloom", "museglimmer-gqa",
         "deepseek2-bias", "mamba2", "falconh1-gqa", "lfm2-gqa", "phimoe-gqa")  # fmt: skip
# HF in float32 is here itself nearly the tolerance from float64: 1.7e-5 of layer_embed_out.
INEXACT = ("gemma4-experts-all",)
# Fewer layers for the suite, still of every kind; of others but KINDS, two.
DEPTHS: dict[str, dict[str, Any]] = {
    **{name: {"num_hidden_layers": 2} for name in ALIKE},
    "cohere2-gqa": {},
    "llama4-gqa": {},
    "gemma4-experts": {"num_hidden_layers": 4, "num_kv_shared_layers": 2},
    "kimilinear": {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "dense", "sparse"]},
    "qwen3next-gqa": {"num_hidden_layers": 3},
    "gemma4-gqa": {"num_hidden_layers": 6, "num_kv_shared_layers": 2},
}
DEEPER = ("cohere2-gqa", "llama4-gqa", "gemma4-experts", "kimilinear", "qwen3next-gqa")


class Context(NamedTuple):
    """A context: its place in the batch, and its tokens."""

    row: int
    start: int
    ids: np.ndarray

    def of(self, values: np.ndarray) -> np.ndarray:
        return values[self.row, self.start : self.start + len(self.ids)]


def batch(lengths: tuple[tuple[int, ...], ...]) -> tuple[list[Context], list[np.ndarray]]:
    """Contexts of random tokens; tokens, positions and segments of the batch that holds them."""
    rng = np.random.default_rng(0)
    tokens, positions, segments = np.zeros((3, len(lengths), SEQ), np.int32)
    contexts: list[Context] = []
    for row, each in enumerate(lengths):
        for segment, length in enumerate(each, 1):
            context = Context(row, sum(each[: segment - 1]), rng.integers(0, 256, length))
            context.of(tokens)[:] = context.ids
            context.of(positions)[:] = np.arange(length)
            context.of(segments)[:] = segment
            contexts.append(context)
    return contexts, [tokens, positions, segments]


CONTEXTS, BATCH = batch(LENGTHS)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are longer than a chunk of the gated delta rule, or of a state space."""
    monkeypatch.setattr(gated_delta, "CHUNK", 16)
    monkeypatch.setattr(state_space, "CHUNK", 16)


def saved(make: Callable[..., Any], directory: Path, **changes: Any) -> tuple[Any, Checkpoint]:
    """A random model, and the checkpoint that Spile opens from its files."""
    model = randomised(lambda: make(**changes))
    save(model, directory)
    tiny.write_tokenizer(directory)
    return model, open_checkpoint(str(directory))


def run(
    checkpoint: Checkpoint,
    taps: tuple[Tap, ...],
    attention: Attention = BLOCKED,
    columns: np.ndarray | None = None,
    dtype: str = "float32",
    inputs: list[np.ndarray] = BATCH,
) -> dict[str, np.ndarray]:
    """Every tap's values [rows, kept, ...], by name."""
    arch = checkpoint.arch
    depth = max(tap.layers_needed(arch) for tap in taps)
    schedule = LayerSchedule.of(arch, depth, whole=needs_whole_block(taps, depth))
    head = any(tap.site in AFTER_BLOCKS for tap in taps)
    params, _ = load_params(checkpoint, schedule, head=head, dtype=jnp.dtype(dtype))
    step = partial(Decoder(arch, taps, "float32", attention).forward, schedule=schedule)
    given = jax.tree.map(jnp.asarray, Inputs(*inputs, columns))
    found = jax.jit(step, compiler_options=QUICK)(params, given)
    rows, kept = inputs[0].shape if columns is None else columns.shape
    return {n: np.asarray(v).reshape(rows, kept, *v.shape[1:]) for n, v in found.items()}


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference over the largest value; for expert ids, the share that differs."""
    assert found.shape == wanted.shape
    if not np.issubdtype(wanted.dtype, np.floating):
        return float((found != wanted).mean())
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def error_by_token(found: np.ndarray, wanted: np.ndarray) -> float:
    """The same over each token's own largest value, if a token has several."""
    if wanted.ndim == 1:
        return error(found, wanted)
    rows = zip(found, wanted, strict=True)
    return float(np.max([error(ours, theirs) for ours, theirs in rows]))


def errors(
    found: dict[str, np.ndarray],
    truth: list[dict[str, np.ndarray]],
    *,
    shifted: bool = False,
    heads: int = 0,
) -> dict[str, float]:
    """Errors of each tap over all contexts; controls compare the next layer, or another head."""
    worst: dict[str, float] = {}
    for context, wanted in zip(CONTEXTS, truth, strict=True):
        for tap, values in found.items():
            name = further_on(tap, wanted) if shifted else tap
            if name is None:
                continue
            own = context.of(values)
            if tap.startswith("attn_pattern"):
                assert not own[..., len(context.ids) :].any(), "keys beyond the context"
                own = own[..., : len(context.ids)]
            own = np.roll(own, heads, axis=1) if heads else own
            right, every = wanted[name], np.arange(len(own))
            if named_in(tap):  # ids of values that rounding may swap
                own, right = (comparable(tap, ids, every, wanted) for ids in (own, right))
            keep_worst(worst, tap, error(own, right))
    return worst


def further_on(tap: str, wanted: dict[str, np.ndarray]) -> str | None:
    """Return the same site in the next layer that has it in the same shape."""
    site, _, layer = tap.partition(".")
    others = {name: name.partition(".") for name in wanted if layer}
    alike = [
        int(number)
        for name, (other, _, number) in others.items()
        if other == site and wanted[name].shape == wanted[tap].shape
    ]
    later = [number for number in alike if number > int(layer)]
    return f"{site}.{min(later)}" if later else None


def keep_worst(worst: dict[str, float], tap: str, found: float) -> None:
    worst[tap] = float(np.maximum(worst.get(tap, 0.0), found))  # `max` would pass over NaN


def too_far(found: dict[str, float]) -> dict[str, float]:
    return {tap: worst for tap, worst in found.items() if not worst <= TOLERANCE}


def too_near(found: dict[str, float]) -> dict[str, float]:
    return {tap: worst for tap, worst in found.items() if not worst > 100 * TOLERANCE}


def sites(taps: tuple[Tap, ...], *names: str) -> tuple[Tap, ...]:
    return tuple(tap for tap in taps if tap.site in names)


def without_pattern(taps: tuple[Tap, ...]) -> tuple[Tap, ...]:
    """Run with attention weights among the taps, which then mix the values."""
    return tuple(tap for tap in taps if tap.site != "attn_pattern")


def truth_of(model: Any, *which: str) -> list[dict[str, np.ndarray]]:
    return [Reference(model).taps(context.ids, which or None) for context in CONTEXTS]


def assert_agrees(found: dict[str, np.ndarray], truth: list[dict[str, np.ndarray]]) -> None:
    """Check the values, and that those of another layer or head would fail."""
    assert not too_far(errors(found, truth))
    others = errors(found, truth, shifted=True)
    kinds = {tap: (tap.partition(".")[0], value.shape) for tap, value in truth[0].items()}
    layered = {tap: int(tap.partition(".")[2]) for tap in truth[0] if "." in tap}
    last = {kinds[tap]: layer for tap, layer in sorted(layered.items(), key=lambda each: each[1])}
    assert set(others) == {t for t in found if t in layered and layered[t] < last[kinds[t]]}
    assert not too_near(others), "the control must fail"
    heads = {tap: value for tap, value in found.items() if tap.startswith(("q.", "z.", "ssm_z."))}
    assert heads
    assert not too_near(errors(heads, truth, heads=1)), "the control must fail"


@pytest.mark.parametrize("name", some(SUPPORTED, *KINDS))
def test_every_tap_agrees_with_hf(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    depth = {} if pytestconfig.getoption("--chaos-full") else DEPTHS.get(name, {})
    model, checkpoint = saved(SUPPORTED[name], tmp_path, **depth)
    truth = truth_of(model.double() if name in INEXACT else model)
    taps = all_taps(checkpoint.arch)
    assert {tap.name for tap in taps} == set(truth[0])
    assert_agrees(run(checkpoint, without_pattern(taps)), truth)


ATTENTION_FREE = ("mamba2", "mamba2-plain")
ATTENDING = [name for name in SUPPORTED if name not in ATTENTION_FREE]


@pytest.mark.full
@pytest.mark.parametrize("name", ATTENTION_FREE)
def test_a_model_of_state_spaces_alone_has_no_attention(name: str) -> None:
    _, _, arch = architecture(SUPPORTED[name])
    assert not sites(all_taps(arch), "attn_pattern", "z")


@pytest.mark.parametrize("name", some(ATTENDING, "gemma2-gqa"))
def test_attention_weights_agree_with_hf_and_mix_the_values(
    name: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """A cap, windows in every other block, sinks; where they are tapped, they mix the values."""
    model, checkpoint = saved(SUPPORTED[name], tmp_path)
    taps = sites(all_taps(checkpoint.arch), "attn_pattern", "z")
    assert any(tap.site == "attn_pattern" for tap in taps)
    if not pytestconfig.getoption("--chaos-full"):
        taps = tuple(tap for tap in taps if tap.layer in (0, 1))
    assert_agrees(run(checkpoint, taps, masked), truth_of(model, "attn_pattern", "z"))


@pytest.mark.parametrize("name", [*ALIKE, *DEEPER])
def test_logits_agree_with_hf(name: str, tmp_path: Path) -> None:
    """Logits depend on everything that the model computes."""
    model, checkpoint = saved(SUPPORTED[name], tmp_path, **DEPTHS[name])
    assert not too_far(errors(run(checkpoint, (Tap("logits"),), masked), truth_of(model, "logits")))


@cache
def architecture(make: Callable[..., Any]) -> tuple[str, Family, Arch]:
    """Return the class of a model, and what Spile reads from its config."""
    with torch.device("meta"):
        model = make()
    config = json.loads(model.config.to_json_string())
    name = type(model).__name__
    return name, *read_config({**config, "architectures": [name]}, "test")


def switches(arch: Arch) -> set[tuple[str, Any]]:
    """Return a model's features that others lack; for numbers, whether they are the usual ones."""
    parts = [arch, *arch.layers, *([arch.experts] if arch.experts else [])]
    return {
        (each.name, value if isinstance(value, bool | str | None) else value == each.default)
        for part in parts
        for each in fields(part)
        if each.default is not MISSING
        for value in [getattr(part, each.name)]
    }


@pytest.mark.full
def test_every_switch_is_compared_with_hf_in_the_suite() -> None:
    every = {name: architecture(make) for name, make in SUPPORTED.items()}
    assert {family.name for _, family, _ in every.values()} == {family.name for family in KNOWN}
    tried = [partial(SUPPORTED[name], **DEPTHS.get(name, {})) for name in (*KINDS, *ALIKE, *DEEPER)]
    assert set.union(*(switches(arch) for _, _, arch in every.values())) == set.union(
        *(switches(architecture(make)[2]) for make in tried)
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_decoder_cannot_compute_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=REFUSED[name]):
        saved(FAMILIES[name], tmp_path)


@pytest.mark.full
def test_every_architecture_is_tested_with_every_kind_of_heads() -> None:
    queries_per_key: dict[str, set[int]] = {}
    for name, _, arch in map(architecture, SUPPORTED.values()):
        queries_per_key.setdefault(name, set()).add(arch.num_heads // arch.num_kv_heads)
    # families without the choice, and families that share a decoder
    own = ("GPT2LMHeadModel", "GPTNeoXForCausalLM", "GPTJForCausalLM", "OPTForCausalLM",
           "BloomForCausalLM", "GPTNeoForCausalLM", "MptForCausalLM", "DeepseekV2ForCausalLM",
           "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "Mamba2ForCausalLM",
           "KimiLinearForCausalLM")  # fmt: skip
    fewer = {
        **dict.fromkeys(own, {1}), "GPTBigCodeForCausalLM": {4},
        **dict.fromkeys(
            ("Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration",
             "Llama4ForConditionalGeneration", "Mistral3ForConditionalGeneration",
             "Qwen3_5ForConditionalGeneration",
             "Qwen3_5MoeForConditionalGeneration"), {2},
        ),
    }  # fmt: skip
    spelled_otherwise = ("MPTForCausalLM", "PhiMoEForCausalLM")  # by the code that came with them
    known = [n for family in KNOWN for n in family.architectures if n not in spelled_otherwise]
    assert queries_per_key == {name: fewer.get(name, {1, 2, 4}) for name in known}


def test_the_controls_can_fail(tmp_path: Path) -> None:
    """If all blocks and heads are equal, the controls find no difference, and report that."""
    model = randomised(FAMILIES["llama-mha-tied"])
    with torch.no_grad():
        for block in model.model.layers:
            block.load_state_dict(model.model.layers[0].state_dict())
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
            for part in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj):
                part.weight.copy_(part.weight[:12].repeat(4, 1))
    model.save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    truth = truth_of(model)
    found = run(checkpoint, sites(all_taps(checkpoint.arch), "resid_post", "q", "z", "v"), masked)
    assert not too_far(errors(found, truth))
    shifted = errors(found, truth, shifted=True)
    assert too_near(shifted) == shifted
    heads = errors({tap: found[tap] for tap in ("q.0", "z.2")}, truth, heads=1)
    assert too_near(heads) == heads

    # and one value out of place is seen
    worse = {**found, "q.1": found["q.1"].copy()}
    worse["q.1"][1, 63, 3, 11] += 10 * TOLERANCE * np.abs(found["q.1"]).max()
    assert set(too_far(errors(worse, truth))) == {"q.1"}
    worse["q.1"][1, 63, 3, 11] = np.nan
    assert set(too_far(errors(worse, truth))) == {"q.1"}


# -- what is run of the model --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["neox", "gptoss-gqa"])
@FULL
def test_any_mix_of_taps_gives_the_rows_of_a_full_run(name: str, tmp_path: Path) -> None:
    _, checkpoint = saved(SUPPORTED[name], tmp_path)
    taps = without_pattern(all_taps(checkpoint.arch))
    full = run(checkpoint, taps, masked)
    rng = np.random.default_rng(1)
    for count in (4, 12):
        chosen = sorted(rng.choice(len(taps), count, replace=False))
        found = run(checkpoint, tuple(taps[i] for i in chosen), masked)
        assert set(found) == {taps[i].name for i in chosen}
        for tap, values in found.items():
            assert error(values, full[tap]) <= 1e-6, tap


@pytest.mark.parametrize("more", [pytest.param("", marks=FULL), "z:2"])
def test_chosen_heads_are_those_of_the_whole_layer(more: str, tmp_path: Path) -> None:
    """Heads of several layers at once, and beside a tap of all heads."""
    _, checkpoint = saved(SUPPORTED["llama-gqa"], tmp_path)
    text = ",".join(filter(None, ["z:0.h1+h3,z:2.h0,k:1.h1,attn_pattern:1.h2", more]))
    chosen = parse_taps(text, checkpoint.arch)
    whole = {tap.name: Tap(tap.site, tap.layer) for tap in chosen}
    full = run(checkpoint, tuple(dict.fromkeys(whole.values())), masked)
    found = run(checkpoint, chosen, masked)
    for tap in chosen:
        expected = full[whole[tap.name].name]
        expected = expected[:, :, list(tap.heads)] if tap.heads else expected
        assert found[tap.name].shape == expected.shape
        assert error(found[tap.name], expected) <= 1e-6, tap.name


def test_the_deepest_block_need_not_run_to_its_end(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    _, checkpoint = saved(SUPPORTED["llama-gqa"], tmp_path)
    everywhere = ("attn_in", "k_rot", "attn_out", "mlp_in", "mlp_hidden")
    chosen = everywhere if pytestconfig.getoption("--chaos-full") else ("k_rot", "mlp_hidden")
    inside = [Tap(site, 2) for site in chosen]
    below, after = Tap("resid_post", 0), Tap("attn_out", 2)
    full = run(checkpoint, (*inside, below, after, Tap("resid_post", 2)), masked)
    for taps in (*((deepest,) for deepest in inside), (below, after)):
        assert not needs_whole_block(taps, 3)
        for tap, values in run(checkpoint, taps, masked).items():
            assert error(values, full[tap]) <= 1e-6, tap


def test_nothing_is_computed_that_no_tap_needs(tmp_path: Path) -> None:
    _, checkpoint = saved(SUPPORTED["llama-gqa"], tmp_path)
    arch = checkpoint.arch
    schedule = LayerSchedule.of(arch, 1, whole=False)
    params, _ = load_params(checkpoint, schedule, head=True, dtype=jnp.dtype("float32"))

    def products(*taps: Tap) -> float:
        step = partial(Decoder(arch, taps, "float32", masked).forward, schedule=schedule)
        inputs = Inputs(*map(jnp.asarray, BATCH))
        lowered = jax.jit(partial(step, params), compiler_options=QUICK).lower(inputs)
        cost: Any = lowered.compile().cost_analysis()
        return cost["flops"]

    tokens, width = ROWS * SEQ, arch.width
    each = 2 * tokens * width * width  # one square matrix
    costs = {site: products(Tap(site, 0)) for site in ("attn_in", "q", "attn_out", "mlp_hidden")}
    assert costs["attn_in"] < 0.3 * each
    assert each < costs["q"] < 1.3 * each
    # q, k, v and o: 3 square matrices; scores and mixing; two matrices of the MLP
    attention = 3 * each + 4 * tokens * SEQ * width
    assert attention < costs["attn_out"] < 1.5 * attention
    both = 2 * each * arch.mlp_width / width
    assert both < costs["mlp_hidden"] - costs["attn_out"] < 1.2 * both


@pytest.mark.parametrize("name", some(["llama-gqa", "gemma3-gqa"], "llama-gqa"))
def test_no_block_stores_the_stream_that_leaves_the_scan(name: str, tmp_path: Path) -> None:
    _, checkpoint = saved(SUPPORTED[name], tmp_path)
    depth = checkpoint.arch.num_layers
    schedule = LayerSchedule.of(checkpoint.arch, depth, whole=True)
    params, _ = load_params(checkpoint, schedule, head=False, dtype=jnp.dtype("float32"))
    inputs = Inputs(*map(jnp.asarray, BATCH))
    last, before = Tap("resid_post", schedule.scanned - 1), Tap("resid_post", 0)

    def stores(*taps: Tap) -> bool:
        forward = partial(Decoder(checkpoint.arch, taps, "float32", masked).forward, params)
        return "dynamic_update_slice" in str(
            jax.make_jaxpr(partial(forward, schedule=schedule))(inputs)
        )

    assert stores(before, last) and not stores(last)
    found, full = run(checkpoint, (last,), masked), run(checkpoint, (before, last), masked)
    assert error(found[last.name], full[last.name]) <= 1e-6


# how deep the model must run, and whether its last block to the end
DEEP: dict[str, tuple[int, bool]] = {
    "embed": (0, False),
    "resid_pre:0": (0, False),
    "resid_pre:2": (2, True),  # what the block before it leaves
    "attn_out:2": (3, False),
    "attn_out:2,resid_post:1": (3, False),
    "mlp_hidden:2,resid_pre:2": (3, False),
    "mlp_out:2": (3, True),
    "resid_post:2": (3, True),
    "q:0,final_norm": (3, True),
    "entropy": (3, True),
}


def test_only_what_is_tapped_is_loaded_and_run(tmp_path: Path) -> None:
    _, checkpoint = saved(SUPPORTED["llama-gqa"], tmp_path)
    for taps, (depth, whole) in DEEP.items():
        wanted = parse_taps(taps, checkpoint.arch)
        assert max(tap.layers_needed(checkpoint.arch) for tap in wanted) == depth, taps
        assert needs_whole_block(wanted, depth) is whole, taps
    for depth, whole in set(DEEP.values()):
        schedule = LayerSchedule.of(checkpoint.arch, depth, whole=whole)
        params, digests = load_params(checkpoint, schedule, head=False, dtype=jnp.dtype("float32"))
        read = {int(name.split(".")[2]) for name in digests if "layers" in name}
        assert read == set(range(depth))
        assert len(params.tail) == depth - schedule.scanned
        assert schedule.scanned == (depth if whole else max(0, depth - 1))


@pytest.mark.full
def test_blocks_of_several_kinds_may_end_anywhere(tmp_path: Path) -> None:
    """Two periods of six blocks and two more: taps within, at the end of, beyond a period."""
    _, checkpoint = saved(SUPPORTED["gemma3-gqa"], tmp_path, num_hidden_layers=14)
    arch = checkpoint.arch
    assert (arch.period, arch.num_layers) == (6, 14)
    full = run(checkpoint, sites(all_taps(arch), "resid_post", "attn_out"), masked)
    ends = [Tap("resid_post", depth - 1) for depth in (1, 2, 5, 6, 7, 9, 12, 13, 14)]
    # These leave a block unfinished.
    ends += [Tap("attn_out", depth - 1) for depth in (1, 6, 7, 12, 13, 14)]
    for deepest in ends:
        taps = (Tap("attn_out", (deepest.layer or 0) // 2), deepest)
        for tap, values in run(checkpoint, tuple(dict.fromkeys(taps)), masked).items():
            assert error(values, full[tap]) <= 1e-6, (deepest, tap)


@pytest.mark.parametrize("name", ["llama-gqa", pytest.param("mixtral-gqa", marks=FULL)])
@pytest.mark.parametrize("pattern", some([False, True], True))
def test_chosen_columns_are_the_rows_of_a_full_run(
    name: str, pattern: bool, tmp_path: Path
) -> None:
    _, checkpoint = saved(SUPPORTED[name], tmp_path)
    taps = all_taps(checkpoint.arch) if pattern else without_pattern(all_taps(checkpoint.arch))
    # as the packer fills them: ascending, the shorter row then points at its first place
    columns = np.array([[3, 4, 32, 33, 41, 55, 0], [0, 1, 17, 40, 41, 62, 63]], np.int32)
    full, chosen = (run(checkpoint, taps, masked, columns=each) for each in (None, columns))
    for tap in full:
        rows = np.stack([full[tap][row, columns[row]] for row in range(ROWS)])
        looks = tap.partition(".")[0] in ("attn_top_weights", "attn_summary")
        if tap in AFTER_BLOCKS or looks:  # another shape of product, another order of summing
            assert error(chosen[tap], rows) <= 2e-6, tap
        else:
            assert np.array_equal(chosen[tap], rows), tap


def test_only_tapped_layers_look_where_heads_do(tmp_path: Path) -> None:
    """In the scan, whose other layers must not pay; of some heads, at kept tokens only."""
    _, checkpoint = saved(SUPPORTED["llama-gqa"], tmp_path)
    arch = checkpoint.arch
    columns = np.sort(np.random.default_rng(2).permuted(np.tile(np.arange(SEQ), (ROWS, 1)), axis=1)[
        :, :9
    ])  # fmt: skip
    text = "attn_top:0.h1+h3,attn_top_keys:2.h0,attn_summary:1,attn_summary:2.h2"
    chosen = with_tops(parse_taps(text, arch), {"attn_top": 3}, arch, SEQ)
    whole = {tap.name: replace(tap, heads=()) for tap in chosen}
    full = run(checkpoint, tuple(dict.fromkeys(whole.values())), masked)
    found = run(checkpoint, chosen, masked, columns)
    for tap in chosen:
        values = full[whole[tap.name].name][:, :, list(tap.heads) or slice(None)]
        kept = np.stack([values[row, at] for row, at in enumerate(columns)])
        assert found[tap.name].shape == kept.shape
        np.testing.assert_allclose(found[tap.name], kept, atol=1e-5, err_msg=tap.name)

    def branches(text: str) -> int:
        taps = (*parse_taps(text, arch), Tap("resid_post", 2))
        schedule = LayerSchedule.of(arch, 3, whole=True)
        params, _ = load_params(checkpoint, schedule, head=False, dtype=jnp.dtype("float32"))
        step = partial(Decoder(arch, taps, "float32", masked).forward, schedule=schedule)
        program = jax.make_jaxpr(partial(step, params))(Inputs(*map(jnp.asarray, BATCH)))
        # (Choices by platform are conditions, too, until the program is lowered.)
        return str(program).count(" cond[") - str(program).count("platform_index[")

    assert branches("attn_summary:1") == 1, "the other layers skip it"
    assert branches("attn_summary:all") == branches("q:1") == 0
    assert branches("attn_top:1,attn_summary:1") == 1, "one look gives both"


# -- the head ------------------------------------------------------------------------------------

HEAD = (Tap("logits"), Tap("logprob"), Tap("entropy"))


@pytest.mark.parametrize("name", some(["llama-gqa", "gemma2-gqa"], "gemma2-gqa"))
def test_logprob_and_entropy_are_those_of_the_logits(name: str, tmp_path: Path) -> None:
    _, checkpoint = saved(SUPPORTED[name], tmp_path, num_hidden_layers=1)
    found = run(checkpoint, HEAD, masked)
    assert all(np.isfinite(values).all() for values in found.values())
    for context in CONTEXTS:
        logits = context.of(found["logits"]).astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        entropy = -(np.exp(logs) * logs).sum(axis=-1)
        assert error(context.of(found["entropy"]), entropy) <= 1e-6
        logprob = context.of(found["logprob"])
        following = logs[np.arange(len(logs) - 1), context.ids[1:]]
        assert error(logprob[:-1], following) <= 1e-6
        assert logprob[-1] == 0.0
        assert (logprob[:-1] < 0).all()


@pytest.mark.full
def test_the_head_may_run_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, checkpoint = saved(SUPPORTED["gemma2-gqa"], tmp_path, num_hidden_layers=1)
    columns = np.tile(np.arange(3, 40, dtype=np.int32), (ROWS, 1))
    whole, chosen = run(checkpoint, HEAD), run(checkpoint, HEAD, columns=columns)
    for room in (10, 1):  # tokens of each row; 64 is no multiple of 10
        monkeypatch.setattr(ends, "_HEAD_VALUES", room * ROWS * tiny.VOCAB)
        for tap, values in run(checkpoint, HEAD).items():
            assert error(values, whole[tap]) <= 2e-6, (room, tap)
        for tap, values in run(checkpoint, HEAD, columns=columns).items():
            assert error(values, chosen[tap]) <= 2e-6, (room, tap)


def test_logits_are_never_held_whole_where_they_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checkpoint = saved(SUPPORTED["llama-gqa"], tmp_path)
    arch, taps = checkpoint.arch, (Tap("logprob"), Tap("entropy"))
    schedule = LayerSchedule.of(arch, arch.num_layers, whole=True)
    params, _ = load_params(checkpoint, schedule, head=True, dtype=jnp.dtype("float32"))

    def shapes() -> str:
        step = partial(Decoder(arch, taps, "float32", masked).forward, schedule=schedule)
        return str(jax.make_jaxpr(partial(step, params))(Inputs(*map(jnp.asarray, BATCH))))

    assert f"f32[{ROWS},{SEQ},{tiny.VOCAB}]" in shapes()
    monkeypatch.setattr(ends, "_HEAD_VALUES", 8 * ROWS * tiny.VOCAB)
    text = shapes()
    assert f"f32[{ROWS},{SEQ},{tiny.VOCAB}]" not in text
    assert f"f32[{ROWS},8,{tiny.VOCAB}]" in text


# -- packing -------------------------------------------------------------------------------------


PACKED = [
    ("gptoss-gqa", "resid_post:all"),  # all else would show there
    ("gemma2-gqa", "attn_pattern:0+1,z:1"),
    ("llama4-gqa", "resid_post:all,q_rot:2"),
    # (Chunks are cut elsewhere in a packed context, so sums round otherwise: at the fifth layer the
    # difference is 1.5e-6.)
    ("qwen35-gqa", "resid_post:0+1,conv_out:0+2,delta_state_norm:0"),
    ("kimilinear", "resid_post:0+1,conv_out:0+2,kv_latent:1"),
    ("deepseek3", "resid_post:all,kv_latent:1,k_rot:all,z:2"),
    ("mamba2", "resid_post:0,conv_out:all,ssm_read:0,ssm_z:0"),
    ("lfm2-gqa", "resid_post:all,conv_out:all,z:all"),
    ("gemma4-gqa", "resid_post:0-4,layer_embed:all,k_rot:all,z:4"),
    ("gptoss-gqa", "attn_pattern:all,q_rot:all,expert_ids:all,logits"),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "which"), PACKED)
def test_a_context_is_the_same_alone_and_packed(name: str, which: str, tmp_path: Path) -> None:
    """(The suite compares packed rows with HF's rows of each context alone, by a coarser bound.)"""
    for tap, own, alone in alone_and_packed(name, which, BLOCKED, tmp_path):
        assert error(own, alone) <= 1e-6, tap
        if tap.startswith("attn_pattern"):
            by_head = own.swapaxes(0, 1)
            assert not np.triu(by_head, 1).any(), "keys after the query, or of another context"
            assert (by_head[:, :WINDOW, 0] > 0).all(), "keys count from the context's start"


# Attention in blocks sums over keys from where their block begins, and that is elsewhere in a
# packed context: at its sixth layer Gemma 4 differs by 1.02e-6. Blocks of one query end with it.
BY_QUERY = {
    "gemma4-gqa": "resid_post:all,layer_embed_out:all,mlp_out:all",
    "gemma4-experts-all": "resid_post:all,expert_weights:all",
    "deepseek3": "resid_post:all,kv_latent:all",
    "gptoss-gqa": "resid_post:all,logits",
}


@pytest.mark.full
@pytest.mark.parametrize("name", BY_QUERY)
def test_packing_changes_nothing_where_keys_are_summed_in_one_order(
    name: str, tmp_path: Path
) -> None:
    by_query = partial(blocked, block=1)
    for tap, own, alone in alone_and_packed(name, BY_QUERY[name], by_query, tmp_path):
        assert np.array_equal(own, alone), tap


def alone_and_packed(
    name: str, which: str, attention: Attention, directory: Path
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Each tap's values of contexts that share a row, and of the same contexts in separate rows."""
    _, checkpoint = saved(SUPPORTED[name], directory)
    contexts, inputs = batch(((33, 9, 14), (33,), (9,), (14,)))
    pairs = list(zip(contexts[:3], contexts[3:], strict=True))
    for packed, alone in pairs:
        alone.of(inputs[0])[:] = packed.ids
    found = run(checkpoint, parse_taps(which, checkpoint.arch), attention, inputs=inputs)
    for packed, alone in pairs:
        for tap, values in found.items():
            yield tap, packed.of(values), alone.of(values)


# -- bfloat16 ------------------------------------------------------------------------------------


def native(checkpoint: Checkpoint) -> Attention:
    """The kernel that `spile extract` uses here: a packed one on GPUs, if it fits the model."""
    platform = jax.default_backend()
    if platform == "cpu":
        return BLOCKED
    return for_platform(platform, checkpoint.arch, "bfloat16", seq_len=SEQ, contexts=16)


COARSE = {
    "llama": "llama-gqa", "mistral": "mistral-window", "qwen2": "qwen2", "qwen3": "qwen3-gqa",
    "gemma": "gemma-gqa", "gemma2": "gemma2-gqa", "gemma3": "gemma3-gqa", "gpt2": "gpt2",
    "gpt_neox": "neox", "phi3": "phi3-gqa", "olmo2": "olmo2-gqa", "mixtral": "mixtral-gqa",
    "qwen3_moe": "qwen3moe-gqa", "gpt_oss": "gptoss-gqa", "starcoder2": "starcoder2-gqa",
    "olmo3": "olmo3-gqa", "smollm3": "smollm3-gqa", "seed_oss": "seedoss-gqa",
    "arcee": "arcee-gqa", "cohere": "cohere-mha-qknorm", "cohere2": "cohere2-gqa",
    "granite": "granite-gqa", "granitemoe": "granitemoe-gqa", "glm": "glm-gqa", "glm4": "glm4-gqa",
    "glm4_moe": "glm4moe-gqa", "olmo": "olmo-gqa", "olmoe": "olmoe-gqa",
    "qwen2_moe": "qwen2moe-gqa", "exaone4": "exaone4-gqa", "ernie4_5": "ernie45-gqa",
    "ernie4_5_moe": "ernie45moe-gqa", "dots1": "dots1-gqa", "minimax_m2": "minimaxm2-gqa",
    "phi": "phi-gqa", "stablelm": "stablelm-gqa", "gptj": "gptj", "opt": "opt", "bloom": "bloom",
    "falcon": "falcon-mqa", "falcon-grouped": "falcon-gqa",
    "falcon-grouped-one-norm": "falcon-mha-one-norm", "gpt_neo": "gptneo",
    "gpt_bigcode": "gptbigcode-mqa", "mpt": "mpt", "hunyuan_v1_dense": "hunyuan-mqa",
    "apertus": "apertus-gqa", "ministral3": "ministral3-gqa", "qwen3_next": "qwen3next-gqa",
    "deepseek_v2": "deepseek2", "deepseek_v2-greedy": "deepseek2-greedy-own-queries",
    "deepseek_v3": "deepseek3", "glm4_moe_lite": "glm4moelite",
    "qwen3_5": "qwen35-gqa", "qwen3_5_moe": "qwen35moe-gqa", "olmo_hybrid": "olmohybrid-gqa",
    "llama4": "llama4-gqa", "mamba2": "mamba2", "bamba": "bamba-gqa",
    "granitemoehybrid": "granitehybrid-gqa", "granitemoehybrid-dense": "granitehybrid-mqa-dense",
    "nemotron_h": "nemotronh-gqa", "falcon_h1": "falconh1-gqa", "lfm2": "lfm2-gqa",
    "gemma4": "gemma4-gqa", "gemma4-experts": "gemma4-experts", "phimoe": "phimoe-mha-bias",
    "muse_glimmer": "museglimmer-gqa", "kimi_linear": "kimilinear",
}  # fmt: skip
# What makes each choose every expert; the first ones choose by the logits alone.
BY_LOGITS = ("mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe", "olmoe", "granitemoe", "qwen3_next",
             "qwen3_5_moe", "granitemoehybrid")  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys((*BY_LOGITS, "glm4_moe", "minimax_m2", "llama4"), {"num_experts_per_tok": 6}),
    "ernie4_5_moe": {"moe_k": 6},
    "gemma4-experts": {"top_k_experts": 6},
    "phimoe": {"num_local_experts": 2},  # (two are chosen in any case)
    **dict.fromkeys(
        (
            "dots1",
            "deepseek_v2",
            "deepseek_v2-greedy",
            "deepseek_v3",
            "glm4_moe_lite",
            "kimi_linear",
            "nemotron_h",
        ),
        {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
    ),
}
ROUNDED = ("attn_out", "ssm_out", "mlp_out", "resid_post", "final_norm")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch without bf16 hardware
@pytest.mark.parametrize("family", some(COARSE, "llama", "gemma2", "gpt2", "qwen3_moe", "gpt_oss"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_stay_within_twice_their_own_floor(dtype: str, family: str, tmp_path: Path) -> None:
    """The distance of HF in that dtype from HF-float32, in the mean over each tap.

    It is 0.9 to 1.2 of it in bfloat16, and less in float16, where only HF's stream is in it, too.

    Rounding may choose another expert, and from there on nothing is comparable; so every expert
    is chosen here, and their weights still depend on the router. The choice has its own test.
    """
    model, checkpoint = saved(SUPPORTED[COARSE[family]], tmp_path, **EXPERTS.get(family, {}))
    assert checkpoint.family.name == family
    coarse = type(model).from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    taps = sites(all_taps(checkpoint.arch), *ROUNDED)
    attention = native(checkpoint)
    if dtype == "float16":
        attention = partial(narrowed, attention=attention)
    found = run(checkpoint, taps, attention, dtype=dtype)
    ours, floor = dict.fromkeys(found, 0.0), dict.fromkeys(found, 0.0)
    for context in CONTEXTS:
        exact, rough = (Reference(m).taps(context.ids, ROUNDED) for m in (model, coarse))
        for tap in found:
            ours[tap] += float(np.abs(context.of(found[tap]) - exact[tap]).sum())
            floor[tap] += float(np.abs(rough[tap] - exact[tap]).sum())
    assert all(floor.values())
    assert {tap: ours[tap] / floor[tap] for tap in found if not ours[tap] <= 2 * floor[tap]} == {}


def test_every_family_is_tested_in_bfloat16() -> None:
    alone = {family.name for family in KNOWN if family.nested is None}
    assert set(COARSE) == alone | {"muse_glimmer"}  # others' towers have the decoder of another row


@pytest.mark.parametrize("family", some(BY_LOGITS, "gpt_oss"))
def test_bfloat16_chooses_the_same_experts_where_the_choice_is_clear(
    family: str, tmp_path: Path
) -> None:
    model, checkpoint = saved(SUPPORTED[COARSE[family]], tmp_path)
    experts = checkpoint.arch.experts
    assert experts
    taps = (Tap("expert_ids", 0), Tap("expert_weights", 0))
    found = run(checkpoint, taps, native(checkpoint), dtype="bfloat16")
    clear = 0
    for context in CONTEXTS:
        exact = Reference(model).taps(context.ids, ("router_logits.0", "expert_ids.0"))
        logits = -np.sort(-exact["router_logits.0"], axis=-1)
        gaps = logits[:, : experts.chosen] - logits[:, 1 : experts.chosen + 1]
        sure = gaps.min(axis=-1) > 0.1  # far beyond bfloat16's rounding of values about one
        assert np.array_equal(context.of(found["expert_ids.0"])[sure], exact["expert_ids.0"][sure])
        clear += int(sure.sum())
    assert clear > 30


# -- from documents to stored rows ---------------------------------------------------------------


def contexts_of(ds: spile.Dataset) -> list[tuple[int, int]]:
    """The rows of each context."""
    flags = ds.index(0, ds.num_tokens)["flags"]
    starts = np.flatnonzero(flags & spile.FLAGS["first"])
    return list(zip(starts.tolist(), [*starts[1:].tolist(), ds.num_tokens], strict=True))


def stored_errors(
    ds: spile.Dataset,
    model: Any,
    contexts: list[tuple[int, int]],
    *,
    shift: int = 0,
    measure: Callable[[np.ndarray, np.ndarray], float] = error,
) -> dict[str, float]:
    """Errors of each tap; `shift` compares another layer."""
    reference = Reference(model)
    layers = range(model.config.num_hidden_layers)
    worst: dict[str, float] = {}
    for start, stop in contexts:
        theirs: dict[str, str] = {}
        for tap in ds.taps:
            site, _, layer = tap.partition(".")
            if not shift or (layer and int(layer) + shift in layers):
                theirs[tap] = f"{site}.{int(layer) + shift}" if layer else tap
        wanted = reference.taps(ds.index(start, stop)["token_id"], set(theirs.values()))
        for tap, name in theirs.items():
            values = np.asarray(ds.read(tap, start, stop))
            assert values.shape == (stop - start, *ds.shape(tap))
            if tap.startswith("attn_pattern"):
                assert not values[..., stop - start :].any()
                values = values[..., : stop - start]
            keep_worst(worst, tap, measure(values, wanted[name]))
    return worst


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        # (In the suite tests/check/test_compare.py does this.)
        *(
            pytest.param(n, pack, marks=FULL)
            for n in ("gpt2", *STORED_TOO)
            for pack in ("ffd", "none")
        ),
    ],
)
def test_what_is_stored_agrees_with_hf(name: str, pack: str, tmp_path: Path) -> None:
    model, checkpoint = saved(SUPPORTED[name], tmp_path / "model")
    # one tap of every site, at various depths; of fewer, but with attention's weights
    there = {tap.site for tap in all_taps(checkpoint.arch)}
    there -= (
        {"attn_pattern"} if pack == "ffd" else {"q", "k", "k_rot", "attn_in", "mlp_in", "embed"}
    )
    taps = [
        f"{site}.{i % checkpoint.arch.num_layers}" if SITES[site].layered else site
        for i, site in enumerate(SITES)
        if site in there
    ]
    # from a few tokens to several contexts, so that packing and splitting both occur
    corpus = tiny.write_corpus(tmp_path / "docs.jsonl", 8, seed=3, mean=2.6)
    recipe = spile.Recipe(
        model=str(tmp_path / "model"),
        corpus=str(corpus),
        taps=",".join(taps),
        seq_len=96,
        pack=pack,
        compute_dtype="float32",
    )
    spile.extract(recipe, str(tmp_path / "out"))
    ds = spile.open(str(tmp_path / "out"))
    assert set(ds.taps) == set(taps)
    contexts = contexts_of(ds)
    assert (ds.index(0, ds.num_tokens)["offset"] >= 96).any(), "no document was split"
    assert len(contexts) > 8

    assert not too_far(stored_errors(ds, model, contexts))
    others = stored_errors(ds, model, contexts, shift=-1)
    assert len(others) > 4
    assert not too_near(others), "the control must fail"


@pytest.mark.full
def test_the_demo_model_agrees_with_hf(tmp_path: Path) -> None:
    recipe = spile.Recipe(
        model="demo",
        corpus="demo",
        taps="embed,resid_pre:0+15,attn_in:4,q:9,k:21,v:2,q_rot:14,k_rot:28,z:0+29,attn_out:3+29,"
        "resid_mid:7,mlp_in:18,mlp_hidden:1+25,mlp_out:11+29,resid_post:0+20+28+29,final_norm,"
        "logprob,entropy",
        seq_len=64,
        max_docs=1,
        compute_dtype="float32",
    )
    spile.extract(recipe, str(tmp_path / "out"))
    ds = spile.open(str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32)
    contexts = contexts_of(ds)
    assert len(contexts) > 3
    # a real model's first token holds values a thousand times larger than the rest
    by_token = partial(stored_errors, ds, model, measure=error_by_token)
    assert not too_far(by_token(contexts))
    assert not too_near(by_token(contexts[:1], shift=-1)), "the control must fail"


@pytest.mark.full
def test_a_document_is_stored_the_same_alone_and_packed(tmp_path: Path, model: Path) -> None:
    corpus = tiny.write_corpus(tmp_path / "docs.jsonl", 20, seed=5)
    lines = corpus.read_text().splitlines()
    common: dict[str, Any] = {
        "model": str(model),
        "taps": "resid_post:all,attn_pattern:1",
        "compute_dtype": "float32",
    }
    spile.extract(spile.Recipe(corpus=str(corpus), **common), str(tmp_path / "packed"))
    packed = spile.open(str(tmp_path / "packed"))
    doc = 7
    alone_corpus = tmp_path / "alone.jsonl"
    alone_corpus.write_text(lines[doc] + "\n")
    spile.extract(spile.Recipe(corpus=str(alone_corpus), **common), str(tmp_path / "alone"))
    alone, together = spile.open(str(tmp_path / "alone")).document(0), packed.document(doc)
    assert np.array_equal(alone.index["token_id"], together.index["token_id"])
    for tap in packed.taps:
        assert error(together.read(tap), alone.read(tap)) <= 1e-5


def test_configs_written_by_transformers_5_and_4_load_alike(tmp_path: Path) -> None:
    _, new = saved(SUPPORTED["llama3-rope"], tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert "rope_parameters" in config, "transformers 5 writes rope_parameters"
    scaling = dict(config["rope_parameters"])
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "dtype")}
    old |= {"rope_theta": scaling.pop("rope_theta"), "torch_dtype": "float32"}
    path.write_text(json.dumps({**old, "rope_scaling": scaling}))
    assert open_checkpoint(str(tmp_path)).arch == new.arch
    plain = {k: v for k, v in old.items() if k != "rope_scaling"}
    path.write_text(json.dumps(plain))
    assert open_checkpoint(str(tmp_path)).arch != new.arch, "the scaling tells"
