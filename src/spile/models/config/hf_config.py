"""Read a published `config.json` into an `Arch`, through its family's row. No jax.

Each key is read, ignored (it cannot change an activation) or required to hold one of given
values. Any other key is refused by name, because a silently ignored key means silently wrong
activations.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from spile.core.bounded_json import Json
from spile.core.errors import InputError
from spile.models.config.arch import (
    Arch,
    Experts,
    GatedDelta,
    Latent,
    ShortConvolution,
    StateSpace,
)
from spile.models.config.families import FAMILIES, REFUSED
from spile.models.config.family import Family
from spile.models.config.hf_layers import (
    KINDS,
    ConfigKeys,
    are_kinds,
    read_layers,
    with_own_sizes,
)
from spile.models.config.rope import Rope, positive

ACTIVATIONS = (
    "silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2",
)  # fmt: skip

# Written by every version of transformers and without effect on a forward pass.
_IGNORED = frozenset(
    (
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
        "attention_dropout", "max_sequence_length",
        "bos_token_id", "chunk_size_feed_forward", "do_sample", "dtype", "eos_token_id", "id2label",
        "initializer_range", "is_llama_config", "label2id", "max_length", "max_window_layers",
        "min_length", "model_type", "num_beams", "output_attentions", "output_hidden_states",
        "pad_token_id", "problem_type", "repetition_penalty", "return_dict", "sep_token_id",
        "task_specific_params", "temperature", "top_k", "top_p", "torch_dtype", "torchscript",
        "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
        "use_return_dict",
    )
)  # fmt: skip
# Values with which a key changes nothing; any other value needs code we do not have.
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
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
}
_PACKED = ("fp8", "compressed-tensors", "gptq", "awq")  # in any family
_MOST_EXPERTS = 1 << 18  # over all layers: each has tensors, which are listed by name
_MOST_KERNEL = 64  # the convolution is written out, token by token


def find_family(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config, by its `architectures` entry."""
    given: Json = config.get("architectures") or []
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], str):
        raise InputError(f"{where}: 'architectures' must name one model class, got {given!r}")
    for family in FAMILIES:
        if given[0] not in family.architectures:
            continue
        inner: Any = config.get(family.nested) if family.nested else config
        keys = cast("Mapping[str, Any]", inner if isinstance(inner, Mapping) else {})
        if all(keys.get(key) in values for key, values in family.when.items()):
            return family
    if given[0] in REFUSED:
        raise InputError(f"{where}: {given[0]} is not supported: {REFUSED[given[0]]}")
    known = list(dict.fromkeys(name for family in FAMILIES for name in family.architectures))
    # By the model's name: what it is for ("CausalLM") is much the same in all of them.
    stems = {name.partition("For")[0]: name for name in reversed(known)}
    stem = difflib.get_close_matches(given[0].partition("For")[0], stems, n=1, cutoff=0.0)[0]
    nearest = stems[stem]
    raise InputError(
        f"{where}: architecture {given[0]!r} is not supported; the nearest is {nearest} "
        f"(supported: {', '.join(known)})"
    )


def read_config(values: Mapping[str, Any], where: str) -> tuple[Family, Arch]:
    """Make an `Arch` from the contents of a HF `config.json`; every key is accounted for."""
    family = find_family(values, where)
    if family.nested:
        inner: Json = values.get(family.nested)
        if not isinstance(inner, Mapping):
            raise InputError(f"{where}: has no {family.nested} for {family.name}")
        _refuse_outer(values, inner, family, where)
        where, values = f"{where} {family.nested}", inner
    config = ConfigKeys(_unfolded(values, family, where), family, where)
    sizes = _sizes(config)
    # `fixed` comes last: a config cannot change the constants of its family.
    fixed = {name: value for name, value in family.fixed.items() if name != "ropes"}
    arch = Arch(**{**sizes, **_attention(config, sizes), **_rest(config), **fixed})
    if not any(layer.dense for layer in arch.layers):
        arch = replace(arch, dense_width=0)
    if not any(map(arch.routed, arch.layers)):
        arch = replace(arch, experts=None)
    if not any(layer.mlp and not layer.dense for layer in arch.layers):
        arch = replace(arch, mlp_width=0)
    _refuse_unknown(config)
    if arch.experts and arch.experts.count * arch.num_layers > _MOST_EXPERTS:
        raise InputError(
            f"{where}: {arch.experts.count} experts in {arch.num_layers} layers are too many"
        )
    for own in (arch.of(layer) for layer in dict.fromkeys(arch.layers)):
        if own.num_heads % own.num_kv_heads:
            raise InputError(
                f"{where}: num_attention_heads {own.num_heads} is not a multiple of "
                f"num_key_value_heads {own.num_kv_heads}"
            )
    if arch.latent and arch.num_heads != arch.num_kv_heads:
        raise InputError(
            f"{where}: num_key_value_heads {arch.num_kv_heads} is not num_attention_heads "
            f"{arch.num_heads}: keys and values of all heads come from one latent"
        )
    for rope, dim in zip(arch.ropes, arch.rope_dims, strict=True):
        rope.check(dim, arch.rope_positions, where)
    return family, arch


