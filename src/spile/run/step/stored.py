"""Stored rows: tapped values in the form in which they are stored, and their statistics.

All of it is computed on the device, so that fewer bytes leave it.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, Shaped

from spile.core.recipe import error_name, latent_names
from spile.dataset.codec.quantization import FLOAT8, FLOAT8_MAX, INT8_MAX, QUANTIZED
from spile.dataset.format import scale_name
from spile.models.files.encoders.arithmetic import completed
from spile.models.files.encoders.sae import Arrays, SparseEncoder
from spile.models.forward.lens import LensHead
from spile.models.forward.pooling import Pooling, products_by_label
from spile.models.forward.sharding import P, Shards
from spile.models.forward.sparse_latents import (
    TopLatents,
    top_attributions,
    top_latents,
    typed_product,
)
from spile.models.layout import AXES
from spile.models.sites import LENSES
from spile.models.taps import Tap

# Sums by name: for each part of a run (and each channel), as `_reduce` returns them, or `PRODUCTS`.
Reduced = dict[str, Array]
PRODUCTS = "products"  # of the deviations of each label's tokens: [devices, labels, width, width]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Extras:
    """The arrays besides the weights that a program reads, or their shapes.

    (jax substitutes placeholders while it inspects the tree.)
    """

    scales: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of channels, by stored name
    encoders: Mapping[str, Arrays] = field(default_factory=dict[str, Arrays])  # by tap
    changes: tuple[Partial, ...] = ()  # of the spliced taps, in their order
    # Of a lens, by the first tap of each layer that holds its predictions.
    lenses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    # Of attributions, by tap: the row that is subtracted, or the columns of the values beside each
    # token that are (`Inputs.beside`).
    baselines: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class StoredForm:
    """How the taps of a program are stored."""

    taps: Mapping[str, Tap]  # by the name under which their values come
    encoders: Mapping[str, SparseEncoder]  # of taps that are stored as latents
    store_dtype: str
    shards: Shards | None
    lens: LensHead | None = None  # if some taps hold a lens's predictions

    def parts(
        self,
        values: Mapping[str, Array],
        extras: Extras,
        pooling: Pooling | None,
        labels: Array | None = None,
        *,
        gathers: bool = False,
    ) -> tuple[dict[str, Array], dict[str, Reduced]]:
        """Return the parts of pooled rows by stored name, which the host merges.

        Those of an encoded tap are of all its latents; the host chooses the largest. With labels,
        each tap also has the products of their tokens' deviations, by device.

        Args:
            values: of each tap, as the decoder returns them.
            pooling: if the decoder has not pooled them.
            labels: the slot of each label in a row, if covariances are summed.
            gathers: whether every device gets the products of all.
        """
        if pooling is None:
            return dict(values), {}
        parts: dict[str, Array] = {}
        products: dict[str, Reduced] = {}
        for name, found in values.items():
            by_row = found.reshape(*pooling.slots.shape, *found.shape[1:])
            by_row = self.shards.rows(by_row) if self.shards else by_row
            stored = name
            if name in self.encoders:
                stored, _ = latent_names(name)
                encoder, arrays = self.encoders[name], extras.encoders[name]
                pooled = pooling.each_slots_latents(by_row, arrays, encoder)
            else:
                pooled = pooling.each_slot(by_row)
            if labels is not None:
                found = self._products(by_row, pooled, pooling, labels, gathers=gathers)
                products[stored] = {PRODUCTS: found}
            flat = pooled.reshape(-1, *pooled.shape[2:])
            parts[stored] = self.shards.runs(flat) if self.shards else flat
        return parts, products

    def _products(
        self, values: Array, sums: Array, pooling: Pooling, labels: Array, *, gathers: bool
    ) -> Float[Array, "devices labels width width"]:
        """Return the products of deviations; each device has those of its own run of tokens."""
        wide = values.reshape(*values.shape[:2], math.prod(values.shape[2:]))
        total = sums.reshape(*sums.shape[:2], wide.shape[-1])
        apart, label = pooling.deviations(wide, total, labels)
        tokens, numbers = apart.reshape(-1, apart.shape[-1]), label.reshape(-1)
        own = partial(products_by_label, count=labels.shape[1])
        if self.shards is None:
            return own(tokens, numbers)

        def everywhere(tokens: Array, numbers: Array) -> Array:
            summed: Array = jax.lax.psum(own(tokens, numbers), AXES)
            return summed

        each, out = (everywhere, P()) if gathers else (own, P(AXES))
        found: Array = self.shards.each(each, [P(AXES)] * 2, out)(tokens, numbers)
        return found

    def rows(
        self,
        values: Mapping[str, Array],
        extras: Extras,
        kept: tuple[Array, Array | None],
        seq_len: int,
        part: int,
    ) -> tuple[dict[str, Array], dict[str, Reduced]]:
        """Return rows by stored name, and their statistics.

        Args:
            values: of each tap, as the decoder returns them.
            kept: the number of kept tokens of each row, and their columns unless all may be kept.
            part: the number of tokens that have statistics of their own.
        """
        counts, columns = kept
        width = seq_len if columns is None else columns.shape[1]
        real = (jnp.arange(width)[None, :] < counts[:, None]).reshape(-1)
        reduce = _on_each(self.shards, partial(_reduce, part=part), 3)
        rows: dict[str, Array] = {}
        reduced: dict[str, Reduced] = {}

        def keep(name: str, found: Array, dtype: str, least: int = 0, **counted: Array) -> None:
            if dtype not in QUANTIZED:
                found = found.astype(dtype)
            encoded = encode_rows(found, dtype, extras.scales.get(name))
            rows[name] = encoded.stored
            if encoded.scale is not None:
                rows[scale_name(name)] = encoded.scale
            floats = jnp.issubdtype(found.dtype, jnp.floating)
            counted["nonfinite"] = _per_token(~jnp.isfinite(found) if floats else found < least)
            if encoded.clipped is not None:
                counted["clipped"] = encoded.clipped
            reduced[name] = reduce(encoded.decoded, real, counted)

        values = {**values, **self._predictions(values, extras, len(counts))}
        across = self._across(values, extras)
        for name, tap in self.taps.items():
            if name not in self.encoders:
                keep(name, values[name], tap.dtype(self.store_dtype), tap.kind.least)
                continue
            top = across.get(name) or self._encoded(name, tap, values, extras.encoders[name])
            latents, ids = latent_names(name)
            keep(latents, top.values, self.store_dtype, truncated=top.beyond.astype(jnp.int32))
            keep(ids, top.ids, self.encoders[name].id_dtype)
            if top.error is not None:
                keep(error_name(name), top.error, self.store_dtype)
        return rows, reduced

    def _predictions(
        self, values: Mapping[str, Array], extras: Extras, rows: int
    ) -> dict[str, Array]:
        """Return a lens's predictions by tap, from the streams that come in place of them."""
        by_layer: dict[int | None, list[str]] = {}
        for name, tap in self.taps.items():
            if tap.site in LENSES:
                by_layer.setdefault(tap.layer, []).append(name)
        found: dict[str, Array] = {}
        for names in by_layer.values():
            assert self.lens
            stream = values[names[0]]
            stream = stream.reshape(rows, -1, stream.shape[-1])
            stream = self.shards.rows(stream) if self.shards else stream
            arrays = next(extras.lenses[name] for name in names if name in extras.lenses)
            sites = {name: self.taps[name].site for name in names}
            sized = [self.taps[name] for name in names if self.taps[name].kind.largest_of]
            top = max((tap.shape(self.lens.arch, 1)[-1] for tap in sized), default=0)
            predicted = self.lens.predictions(arrays, stream, [*sites.values()], top)
            for name, site in sites.items():
                flat = predicted[site].reshape(-1, *predicted[site].shape[2:])
                found[name] = self.shards.runs(flat) if self.shards else flat
        return found

    def _encoded(
        self, name: str, tap: Tap, values: Mapping[str, Array], arrays: Arrays
    ) -> TopLatents:
        """Encode a tap's rows; every device has the whole encoder and encodes runs of tokens."""
        encoder, given = self.encoders[name], [values[name]]
        if tap.kind.summed:  # a row's values, and their gradients
            given = [values[name][:, 0], values[name][:, 1]]
            function = partial(top_attributions, encoder=encoder)
            if self.shards:
                function = self.shards.each(function, [P(), P(AXES), P(AXES)], P(AXES))
            return function(arrays, *given)
        if encoder.error_of and not encoder.sae.across:
            given.append(self._reconstructed(encoder, tap, values))
        function = partial(top_latents, encoder=encoder)
        if self.shards:
            function = self.shards.each(function, [P(), *[P(AXES)] * len(given)], P(AXES))
        return function(arrays, *given)

    def _reconstructed(
        self, encoder: SparseEncoder, tap: Tap, values: Mapping[str, Array]
    ) -> Array:
        """Return the rows that an encoder reconstructs: those of a site of the same block."""
        wanted = Tap(encoder.error_of or "", tap.layer)
        return next(values[each] for each, own in self.taps.items() if own == wanted)

    def _across(self, values: Mapping[str, Array], extras: Extras) -> dict[str, TopLatents]:
        """Encode the taps that cross-layer transcoders read, if their errors are stored.

        They go from the first layer on: the error of a layer needs what all layers up to it write.
        """
        found: dict[str, TopLatents] = {}
        sums: dict[tuple[str, int | None], Array] = {}  # by the site that is read, and the layer
        crossing = [name for name, each in self.encoders.items() if each.sae.across]
        for name in sorted(crossing, key=lambda name: self.taps[name].layer or 0):
            tap, encoder, arrays = self.taps[name], self.encoders[name], extras.encoders[name]
            top = self._encoded(name, tap, values, arrays)
            assert top.written is not None
            parts = jnp.split(top.written, len(encoder.sae.across), axis=1)
            for layer, part in zip(encoder.sae.across, parts, strict=True):
                before = sums.get((tap.site, layer))
                sums[tap.site, layer] = part if before is None else before + part
            if encoder.error_of:
                wanted = self._reconstructed(encoder, tap, values)
                rows = values[name].reshape(len(wanted), -1).astype(jnp.float32)
                made = completed(
                    encoder.sae, arrays, sums.pop((tap.site, tap.layer)), rows, typed_product
                )
                error = wanted.astype(jnp.float32) - made.reshape(wanted.shape)
                top = top._replace(error=error)
            found[name] = top
        return found


