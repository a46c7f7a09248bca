"""What a row of `families.py` is, and how its tensors are named. No jax."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spile.models.config.sources import Source


def named(stem: str, **names: str) -> dict[str, Source]:
    """Our name -> the tensor's, after a common stem."""
    return {ours: Source(stem + theirs) for ours, theirs in names.items()}


def fused(name: str, *parts: str, by: str = "part", transposed: bool = False) -> dict[str, Source]:
    """One tensor that holds several of our arrays."""
    return {part: Source(name, parts, by, transposed) for part in parts}


def linears(stem: str, **names: str) -> dict[str, Source]:
    """Layers with a matrix and, where the model has one, a bias: `wq` and `bq`."""
    both = {f"w{ours}": f"{theirs}.weight" for ours, theirs in names.items()}
    return named(stem, **both, **{f"b{n}": f"{theirs}.bias" for n, theirs in names.items()})


def norms(stem: str, **names: str) -> dict[str, Source]:
    both = {ours: f"{theirs}.weight" for ours, theirs in names.items()}
    return named(stem, **both, **{f"{n}_bias": f"{theirs}.bias" for n, theirs in names.items()})


LAYER = "layers.{layer}."
LLAMA_WEIGHTS: Mapping[str, Source] = {
    **named("", embed="embed_tokens.weight"),
    **norms("", final_norm="norm"),
    **norms(LAYER, attn_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
    **linears(LAYER + "self_attn.", q="q_proj", k="k_proj", v="v_proj", o="o_proj"),
    **named(LAYER + "self_attn.", q_norm="q_norm.weight", k_norm="k_norm.weight"),
    **linears(LAYER + "mlp.", _gate="gate_proj", _up="up_proj", _down="down_proj"),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row."""

    name: str
    architectures: tuple[str, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields of `Arch`
    biases: Mapping[str, str] = field(default_factory=dict[str, str])  # field of `Arch` -> key
    # usual key -> this family's, or several spellings of it
    keys: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict[str, Any])
    reads: tuple[str, ...] = ()  # keys beyond the usual ones: see `hf_config.py`
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])  # where a key is missing
    ignored: tuple[str, ...] = ()  # keys that cannot change an activation
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, Any])
    windows: str = "never"  # which layers slide: "never", "always", "upper", or "pattern"
    scaled_embeddings: bool = False
    quantized: tuple[str, ...] = ()  # methods whose tensors can be decoded
    rope_scaling: Mapping[str, Any] | None = None  # where the config has none
    nested: str | None = None  # the config lies under this key
    beside: tuple[str, ...] = ()  # keys there that do not concern the decoder
    weights: Mapping[str, Source] = field(default_factory=lambda: LLAMA_WEIGHTS)
    prefixes: tuple[str, ...] = ("model.",)  # of every tensor but the head; published files vary
    head: str = "lm_head.weight"
    unused_weights: tuple[str, ...] = ()  # tensors that no forward pass needs; `*` is anything
