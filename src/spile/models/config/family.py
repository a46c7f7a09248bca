"""A family of models as data: what a row states, and the names of Llama's tensors.

A row states the constants of the family, the keys its `config.json` has beyond the shared ones,
the defaults of transformers for missing keys, and the names of its tensors. `rows` holds the rows,
by how their layers mix tokens; `families.py` lists them; `hf_config.py` reads a config through its
row. To add a family, see docs/models.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spile.models.config.arch import Layer
from spile.models.config.specs import TensorSource, linears, named, norms

LAYER = "layers.{layer}."
LLAMA_WEIGHTS: Mapping[str, TensorSource] = {
    **named("", embed="embed_tokens.weight"),
    **norms("", final_norm="norm"),
    **norms(LAYER, attn_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
    **linears(LAYER + "self_attn.", q="q_proj", k="k_proj", v="v_proj", o="o_proj"),
    **named(LAYER + "self_attn.", q_norm="q_norm.weight", k_norm="k_norm.weight"),
    **linears(LAYER + "mlp.", _gate="gate_proj", _up="up_proj", _down="down_proj"),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table in `families.py`."""

    name: str
    architectures: tuple[str, ...]
    # key -> its values in models of this row, where one class has several rows
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, Any])
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields of `Arch`
    biases: Mapping[str, str] = field(default_factory=dict[str, str])  # field of `Arch` -> key
    amounts: Mapping[str, str] = field(default_factory=dict[str, str])  # the same, for numbers
    # field of `Arch` -> key, and the field's value if that is true
    switched: Mapping[str, tuple[str, Any]] = field(default_factory=dict[str, Any])
    # usual key -> this family's, or several spellings of it
    keys: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict[str, Any])
    reads: tuple[str, ...] = ()  # keys beyond the usual ones: see `hf_config.py`
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for missing keys
    ignored: tuple[str, ...] = ()  # keys that cannot change an activation
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, Any])
    equal: Mapping[str, str] = field(default_factory=dict[str, str])  # key -> one with its value
    # which layers slide: "never", "always", "upper", "lower" (every other), "pattern", "listed",
    # those without rotary positions, or all but every fourth, counted from the last
    windows: str = "never"
    full_unrotated: bool = False  # if some layers slide, the others have no rotary positions
    alibi: bool = False  # scores fall with the distance
    experts: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields of `Experts`
    ropes_by_kind: bool = False  # sliding layers have their own rotary settings
    unrotated_without_theta: bool = False  # `"rope_theta": null`: no layer rotates q and k
    # key -> its values with which no layer does
    unrotated: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, Any])
    # where layers differ in more than windows: each kind, as configs name it
    kinds: Mapping[str, Layer] = field(default_factory=dict[str, Layer])
    unlisted: str | None = None  # the kind of all layers, if a config lists none
    first_listed: int = 0  # the number that the first layer has, in lists of layers by their kind
    # fields of `GatedDelta` that are constant; None: the family has no such layers
    delta: Mapping[str, Any] | None = None
    state_space: Mapping[str, Any] | None = None  # the same, of `StateSpace`
    latent: Mapping[str, Any] | None = None  # the same, of `Latent`
    scaled_embeddings: bool = False
    activations: tuple[str, ...] = ()  # that need arrays of their own
    quantized: tuple[str, ...] = ()  # methods whose tensors can be decoded
    rope_scaling: Mapping[str, Any] | None = None  # if the config has none
    # keys that hold further keys -> new names of some of these, outside
    inside: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Any])
    nested: str | None = None  # the key that holds the config
    beside: tuple[str, ...] = ()  # keys beside it that do not concern the decoder
    weights: Mapping[str, TensorSource] = field(default_factory=lambda: LLAMA_WEIGHTS)
    # arrays that some files hold under other names than these
    elsewhere: Mapping[str, TensorSource] = field(default_factory=dict[str, TensorSource])
    prefixes: tuple[str, ...] = ("model.",)  # of every tensor but the head; published files vary
    head: str = "lm_head.weight"
    head_bias: str = "lm_head.bias"
    unused_weights: tuple[str, ...] = ()  # tensors that no forward pass needs; `*` is anything
