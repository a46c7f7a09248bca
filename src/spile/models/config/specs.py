"""Every array of the decoder, declared once: shape and logical axes. No jax, no file access.

Loading, checking, sharding and memory accounting derive from these declarations. Matrices keep
the layout most checkpoints have, [out, in], so loading is a plain copy; `TensorSource` describes
an array in a checkpoint: its name, the arrays it is fused with, and their order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spile.models.config.arch import Arch


@dataclass(frozen=True)
class ParamSpec:
    """One array. `axes` are logical; a mesh assigns them (sharding.py)."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]


# What `--compute-dtype float8_e4m3` multiplies in 8 bits, unless the MLP's are of experts.
_FLOAT8 = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


def in_float8(spec: ParamSpec) -> bool:
    """Whether an array can be held in float8, with a scale for each output channel."""
    return spec.name in _FLOAT8 and len(spec.shape) == 2


def block_specs(arch: Arch) -> tuple[ParamSpec, ...]:
    """The arrays of one block."""
    d, h = arch.width, arch.head_dim
    q, kv = arch.num_heads * h, arch.num_kv_heads * h
    specs = [
        ParamSpec("wq", (q, d), ("heads", "width")),
        ParamSpec("wk", (kv, d), ("kv_heads", "width")),
        ParamSpec("wv", (kv, d), ("kv_heads", "width")),
        ParamSpec("wo", (d, q), ("width", "heads")),
    ]
    if arch.qkv_bias:
        specs += [
            ParamSpec("bq", (q,), ("heads",)),
            ParamSpec("bk", (kv,), ("kv_heads",)),
            ParamSpec("bv", (kv,), ("kv_heads",)),
        ]
    if arch.out_bias:
        specs.append(ParamSpec("bo", (d,), ("width",)))
    if arch.sinks:
        specs.append(ParamSpec("sinks", (arch.num_heads,), ("heads",)))
    if arch.qk_norm == "head":
        specs += [ParamSpec(name, (h,), ("head_dim",)) for name in ("q_norm", "k_norm")]
    elif arch.qk_norm == "full":
        specs += [
            ParamSpec("q_norm", (q,), ("heads",)),
            ParamSpec("k_norm", (kv,), ("kv_heads",)),
        ]
    for placed, names in (
        (arch.pre_norm, ("attn_norm", "mlp_norm")),
        (arch.post_norm, ("attn_post_norm", "mlp_post_norm")),
    ):
        specs += [spec for name in names if placed for spec in _norm_specs(name, arch)]
    return (*specs, *_mlp_specs(arch))


def _norm_specs(name: str, arch: Arch) -> list[ParamSpec]:
    names = (name, f"{name}_bias") if arch.norm == "layer" else (name,)
    return [ParamSpec(each, (arch.width,), ("width",)) for each in names]


def _mlp_specs(arch: Arch) -> list[ParamSpec]:
    d, f, experts = arch.width, arch.mlp_width, arch.experts
    lead, lead_axes = ((experts.count,), ("experts",)) if experts else ((), ())
    inner = ("gate", "up") if arch.gated else ("up",)
    specs = [ParamSpec(f"w_{n}", (*lead, f, d), (*lead_axes, "mlp", "width")) for n in inner]
    specs.append(ParamSpec("w_down", (*lead, d, f), (*lead_axes, "width", "mlp")))
    if arch.mlp_bias:
        specs += [ParamSpec(f"b_{n}", (*lead, f), (*lead_axes, "mlp")) for n in inner]
        specs.append(ParamSpec("b_down", (*lead, d), (*lead_axes, "width")))
    if experts:
        # Not an "experts" axis: every device needs the whole router.
        specs.append(ParamSpec("w_router", (experts.count, d), ("routes", "width")))
        if arch.mlp_bias:
            specs.append(ParamSpec("b_router", (experts.count,), ("routes",)))
    return specs


def outer_specs(arch: Arch) -> tuple[ParamSpec, ...]:
    """The arrays before and after the blocks; a tied head has no array of its own."""
    specs = [ParamSpec("embed", (arch.vocab_size, arch.width), ("vocab", "width"))]
    if not arch.ropes:
        specs.append(ParamSpec("positions", (arch.max_positions, arch.width), ("seq", "width")))
    return (*specs, *head_specs(arch))


def head_specs(arch: Arch) -> tuple[ParamSpec, ...]:
    """The arrays after the blocks, which only some taps need."""
    specs = _norm_specs("final_norm", arch)
    if not arch.tied_head:
        specs.append(ParamSpec("head", (arch.vocab_size, arch.width), ("vocab", "width")))
    return tuple(specs)


def axis_sizes(arch: Arch) -> dict[str, int]:
    """Lengths of the logical axes that a mesh may cut, counting whole items such as heads."""
    sizes = {"heads": arch.num_heads, "kv_heads": arch.num_kv_heads}
    if arch.experts:
        sizes["experts"] = arch.experts.count
    return sizes | {"mlp": arch.mlp_width, "vocab": arch.vocab_size, "width": arch.width}


def array_axes(arch: Arch) -> dict[str, tuple[str, ...]]:
    """The logical axes of every array of a model."""
    return {spec.name: spec.axes for spec in (*outer_specs(arch), *block_specs(arch))}


# -- where published checkpoints hold them ---------------------------------------------------------


@dataclass(frozen=True)
class TensorSource:
    """A tensor of a checkpoint that holds one of our arrays, or several fused ones."""

    name: str  # {layer} and {expert} are filled in
    parts: tuple[str, ...] = ()  # the arrays it holds, in order; empty: just the one
    by: str = "part"  # parts are concatenated ("part"), or alternate by "head" or by "row"
    transposed: bool = False  # stored [in, out]

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.name

    def shape(self, spec: ParamSpec, specs: Mapping[str, ParamSpec]) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        shape = list(spec.shape[1:] if self.per_expert else spec.shape)
        axis = _out_axis(spec) - self.per_expert
        if self.parts:
            shape[axis] = sum(specs[part].shape[_out_axis(specs[part])] for part in self.parts)
        if self.transposed and len(shape) - axis > 1:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        return tuple(shape)

    def take(
        self, tensor: np.ndarray, spec: ParamSpec, specs: Mapping[str, ParamSpec], head_dim: int
    ) -> np.ndarray:
        """Extract our array from the tensor; a view if possible."""
        axis = _out_axis(spec) - self.per_expert
        if self.transposed and tensor.ndim - axis > 1:
            tensor = tensor.swapaxes(-1, -2)
        if not self.parts:
            return tensor
        number = self.parts.index(spec.name)
        if self.by == "part":
            sizes = [specs[part].shape[_out_axis(specs[part])] for part in self.parts]
            start = sum(sizes[:number])
            return tensor[(slice(None),) * axis + (slice(start, start + sizes[number]),)]
        group = head_dim if self.by == "head" else 1
        before, after = tensor.shape[:axis], tensor.shape[axis + 1 :]
        grouped = tensor.reshape(*before, -1, len(self.parts), group, *after)
        chosen = grouped[(slice(None),) * (axis + 1) + (number,)]
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
