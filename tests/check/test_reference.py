"""The ground truth agrees with itself: each tap follows from other taps and the weights."""

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma3ForCausalLM

from spile.check.hf_arithmetic import mixed_in_float8
from spile.check.reference import Reference
from spile.models.config.hf_config import read_config
from spile.models.forward.moe import mix
from spile.models.forward.ops import Float8Weight
from support import families
from support.families import FAMILIES, REFUSED, WINDOW, randomised
from support.marks import some

TOLERANCE = 2e-5  # of the largest value
IDS = ("expert_ids", "attn_top_keys", "next_rank", "top_token_ids")
WIDE = ("attn_summary", "logprob", "entropy", "logsumexp", "top_logprobs")
LENGTH = 70  # beyond the window, and beyond longrope's original length
SCALE_24 = ("gemma2", "gemma3")  # query_pre_attn_scalar instead of the head's width
SANDWICH = ("gemma2", "gemma3", "olmo2")
MOE = [name for name in FAMILIES if name.startswith(("mixtral", "qwen3moe", "gptoss"))]
WINDOWED = {  # layers
    "mistral-window": (0, 1, 2),
    "qwen2-window": (1, 2),
    "phi3-window": (0, 1, 2),
    "mixtral-mqa-window": (0, 1, 2),
    "starcoder2-mqa-window": (0, 1, 2),
    "gemma2": (0, 2),
    "gptoss": (0, 2),
    "gemma3": (0, 1, 2, 3, 4, 6, 7),
}
# The suite takes each family once, in the variant that has most to it.
FEW = ("llama-mqa-bias", "mistral-window", "qwen2-window", "qwen3-mqa", "gemma-gqa", "gemma2-gqa",
       "gemma3-gqa", "gpt2", "neox", "neox-sequential", "phi3-longrope-partial", "olmo2-gqa",
       "mixtral-mqa-window", "qwen3moe-mqa-mixed", "gptoss-gqa", "starcoder2-gqa",
       "stablelm-mqa-parallel-qknorm")  # fmt: skip
# Scope "module": all tests of one model run one after the other, in one process.
# The arithmetic below knows these; others are held to HF's own outputs, and to sums.
OTHERS = (
    "apertus", "bloom", "cohere", "dots1", "ernie45", "exaone4", "falcon", "glm", "gptbigcode",
    "gptj", "gptneo", "granite", "hunyuan", "minimaxm2", "ministral3", "mpt", "olmo-", "olmoe",
    "opt", "phi-", "qwen2moe", "mamba2", "bamba", "nemotronh", "lfm2", "gemma4", "deepseek",
    "kimilinear", "llama4", "olmo3", "olmohybrid", "phimoe", "qwen35", "qwen3next", "smollm3",
)  # fmt: skip
FOLLOWED = [name for name in FAMILIES if not name.startswith(OTHERS)]
IN_PARALLEL = ("cohere", "falcon-", "gptj", "phi-")
each_family = pytest.mark.parametrize("name", some(FOLLOWED, *FEW), scope="module")
COMPUTED = [name for name in FAMILIES if name in FOLLOWED or name not in REFUSED]
any_family = pytest.mark.parametrize("name", some(COMPUTED, *FEW), scope="module")


@dataclass(frozen=True)
class Case:
    """A model, one context, and its taps."""

    name: str
    model: Any
    ids: np.ndarray
    taps: dict[str, np.ndarray]
    weights: dict[str, Tensor]

    @property
    def layers(self) -> range:
        return range(self.model.config.num_hidden_layers)

    @property
    def body(self) -> Any:
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def parallel(self) -> bool:
        known = ("neox", "neox-tied-unbiased", "stablelm-mqa-parallel-qknorm")
        return self.name in known or self.name.startswith(IN_PARALLEL)

    def get(self, site: str, layer: int) -> Tensor:
        return torch.from_numpy(self.taps[f"{site}.{layer}"])

    def key(self, layer: int, part: str) -> str:
        prefix = {"gpt2": "transformer.h", "neox": "gpt_neox.layers"}
        return f"{prefix.get(self.name.split('-')[0], 'model.layers')}.{layer}.{part}"

    def linear(self, value: Tensor, layer: int, part: str) -> Tensor:
        weight = self.weights[self.key(layer, f"{part}.weight")]
        if self.name.startswith("gpt2"):  # stored [in, out]
            weight = weight.T
        return F.linear(value, weight, self.weights.get(self.key(layer, f"{part}.bias")))

    def norm(self, value: Tensor, key: str) -> Tensor:
        """Norm by hand: layer norms have a bias or are StableLM's; others are RMS; Gemma adds 1."""
        config = self.model.config
        eps = next(
            getattr(config, name)
            for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
            if hasattr(config, name)
        )
        weight, bias = self.weights[f"{key}.weight"], self.weights.get(f"{key}.bias")
        if bias is not None or self.name.startswith("stablelm"):
            value = value - value.mean(-1, keepdim=True)
        value = value / (value.square().mean(-1, keepdim=True) + eps).sqrt()
        value = value * (weight + 1 if self.name.startswith("gemma") else weight)
        return value if bias is None else value + bias