def _unfolded(values: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """The keys of a config, with those that are written inside another one."""
    unfolded = {key: value for key, value in values.items() if key not in family.inside}
    for key in family.inside:
        inner: Json = values.get(key) or {}
        if not isinstance(inner, Mapping):
            raise InputError(f"{where}: {key} must be an object, got {inner!r}")
        names = family.inside[key]
        for name, outside in names.items():
            if name in inner and unfolded.get(outside, inner[name]) != inner[name]:
                raise InputError(
                    f"{where}: {outside} is {unfolded[outside]!r}, but {inner[name]!r} in {key}"
                )
        unfolded = {**{names.get(name, name): inner[name] for name in inner}, **unfolded}
    return unfolded


def _sizes(config: ConfigKeys) -> dict[str, Any]:
    heads, width = config.number("num_attention_heads"), config.number("hidden_size")
    if config.family.latent is None:
        head_dim = config.number("head_dim", width // heads)
    else:
        head_dim = config.number("qk_nope_head_dim") + config.number("qk_rope_head_dim")
    return {
        "family": config.family.name,
        "vocab_size": config.number("vocab_size"),
        "width": width,
        "num_heads": heads,
        "num_kv_heads": config.number("num_key_value_heads", heads),
        "head_dim": head_dim,
        "mlp_width": _mlp_width(config, width),
    }


def _mlp_width(config: ConfigKeys, width: int) -> int:
    inner = config.number("intermediate_size", 4 * width)
    if "block_auto_adjust_ff_dim" not in config.family.reads:
        return inner
    factor, multiple = config.get("block_ffn_dim_multiplier"), config.number("block_multiple_of")
    if not config.switch("block_auto_adjust_ff_dim"):
        return inner
    inner = 2 * inner // 3
    if factor is None:
        return inner
    inner = int(positive(factor, "block_ffn_dim_multiplier", config.where) * inner)
    return -(-inner // multiple) * multiple


def _attention(config: ConfigKeys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    ropes = config.family.fixed.get("ropes")
    ropes = _ropes(config, sizes["head_dim"]) if ropes is None else ropes
    longest = config.number("max_position_embeddings")
    for rope in ropes:
        longest = rope.longest(longest)
    scalar = config.amount("query_pre_attn_scalar")
    latent = _latent(config)
    scale = (scalar or sizes["head_dim"]) ** -0.5
    return {
        "layers": with_own_sizes(config, read_layers(config, len(ropes))),
        "delta": _delta(config),
        "state_space": _state_space(config),
        "convolution": _convolution(config),
        "latent": latent,
        "ropes": ropes,
        "max_positions": longest,
        "rope_positions": config.number("max_position_embeddings"),
        "alibi": _slopes(sizes["num_heads"]) if config.family.alibi else (),
        "attn_scale": scale * ropes[0].score_scale if latent and ropes else scale,
        "attn_softcap": config.amount("attn_logit_softcapping"),
        "attn_growth": _growth(config),
    }


def _growth(config: ConfigKeys) -> tuple[float, int] | None:
    if "attn_temperature_tuning" not in config.family.reads:
        return None
    share = positive(config.get("attn_scale"), "attn_scale", config.where)
    step = config.number("floor_scale")
    return (share, step) if config.switch("attn_temperature_tuning") else None


def _latent(config: ConfigKeys) -> Latent | None:
    """The sizes of latent attention, if the family has it."""
    constants = config.family.latent
    if constants is None:
        return None
    asked = None if config.get("q_lora_rank") is None else config.number("q_lora_rank")
    regroups = "rope_interleave" in config.family.reads
    latent = Latent(
        rank=config.number("kv_lora_rank"),
        query_rank=asked,
        rope_dim=config.number("qk_rope_head_dim"),
        value_dim=config.number("v_head_dim"),
        regrouped=regroups and config.switch("rope_interleave"),
    )
    return replace(latent, **constants)


def _slopes(heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each head (arXiv:2108.12409): a geometric series down to 2^-8.

    Heads beyond a power of two have every other slope of the next series.
    """
    whole = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    others = [2 ** (-4 * i / whole) for i in range(1, 2 * whole, 2)]
    return tuple((first + others)[:heads])


def _delta(config: ConfigKeys) -> GatedDelta | None:
    """The sizes of the gated delta rule, if the family has such layers."""
    constants = config.family.delta
    if constants is None:
        return None
    heads, width = config.number("num_attention_heads"), config.number("hidden_size")
    keys = config.number("linear_num_key_heads", heads)
    values = config.number("linear_num_value_heads", heads)
    dim = config.number("linear_key_head_dim", 3 * width // (4 * keys) or 1)
    kernel = _kernel(config, "linear_conv_kernel_dim")
    if values % keys:
        raise config.error(
            f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
        )
    turns = "linear_allow_neg_eigval" in config.family.reads
    delta = GatedDelta(
        key_heads=keys,
        value_heads=values,
        key_dim=dim,
        value_dim=config.number("linear_value_head_dim", 2 * dim),
        kernel=kernel,
        norm_eps=_norm_eps(config),
        most_written=2.0 if turns and config.switch("linear_allow_neg_eigval") else 1.0,
    )
    return replace(delta, **constants)


def _state_space(config: ConfigKeys) -> StateSpace | None:
    """The sizes of the state space, if the family has such layers."""
    constants, reads = config.family.state_space, config.family.reads
    if constants is None:
        return None
    heads, groups = config.number("ssm_heads"), config.number("ssm_groups")
    inner, named = None, config.get("ssm_head_dim") != "auto"
    if "ssm_expand" in reads:
        inner = config.number("ssm_expand") * config.number("hidden_size")
    if "ssm_inner" in reads and config.get("ssm_inner") is not None:
        inner = config.number("ssm_inner")
    dim = config.number("ssm_head_dim") if named or inner is None else inner // heads
    if heads % groups or (inner is not None and heads * dim != inner):
        raise config.error(
            f"{heads} heads of {dim} channels, in {groups} groups, are not the {inner} "
            "channels of the state space"
        )
    space = StateSpace(
        heads=heads,
        head_dim=dim,
        groups=groups,
        state=config.number("ssm_state"),
        kernel=_kernel(config, "ssm_kernel"),
        norm_eps=_norm_eps(config),
        bias=config.switch("ssm_bias"),
        conv_bias=config.switch("ssm_conv_bias"),
        activation=_activation(config, "ssm_activation"),
        **_step_limits(config),
        **_space_scales(config),
    )
    if "mamba_rms_norm" in reads:
        kind = "ungated" if config.switch("mamba_norm_before_gate") else "gated"
        space = replace(space, norm=kind if config.switch("mamba_rms_norm") else None)
    return replace(space, **constants)


def _kernel(config: ConfigKeys, key: str) -> int:
    kernel = config.number(key)
    if kernel > _MOST_KERNEL:
        raise config.error(f"{key} must be at most {_MOST_KERNEL}, got {kernel}")
    return kernel


def _step_limits(config: ConfigKeys) -> dict[str, float | None]:
    """The least and the most that a step may be; transformers writes infinity as an object."""
    if "time_step_min" in config.family.reads:
        return {"least_step": config.amount("time_step_min") or 0.0}
    given: Json = config.get("time_step_limit")
    if given is None:
        return {}
    limits = given if isinstance(given, list) else []
    written = {"__float__": "Infinity"}
    limits = [math.inf if limit == written else limit for limit in limits]
    numbers = all(isinstance(limit, int | float) and limit >= 0 for limit in limits)
    if len(limits) != 2 or not numbers or limits[0] > limits[1]:
        raise config.error(f"time_step_limit must be two ascending numbers, got {given!r}")
    least, most = map(float, limits)
    return {"least_step": least, "most_step": most if math.isfinite(most) else None}


def _space_scales(config: ConfigKeys) -> dict[str, Any]:
    if "ssm_multipliers" not in config.family.reads:
        return {}
    return {
        "in_scale": config.amount("ssm_in_multiplier") or 1.0,
        "out_scale": config.amount("ssm_out_multiplier") or 1.0,
        "scales": _amounts(config, "ssm_multipliers", 5),
    }


def _amounts(config: ConfigKeys, key: str, count: int) -> tuple[float, ...]:
    """A list of so many positive numbers; if it is missing, each is one."""
    given: Json = config.get(key)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list) or len(given) != count:
        raise config.error(f"{key} must be a list of {count} numbers, got {given!r}")
    return tuple(positive(each, key, config.where) for each in given)


def _convolution(config: ConfigKeys) -> ShortConvolution | None:
    """The gated convolution, if the family has layers of it."""
    if "conv_L_cache" not in config.family.reads:
        return None
    return ShortConvolution(_kernel(config, "conv_L_cache"), config.switch("conv_bias"))


def _activation(config: ConfigKeys, key: str) -> str:
    family = config.family
    name = config.get(key, "silu")
    if name not in (*ACTIVATIONS, *family.activations):
        raise config.error(f"{key} {name!r} is not supported (known: {', '.join(ACTIVATIONS)})")
    return name


def _norm_eps(config: ConfigKeys) -> float:
    eps = config.get("rms_norm_eps")
    return positive(1e-6 if eps is None else eps, "rms_norm_eps", config.where)


def _rest(config: ConfigKeys) -> dict[str, Any]:
    family, where = config.family, config.where
    activation = family.fixed.get("activation") or _activation(config, "hidden_act")
    experts = _experts(config) if "num_experts" in family.reads else None
    switches = {field: config.switch(key) for field, key in family.biases.items()}
    amounts = {field: config.get(key) for field, key in family.amounts.items()}
    divisor = config.amount("logits_scaling")
    return {
        "activation": activation,
        "norm_eps": _norm_eps(config),
        "tied_head": config.switch("tie_word_embeddings"),
        "embed_scale": config.number("hidden_size") ** 0.5 if family.scaled_embeddings else 1.0,
        "layer_embed": config.whole("layer_embed") if "layer_embed" in family.reads else 0,
        "logit_softcap": config.amount("final_logit_softcapping"),
        "logit_scale": 1.0 if divisor is None else 1.0 / divisor,
        "glu_limit": config.amount("glu_limit"),
        "mlp_scales": _amounts(config, "mlp_multipliers", 2),
        "experts": experts,
        "dense_width": config.number("dense_size") if "dense_size" in family.reads else 0,
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), False),
        **switches,
        **{n: positive(v, family.amounts[n], where) for n, v in amounts.items() if v is not None},
        **{field: value for field, (key, value) in family.switched.items() if config.switch(key)},
    }


def _experts(config: ConfigKeys) -> Experts:
    reads = config.family.reads
    normalised = config.switch if "norm_topk_prob" in reads else config.family.defaults.get
    shared = 0
    if "shared_size" in reads:
        shared = config.number("shared_size")
    elif "shared_count" in reads and config.get("shared_count") != 0:
        shared = config.number("shared_count") * config.number("intermediate_size")
    grouped = "n_group" in reads
    experts = Experts(
        config.number("num_experts"),
        config.number("num_experts_per_tok"),
        bool(normalised("norm_topk_prob")),
        groups=config.number("n_group") if grouped else 1,
        chosen_groups=config.number("topk_group") if grouped else 1,
        scale=config.amount("routed_scaling_factor") or 1.0,
        shared=shared,
        margin=config.amount("margin"),
        **config.family.experts,
    )
    if experts.margin is not None and experts.chosen != 2:
        raise config.error(
            f"num_experts_per_tok must be 2 for {config.family.name}, got {experts.chosen}"
        )
    if experts.chosen > experts.count:
        raise config.error(f"num_experts_per_tok {experts.chosen} of {experts.count} experts")
    in_group, left = divmod(experts.count, experts.groups)
    if left or not experts.chosen <= in_group * experts.chosen_groups <= experts.count:
        raise config.error(
            f"{experts.chosen} of {experts.count} experts cannot be chosen from "
            f"topk_group {experts.chosen_groups} of n_group {experts.groups}"
        )
    if experts.groups > 1 and in_group < experts.group_best:
        raise config.error(f"n_group {experts.groups} leaves one expert in a group")
    return experts


def _ropes(config: ConfigKeys, head_dim: int) -> tuple[Rope, ...]:
    """The model's rotary settings; a second one if sliding layers have their own."""
    where, family = config.where, config.family
    parameters, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    parameters = parameters or family.defaults.get("rope_parameters")
    if parameters and scaling and parameters != scaling:
        raise config.error("rope_parameters and rope_scaling are both given")
    theta = config.get("rope_theta", 10000.0)
    if isinstance(parameters, Mapping):
        given = cast("Mapping[str, Any]", parameters)
        parameters = {key: value for key, value in given.items() if key not in family.ignored}
        theta = given.get("rope_theta", theta)
    if theta is None and family.unrotated_without_theta:
        return ()
    if any(config.get(key) in values for key, values in family.unrotated.items()):
        return ()
    fraction = config.extra("partial_rotary_factor")
    if "rotary_dim" in family.reads:
        fraction = config.number("rotary_dim", head_dim) / head_dim
    theta = config.get("rope_theta")
    if "rope_alpha" in family.reads:
        parameters, scaling = (
            _with_alpha(given, theta, head_dim, where) for given in (parameters, scaling)
        )
    common = {
        "rope_theta": theta,
        "rope_parameters": parameters,
        "rope_scaling": scaling or (None if parameters else family.rope_scaling),
        "partial_rotary_factor": fraction,
        "original_max_position_embeddings": config.extra("original_max_position_embeddings"),
    }
    every: list[dict[str, Any]] = [common]
    if family.ropes_by_kind:
        own = "rope_local_base_freq" in family.reads
        local = config.get("rope_local_base_freq" if own else "rope_theta")
        nested: Json = parameters or {}
        if not isinstance(nested, Mapping) or set(nested) - set(KINDS):
            raise config.error(f"rope_parameters must be given for {', '.join(KINDS)}")
        every = [
            {**common, "rope_parameters": nested.get("full_attention")},
            {"rope_parameters": nested.get("sliding_attention"), "rope_theta": local},
        ]
    ropes = tuple(Rope.from_config(each, where, default_theta=10000.0) for each in every)
    partial = {"partial_rotary_factor", "rotary_dim"} & set(family.reads)
    if not partial and any(r.fraction != 1 and r.kind != "proportional" for r in ropes):
        raise config.error(f"partial_rotary_factor is not supported for {family.name}")
    return ropes


def _with_alpha(given: Any, theta: Any, head_dim: int, where: str) -> Any:
    """Settings that are called dynamic, but only stretch the base, by a power of `alpha`."""
    if not isinstance(given, Mapping):
        return given
    written = cast("Mapping[str, Any]", given)
    kinds = [written[key] for key in ("rope_type", "type") if written.get(key) is not None]
    if not kinds or any(kind != "dynamic" for kind in kinds) or not written.get("alpha"):
        return written
    given_first = (base for base in (written.get("rope_theta"), theta) if base is not None)
    base = positive(next(given_first, 10000.0), "rope_theta", where)
    alpha = positive(written["alpha"], "rope scaling alpha", where)
    if head_dim < 4:
        raise InputError(f"{where}: rope scaling alpha needs heads of 4 or more, got {head_dim}")
    try:
        return {"rope_type": "default", "rope_theta": base * alpha ** (head_dim / (head_dim - 2))}
    except OverflowError:
        raise InputError(f"{where}: rope scaling alpha {alpha} is too large") from None


def _refuse_unknown(config: ConfigKeys) -> None:
    family = config.family
    harmless = {**_HARMLESS, **family.harmless, **family.when}
    for key, other in family.equal.items():
        if config.values.get(key) is not None:
            harmless[key] = (config.get(other),)
    for key, value in config.values.items():
        if key in config.seen or key in _IGNORED or key in family.ignored:
            continue
        if key in harmless:
            if value not in harmless[key] and not _decoded(key, value, family):
                raise config.error(f"{key} = {value!r} is not supported for {family.name}")
        elif key == "layer_types":
            if value is not None and not are_kinds(value, KINDS[:1]):
                raise config.error(f"sliding layer_types are not supported for {family.name}")
        else:
            raise config.error(
                f"unknown config key {key!r}; it may change the model's activations, "
                f"so it must be listed in models/config/rows as read or ignored first"
            )


def _decoded(key: str, value: Any, family: Family) -> bool:
    """Whether a value names a form of packed weights; `files/quantized.py` decides about it."""
    if key != "quantization_config" or not isinstance(value, Mapping):
        return False
    method = cast("Mapping[str, Any]", value).get("quant_method")
    return method in (*_PACKED, *family.quantized)


def _refuse_outer(
    values: Mapping[str, Any], inner: Mapping[str, Any], family: Family, where: str
) -> None:
    """Refuse keys beside a nested config that may concern the decoder."""
    tied = inner.get("tie_word_embeddings", family.defaults.get("tie_word_embeddings", False))
    for key, value in values.items():
        if key in _IGNORED or key in family.beside or key == family.nested:
            continue
        if key not in _HARMLESS and key != "tie_word_embeddings":
            raise InputError(
                f"{where}: unknown config key {key!r}; it may change the model's activations, "
                f"so it must be listed in models/config/rows as read or ignored first"
            )
        agrees = _HARMLESS.get(key, (tied, None) if type(tied) is bool else (value,))
        if value not in agrees and not _decoded(key, value, family):
            raise InputError(f"{where}: {key} = {value!r} is not supported for {family.name}")
