"""Read a published `config.json` into an `Arch`, through its family's row. No jax.

Each key is read, ignored (it cannot change an activation) or required to hold one of given
values. Any other key is refused by name, because a silently ignored key means silently wrong
activations.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from spile.core.bounded_json import Json
from spile.core.errors import InputError
from spile.models.config.arch import (
    Arch,
    Experts,
    GatedDelta,
    Latent,
    Layer,
    ShortConvolution,
    StateSpace,
)
from spile.models.config.families import FAMILIES, REFUSED
from spile.models.config.family import Family
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
_KINDS = ("full_attention", "sliding_attention")
_LINEAR = "linear_attention"  # layers that mix tokens by the gated delta rule, or a state space
# Other spellings of kinds of layers, in lists and in patterns.
_SPELLED = {
    "attention": _KINDS[0], "*": _KINDS[0], "mamba": _LINEAR, "M": _LINEAR, "-": "mlp", "E": "moe",
}  # fmt: skip
_CHUNKED = "chunked_attention"
# Larger than in any model: a config is untrusted, and layers are listed one by one.
_MOST, _MOST_LAYERS = 1 << 31, 4096
_MOST_EXPERTS = 1 << 18  # over all layers: each has tensors, which are listed by name
_MOST_KERNEL = 64  # the convolution is written out, token by token


class _Config:
    """A config that records which of its keys are read."""

    def __init__(self, values: Mapping[str, Any], family: Family, where: str) -> None:
        self.values, self.family, self.where = values, family, where
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A key by its usual name, or the default of transformers if it is missing."""
        spelled = self.family.keys.get(key, key)
        names = (spelled,) if isinstance(spelled, str) else spelled
        self.seen.update(names)
        written = (self.values[name] for name in names if name in self.values)
        return next(written, self.family.defaults.get(key, default))

    def extra(self, key: str) -> Any:
        """A key that only some families read; the others refuse it."""
        return self.get(key) if key in self.family.reads else self.family.defaults.get(key)

    def number(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < _MOST:
            raise InputError(f"{self.where}: {key} must be a positive number, got {value!r}")
        return value

    def whole(self, key: str) -> int:
        value = self.get(key)
        if type(value) is not int or not 0 <= value < _MOST:
            raise InputError(f"{self.where}: {key} must be a number from 0, got {value!r}")
        return value

    def switch(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and type(value) is not bool:
            raise InputError(f"{self.where}: {key} must be true or false, got {value!r}")
        return bool(value)

    def amount(self, key: str) -> float | None:
        value = self.extra(key)
        return None if value is None else positive(value, key, self.where)


def find_family(config: Mapping[str, Any], where: str) -> Family:
    """The family of a config, by its `architectures` entry."""
    given: Json = config.get("architectures") or []
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], str):
        raise InputError(f"{where}: 'architectures' must name one model class, got {given!r}")
    for family in FAMILIES:
        inner: Any = config.get(family.nested) if family.nested else config
        keys = cast("Mapping[str, Any]", inner if isinstance(inner, Mapping) else {})
        fits = all(keys.get(key) in values for key, values in family.when.items())
        if given[0] in family.architectures and fits:
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
    config = _Config(_unfolded(values, family, where), family, where)
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


def _sizes(config: _Config) -> dict[str, Any]:
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


def _mlp_width(config: _Config, width: int) -> int:
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