@lru_cache
def case(name: str) -> Case:
    model = randomised(FAMILIES[name])
    ids = np.random.default_rng(0).integers(0, 256, LENGTH).astype(np.int32)
    return Case(name, model, ids, Reference(model).taps(ids), model.state_dict())


def close(a: Tensor | np.ndarray, b: Tensor | np.ndarray, tolerance: float = TOLERANCE) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool(np.abs(a - b).max() <= tolerance * np.abs(b).max())


@any_family
def test_the_stream_is_the_sum_of_what_is_added(name: str) -> None:
    c = case(name)
    for i in c.layers:
        mid = c.get("resid_pre", i)
        mixers = [site for site in ("attn_out", "ssm_out") if f"{site}.{i}" in c.taps]
        for site in mixers:
            mid = mid + c.get(site, i)
        both = bool(mixers) and f"mlp_out.{i}" in c.taps
        assert both or c.name.startswith(("mamba2", "nemotronh"))
        post = mid + c.get("mlp_out", i) if f"mlp_out.{i}" in c.taps else mid
        if f"layer_embed_out.{i}" in c.taps:
            post = post + c.get("layer_embed_out", i)
        post = post * c.weights.get(c.key(i, "layer_scalar"), 1.0)
        assert close(post, c.get("resid_post", i))
        if c.parallel or not both:
            assert f"resid_mid.{i}" not in c.taps
        else:
            assert close(mid, c.get("resid_mid", i))
        if i:
            assert np.array_equal(c.taps[f"resid_pre.{i}"], c.taps[f"resid_post.{i - 1}"])


@any_family
def test_what_hf_itself_returns_is_the_same(name: str) -> None:
    c = case(name)
    with torch.no_grad():
        out = c.model(
            torch.tensor(c.ids[None].astype(np.int64)),
            output_hidden_states=True,
            **({} if c.name.startswith("mamba2") else {"output_attentions": True}),
        )
    site = "resid_post" if c.name.startswith("mamba2") else "resid_pre"
    streams = [c.taps[f"{site}.{i}"] for i in c.layers] + [c.taps["final_norm"]]
    for ours, theirs in zip(streams, out.hidden_states, strict=True):
        assert close(ours, theirs[0])
    attend = [i for i in c.layers if f"attn_pattern.{i}" in c.taps]
    returned = [each for each in getattr(out, "attentions", None) or () if each is not None]
    for i, theirs in zip(attend, returned, strict=True):
        assert close(c.get("attn_pattern", i), theirs[0].transpose(0, 1))
    assert close(c.taps["logits"], out.logits[0])


@each_family
def test_both_ends_follow_from_the_weights(name: str) -> None:
    c = case(name)
    table = c.model.get_input_embeddings().weight.detach()
    scale = table.shape[1] ** 0.5 if name.startswith("gemma") else 1.0
    embed = table[torch.tensor(c.ids)] * scale
    assert close(c.taps["embed"], embed)
    if name.startswith("gpt2"):
        embed = embed + c.weights["transformer.wpe.weight"][:LENGTH]
    assert close(c.taps["resid_pre.0"], embed)
    last = {"gpt2": "transformer.ln_f", "neox": "gpt_neox.final_layer_norm"}
    final = c.norm(c.get("resid_post", c.layers[-1]), last.get(name.split("-")[0], "model.norm"))
    assert close(c.taps["final_norm"], final)
    head = table if c.model.config.tie_word_embeddings else c.model.get_output_embeddings().weight
    logits = final @ head.detach().T
    if name.startswith("gemma2") and name != "gemma2-nocap":
        logits = 3.0 * torch.tanh(logits / 3.0)
    assert close(c.taps["logits"], logits)


