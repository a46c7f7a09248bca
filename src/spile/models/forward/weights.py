"""The decoder's weights as arrays: which there are, in which dtypes, and how blocks are stacked."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from spile.models.config.arch import Arch
from spile.models.config.specs import (
    ParamSpec,
    block_specs,
    head_specs,
    in_float8,
    in_float16,
    in_float32,
    outer_specs,
)
from spile.models.forward.ops import FLOAT8, Float8Weight
from spile.models.forward.sharding import Shards, moved

# Arrays by name, or `Float8Weight`; jax substitutes placeholders while it inspects the tree.
WeightArrays = dict[str, Any]
Block = WeightArrays  # of one block; inside `Params.cycle` each has a leading axis of cycles


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """The weights on the device; those after the blocks only if a tap needs them.

    Blocks whose kinds repeat are scanned: `cycle` has one entry for each block of a period, its
    arrays stacked over the repetitions. Blocks before them are in `lead`, and blocks that do not
    fill a period in `tail`, one by one.
    """

    outer: WeightArrays
    cycle: tuple[Block, ...]
    tail: tuple[Block, ...]
    lead: tuple[Block, ...] = ()


@dataclass(frozen=True)
class LayerSchedule:
    """The order in which the first `depth` blocks run.

    `lead` of them one by one, `cycles` times a period, then the rest.
    """

    depth: int
    period: int
    cycles: int
    lead: int = 0

    @classmethod
    def of(cls, arch: Arch, depth: int, *, whole: bool) -> "LayerSchedule":
        """Without `whole`, the last block runs apart, and only as far as taps need it."""
        last = min(depth - (not whole), arch.num_layers - arch.tail)
        cycles = max(0, last - arch.lead) // arch.period
        return cls(depth, arch.period, cycles, arch.lead if cycles else 0)

    @property
    def one_by_one(self) -> "LayerSchedule":
        """The same blocks, none of them in a scan."""
        return replace(self, cycles=0, lead=0)

    @property
    def scanned(self) -> int:
        """Number of blocks up to the end of the scan."""
        return self.lead + self.period * self.cycles


def block_array(params: Params, schedule: LayerSchedule, layer: int, name: str) -> Any:
    """Return an array of a block, by the block's number."""
    if layer < schedule.lead:
        return params.lead[layer][name]
    if layer >= schedule.scanned:
        return params.tail[layer - schedule.scanned][name]
    number, place = divmod(layer - schedule.lead, schedule.period)
    return params.cycle[place][name][number]


def abstract_params(
    arch: Arch,
    schedule: LayerSchedule,
    *,
    head: bool,
    dtype: jnp.dtype,
    shards: Shards | None = None,
) -> Params:
    """The shapes and shardings of what `load_params` returns: enough to compile a step."""

    def array(spec: ParamSpec, stack: tuple[int, ...]) -> Any:
        held = held_dtype(spec.name, dtype)
        shaped: Any = jax.ShapeDtypeStruct((*stack, *spec.shape), held)
        float8 = dtype == FLOAT8 and in_float8(spec)
        if float8:
            shaped = jax.eval_shape(Float8Weight.of, shaped)
        if shards is None:
            return shaped
        places = kept_as(spec.name, shards, stacked=bool(stack), float8=float8)
        return jax.tree.map(
            lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shaped, places
        )

    def shapes(specs: Sequence[ParamSpec], stack: tuple[int, ...] = ()) -> WeightArrays:
        return {spec.name: array(spec, stack) for spec in specs}

    late = {spec.name for spec in head_specs(arch) if not head}
    blocks = [block_specs(arch, layer) for layer in arch.layers[: schedule.depth]]
    cycle = blocks[schedule.lead :][: schedule.period] if schedule.cycles else []
    return Params(
        outer=shapes([spec for spec in outer_specs(arch) if spec.name not in late]),
        cycle=tuple(shapes(specs, (schedule.cycles,)) for specs in cycle),
        tail=tuple(map(shapes, blocks[schedule.scanned :])),
        lead=tuple(map(shapes, blocks[: schedule.lead])),
    )


def held_dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of an array on the device, before matrices are rounded to float8.

    Args:
        dtype: the compute dtype.
    """
    if in_float32(name) or (dtype == jnp.float16 and not in_float16(name)):
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.bfloat16) if dtype == FLOAT8 else dtype


def moved_params(params: Params, shards: Shards) -> Params:
    """Lay a loaded model out on another mesh, array by array."""

    def block(arrays: Block, *, stacked: bool) -> Block:
        return {
            name: jax.tree.map(
                moved,
                array,
                kept_as(name, shards, stacked=stacked, float8=isinstance(array, Float8Weight)),
            )
            for name, array in arrays.items()
        }

    return Params(
        outer=block(params.outer, stacked=False),
        cycle=tuple(block(arrays, stacked=True) for arrays in params.cycle),
        tail=tuple(block(arrays, stacked=False) for arrays in params.tail),
        lead=tuple(block(arrays, stacked=False) for arrays in params.lead),
    )


def kept_as(name: str, shards: Shards, *, stacked: bool, float8: bool) -> Any:
    """The sharding of an array of a model, or of both parts of one in float8."""
    whole = shards.kept(name, stacked=stacked)
    if not float8:
        return whole
    return Float8Weight(whole, shards.kept(name, stacked=stacked, scale=True))  # type: ignore[arg-type]