def joined(values: Mapping[str, Array], beside: str) -> dict[str, Array]:
    """Return each other tap's values, followed by those of the tap `beside`: [tokens, both]."""
    flat = {name: found.reshape(len(found), -1) for name, found in values.items()}
    other = flat.pop(beside)
    return {name: jnp.concatenate([found, other], axis=1) for name, found in flat.items()}


def _on_each(shards: Shards | None, function: Callable[..., Any], arguments: int) -> Any:
    """Return `function` applied by every device to its own runs of tokens."""
    if shards is None:
        return function
    return shards.each(function, [P(AXES)] * arguments, P(AXES))


def packing(shards: Shards | None, *, gathers: bool = False) -> Any:
    """Return the function that packs rows: it takes rows by name, and the places of kept ones.

    `gathers`: whether every device gets the rows of all.
    """
    if shards and gathers:
        return shards.each(_compact_everywhere, [P(AXES)] * 2, P())
    return _on_each(shards, _compact, 2)


def _compact_everywhere(rows: Mapping[str, Array], kept: Array) -> dict[str, Array]:
    own = _compact(rows, kept)
    return {name: jax.lax.all_gather(a, AXES, tiled=True) for name, a in own.items()}


def _compact(rows: Mapping[str, Array], kept: Array) -> dict[str, Array]:
    """Keep only the rows to store, without gaps: padding never leaves the device."""
    return {name: values[kept] for name, values in rows.items()}


