"""Every array of the decoder, declared once: shape and logical axes. No jax, no file access.

Loading, checking, sharding and memory accounting derive from these declarations. Matrices keep
the layout most checkpoints have, [out, in], so loading is a plain copy; `TensorSource` describes
an array in a checkpoint: its name, the arrays it is fused with, and their order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spile.models.config.arch import (
    GATED_DELTA,
    SHORT_CONVOLUTION,
    Arch,
    GatedDelta,
    Latent,
    Layer,
    ShortConvolution,
    StateSpace,
)


@dataclass(frozen=True)
class ParamSpec:
    """One array. `axes` are logical; a mesh assigns them (sharding.py)."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    heads: int = 0  # whose rows lie one after another; 0: they are not by head


# The arrays of an MLP begin with these; with experts, so do those of the shared one, and of the MLP
# in blocks without experts.
MLP, SHARED, DENSE = "w_", "ws_", "wd_"
# What `--compute-dtype float8_e4m3` multiplies in 8 bits.
_FLOAT8 = (
    "wq", "wk", "wv", "wg", "wo", "wqa", "wqb", "wka", "wkr", "wdq", "wdk", "wdv", "wdg", "wdgn",
    "wdo", "wmz", "wmx", "wmb", "wmc", "wmo", "wcb", "wcc", "wcx", "wco",
    *(m + n for m in (MLP, SHARED, DENSE) for n in ("gate", "up", "down")),
)  # fmt: skip

FLOAT8_TERMS = 128  # experts' kernel adds up so many at once; other widths stay in bfloat16
_FLOAT16_OUTSIDE = ("embed", "head", "layer_embeds", "layer_embeds_from")


def in_float8(spec: ParamSpec) -> bool:
    """Whether an array can be held in float8, with a scale for each output channel."""
    experts = len(spec.shape) == 3
    return spec.name in _FLOAT8 and not (experts and spec.shape[-1] % FLOAT8_TERMS)


def in_float16(name: str) -> bool:
    """Whether `--compute-dtype float16` holds an array in it: what products and lookups take."""
    return name.startswith("w") or name in _FLOAT16_OUTSIDE


def in_float32(name: str) -> bool:
    """Whether an array is held in float32, whatever the compute dtype: choices depend on it."""
    return name == "correction"


def block_specs(arch: Arch, layer: Layer | None = None) -> tuple[ParamSpec, ...]:
    """The arrays of a block, or of all kinds of blocks if none is given.

    If the shape of one differs between kinds, it is then that of the first kind.
    """
    if layer is not None:
        return _specs_of(arch.of(layer), layer)
    kinds = reversed(dict.fromkeys(arch.layers))
    every = {spec.name: spec for kind in kinds for spec in block_specs(arch, kind)}
    first = [spec.name for spec in block_specs(arch, arch.layers[0])]
    return tuple(every[name] for name in dict.fromkeys((*first, *sorted(every))))


def _specs_of(arch: Arch, layer: Layer) -> tuple[ParamSpec, ...]:
    specs: list[ParamSpec] = []
    if layer.attends:
        specs += _latent_specs(arch, arch.latent) if arch.latent else _attention_specs(arch, layer)
    if layer.mixer == GATED_DELTA:
        assert arch.delta
        specs += _delta_specs(arch.delta, arch.width)
    if layer.has_state_space:
        assert arch.state_space
        specs += _state_space_specs(arch.state_space, arch.width)
    if layer.mixer == SHORT_CONVOLUTION:
        assert arch.convolution
        specs += _convolution_specs(arch.convolution, arch.width)
    if arch.layer_embed:
        inner, d = arch.layer_embed, arch.width
        specs.append(ParamSpec("wlg", (inner, d), ("layer_embed", "width")))
        specs.append(ParamSpec("wlo", (d, inner), ("width", "layer_embed")))
    if arch.block_scale:
        specs.append(ParamSpec("block_scale", (1,), ("one",)))
    specs += [spec for name in arch.norms_of(layer) for spec in _norm_specs(name, arch)]
    return (*specs, *_mlp_specs(arch, layer))


