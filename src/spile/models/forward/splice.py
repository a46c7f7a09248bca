"""Changes of a tap's values before the model continues: replace, add, patch some positions.

A change is a function of the values [rows, seq, ...]. Arrays that it needs go with it in a
`jax.tree_util.Partial`, so that other arrays of the same shape need no new program.
"""

# jax's arrays, shardings and devices are only partly typed: strict would want casts everywhere.
# pyright: standard

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool

from spile.models.forward.weights import LayerSchedule
from spile.models.taps import Tap

Change = Callable[[Array], Array]
Changes = Mapping[Tap, Change]
At = Callable[[str, Array], Array]  # a site and its values -> the values to continue with

SPLICED = (
    "embed", "resid_pre", "attn_in", "q", "kv_latent", "k", "v", "conv_in", "conv_out", "conv_gate",
    "attn_gate", "z", "attn_out", "ssm_in", "ssm_read", "ssm_gate", "ssm_z", "ssm_out", "resid_mid",
    "mlp_in", "mlp_hidden", "shared_expert_out", "mlp_out", "layer_embed", "layer_embed_out",
    "resid_post",
)  # fmt: skip


def replaced(values: Array) -> Change:
    """Replace values by these: [rows, seq, ...], or an array that broadcasts to that."""
    return Partial(_replace, values)


def added(values: Array) -> Change:
    """Add a vector, or any array that broadcasts (steering)."""
    return Partial(_add, values)


def only(where: Bool[Array, "rows seq"], change: Change) -> Change:
    """Apply a change to some tokens only; all others keep their values."""
    return Partial(_only, where, change if isinstance(change, Partial) else Partial(change))


def _replace(new: Array, values: Array) -> Array:
    return jnp.broadcast_to(new, values.shape)


def _add(more: Array, values: Array) -> Array:
    return values + jnp.broadcast_to(more, values.shape).astype(values.dtype)


def _only(where: Array, change: Change, values: Array) -> Array:
    mask = where.reshape(*where.shape, *[1] * (values.ndim - where.ndim))
    return jnp.where(mask, change(values).astype(values.dtype), values)


def in_block(changes: Changes, layer: int | None = None) -> At:
    """The changes in a block that runs by itself, or outside the blocks."""

    def at(site: str, values: Array) -> Array:
        tap = Tap(site, layer)
        return _changed(tap, changes[tap], values) if tap in changes else values

    return at


def in_scan(changes: Changes, place: int, schedule: LayerSchedule, cycle: Array | None) -> At:
    """The changes in the blocks at one place of a period, of which block `cycle` is running."""

    def at(site: str, values: Array) -> Array:
        for tap, change in changes.items():
            if tap.site != site or tap.layer is None:
                continue
            number, own = divmod(tap.layer - schedule.lead, schedule.period)
            if own == place and schedule.lead <= tap.layer < schedule.scanned:
                assert cycle is not None
                values = jax.lax.cond(
                    cycle == number,
                    lambda own, tap=tap, change=change: _changed(tap, change, own),
                    lambda own: own,
                    values,
                )
        return values

    return at


def _changed(tap: Tap, change: Change, values: Array) -> Array:
    new = change(values)
    if new.shape != values.shape:
        raise ValueError(f"splice {tap.name}: {values.shape} became {new.shape}")
    return new.astype(values.dtype)