def _reduce(
    values: Shaped[Array, "tokens ..."],
    real: Bool[Array, " tokens"],
    counted: Mapping[str, Int[Array, " tokens"]],
    *,
    part: int,
) -> Reduced:
    """Moments of the stored values over the kept tokens of each part of a run.

    Values stay [tokens, channels] until they are summed. With parts as an axis of their own, XLA
    copies them for a GPU, transposed and in float32, before it sums over tokens.
    """
    wide = values.reshape(len(values), -1).astype(jnp.float32)
    masked = partial(jnp.where, real[:, None])

    def over_tokens(values: Array) -> Array:
        return values.reshape(-1, part, values.shape[-1]).sum(axis=1)

    count = jnp.maximum(real.reshape(-1, part).sum(axis=1), 1).astype(jnp.float32)[:, None]
    present = masked(wide, 0.0)
    mean = _rounded(over_tokens(present) / count)
    of_each = jnp.broadcast_to(mean[:, None], (len(mean), part, mean.shape[-1]))
    deviation = masked(wide - of_each.reshape(wide.shape), 0.0)
    length = jnp.sqrt((present * present).sum(axis=-1))
    largest = jnp.where(jnp.isfinite(present), jnp.abs(present), 0.0).max(axis=-1)
    return {
        "mean": mean,
        "rest": over_tokens(deviation) / count,
        "m2": over_tokens(deviation * deviation),
        "norm_sum": length.reshape(-1, part).sum(axis=-1),
        "max_abs": largest.reshape(-1, part).max(axis=-1),
    } | {
        name: jnp.where(real, counts, 0).reshape(-1, part).sum(axis=1)
        for name, counts in counted.items()
    }