def _attention_specs(arch: Arch, layer: Layer) -> list[ParamSpec]:
    d, h = arch.width, arch.head_dim
    q, kv = arch.num_heads * h, arch.num_kv_heads * h
    projected = [("q", q, "heads")]
    if not layer.borrows:
        projected += [(n, kv, "kv_heads") for n in ("k" if layer.keys_as_values else "kv")]
    if arch.attn_gate:
        projected.append(("g", q, "heads"))
    specs = [
        ParamSpec(f"w{n}", (size, d), (axis, "width"), size // h) for n, size, axis in projected
    ]
    specs.append(ParamSpec("wo", (d, q), ("width", "heads")))
    if arch.qkv_bias:
        specs += [ParamSpec(f"b{n}", (size,), (axis,), size // h) for n, size, axis in projected]
    if arch.out_bias:
        specs.append(ParamSpec("bo", (d,), ("width",)))
    if arch.sinks:
        specs.append(ParamSpec("sinks", (arch.num_heads,), ("heads",)))
    if arch.qk_norm == "head":
        named = ("q_norm",) if layer.borrows else ("q_norm", "k_norm")
        specs += [ParamSpec(name, (h,), ("head_dim",)) for name in named]
    elif arch.qk_norm == "heads":
        specs += [
            ParamSpec("q_norm", (arch.num_heads, h), ("heads", "head_dim")),
            ParamSpec("k_norm", (arch.num_kv_heads, h), ("kv_heads", "head_dim")),
        ]
    elif arch.qk_norm == "full":
        specs += [
            ParamSpec("q_norm", (q,), ("heads",)),
            ParamSpec("k_norm", (kv,), ("kv_heads",)),
        ]
    return specs


def _latent_specs(arch: Arch, latent: Latent) -> list[ParamSpec]:
    """Projections to the latents and from them; a mesh splits only the latter, by heads."""
    d, heads = arch.width, arch.num_heads
    down = {"ka": latent.rank, "kr": latent.rope_dim}
    if latent.query_rank:
        down["qa"] = latent.query_rank
    own = arch.head_dim - latent.rope_dim
    up = {"k": (own, "kv_heads", latent.rank), "v": (latent.value_dim, "kv_heads", latent.rank)}
    if latent.query_rank:
        up["qb"] = (arch.head_dim, "heads", latent.query_rank)
    specs = [ParamSpec(f"w{n}", (size, d), ("latent", "width")) for n, size in down.items()]
    for name, (dim, axis, rank) in up.items():
        specs.append(ParamSpec(f"w{name}", (heads * dim, rank), (axis, "latent"), heads))
    if not latent.query_rank:
        specs.append(ParamSpec("wq", (heads * arch.head_dim, d), ("heads", "width"), heads))
    specs.append(ParamSpec("wo", (d, heads * latent.value_dim), ("width", "heads")))
    specs.append(ParamSpec("kv_latent_norm", (latent.rank,), ("latent",)))
    if latent.query_rank:
        specs.append(ParamSpec("q_latent_norm", (latent.query_rank,), ("latent",)))
    if arch.qkv_bias:
        specs += [ParamSpec(f"b{n}", (size,), ("latent",)) for n, size in down.items()]
    if arch.out_bias:
        specs.append(ParamSpec("bo", (d,), ("width",)))
    return specs


def _delta_specs(delta: GatedDelta, d: int) -> list[ParamSpec]:
    """Queries, keys, values and the gate on what is read; then decay and strength of writing.

    A mesh cuts all of them by key heads, so that a key stays with the values written under it.
    """
    heads = (delta.key_heads, delta.value_heads)
    q, v = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    axis, sizes = "delta_heads", {"q": (q, 0), "k": (q, 0), "v": (v, 1)}
    rank, given = (delta.key_dim, "latent") if delta.narrow else (d, "width")
    decays = q if delta.by_channel else heads[1]
    specs = [
        ParamSpec(f"wd{name}", (size, d), (axis, "width"), heads[which])
        for name, (size, which) in sizes.items()
    ]
    specs.append(ParamSpec("wdg", (v, rank), (axis, given), heads[1]))
    specs.append(ParamSpec("wda", (decays, rank), (axis, given), heads[0]))
    specs.append(ParamSpec("wdb", (heads[1], d), (axis, "width"), heads[0]))
    if delta.narrow:
        specs += [ParamSpec(name, (rank, d), (given, "width")) for name in ("wdan", "wdgn")]
    specs += [
        ParamSpec(f"conv_{name}", (size, 1, delta.kernel), (axis, "one", "kernel"))
        for name, (size, _) in sizes.items()
    ]
    if delta.by_channel:  # as files hold it, to meet all channels of a head
        specs.append(ParamSpec("decay", (1, 1, heads[1], 1), ("one", "one", axis, "one")))
    else:
        specs.append(ParamSpec("decay", (heads[1],), (axis,)))
    specs.append(ParamSpec("decay_bias", (decays,), (axis,)))
    specs.append(ParamSpec("delta_norm", (delta.value_dim,), ("head_dim",)))
    return [*specs, ParamSpec("wdo", (d, v), ("width", axis))]


def _state_space_specs(space: StateSpace, d: int) -> list[ParamSpec]:
    """The gate, values, keys, queries and steps; then three numbers for each head.

    A mesh cuts them by groups, so that heads stay with their keys; the heads of a single group are
    cut themselves, and its keys and queries are whole on every device.
    """
    keys = space.groups * space.state
    convolved = {
        "x": (space.inner, "ssm_heads"), "b": (keys, "ssm_groups"), "c": (keys, "ssm_groups")
    }  # fmt: skip
    projected = {
        "z": (space.inner, "ssm_heads"), **convolved, "t": (space.heads, "ssm_heads")
    }  # fmt: skip
    specs = [
        ParamSpec(f"wm{n}", (size, d), (axis, "width")) for n, (size, axis) in projected.items()
    ]
    if space.bias:
        specs += [ParamSpec(f"bm{n}", (size,), (axis,)) for n, (size, axis) in projected.items()]
        specs.append(ParamSpec("bmo", (d,), ("width",)))
    for name, (size, axis) in convolved.items():
        specs.append(ParamSpec(f"conv_{name}", (size, 1, space.kernel), (axis, "one", "kernel")))
        if space.conv_bias:
            specs.append(ParamSpec(f"conv_bias_{name}", (size,), (axis,)))
    numbers = ("decay", "step_bias", "skip")
    specs += [ParamSpec(name, (space.heads,), ("ssm_heads",)) for name in numbers]
    if space.norm:
        specs.append(ParamSpec("ssm_norm", (space.inner,), ("ssm_heads",)))
    return [*specs, ParamSpec("wmo", (d, space.inner), ("width", "ssm_heads"))]


def _convolution_specs(convolution: ShortConvolution, d: int) -> list[ParamSpec]:
    """The gate before the convolution, the gate after it, and the values."""
    specs = [ParamSpec(f"wc{name}", (d, d), ("channels", "width")) for name in "bcx"]
    specs.append(ParamSpec("wco", (d, d), ("width", "channels")))
    specs.append(ParamSpec("conv", (d, 1, convolution.kernel), ("channels", "one", "kernel")))
    if convolution.bias:
        specs += [ParamSpec(f"bc{name}", (d,), ("channels",)) for name in "bcx"]
        specs.append(ParamSpec("conv_bias", (d,), ("channels",)))
        specs.append(ParamSpec("bco", (d,), ("width",)))
    return specs


def _norm_specs(name: str, arch: Arch) -> list[ParamSpec]:
    learned = {"layer": (name, f"{name}_bias"), "layer_bare": ()}.get(arch.norm, (name,))
    return [ParamSpec(each, (arch.width,), ("width",)) for each in learned]


def _mlp_specs(arch: Arch, layer: Layer) -> list[ParamSpec]:
    experts = arch.experts
    if not layer.mlp:
        return []
    if layer.dense:
        return _one_mlp(arch, DENSE, arch.dense_width)
    if experts is None:
        learned = ("xielu_up", "xielu_down") if arch.activation == "xielu" else ()
        shapes = [ParamSpec(name, (1,), ("one",)) for name in learned]
        return [*_one_mlp(arch, MLP, arch.mlp_width), *shapes]
    specs = _one_mlp(arch, MLP, arch.mlp_width, (experts.count,), ("experts",))
    # Not an "experts" axis: every device needs the whole router.
    specs.append(ParamSpec("w_router", (experts.count, arch.width), ("routes", "width")))
    if arch.mlp_bias:
        specs.append(ParamSpec("b_router", (experts.count,), ("routes",)))
    if experts.apart:
        specs.append(ParamSpec("router_scale", (arch.width,), ("width",)))
    if experts.scaled:
        specs.append(ParamSpec("expert_scale", (experts.count,), ("routes",)))
    if experts.corrected:
        specs.append(ParamSpec("correction", (experts.count,), ("routes",)))
    if experts.shared:
        specs += _one_mlp(arch, SHARED, experts.shared)
    if experts.shared_gate:
        specs.append(ParamSpec("ws_router", (1, arch.width), ("one", "width")))
    return specs


def _one_mlp(
    arch: Arch,
    stem: str,
    inner: int,
    lead: tuple[int, ...] = (),
    lead_axes: tuple[str, ...] = (),
) -> list[ParamSpec]:
    d, bias = arch.width, stem.replace("w", "b")
    names = ("gate", "up") if arch.gated else ("up",)
    specs = [ParamSpec(stem + n, (*lead, inner, d), (*lead_axes, "mlp", "width")) for n in names]
    specs.append(ParamSpec(f"{stem}down", (*lead, d, inner), (*lead_axes, "width", "mlp")))
    if arch.mlp_bias:
        specs += [ParamSpec(bias + n, (*lead, inner), (*lead_axes, "mlp")) for n in names]
        specs.append(ParamSpec(f"{bias}down", (*lead, d), (*lead_axes, "width")))
    return specs


def outer_specs(arch: Arch) -> tuple[ParamSpec, ...]:
    """The arrays before and after the blocks; a tied head has no array of its own."""
    specs = [ParamSpec("embed", (arch.vocab_size, arch.width), ("vocab", "width"))]
    if arch.embed_norm:
        specs += _norm_specs("embed_norm", arch)
    if arch.learned_positions:
        rows = arch.max_positions + arch.position_offset
        specs.append(ParamSpec("positions", (rows, arch.width), ("seq", "width")))
    if arch.layer_embed:
        every = arch.num_layers * arch.layer_embed
        specs += [
            ParamSpec("layer_embeds", (arch.vocab_size, every), ("vocab", "layer_embed")),
            ParamSpec("layer_embeds_from", (every, arch.width), ("layer_embed", "width")),
            ParamSpec("layer_embeds_norm", (arch.layer_embed,), ("layer_embed",)),
        ]
    return (*specs, *head_specs(arch))


def head_specs(arch: Arch) -> tuple[ParamSpec, ...]:
    """The arrays after the blocks, which only some taps need."""
    specs = _norm_specs("final_norm", arch)
    if not arch.tied_head:
        specs.append(ParamSpec("head", (arch.vocab_size, arch.width), ("vocab", "width")))
    if arch.head_bias:
        specs.append(ParamSpec("head_bias", (arch.vocab_size,), ("vocab",)))
    return tuple(specs)


def axis_sizes(arch: Arch) -> dict[str, int]:
    """Lengths of the logical axes that a mesh may cut, counting whole items such as heads."""
    # Heads and MLPs of several sizes are cut alike, or none is.
    kinds = [arch.of(layer) for layer in dict.fromkeys(arch.layers)]
    sizes: dict[str, int] = {}
    if any(layer.attends for layer in arch.layers):
        kv_heads = math.gcd(*(kind.num_kv_heads for kind in kinds))
        sizes = {"heads": arch.num_heads, "kv_heads": kv_heads}
    if arch.delta:
        sizes["delta_heads"] = arch.delta.key_heads
    if space := arch.state_space:
        sizes["ssm_heads"] = space.heads if space.groups == 1 else space.groups
        if space.groups > 1:
            sizes["ssm_groups"] = space.groups
    if arch.convolution:
        sizes["channels"] = arch.width
    inner = [arch.dense_width, *(kind.mlp_width for kind in kinds)]
    if arch.experts:
        sizes["experts"] = arch.experts.count
        inner.append(arch.experts.shared)
    if any(inner):
        sizes["mlp"] = math.gcd(*inner)
    return sizes | {"vocab": arch.vocab_size, "width": arch.width}


def array_axes(arch: Arch) -> dict[str, tuple[str, ...]]:
    """The logical axes of every array of a model."""
    return {spec.name: spec.axes for spec in (*outer_specs(arch), *block_specs(arch))}


# -- where published checkpoints hold them ---------------------------------------------------------


@dataclass(frozen=True)
class TensorSource:
    """A tensor of a checkpoint that holds one of our arrays, or several fused ones."""

    name: str  # {layer} and {expert}, or {head}, are filled in
    parts: tuple[str, ...] = ()  # the arrays it holds, in order; empty: just the one
    # Parts are concatenated ("part"), or alternate by "row" or by "head": where some have more
    # heads than others, interleaved as k0 q0 q1, k1 q2 q3, ...
    by: str = "part"
    transposed: bool = False  # stored [in, out]
    boxed: bool = False  # stored with one more axis, of length one

    @property
    def one_by_one(self) -> bool:
        """Whether each expert, or each head, has a tensor of its own."""
        return "{expert}" in self.name or "{head}" in self.name

    def shape(self, spec: ParamSpec, specs: Mapping[str, ParamSpec]) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        shape = list(spec.shape[1:] if self.one_by_one else spec.shape)
        axis = _out_axis(spec) - self.one_by_one
        if self.parts:
            shape[axis] = sum(specs[part].shape[_out_axis(specs[part])] for part in self.parts)
        if self.transposed and len(shape) - axis > 1:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        return (1, *shape) if self.boxed else tuple(shape)

    def take(
        self, tensor: np.ndarray, spec: ParamSpec, specs: Mapping[str, ParamSpec]
    ) -> np.ndarray:
        """Extract our array from the tensor; a view if possible."""
        if self.boxed:
            tensor = tensor[0]
        axis = _out_axis(spec) - self.one_by_one
        if self.transposed and tensor.ndim - axis > 1:
            tensor = tensor.swapaxes(-1, -2)
        if not self.parts:
            return tensor
        every = [specs[part] for part in self.parts]
        sizes = [part.shape[_out_axis(part)] for part in every]
        groups = {
            "part": 1, "row": min(sizes), "head": min(part.heads for part in every)
        }[self.by]  # fmt: skip
        number = self.parts.index(spec.name)
        start, size = sum(sizes[:number]) // groups, sizes[number] // groups
        before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
        grouped = tensor.reshape(*before, groups, -1, *after)
        chosen = grouped[(slice(None),) * (axis + 1) + (slice(start, start + size),)]
        return chosen.reshape(*before, -1, *after)


def _out_axis(spec: ParamSpec) -> int:
    """The axis along which arrays are fused: the layer's output."""
    return 1 if spec.axes[0] == "experts" else 0


def named(stem: str, **names: str) -> dict[str, TensorSource]:
    """Map our names to tensor names with a common stem."""
    return {ours: TensorSource(stem + theirs) for ours, theirs in names.items()}


def fused(
    name: str, *parts: str, by: str = "part", transposed: bool = False
) -> dict[str, TensorSource]:
    """One tensor that holds several of our arrays."""
    return {part: TensorSource(name, parts, by, transposed) for part in parts}


def linears(stem: str, **names: str) -> dict[str, TensorSource]:
    """Sources of layers with a matrix and, if the model has one, a bias: `wq` and `bq`."""
    both = {f"w{ours}": f"{theirs}.weight" for ours, theirs in names.items()}
    return named(stem, **both, **{f"b{n}": f"{theirs}.bias" for n, theirs in names.items()})


def norms(stem: str, **names: str) -> dict[str, TensorSource]:
    both = {ours: f"{theirs}.weight" for ours, theirs in names.items()}
    return named(stem, **both, **{f"{n}_bias": f"{theirs}.bias" for n, theirs in names.items()})


def state_space(stem: str) -> dict[str, TensorSource]:
    """Sources of a state space, as Mamba-2 names its tensors."""
    return {
        **fused(stem + "in_proj.weight", "wmz", "wmx", "wmb", "wmc", "wmt"),
        **fused(stem + "in_proj.bias", "bmz", "bmx", "bmb", "bmc", "bmt"),
        **fused(stem + "conv1d.weight", "conv_x", "conv_b", "conv_c"),
        **fused(stem + "conv1d.bias", "conv_bias_x", "conv_bias_b", "conv_bias_c"),
        **named(stem, decay="A_log", step_bias="dt_bias", skip="D", ssm_norm="norm.weight"),
        **linears(stem, mo="out_proj"),
    }
