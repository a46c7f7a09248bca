"""A spliced forward agrees with HF transformers, where hooks change the same tensors."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from spile.core.errors import ConfigError
from spile.models.files.checkpoint import Checkpoint, open_checkpoint
from spile.models.forward.attention import masked
from spile.models.forward.decoder import Decoder, Inputs
from spile.models.forward.splice import Change, added, only, replaced
from spile.models.forward.weight_loader import load_params
from spile.models.forward.weights import LayerSchedule
from spile.models.sites import SPLICED
from spile.models.taps import Tap, all_taps, parse_taps
from support import quick, tiny
from support.families import FAMILIES, randomised
from support.marks import some

TOLERANCE = 2e-5  # of the largest logit
# Two contexts in a row, and padding.
LENGTHS = (17, 11)
STARTS = (0, 17)
SEQ = 32
STREAM = ("embed", "resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
OWN_EMBEDDINGS = ("layer_embed", "layer_embed_out")
INSIDE = ("attn_in", "q", "k", "v", "z", "mlp_in", "mlp_hidden")

# Where nothing passes, nothing comes out of the mixer.
SHUT = {
    "falconh1-gqa": ("conv_out", "ssm_read", "ssm_gate", "ssm_z"),
    "lfm2-gqa": ("conv_in", "conv_out", "conv_gate"),
}

Make = Callable[[torch.Tensor], torch.Tensor]


def test_every_site_that_can_be_spliced_is_tested() -> None:
    assert set(SPLICED) == {
        *STREAM,
        *INSIDE,
        "shared_expert_out",
        "attn_gate",
        "kv_latent",
        "ssm_in",
        "ssm_out",
        *(site for sites in SHUT.values() for site in sites),
        *OWN_EMBEDDINGS,
    }


def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, positions, segments = np.zeros((3, 1, SEQ), np.int32)
    rng = np.random.default_rng(0)
    for number, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True), 1):
        own = slice(start, start + length)
        tokens[0, own] = rng.integers(0, 250, length)
        positions[0, own], segments[0, own] = np.arange(length), number
    return tokens, positions, segments


TOKENS, POSITIONS, SEGMENTS = batch()


class Ours:
    """A model, and its logits with changes."""

    def __init__(self, make: Callable[[], Any], directory: Path) -> None:
        self.hf = randomised(make)
        self.hf.save_pretrained(directory)
        tiny.write_tokenizer(directory)
        self.checkpoint: Checkpoint = open_checkpoint(str(directory))
        self.arch = self.checkpoint.arch
        self.schedule = LayerSchedule.of(self.arch, self.arch.num_layers, whole=True)
        dtype = jnp.dtype("float32")
        self.params, _ = load_params(self.checkpoint, self.schedule, head=True, dtype=dtype)

    def step(self, taps: str, changes: dict[Tap, Change] | None = None) -> Callable[..., Any]:
        chosen = parse_taps(taps, self.arch)
        made = Decoder(self.arch, chosen, "float32", masked, splice=changes or {})
        return lambda params, *inputs: made.forward(params, Inputs(*inputs), self.schedule)

    def run(self, taps: str, changes: dict[Tap, Change] | None = None) -> dict[str, np.ndarray]:
        step = jax.jit(self.step(taps, changes), compiler_options=quick.OPTIONS)
        found = step(self.params, *map(jnp.asarray, (TOKENS, POSITIONS, SEGMENTS)))
        return {tap: np.asarray(values) for tap, values in found.items()}

    def logits(self, changes: dict[Tap, Change] | None = None) -> np.ndarray:
        return self.run("logits", changes)["logits"]

    def taps(self, *sites: str) -> list[Tap]:
        """Changes in the first and the last block: in and behind the scan, or at its ends."""
        layers = (None, 0, self.arch.num_layers - 1)
        # The stream that enters the first block is the embeddings; where none are added to it,
        # both are one tensor of HF's.
        return [
            tap for tap in all_taps(self.arch)
            if tap.site in sites and tap.layer in layers and tap != Tap("resid_pre", 0)
        ]  # fmt: skip

    def theirs(self, deltas: dict[Tap, np.ndarray]) -> np.ndarray:
        """HF's logits where hooks add the same to the same tensors, context by context."""
        found = np.zeros((SEQ, self.arch.vocab_size), np.float32)
        for start, length in zip(STARTS, LENGTHS, strict=True):
            own = slice(start, start + length)
            with ExitStack() as hooks, torch.no_grad():
                for tap, delta in deltas.items():
                    part = torch.from_numpy(delta[0, own].reshape(length, -1))[None]
                    hooks.enter_context(changed(self.hf, tap, lambda x, part=part: x + part))
                ids = torch.from_numpy(TOKENS[:, own].astype(np.int64))
                found[own] = self.hf(input_ids=ids, use_cache=False).logits[0].numpy()
        return found

    def deltas(self, *sites: str) -> dict[Tap, np.ndarray]:
        rng = np.random.default_rng(1)
        return {
            tap: 0.3 * rng.standard_normal((1, SEQ, *tap.shape(self.arch, SEQ)), np.float32)
            for tap in self.taps(*sites)
        }


