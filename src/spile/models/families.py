"""Model families as data: one row each, read by one decoder.

A row says how the family's `config.json` maps to an `Arch` and what its tensors are called. Each
config key is read, ignored (it cannot change an activation) or required to hold one of given
values; a key that is in none of these is refused by name, because a silently ignored key means
silently wrong activations.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spile.errors import InputError
from spile.models.arch import Arch
from spile.models.rope import Rope, positive

ACTIVATIONS = ("silu",)

# Written by every version of transformers and without effect on a forward pass.
_IGNORED = frozenset(
    [
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "use_cache",
        "use_return_dict",
        "do_sample",
        "max_length",
        "min_length",
        "num_beams",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
        "unk_token_id",
        "sep_token_id",
        "task_specific_params",
    ]
)

_READ = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "rms_norm_eps",
        "hidden_act",
        "tie_word_embeddings",
        "max_position_embeddings",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
    ]
)

# Values under which a key changes nothing; any other value needs code we do not have.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "rope_interleaved": (False, None),
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
    "partial_rotary_factor": (1.0, 1, None),
    "quantization_config": (None,),
}

_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.o_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
    "b_gate": "mlp.gate_proj.bias",
    "b_up": "mlp.up_proj.bias",
    "b_down": "mlp.down_proj.bias",
}

_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    **{name: "model.layers.{layer}." + source for name, source in _LAYER.items()},
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row: a family's config keys and tensor names."""

    name: str
    architectures: tuple[str, ...]
    qkv_bias: bool | str  # a constant of the family, or the config key that says
    out_bias: bool | str
    mlp_bias: bool | str
    default_max_positions: int
    default_theta: float = 10000.0
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, Any])
    weights: Mapping[str, str] = field(default_factory=lambda: _NAMES)
    # Tensors that old checkpoints carry and no forward pass needs.
    unused_weights: tuple[str, ...] = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)


FAMILIES = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM",),
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        default_max_positions=2048,
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM",),
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        default_max_positions=32768,
        harmless={"use_sliding_window": (False, None), "use_mrope": (False, None)},
    ),
)


def find_family(config: Mapping[str, Any], where: str) -> Family:
    """The row for a config, by its `architectures` entry."""
    given = config.get("architectures") or []
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], str):
        raise InputError(f"{where}: 'architectures' must name one model class, got {given!r}")
    for family in FAMILIES:
        if given[0] in family.architectures:
            return family
    known = [name for family in FAMILIES for name in family.architectures]
    nearest = difflib.get_close_matches(given[0], known, n=1, cutoff=0.0)[0]
    raise InputError(
        f"{where}: architecture {given[0]!r} is not supported; the nearest is {nearest} "
        f"(supported: {', '.join(known)})"
    )


def read_config(config: Mapping[str, Any], where: str) -> tuple[Family, Arch]:
    """An `Arch` from the contents of a HF `config.json`; every key is accounted for."""
    family = find_family(config, where)
    _refuse_unknown(config, family, where)

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if type(value) is not int or value <= 0:
            raise InputError(f"{where}: {key} must be a positive number, got {value!r}")
        return value

    def switch(rule: bool | str) -> bool:
        return bool(config.get(rule, False)) if isinstance(rule, str) else rule

    activation = config.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise InputError(
            f"{where}: hidden_act {activation!r} is not supported (known: {', '.join(ACTIVATIONS)})"
        )
    eps = config.get("rms_norm_eps")
    heads = number("num_attention_heads")
    width = number("hidden_size")
    arch = Arch(
        family=family.name,
        vocab_size=number("vocab_size"),
        width=width,
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", width // heads),
        mlp_width=number("intermediate_size"),
        norm_eps=positive(1e-6 if eps is None else eps, "rms_norm_eps", where),
        activation=activation,
        rope=Rope.from_config(config, where, default_theta=family.default_theta),
        qkv_bias=switch(family.qkv_bias),
        out_bias=switch(family.out_bias),
        mlp_bias=switch(family.mlp_bias),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        max_positions=number("max_position_embeddings", family.default_max_positions),
    )
    if arch.num_heads % arch.num_kv_heads:
        raise InputError(
            f"{where}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {arch.num_kv_heads}"
        )
    return family, arch


def _refuse_unknown(config: Mapping[str, Any], family: Family, where: str) -> None:
    switches = {
        r for r in (family.qkv_bias, family.out_bias, family.mlp_bias) if isinstance(r, str)
    }
    harmless = {**_HARMLESS, **family.harmless}
    for key, value in config.items():
        if key in _IGNORED or key in _READ or key in switches:
            continue
        if key in harmless:
            if value not in harmless[key]:
                raise InputError(f"{where}: {key} = {value!r} is not supported for {family.name}")
        elif key == "layer_types":
            if value is not None and (
                not isinstance(value, list) or any(v != "full_attention" for v in value)
            ):
                raise InputError(
                    f"{where}: layer_types other than full_attention are not supported "
                    f"for {family.name}"
                )
        elif key == "sliding_window":
            # Published Qwen2 configs carry a size with the switch off; the switch decides.
            if value is not None and "use_sliding_window" not in config:
                raise InputError(f"{where}: sliding_window is not supported for {family.name}")
        else:
            raise InputError(
                f"{where}: unknown config key {key!r}; it may change the model's activations, "
                f"so it must be listed in models/families.py as read or ignored first"
            )