@each_family
def test_logprob_and_entropy_follow_from_the_logits(name: str) -> None:
    c = case(name)
    logits = torch.from_numpy(c.taps["logits"]).double()
    targets = torch.tensor(c.ids[1:].astype(np.int64))
    losses = F.cross_entropy(logits[:-1], targets, reduction="none")
    assert c.taps["logprob"].dtype == c.taps["entropy"].dtype == np.float32
    assert close(c.taps["logprob"][:-1], -losses, 1e-6)
    assert c.taps["logprob"][-1] == 0.0
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert close(c.taps["entropy"], entropy, 1e-6)


@each_family
def test_q_k_v_are_projections_of_the_normed_stream(name: str) -> None:
    c = case(name)
    heads = c.model.config.num_attention_heads
    for i in c.layers:
        x = c.get("attn_in", i)
        if name.startswith("olmo2"):
            assert close(x, c.get("resid_pre", i))
        else:
            norm = "ln_1" if name.startswith("gpt2") else "input_layernorm"
            assert close(x, c.norm(c.get("resid_pre", i), c.key(i, norm)))
        width = c.taps[f"q.{i}"].shape[-1]
        if name.startswith("gpt2"):
            q, k, v = c.linear(x, i, "attn.c_attn").chunk(3, -1)
        elif name.startswith("phi3"):
            few = c.model.config.num_key_value_heads * width
            q, k, v = c.linear(x, i, "self_attn.qkv_proj").split([heads * width, few, few], -1)
        elif name.startswith("neox"):  # the rows of the weight: q, k and v of head 0, of head 1, ..
            rows = c.linear(x, i, "attention.query_key_value").split(width, -1)
            q, k, v = (torch.cat(rows[part::3], -1) for part in range(3))
        else:
            q, k, v = (c.linear(x, i, f"self_attn.{site}_proj") for site in "qkv")
        for site, wanted in zip("qkv", (q, k, v), strict=True):
            assert close(c.get(site, i), wanted.unflatten(-1, (-1, width)))
        assert c.taps[f"q.{i}"].shape[1] == heads


@each_family
def test_q_and_k_enter_the_score_normed_and_rotated(name: str) -> None:
    c = case(name)
    for i in c.layers if not name.startswith("gpt2") else ():
        for site in "qk":
            value = c.get(site, i)
            if name.startswith(("qwen3", "gemma3")):
                value = c.norm(value, c.key(i, f"self_attn.{site}_norm"))
            elif name.startswith("olmo2"):  # over all heads at once
                flat = c.norm(value.flatten(1), c.key(i, f"self_attn.{site}_norm"))
                value = flat.view_as(value)
            elif "qknorm" in name:  # each head has its own
                key = c.key(i, f"self_attn.{site}_layernorm.norms")
                parts = [c.norm(value[:, h], f"{key}.{h}") for h in range(value.shape[1])]
                value = torch.stack(parts, 1)
            assert close(c.get(f"{site}_rot", i), rotated(c, value, i))
    assert any(key.startswith("q_rot") for key in c.taps) != name.startswith("gpt2")