def _attention(config: _Config, sizes: Mapping[str, Any]) -> dict[str, Any]:
    ropes = config.family.fixed.get("ropes")
    ropes = _ropes(config, sizes["head_dim"]) if ropes is None else ropes
    longest = config.number("max_position_embeddings")
    for rope in ropes:
        longest = rope.longest(longest)
    scalar = config.amount("query_pre_attn_scalar")
    latent = _latent(config)
    scale = (scalar or sizes["head_dim"]) ** -0.5
    return {
        "layers": _with_own_sizes(config, _layers(config, len(ropes))),
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


def _growth(config: _Config) -> tuple[float, int] | None:
    if "attn_temperature_tuning" not in config.family.reads:
        return None
    share = positive(config.get("attn_scale"), "attn_scale", config.where)
    step = config.number("floor_scale")
    return (share, step) if config.switch("attn_temperature_tuning") else None


def _latent(config: _Config) -> Latent | None:
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


def _delta(config: _Config) -> GatedDelta | None:
    """The sizes of the gated delta rule, if the family has such layers."""
    constants, where = config.family.delta, config.where
    if constants is None:
        return None
    heads, width = config.number("num_attention_heads"), config.number("hidden_size")
    keys = config.number("linear_num_key_heads", heads)
    values = config.number("linear_num_value_heads", heads)
    dim = config.number("linear_key_head_dim", 3 * width // (4 * keys) or 1)
    kernel = _kernel(config, "linear_conv_kernel_dim")
    if values % keys:
        raise InputError(
            f"{where}: linear_num_value_heads {values} is not a multiple of "
            f"linear_num_key_heads {keys}"
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


def _state_space(config: _Config) -> StateSpace | None:
    """The sizes of the state space, if the family has such layers."""
    constants, reads, where = config.family.state_space, config.family.reads, config.where
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
        raise InputError(
            f"{where}: {heads} heads of {dim} channels, in {groups} groups, are not the {inner} "
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


def _kernel(config: _Config, key: str) -> int:
    kernel = config.number(key)
    if kernel > _MOST_KERNEL:
        raise InputError(f"{config.where}: {key} must be at most {_MOST_KERNEL}, got {kernel}")
    return kernel


def _step_limits(config: _Config) -> dict[str, float | None]:
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
        raise InputError(
            f"{config.where}: time_step_limit must be two ascending numbers, got {given!r}"
        )
    least, most = map(float, limits)
    return {"least_step": least, "most_step": most if math.isfinite(most) else None}


def _space_scales(config: _Config) -> dict[str, Any]:
    if "ssm_multipliers" not in config.family.reads:
        return {}
    return {
        "in_scale": config.amount("ssm_in_multiplier") or 1.0,
        "out_scale": config.amount("ssm_out_multiplier") or 1.0,
        "scales": _amounts(config, "ssm_multipliers", 5),
    }


def _amounts(config: _Config, key: str, count: int) -> tuple[float, ...]:
    """A list of so many positive numbers; if it is missing, each is one."""
    given: Json = config.get(key)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, list) or len(given) != count:
        raise InputError(f"{config.where}: {key} must be a list of {count} numbers, got {given!r}")
    return tuple(positive(each, key, config.where) for each in given)


def _convolution(config: _Config) -> ShortConvolution | None:
    """The gated convolution, if the family has layers of it."""
    if "conv_L_cache" not in config.family.reads:
        return None
    return ShortConvolution(_kernel(config, "conv_L_cache"), config.switch("conv_bias"))


def _activation(config: _Config, key: str) -> str:
    family = config.family
    name = config.get(key, "silu")
    if name not in (*ACTIVATIONS, *family.activations):
        raise InputError(
            f"{config.where}: {key} {name!r} is not supported (known: {', '.join(ACTIVATIONS)})"
        )
    return name


def _norm_eps(config: _Config) -> float:
    eps = config.get("rms_norm_eps")
    return positive(1e-6 if eps is None else eps, "rms_norm_eps", config.where)


def _rest(config: _Config) -> dict[str, Any]:
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


def _experts(config: _Config) -> Experts:
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
        raise InputError(
            f"{config.where}: num_experts_per_tok must be 2 for {config.family.name}, got "
            f"{experts.chosen}"
        )
    if experts.chosen > experts.count:
        raise InputError(
            f"{config.where}: num_experts_per_tok {experts.chosen} of {experts.count} experts"
        )
    in_group, left = divmod(experts.count, experts.groups)
    if left or not experts.chosen <= in_group * experts.chosen_groups <= experts.count:
        raise InputError(
            f"{config.where}: {experts.chosen} of {experts.count} experts cannot be chosen from "
            f"topk_group {experts.chosen_groups} of n_group {experts.groups}"
        )
    if experts.groups > 1 and in_group < experts.group_best:
        raise InputError(f"{config.where}: n_group {experts.groups} leaves one expert in a group")
    return experts


def _dense(config: _Config, count: int) -> list[bool]:
    """Which layers have a plain MLP, where others have experts."""
    if "dense_size" not in config.family.reads:
        return [False] * count
    listed = config.extra("mlp_layer_types")
    if "first_k_dense_replace" in config.family.reads:
        first = config.whole("first_k_dense_replace")
        if listed is None:
            return [i < first for i in range(count)]
    if "moe_layer_interval" in config.family.reads:
        interval, first = config.number("moe_layer_interval"), config.whole("moe_layer_start_index")
        last = config.get("moe_layer_end_index")
        last = count - 1 if last == -1 else config.whole("moe_layer_end_index")
        return [(i + 1) % interval != 0 or not first <= i <= last for i in range(count)]
    if "moe_layers" in config.family.reads:
        step, given = config.number("interleave_moe_layer_step"), config.get("moe_layers")
        listed = list(range(step - 1, count, step)) if given is None else given
        if not _are_kinds(listed, tuple(range(count))):
            raise InputError(f"{config.where}: moe_layers must be a list of layers, got {given!r}")
        return [i not in listed for i in range(count)]
    if "mlp_layer_types" in config.family.reads:
        if listed is None:
            return [i == 0 for i in range(count)]
        if not _are_kinds(listed, ("dense", "sparse")) or len(listed) != count:
            raise InputError(
                f"{config.where}: mlp_layer_types must say dense or sparse for each layer"
            )
        return [kind == "dense" for kind in listed]
    step, given = config.number("decoder_sparse_step"), config.get("mlp_only_layers")
    if given is not None and not isinstance(given, list):
        raise InputError(f"{config.where}: mlp_only_layers must be a list of layers, got {given!r}")
    plain = cast("list[Any]", given or [])
    return [i in plain or (i + 1) % step != 0 for i in range(count)]


def _ropes(config: _Config, head_dim: int) -> tuple[Rope, ...]:
    """The model's rotary settings; a second one if sliding layers have their own."""
    where, family = config.where, config.family
    parameters, scaling = config.get("rope_parameters"), config.get("rope_scaling")
    parameters = parameters or family.defaults.get("rope_parameters")
    if parameters and scaling and parameters != scaling:
        raise InputError(f"{where}: rope_parameters and rope_scaling are both given")
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
        if not isinstance(nested, Mapping) or set(nested) - set(_KINDS):
            raise InputError(f"{where}: rope_parameters must be given for {', '.join(_KINDS)}")
        every = [
            {**common, "rope_parameters": nested.get("full_attention")},
            {"rope_parameters": nested.get("sliding_attention"), "rope_theta": local},
        ]
    ropes = tuple(Rope.from_config(each, where, default_theta=10000.0) for each in every)
    partial = {"partial_rotary_factor", "rotary_dim"} & set(family.reads)
    if not partial and any(r.fraction != 1 and r.kind != "proportional" for r in ropes):
        raise InputError(f"{where}: partial_rotary_factor is not supported for {family.name}")
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


def _layers(config: _Config, ropes: int) -> tuple[Layer, ...]:
    """The kind of every block: full attention, or a sliding window."""
    rule = config.family.windows
    listed = config.extra("layer_types") or config.extra("hybrid_override_pattern")
    written = len(cast("list[Any]", listed)) if isinstance(listed, list | str) else None
    count = config.number("num_hidden_layers", written)
    window = None if rule == "never" else config.extra("sliding_window")
    if count > _MOST_LAYERS:
        raise InputError(f"{config.where}: num_hidden_layers must be at most {_MOST_LAYERS}")
    if config.family.kinds:
        return _hybrid_layers(config, count)
    if "attention_chunk_size" in config.family.reads:
        return _chunked_layers(config, count)
    if "use_sliding_window" in config.family.reads and not config.switch("use_sliding_window"):
        window = None
    if window is not None and (type(window) is not int or not 0 < window < _MOST):
        raise InputError(f"{config.where}: sliding_window must be a positive number or null")
    given = config.extra("layer_types") if "layer_types" in config.family.reads else None
    rule = "never" if given is not None else rule
    first, pattern = config.extra("max_window_layers"), config.extra("sliding_window_pattern")
    if rule in ("upper", "lower") and (type(first) is not int or first < 0):
        raise InputError(f"{config.where}: max_window_layers must be a number, got {first!r}")
    if rule == "pattern" and (type(pattern) is not int or pattern < 1):
        raise InputError(
            f"{config.where}: sliding_window_pattern must be a positive number, got {pattern!r}"
        )
    rules: dict[str, Callable[[int], bool]] = {
        "never": lambda i: False,
        "always": lambda i: window is not None,
        "upper": lambda i: window is not None and i >= first,
        "lower": lambda i: window is not None and i < first and i % 2 == 0,
        "pattern": lambda i: (i + 1) % pattern != 0,
        "listed": lambda i: listed[i],
        "unrotated": lambda i: window is not None and not rotated[i],
        "but_fourth": lambda i: (count - 1 - i) % 4 != 0,
    }
    rotated = _rotated(config, count)
    listed = _listed(config, count) if rule == "listed" else []
    slides = rules[rule]
    kinds = [_KINDS[slides(i)] for i in range(count)]
    if given is not None:
        if not _are_kinds(given, _KINDS) or len(given) != count:
            raise InputError(
                f"{config.where}: layer_types must say {' or '.join(_KINDS)} for each layer"
            )
        kinds = list(given)
    if _KINDS[1] in kinds and window is None:
        raise InputError(f"{config.where}: sliding layers, but no sliding_window")
    if config.family.full_unrotated and window is not None:
        rotated = [kind == _KINDS[1] for kind in kinds]
    slid = Layer(window, ropes - 1 if ropes else 0)
    layers = [slid if kind == _KINDS[1] else Layer() for kind in kinds]
    return tuple(
        replace(layer, rope=layer.rope if turned else None, dense=dense)
        for layer, turned, dense in zip(layers, rotated, _dense(config, count), strict=True)
    )


def _with_own_sizes(config: _Config, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Layers with heads and MLPs of their own sizes, and those that borrow keys and values."""
    if "per_layer_config" not in config.family.reads:
        return layers
    where, last = config.where, layers[-1]
    if last.window is not None:
        raise InputError(f"{where}: layer_types must end in {_KINDS[0]}")
    borrowing, alike = config.whole("num_kv_shared_layers"), config.switch("attention_k_eq_v")
    first = len(layers) - borrowing
    if not {layer.window for layer in layers} <= {layer.window for layer in layers[:first]}:
        raise InputError(
            f"{where}: num_kv_shared_layers {borrowing} leaves no layer of each kind whose keys "
            "and values the others share"
        )
    sizes = _sizes_by_layer(config, layers, alike)
    doubled = "use_double_wide_mlp" in config.family.reads and config.switch("use_double_wide_mlp")
    wide = 2 * config.number("intermediate_size") if doubled else None
    return tuple(
        replace(
            layer,
            **sizes.get(number, {}),
            keys_as_values=alike and layer.window is None and number < first,
            borrows=number >= first,
            mlp_width=wide if number >= first else None,
        )
        for number, layer in enumerate(layers)
    )


def _sizes_by_layer(
    config: _Config, layers: tuple[Layer, ...], alike: bool
) -> dict[int, dict[str, int]]:
    """Head sizes and numbers of keys that differ from the others', by layer.

    Full layers have them, by two keys or layer by layer, as transformers writes it.
    """
    names, where = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}, config.where
    wide = {"head_dim": config.number("global_head_dim")}
    if config.get("num_global_key_value_heads") is not None and alike:
        wide["num_key_value_heads"] = config.number("num_global_key_value_heads")
    full = [number for number, layer in enumerate(layers) if layer.window is None]
    given: Json = config.get("per_layer_config")
    written: dict[int, Any] = dict.fromkeys(full, wide)
    if given is not None:
        keys = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {"": None}
        written = {int(key) if key.isdecimal() else -1: keys[key] for key in keys}
    every = list(written.values())
    found: Any = every[0] if every else {}
    sizes = cast("Mapping[str, Any]", found if isinstance(found, Mapping) else {"": found})
    known = set(sizes) <= set(names) and all(
        type(size) is int and 0 < size < _MOST for size in sizes.values()
    )
    if not known or set(written) not in ({*full}, set()) or every[1:] != every[:-1]:
        raise InputError(
            f"{where}: per_layer_config must give the same head_dim and num_key_value_heads for "
            f"each {_KINDS[0]} layer, and nothing for others"
        )
    own = {names[name]: size for name, size in sizes.items()}
    return dict.fromkeys(full, own)


def _listed(config: _Config, count: int) -> list[bool]:
    """Which layers slide, from a list of runs: kinds in turn, and how often they are repeated."""
    given = config.get("attention_types")
    runs = cast("list[Any]", given) if isinstance(given, list) else []
    kinds: list[Any] = []
    for run in runs:
        pair = cast("list[Any]", run) if isinstance(run, list) else []
        if (
            len(pair) != 2
            or not _are_kinds(pair[0], ("global", "local"))
            or type(pair[1]) is not int
        ):
            break
        kinds += pair[0][: count + 1] * min(pair[1], count + 1)
    if len(kinds) != count:
        raise InputError(
            f"{config.where}: attention_types must say global or local for each layer, as in "
            f'[[["global", "local"], {count // 2}]]'
        )
    return [kind == "local" for kind in kinds]


def _hybrid_layers(config: _Config, count: int) -> tuple[Layer, ...]:
    """Layers of the kinds that are listed, or spelled by a letter each, or counted."""
    family, reads = config.family, config.family.reads
    names = list(family.kinds)
    kinds: Any = config.extra("layer_types")
    if "hybrid_override_pattern" in reads:
        pattern = config.get("hybrid_override_pattern")
        if kinds is None and not isinstance(pattern, str):
            raise InputError(
                f"{config.where}: hybrid_override_pattern must have a letter for each layer, got "
                f"{pattern!r}"
            )
        kinds = list(pattern) if kinds is None else kinds
    attend: list[int] | None = None
    if "full_attention_interval" in reads:
        interval = config.number("full_attention_interval")
        attend = list(range(interval - 1, count, interval))
    numbers = tuple(range(family.first_listed, family.first_listed + count))
    if "attention_layers" in reads and (given := config.get("attention_layers")) is not None:
        if not _are_kinds(given, numbers):
            raise InputError(f"{config.where}: {given!r} is no list of the layers that attend")
        attend = [number - family.first_listed for number in given]
        others = sorted({*numbers} - {*given})
        if "linear_layers" in reads and config.get("linear_layers") != others:
            raise InputError(
                f"{config.where}: {family.keys['linear_layers']} must be the layers that do not "
                f"attend, {others}"
            )
    if kinds is None and attend is not None:
        (other,) = set(names) - {_KINDS[0]}
        kinds = [_KINDS[0] if i in attend else other for i in range(count)]
    if kinds is None and family.unlisted:
        kinds = [family.unlisted] * count
    if isinstance(kinds, list):
        written = cast("list[Any]", kinds)
        kinds = [_SPELLED.get(kind, kind) if isinstance(kind, str) else kind for kind in written]
    if not _are_kinds(kinds, tuple(names)) or len(cast("list[Any]", kinds)) != count:
        raise InputError(
            f"{config.where}: layer_types must say {' or '.join(names)} for each layer"
        )
    layers = [family.kinds[kind] for kind in cast("list[str]", kinds)]
    if any(kind.dense for kind in family.kinds.values()):
        return tuple(layers)
    return tuple(
        replace(layer, dense=dense)
        for layer, dense in zip(layers, _dense(config, count), strict=True)
    )


def _chunked_layers(config: _Config, count: int) -> tuple[Layer, ...]:
    """Chunks in the layers that are listed, or in those that rotate q and k."""
    size, rotated = config.number("attention_chunk_size"), _rotated(config, count)
    by_rotation = [_CHUNKED if turned else _KINDS[0] for turned in rotated]
    given = config.get("layer_types")
    kinds: Any = by_rotation if given is None else given
    if not _are_kinds(kinds, (_KINDS[0], _CHUNKED)) or len(kinds) != count:
        raise InputError(
            f"{config.where}: layer_types must say {_KINDS[0]} or {_CHUNKED} for each layer"
        )
    return tuple(
        Layer(rope=0 if turned else None, dense=dense, chunk=size if kind == _CHUNKED else None)
        for kind, turned, dense in zip(kinds, rotated, _dense(config, count), strict=True)
    )


def _rotated(config: _Config, count: int) -> list[bool]:
    """Which layers rotate q and k: all, but in families that leave some out."""
    if "layer_rope_theta" in config.family.reads:
        return _rotated_by_theta(config, count)
    if "no_rope_layers" not in config.family.reads:
        return [True] * count
    interval, given = config.number("no_rope_layer_interval"), config.extra("no_rope_layers")
    if given is None or given == []:
        return [(i + 1) % interval != 0 for i in range(count)]
    if not _are_kinds(given, (0, 1)) or len(given) < count:
        raise InputError(f"{config.where}: no_rope_layers must say 0 or 1 for each layer")
    return [bool(each) for each in given[:count]]


def _rotated_by_theta(config: _Config, count: int) -> list[bool]:
    """The same from a base for each layer, of which zero means none; others have one base."""
    given = config.get("layer_rope_theta")
    if given is None:
        return [(count - 1 - i) % 4 != 0 for i in range(count)]
    bases = cast("list[Any]", given) if isinstance(given, list) else []
    if len(bases) != count or len({base for base in bases if base}) > 1:
        raise InputError(
            f"{config.where}: layer_rope_theta must be zero, or one and the same number, for each "
            "layer"
        )
    return [bool(base) for base in bases]


def _refuse_unknown(config: _Config) -> None:
    family, where = config.family, config.where
    harmless = {**_HARMLESS, **family.harmless, **family.when}
    for key, other in family.equal.items():
        if config.values.get(key) is not None:
            harmless[key] = (config.get(other),)
    for key, value in config.values.items():
        if key in config.seen or key in _IGNORED or key in family.ignored:
            continue
        if key in harmless:
            if value not in harmless[key] and not _decoded(key, value, family):
                raise InputError(f"{where}: {key} = {value!r} is not supported for {family.name}")
        elif key == "layer_types":
            if value is not None and not _are_kinds(value, _KINDS[:1]):
                raise InputError(f"{where}: sliding layer_types are not supported "
                        f"for {family.name}")  # fmt: skip
        else:
            raise InputError(
                f"{where}: unknown config key {key!r}; it may change the model's activations, "
                f"so it must be listed in models/config/rows as read or ignored first"
            )


def _decoded(key: str, value: Any, family: Family) -> bool:
    """Whether a value names a form of weights that may be decoded: `files/quantized.py` tells."""
    if key != "quantization_config" or not isinstance(value, Mapping):
        return False
    method = cast("Mapping[str, Any]", value).get("quant_method")
    return method in (*_PACKED, *family.quantized)


def _are_kinds(given: Any, kinds: tuple[Any, ...]) -> bool:
    return isinstance(given, list) and all(kind in kinds for kind in cast("list[Any]", given))


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