@contextmanager
def changed(model: Any, tap: Tap, make: Make) -> Iterator[None]:
    """Replace a tensor inside HF's model by a function of it."""
    body = model.get_decoder()
    blocks = getattr(body, "layers", None) or body.h
    block = blocks[tap.layer or 0]
    names = ("self_attn", "attn", "attention", "linear_attn", "mamba")
    attention = next(getattr(block, n) for n in names if hasattr(block, n))
    mlp = getattr(block, "mlp", None) or block.feed_forward
    sandwich = hasattr(block, "post_feedforward_layernorm")
    # Embeddings enter the first block as they are; where blocks have some of their own, not alone.
    alone = hasattr(body, "rotary_emb") and not hasattr(body, "embed_tokens_per_layer")
    side, module = {
        "embed": ("in", blocks[0]) if alone else ("out", model.get_input_embeddings()),
        "resid_pre": ("in", block),
        "attn_in": ("in", attention),
        "ssm_in": ("in", attention),
        "ssm_out": ("out", attention),
        "attn_out": ("out", block.post_attention_layernorm if sandwich else attention),
        # To add to the stream behind attention is to add to what attention adds.
        "resid_mid": ("out", block.post_attention_layernorm if sandwich else attention),
        "mlp_in": ("in", mlp),
        "mlp_out": ("out", block.post_feedforward_layernorm if sandwich else mlp),
        "resid_post": ("out", block),
        **{n: ("out", getattr(attention, f"{n}_proj", None)) for n in "qkv"},
        "z": ("in", getattr(attention, "o_proj", getattr(attention, "out_proj", None))),
        "mlp_hidden": ("in", getattr(mlp, "down_proj", None)),
        "shared_expert_out": ("out", getattr(mlp, "shared_experts", None)),
        "kv_latent": ("out", getattr(attention, "kv_a_layernorm", None)),
        "layer_embed": ("in", block),
        "layer_embed_out": ("out", getattr(block, "post_per_layer_input_norm", None)),
    }[tap.site]

    def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if args:
            place = int(tap.site == "layer_embed")  # it is given to the block after the stream
            return (*args[:place], make(args[place]), *args[place + 1 :]), named
        return args, {**named, "hidden_states": make(named["hidden_states"])}

    def after(module: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (make(output[0]), *output[1:])
        return make(output)

    if side == "in":
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def far(found: np.ndarray, wanted: np.ndarray) -> float:
    real = SEGMENTS[0] > 0
    return float(np.abs(found - wanted)[real].max() / np.abs(wanted[real]).max())


def test_a_gate_that_is_shut_lets_nothing_pass(tmp_path: Path) -> None:
    """One layer attends; the other has the gated delta rule, which reads convolved values."""
    ours = Ours(partial(FAMILIES["qwen35-gqa"], num_hidden_layers=2), tmp_path)
    shut = replaced(jnp.zeros(()))
    for tap in (Tap("attn_gate", 1), Tap("conv_out", 0)):  # (other gates: in `SHUT`)
        found = ours.run("z:all,attn_out:all", {tap: shut})
        for site in ("z", "attn_out"):
            assert not found[f"{site}.{tap.layer}"].any()
            assert found[f"{site}.{1 - (tap.layer or 0)}"].any()


@pytest.mark.parametrize(
    ("name", "site"),
    some([(name, site) for name, sites in SHUT.items() for site in sites],
         ("falconh1-gqa", "ssm_gate")),
)  # fmt: skip
def test_what_is_shut_inside_another_mixer_lets_nothing_pass(
    name: str, site: str, tmp_path: Path
) -> None:
    ours = Ours(partial(FAMILIES[name], num_hidden_layers=2), tmp_path)
    out = "ssm_out" if name == "falconh1-gqa" else "attn_out"
    found = ours.run(f"{site}:0,{out}:0", {Tap(site, 0): replaced(jnp.zeros(()))})
    assert not found[f"{site}.0"].any()
    assert not found[f"{out}.0"].any()
    assert ours.run(f"{out}:0")[f"{out}.0"].any()


@pytest.mark.parametrize(
    ("name", "sites"),
    [
        ("llama-gqa", (*STREAM, *INSIDE)),
        pytest.param("gemma2-gqa", STREAM, marks=pytest.mark.full),  # two kinds of blocks in turn
        pytest.param("neox", STREAM, marks=pytest.mark.full),
        # a plain block before those of the scan
        pytest.param(
            "glm4moe-gqa", ("shared_expert_out", "attn_out", "resid_post"), marks=pytest.mark.full
        ),
        pytest.param("llama-gqa", INSIDE, marks=pytest.mark.full),
        *(
            pytest.param(name, STREAM, marks=pytest.mark.full)
            for name in (
                "llama-gqa",
                "gpt2",  # in the suite: the test below
                "gemma3-gqa",
                "mixtral-gqa",
                "qwen3-gqa",
                "olmo2-gqa",
                "phi3-gqa",
                "gptoss-gqa",
                "qwen35-gqa",
            )
        ),
        pytest.param("qwen35-gqa", ("attn_in", "z", "mlp_hidden"), marks=pytest.mark.full),
        pytest.param(
            "bamba-gqa",
            ("embed", "resid_pre", "ssm_in", "ssm_out", "resid_mid", "mlp_in", "mlp_out"),
            marks=pytest.mark.full,
        ),
        pytest.param("gemma4-gqa", (*STREAM, *OWN_EMBEDDINGS), marks=pytest.mark.full),
        pytest.param("gemma4-gqa", ("q", "k", "z", "mlp_hidden"), marks=pytest.mark.full),
        pytest.param("deepseek3", ("kv_latent", "attn_in", "z"), marks=pytest.mark.full),
    ],
    ids=lambda given: given if isinstance(given, str) else str(len(given)),
)
def test_changes_at_every_site_agree_with_hooks_in_hf(
    name: str, sites: tuple[str, ...], tmp_path: Path
) -> None:
    """All changes at once, so that a missing or repeated one would show."""
    ours = Ours(FAMILIES[name], tmp_path)
    deltas = ours.deltas(*sites)
    assert {tap.site for tap in deltas} == {
        site for site in sites if site != "resid_mid" or not ours.arch.parallel
    }
    found = ours.logits({tap: added(jnp.asarray(delta)) for tap, delta in deltas.items()})
    assert far(found, ours.theirs(deltas)) <= TOLERANCE
    for left_out in deltas:
        others = {tap: delta for tap, delta in deltas.items() if tap != left_out}
        assert far(found, ours.theirs(others)) > 100 * TOLERANCE, left_out


def test_the_stream_that_enters_the_first_block_has_its_positions(tmp_path: Path) -> None:
    ours = Ours(FAMILIES["gpt2"], tmp_path)
    clean = ours.run("logits,resid_pre:0")
    change = {Tap("resid_pre", 0): replaced(jnp.asarray(clean["resid_pre.0"][None]))}
    assert far(ours.logits(change), clean["logits"]) <= 1e-6
    change = {Tap("embed"): replaced(jnp.asarray(clean["resid_pre.0"][None]))}
    assert far(ours.logits(change), clean["logits"]) > 100 * TOLERANCE


def test_only_the_chosen_tokens_are_patched(tmp_path: Path) -> None:
    ours = Ours(FAMILIES["llama-gqa"], tmp_path)
    new = np.random.default_rng(2).standard_normal((1, SEQ, ours.arch.width), np.float32)
    where = np.zeros((1, SEQ), bool)
    where[0, [3, 20]] = True  # one of each context
    change = only(jnp.asarray(where), replaced(jnp.asarray(new)))
    taps = "resid_post:0+1,logits"
    clean, found = ours.run(taps), ours.run(taps, {Tap("resid_post", 1): change})
    assert np.array_equal(found["resid_post.0"], clean["resid_post.0"])
    wanted = np.where(where[0][:, None], new[0], clean["resid_post.1"])
    assert np.array_equal(found["resid_post.1"], wanted), "a tap shows what the model goes on with"
    before = [*range(3), *range(17, 20)]
    np.testing.assert_allclose(
        found["logits"][before], clean["logits"][before], rtol=1e-5, atol=1e-5
    )
    after = [*range(3, 17), *range(20, 28)]
    assert (np.abs(found["logits"][after] - clean["logits"][after]).max(axis=1) > 1e-3).all()


def test_a_model_that_is_not_spliced_is_the_same_program(tmp_path: Path) -> None:
    ours = Ours(FAMILIES["gemma2-gqa"], tmp_path)

    def program(changes: dict[Tap, Change] | None) -> str:
        step = ours.step("resid_post:all,logits", changes)
        return str(jax.make_jaxpr(partial(step, ours.params))(TOKENS, POSITIONS, SEGMENTS))

    plain = program(None)
    assert program({}) == plain
    assert program({Tap("mlp_out", 1): lambda x: x}).count(" cond[") == plain.count(" cond[") + 1


def test_one_place_cannot_be_changed_twice(tmp_path: Path) -> None:
    ours = Ours(FAMILIES["llama-gqa"], tmp_path)
    both: dict[Tap, Change] = {
        Tap("resid_pre", 2): jnp.negative,
        Tap("resid_post", 1): jnp.negative,
    }
    with pytest.raises(ConfigError, match="resid_pre of a block is resid_post of the one before"):
        ours.logits(both)


def test_a_change_of_shape_is_refused_by_name(tmp_path: Path) -> None:
    ours = Ours(FAMILIES["llama-gqa"], tmp_path)
    with pytest.raises(ConfigError, match=r"splice mlp_out\.1: \(1, 32, 48\) became \(1, 32\)"):
        ours.logits({Tap("mlp_out", 1): lambda x: x[..., 0]})