def rotated(c: Case, value: Tensor, layer: int) -> Tensor:
    """Rotate by the angles that the model's own module returns."""
    kind = [c.model.config.layer_types[layer]] if c.name.startswith("gemma3") else []
    cos, sin = c.body.rotary_emb(value[None], torch.arange(LENGTH)[None], *kind)
    if c.name.startswith("gptoss"):  # gives each angle once
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    turned, left = value[..., : cos.shape[-1]], value[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    swapped = torch.cat([-second, first], -1)
    return torch.cat([turned * cos[0][:, None] + swapped * sin[0][:, None], left], -1)


@each_family
def test_the_pattern_is_the_softmax_of_scores_within_the_window(name: str) -> None:
    c = case(name)
    rot = "" if name.startswith("gpt2") else "_rot"
    windowed = WINDOWED.get(name, WINDOWED.get(name.split("-")[0], ()))
    behind = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    for i in c.layers:
        q, k, v = (c.get(site, i) for site in (f"q{rot}", f"k{rot}", "v"))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->qhk", q, k)
        scores *= (24 if name.startswith(SCALE_24) else q.shape[-1]) ** -0.5
        if name == "gpt2-layer-scaled":
            scores /= i + 1
        if name.startswith("gemma2") and name != "gemma2-nocap":
            scores = 2.0 * torch.tanh(scores / 2.0)
        seen = (behind >= 0) & (behind < (WINDOW if i in windowed else LENGTH))
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        if name.startswith("gptoss"):
            sinks = c.weights[c.key(i, "self_attn.sinks")].expand(LENGTH, -1)[..., None]
            scores = torch.cat([scores, sinks], -1)
        pattern = c.get("attn_pattern", i)
        assert close(pattern, scores.softmax(-1)[..., :LENGTH])
        assert torch.equal(pattern > 0, seen[:, None].expand_as(pattern))
        sums = pattern.sum(-1)
        assert (sums < 1).all() if name.startswith("gptoss") else close(sums, torch.ones_like(sums))
        assert close(c.get("z", i), torch.einsum("qhk,khd->qhd", pattern, v))


@each_family
def test_attention_adds_its_output_projection(name: str) -> None:
    c = case(name)
    part = {"gpt2": "attn.c_proj", "neox": "attention.dense"}
    for i in c.layers:
        out = c.linear(
            c.get("z", i).flatten(1), i, part.get(name.split("-")[0], "self_attn.o_proj")
        )
        if name.startswith(SANDWICH):
            out = c.norm(out, c.key(i, "post_attention_layernorm"))
        assert close(c.get("attn_out", i), out)


@each_family
def test_the_mlp_reads_the_normed_stream_and_adds_its_down_projection(name: str) -> None:
    c = case(name)
    down = {"gpt2": "c_proj", "neox": "dense_4h_to_h", "starcoder2": "c_proj"}
    norm = {"gpt2": "ln_2", "gemma2": "pre_feedforward_layernorm"}
    norm["gemma3"] = norm["gemma2"]
    for i in c.layers:
        stream = c.get("resid_pre" if c.parallel else "resid_mid", i)
        if name.startswith("olmo2"):
            wanted = stream
        elif c.parallel and name.startswith("stablelm"):
            wanted = c.get("attn_in", i)  # the two share a norm
        else:
            wanted = c.norm(
                stream, c.key(i, norm.get(name.split("-")[0], "post_attention_layernorm"))
            )
        assert close(c.get("mlp_in", i), wanted)
        if f"router_logits.{i}" in c.taps:
            assert f"mlp_hidden.{i}" not in c.taps
            continue
        out = c.linear(
            c.get("mlp_hidden", i), i, f"mlp.{down.get(name.split('-')[0], 'down_proj')}"
        )
        if name.startswith(SANDWICH):
            out = c.norm(out, c.key(i, "post_feedforward_layernorm"))
        assert close(c.get("mlp_out", i), out)


@pytest.mark.parametrize("name", some(MOE, *(name for name in FEW if name in MOE)), scope="module")
def test_experts_are_chosen_and_weighed_by_the_router(name: str) -> None:
    c = case(name)
    routed = [i for i in c.layers if f"router_logits.{i}" in c.taps]
    assert routed == ([0, 2] if name == "qwen3moe-mqa-mixed" else list(c.layers))
    for i in routed:
        x, logits = c.get("mlp_in", i), c.get("router_logits", i)
        router = "mlp.router" if name.startswith("gptoss") else "mlp.gate"
        assert close(logits, c.linear(x, i, router))
        weights, ids = c.get("expert_weights", i), c.get("expert_ids", i)
        assert ids.dtype == torch.int64
        assert torch.equal(ids, logits.argsort(-1, descending=True)[:, : ids.shape[1]])
        chosen = logits.softmax(-1).gather(-1, ids)
        if name != "qwen3moe-mha-unnormed":  # over all, then shared out; or over the chosen: alike
            chosen = chosen / chosen.sum(-1, keepdim=True)
        assert close(weights, chosen)
        every = torch.stack([expert(c, x, i, e) for e in range(logits.shape[1])], 1)
        picked = every.gather(1, ids[..., None].expand(-1, -1, x.shape[1]))
        assert close(c.get("mlp_out", i), (weights[..., None] * picked).sum(1))


def expert(c: Case, x: Tensor, layer: int, number: int) -> Tensor:
    """Return the output of one expert for every token."""
    up, down = (
        c.weights[c.key(layer, f"mlp.experts.{n}_proj")][number] for n in ("gate_up", "down")
    )
    if not c.name.startswith("gptoss"):  # gate above up
        gate, value = (x @ up.T).chunk(2, -1)
        return (F.silu(gate) * value) @ down.T
    biases = (
        c.weights[c.key(layer, f"mlp.experts.{n}_proj_bias")][number] for n in ("gate_up", "down")
    )
    up_bias, down_bias = biases
    both = x @ up + up_bias  # gate and up by turns
    gate, value = both[:, ::2].clamp(max=1.5), both[:, 1::2].clamp(-1.5, 1.5)
    return (gate * torch.sigmoid(1.702 * gate) * (value + 1)) @ down + down_bias


def test_only_what_is_asked_for_is_kept() -> None:
    c = case("gemma2-gqa")
    few = Reference(c.model).taps(c.ids, ["attn_pattern.1", "k_rot", "entropy"])
    assert set(few) == {"attn_pattern.1", "entropy", *(f"k_rot.{i}" for i in c.layers)}
    few |= Reference(c.model).taps(c.ids, {"resid_post.3", "embed"})  # this one needs no head
    assert len(few) == 8
    for tap, value in few.items():
        assert np.array_equal(value, c.taps[tap])


def test_the_model_is_left_as_it_was_even_after_an_error() -> None:
    model = randomised(FAMILIES["llama-gqa"])
    modeling = sys.modules[type(model).__module__]
    original = modeling.eager_attention_forward
    with pytest.raises(IndexError):
        Reference(model).taps(np.array([5, 10_000]))
    assert modeling.eager_attention_forward is original
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["llama-dynamic-rope", "phi3-longrope"])
def test_a_context_does_not_depend_on_those_before_it(name: str) -> None:
    # both lengths lie beyond the original one, where "dynamic" looks at the length itself
    model = randomised(lambda: FAMILIES[name](max_position_embeddings=40))
    ids = np.arange(100)
    fresh = Reference(model).taps(ids[:50], ["q_rot.0"])["q_rot.0"]
    reference = Reference(model)
    longer = reference.taps(ids, ["q_rot.0"])["q_rot.0"]
    assert not close(fresh, longer[:50], 1e-2), "positions depend on the length of the context"
    assert np.array_equal(fresh, reference.taps(ids[:50], ["q_rot.0"])["q_rot.0"])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch without bf16 hardware