def _rounded(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Clear the last bit of each float32.

    A compiler may use an unrounded quotient in a following difference (a fused multiply-add). But
    deviations must be taken from exactly the mean that is returned: then the mean of the deviations
    is the error of that mean, from its rounding and its sum. An operation on the bits forces the
    rounding.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jax.lax.bitcast_convert_type(bits & ~1, jnp.float32)


def _per_token(found: Bool[Array, "tokens ..."]) -> Int[Array, " tokens"]:
    """Number of true values of each token."""
    return found.reshape(len(found), -1).sum(axis=-1, dtype=jnp.int32)


@dataclass(frozen=True)
class EncodedRows:
    """Values in their stored form, and as they are read back.

    `dataset/codec/quantization.py` defines the stored forms and how to read them.
    """

    stored: Shaped[Array, "rows ..."]
    scale: Float[Array, " rows"] | None  # if each row has one
    decoded: Shaped[Array, "rows ..."]
    clipped: Int[Array, " rows"] | None  # values of each row that were too large


def encode_rows(
    values: Shaped[Array, "rows ..."],
    dtype: str,
    channel_scale: Float[Array, "..."] | None,
) -> EncodedRows:
    """Round values to the form in which they are stored, so that fewer bytes leave the device.

    Values of a plain dtype pass through unchanged.
    """
    if dtype == "float8_e4m3":
        return _by_row(values)
    if dtype == "int8":
        assert channel_scale is not None
        return _by_channel(values, channel_scale)
    return EncodedRows(values, None, values, None)


def _by_row(values: Shaped[Array, "rows ..."]) -> EncodedRows:
    wide = values.astype(jnp.float32)
    # Nonfinite values are stored as NaN, and must not spoil the rest of their row.
    present = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0.0)
    largest = present.reshape(len(values), -1).max(axis=-1)
    # Not so small that a device flushes it to zero.
    smallest = float(np.finfo(np.float32).tiny)
    scale = jnp.where(largest > 0, jnp.maximum(largest / FLOAT8_MAX, smallest), 1.0)
    shaped = scale.reshape(*scale.shape, *[1] * (values.ndim - 1))
    stored = (wide / shaped).astype(FLOAT8)
    return EncodedRows(stored, scale, stored.astype(jnp.float32) * shaped, None)


def _by_channel(values: Shaped[Array, "rows ..."], scale: Float[Array, "..."]) -> EncodedRows:
    scale = scale[None]
    steps = jnp.rint(values.astype(jnp.float32) / scale)
    stored = jnp.clip(steps, -INT8_MAX, INT8_MAX).astype(jnp.int8)
    beyond = (jnp.abs(steps) > INT8_MAX).reshape(len(values), -1).sum(axis=-1)
    return EncodedRows(stored, None, stored.astype(jnp.float32) * scale, beyond)
