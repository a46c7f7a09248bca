"""Pooled values: in each packed row, one value for each span, in float32.

A row's spans have slots. The value of a slot is the sum (for "mean") or the maximum of its tokens'
values in that row, or (for "moments") the sum and the sum of squared deviations from the mean, in
a last axis of two; the host merges rows and divides. A sum is a product with zeros and ones: it is
exact but for its float32 accumulation, and has one order on a device. (Additions by index have
none on GPUs.)

For "covariance" a slot's value is the sum. In addition, each label of the unit has the products of
its tokens' deviations from their mean in the step; a row for each slot would not fit.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spile.core.pool import MOMENTS
from spile.models.files.encoders.arithmetic import latents_of
from spile.models.files.encoders.sae import AT_ONCE, Arrays, SparseEncoder
from spile.models.forward.splice import kth_largest

_BLOCK = 512  # tokens of one label that are multiplied at a time


@dataclass(frozen=True)
class Pooling:
    """How the kept tokens of a batch are pooled."""

    by: str  # "mean", "max", `MOMENTS` or `COVARIANCE`
    slots: Int[Array, "rows kept"]  # of each token, from 1; 0: it belongs to none
    count: int  # slots of a row

    @property
    def slots_of_all(self) -> int:
        """The slots of all rows together."""
        return len(self.slots) * self.count

    @property
    def members(self) -> Bool[Array, "rows kept slots"]:
        return self.slots[:, :, None] == jnp.arange(1, self.count + 1)[None, None, :]

    def each_slot(self, values: Float[Array, "rows kept ..."]) -> Float[Array, "rows slots ..."]:
        """Return the sum or the maximum of each slot's values; NaN where one of them is not finite.

        Slots without tokens have no meaning.
        """
        shape = values.shape[2:]
        flat = values.reshape(*values.shape[:2], math.prod(shape))
        if self.by == MOMENTS:
            found = self._moments(flat)
            return found.reshape(*found.shape[:2], *shape, 2)
        pooled = self._maxima(flat) if self.by == "max" else self._sums(flat)
        return pooled.reshape(*pooled.shape[:2], *shape)

    def _moments(
        self, values: Float[Array, "rows kept width"]
    ) -> Float[Array, "rows slots width 2"]:
        sums = self._sums(values)
        counts = jnp.maximum(self.members.sum(axis=1), 1).astype(jnp.float32)[..., None]
        # (Tokens of no slot read the mean of the last one, and are left out of the next sum.)
        own = jnp.take_along_axis(sums / counts, self.slots[..., None] - 1, axis=1)
        deviations = values.astype(jnp.float32) - own
        return jnp.stack([sums, self._sums(deviations * deviations)], axis=-1)

    def deviations(
        self,
        values: Float[Array, "rows kept width"],
        sums: Float[Array, "rows slots width"],
        labels: Int[Array, "rows labels"],
    ) -> tuple[Float[Array, "rows kept width"], Int[Array, "rows kept"]]:
        """Return each token's distance from the mean of its label in this step, and its label.

        Args:
            sums: of the slots.
            labels: the slot of each label in a row, or 0. Tokens of no label get the number after
                the last.
        """
        held, most = labels > 0, labels.shape[1]
        own = jnp.take_along_axis(sums, jnp.maximum(labels - 1, 0)[..., None], axis=1)
        total = jnp.where(held[..., None], own, 0.0).sum(axis=0)
        members = (self.slots[:, :, None] == labels[:, None, :]) & held[:, None, :]
        counts = jnp.maximum(members.sum(axis=(0, 1)), 1).astype(jnp.float32)
        label = jnp.where(members.any(axis=-1), members.argmax(axis=-1).astype(jnp.int32), most)
        means = total / counts[:, None]
        apart = values.astype(jnp.float32) - means[jnp.minimum(label, most - 1)]
        return apart, label

    def _sums(self, values: Float[Array, "rows kept width"]) -> Float[Array, "rows slots width"]:
        members = self.members
        finite = jnp.isfinite(values)
        # Zero times infinity is NaN: one bad token must not spoil the other spans of its row.
        spoilt = (members & ~finite.all(axis=-1)[..., None]).any(axis=1)
        sums = jnp.einsum(
            "rks,rkw->rsw",
            members.astype(values.dtype),
            jnp.where(finite, values, 0),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return jnp.where(spoilt[..., None], jnp.nan, sums)

    def _maxima(self, values: Float[Array, "rows kept width"]) -> Float[Array, "rows slots width"]:
        def largest(slot: Int[Array, ""]) -> Float[Array, "rows width"]:
            own = (self.slots == slot)[..., None]
            return jnp.where(own, values, -jnp.inf).max(axis=1).astype(jnp.float32)

        found = jax.lax.map(largest, jnp.arange(1, self.count + 1))
        return jnp.where(jnp.isposinf(found), jnp.nan, found).swapaxes(0, 1)

    def each_slots_latents(
        self, values: Float[Array, "rows kept ..."], arrays: Arrays, encoder: SparseEncoder
    ) -> Float[Array, "rows slots latents"]:
        """Pool all latents of the tokens; a few tokens of each row are encoded at a time."""
        sae, (rows, kept) = encoder.sae, values.shape[:2]
        product = partial(jnp.dot, preferred_element_type=jnp.float32)

        def encoded(row: Float[Array, " width"]) -> Float[Array, " latents"]:
            wide = row.astype(jnp.float32)
            return latents_of(
                sae, arrays, wide, jnp, lambda a, b: product(a.astype(b.dtype), b), kth_largest
            )

        size = min(kept, max(1, AT_ONCE // (rows * sae.latents)))
        short = -kept % size

        def by_part(array: Array) -> Array:
            padded = jnp.pad(array, ((0, 0), (0, short), *[(0, 0)] * (array.ndim - 2)))
            return padded.reshape(rows, -1, size, *array.shape[2:]).swapaxes(0, 1)

        def add(
            before: Float[Array, "rows slots latents"], part: tuple[Array, Array]
        ) -> tuple[Float[Array, "rows slots latents"], None]:
            tokens, slots = part
            found = jax.vmap(jax.vmap(encoded))(tokens)
            new = Pooling(self.by, slots, self.count).each_slot(found)
            return (before + new if self.by == "mean" else jnp.maximum(before, new)), None

        start = 0.0 if self.by == "mean" else -jnp.inf
        nothing = jnp.full((rows, self.count, sae.latents), start, jnp.float32)
        flat = values.reshape(rows, kept, math.prod(values.shape[2:]))
        pooled, _ = jax.lax.scan(add, nothing, (by_part(flat), by_part(self.slots)))
        return pooled


def products_by_label(
    deviations: Float[Array, "tokens width"], labels: Int[Array, " tokens"], count: int
) -> Float[Array, "1 labels width width"]:
    """Sum the outer products of each label's tokens, in an order that a device fixes.

    Tokens are sorted by label, and laid into blocks of one label each. So the cost is that of one
    product of all tokens, however many labels there are.
    """
    tokens, width = deviations.shape
    size = min(tokens, _BLOCK)
    blocks = -(-tokens // size) + count
    order = jnp.argsort(labels, stable=True)
    held = jnp.bincount(labels, length=count + 1).astype(jnp.int32)
    padded = -(-held[:count] // size) * size
    ends = jnp.cumsum(padded)
    # (Those of no label come last, and have no place.)
    first = jnp.concatenate([ends - padded, jnp.full((1,), blocks * size, ends.dtype)])
    sorted_by = labels[order]
    rank = jnp.arange(tokens) - (jnp.cumsum(held) - held)[sorted_by]
    places = jnp.full((blocks * size,), tokens, jnp.int32)
    places = places.at[first[sorted_by] + rank].set(order.astype(jnp.int32), mode="drop")
    label_of = jnp.searchsorted(ends, jnp.arange(blocks) * size, side="right")
    label_of = jnp.minimum(label_of, count - 1).astype(jnp.int32)
    rows = jnp.pad(deviations, ((0, 1), (0, 0)))

    def add(
        total: Float[Array, "labels width width"], block: tuple[Array, Array]
    ) -> tuple[Float[Array, "labels width width"], None]:
        label, own = block
        wide = rows[own]
        products = jnp.einsum("tw,tv->wv", wide, wide, precision=jax.lax.Precision.HIGHEST)
        before = jax.lax.dynamic_index_in_dim(total, label, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, before + products, label, 0), None

    nothing = jnp.zeros((count, width, width), jnp.float32)
    found, _ = jax.lax.scan(add, nothing, (label_of, places.reshape(blocks, size)))
    return found[None]