@pytest.mark.parametrize("name", some(["qwen3-mqa", "gpt2", "neox", "gemma3-gqa"], "gpt2", "neox"))
def test_a_bfloat16_model_gives_float32_of_its_own_values(name: str) -> None:
    c = case(name)
    coarse = Reference(randomised(FAMILIES[name]).to(torch.bfloat16)).taps(c.ids)
    assert coarse.keys() == c.taps.keys()
    for tap, value in coarse.items():
        site = tap.partition(".")[0]
        if site in IDS:  # of what may tie in bfloat16
            continue
        assert value.dtype == np.float32
        if site not in WIDE:  # computed above bfloat16
            assert np.array_equal(value, torch.from_numpy(value).bfloat16().float().numpy())
        assert close(value, c.taps[tap], 0.25)


def test_a_multimodal_gemma3_gives_the_taps_of_its_decoder() -> None:
    both = randomised(families.gemma3_multimodal)
    alone: Any = Gemma3ForCausalLM(both.config.text_config)
    alone.model.load_state_dict(both.model.language_model.state_dict())
    ids = case("gemma3-gqa").ids
    found, wanted = Reference(both).taps(ids), Reference(alone).taps(ids)
    assert found.keys() == wanted.keys()
    for tap, value in wanted.items():
        assert np.array_equal(found[tap], value)


@pytest.mark.parametrize("shape", [(0,), (1, 5)])
def test_anything_but_one_context_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one context"):
        Reference(case("llama-gqa").model).taps(np.zeros(shape, np.int32))


@each_family
def test_every_parameter_is_random_and_activations_stay_of_order_one(name: str) -> None:
    c = case(name)
    for key, parameter in c.model.named_parameters():
        assert parameter.std() > 0.05, key
        assert len(parameter.unique()) > 0.9 * min(parameter.numel(), 1000), key
    for i in c.layers:
        assert 0.2 < c.taps[f"resid_post.{i}"].std() < 8.0


def test_products_of_bfloat16_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor without them: torch's own way takes several times as long."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    model, ids = randomised(FAMILIES["gpt2"]).bfloat16(), case("gpt2").ids
    multiplied = set()

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if "mm" in str(func):
                multiplied.update(each.dtype for each in args)
            return func(*args, **(kwargs or {}))

    with Watching():
        found = Reference(model).taps(ids, {"mlp_hidden", "mlp_out"})
    assert multiplied == {torch.float32}
    weights = model.transformer.h[1].mlp.c_proj
    hidden = torch.tensor(found["mlp_hidden.1"])
    wide = torch.addmm(weights.bias.float(), hidden, weights.weight.float())
    assert np.array_equal(found["mlp_out.1"], wide.bfloat16().float().detach().numpy())


@pytest.mark.parametrize(
    "name",
    some(("llama-gqa", "mixtral-gqa", "gemma3-gqa", "qwen2-yarn", "gptoss-gqa"), "mixtral-gqa"),
)
def test_in_float64_nothing_is_rounded_to_float32(name: str) -> None:
    """HF's code asks for float32 in norms, softmax and rotary angles."""
    model, ids = randomised(FAMILIES[name]), case(name).ids
    reference = Reference(model)
    reference.compute_in(torch.float64)
    found = reference.taps(ids)
    ids_of = {tap for tap, values in found.items() if values.dtype == np.int64}
    assert {tap.partition(".")[0] for tap in ids_of} <= {*IDS}
    assert {values.dtype.name for tap, values in found.items() if tap not in ids_of} == {"float64"}
    one = found["attn_pattern.1"].sum(-1)
    if not name.startswith("gptoss"):  # with sinks less than one
        np.testing.assert_allclose(one, 1.0, rtol=0, atol=1e-14)
    # the norm, by its formula
    own = Case(name, model, ids, found, model.state_dict())
    normed = own.norm(own.get("resid_pre", 1), own.key(1, "input_layernorm"))
    assert close(normed, found["attn_in.1"], 1e-13)
    # a rotation keeps the length of each pair
    if name in ("llama-gqa", "mixtral-gqa"):
        half = found["q.1"].shape[-1] // 2
        for before, after in (("q.1", "q_rot.1"), ("k.1", "k_rot.1")):
            squares = [np.square(found[tap]) for tap in (before, after)]
            lengths = [each[..., :half] + each[..., half:] for each in squares]
            np.testing.assert_allclose(*lengths, rtol=1e-12)
    # and float32 is what it was
    reference.compute_in(torch.float32)
    again = reference.taps(ids)
    # (Computed now: without bfloat16 hardware torch changes its float32 products for good once one
    # in bfloat16 was asked for, so that what another test computed may differ in the last digits.)
    fresh = Reference(randomised(FAMILIES[name])).taps(ids)
    assert again.keys() == fresh.keys()
    assert all(np.array_equal(again[tap], values) for tap, values in fresh.items())


@pytest.mark.full
def test_experts_in_float8_are_those_of_the_model_that_stores_rows() -> None:
    made = FAMILIES["qwen3moe-gqa"](hidden_size=128, moe_intermediate_size=128)
    made.set_experts_implementation("eager")
    experts = made.model.layers[0].mlp.experts
    rng = np.random.default_rng(0)
    weights = {
        name: rng.standard_normal(parameter.shape).astype(np.float32) / 128**0.5
        for name, parameter in experts.named_parameters()
    }
    experts.load_state_dict({name: torch.as_tensor(array) for name, array in weights.items()})
    x = rng.standard_normal((5, 128)).astype(np.float32)
    ids, shares = rng.permuted(np.tile(np.arange(6), (5, 1)), axis=1)[:, :2], np.full((5, 2), 0.5)
    given = torch.as_tensor(x), torch.as_tensor(ids), torch.as_tensor(shares, dtype=torch.float32)
    with torch.no_grad():
        exact = experts(*given).numpy()
        found = mixed_in_float8(experts.forward, *given).numpy()
    gate, up = np.split(weights["gate_up_proj"], 2, axis=1)
    matrices = {"w_gate": gate, "w_up": up, "w_down": weights["down_proj"]}
    block = {name: Float8Weight.of(jnp.asarray(array)) for name, array in matrices.items()}
    config = made.config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    arch = read_config(config, "test")[1]
    tokens = (jnp.asarray(each)[None] for each in (x, shares.astype(np.float32), ids))
    stored = mix(*tokens, block, arch)
    apart = np.linalg.norm(found - np.asarray(stored)[0])
    assert apart < 2e-3 * np.linalg.norm(exact) < 0.1 * np.linalg.norm(found - exact)
