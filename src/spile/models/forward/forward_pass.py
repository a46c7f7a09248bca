"""The state that the blocks of one forward pass share, and which of their values are kept."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spile.core.pool import MOMENTS
from spile.models.config.arch import (
    Arch,
    Layer,
)
from spile.models.forward.attention import (
    Attend,
)
from spile.models.forward.ops import (
    Heads,
    Places,
)
from spile.models.forward.pooling import Pooling
from spile.models.forward.probes import watched
from spile.models.forward.sharding import Shards
from spile.models.forward.splice import At, Changes
from spile.models.forward.weights import Block
from spile.models.sites import SITES
from spile.models.taps import Tap, computed_as

KeptColumns = Int[Array, "rows kept"]
SiteValues = dict[str, Array]  # by site
BufferKey = tuple[str, str]  # a site and `Layer.shapes`: such blocks have values of one shape
Buffers = dict[BufferKey, Array]
# Rotated keys, and values, which later blocks may read, too.
Lent = tuple[Heads, Float[Array, "rows seq heads value_dim"]]


class Inputs(NamedTuple):
    """The arrays of a batch that a forward pass reads."""

    tokens: Places
    positions: Places
    segments: Places
    columns: KeptColumns | None = None  # None: all tokens are kept
    slots: Int[Array, "rows kept"] | None = None  # of each kept token, from 1; if values are pooled
    sizes: Int[Array, "rows slots"] | None = None  # the number of tokens in each
    # Places of tokens whose next token has a log-probability from an engine, and that.
    scored: KeptColumns | None = None
    claimed: Float[Array, "rows scored"] | None = None
    # 1 for tokens that count to an objective, if some do not; and two tokens whose logits it
    # compares, if it does: then only their logits are aimed at.
    aimed: Int[Array, "rows seq"] | None = None
    answers: Int[Array, "rows seq 2"] | None = None
    # Values with which those of each token are compared, if attributions have such a baseline.
    beside: Float[Array, "rows seq values"] | None = None


def copied(values: Array, slot: Array) -> Array:
    """Return values that will be copied into a slot of a buffer.

    A GPU would compute a product a second time to write it there, if it is used elsewhere, too. A
    condition prevents that: a slot is never negative, which XLA does not know.
    """
    return jax.lax.platform_dependent(
        values,
        slot,
        cuda=lambda values, slot: jnp.where(slot >= 0, values, jnp.zeros_like(values)),
        default=lambda values, slot: values,
    )


@dataclass(frozen=True)
class Running:
    """The block that runs: its layer, and the layers that the same code runs, if it is in a scan.

    (`layer` is None where no tap and no splice asks which one it is.)
    """

    layer: Array | int | None
    of: Collection[int]

    def is_among(self, layers: Collection[int]) -> Array | bool:
        chosen = [layer for layer in self.of if layer in layers]
        if len(chosen) in (0, len(self.of)):
            return bool(chosen)
        return jnp.any(jnp.asarray(self.layer) == jnp.asarray(chosen))


@dataclass(frozen=True)
class ForwardPass:
    """The state that every block of one forward pass shares."""

    arch: Arch
    tokens: Places
    positions: Places
    segments: Places
    columns: KeptColumns | None
    pooling: Pooling | None  # None: values are not pooled here
    angles: tuple[tuple[Array, Array], ...]  # cos and sin, for each rotary setting
    attends: dict[int | None, Attend]  # by the chunks of layers; none: there is no block
    wanted: dict[str, list[int]]  # site -> layers to keep, ascending
    heads: dict[BufferKey, list[int]]  # heads to keep in all layers of a kind; if absent, all
    tops: dict[str, int]  # values to keep at sites that keep the largest
    shards: Shards | None  # None: one device has everything
    changes: Changes
    scores_all: bool  # attention weights are tapped, so they are computed for every pair
    running: Running = Running(0, (0,))
    watched: "Watched | None" = None  # the values whose gradients are collected
    aims: dict[str, list[int]] = field(default_factory=dict[str, list[int]])  # as `wanted`
    remat: bool = False  # blocks are computed again in the backward pass, and keep nothing for it
    goes_back: bool = False  # there is a backward pass

    def again(self, function: Callable[..., Array]) -> Callable[..., Array]:
        """Return a function that a backward pass computes again, and keeps only the inputs of."""
        return jax.checkpoint(function, prevent_cse=False) if self.goes_back else function

    def by_rows(self, values: Array) -> Array:
        return self.shards.rows(values) if self.shards else values

    def flat(self, values: Array) -> Array:
        """[rows, kept, ...] -> [rows x kept, ...], as stored."""
        end_to_end = values.reshape(-1, *values.shape[2:])
        return self.shards.runs(end_to_end) if self.shards else end_to_end

    def used(self, block: Block) -> Block:
        if self.shards is None:
            return block
        return {n: jax.tree.map(partial(self.shards.used, n), a) for n, a in block.items()}

    def chosen(self, kept: BufferKey, values: Array) -> Array:
        """[rows, seq, heads, ...] -> [rows, kept, heads, ...]: what some tap of the site wants."""
        if SITES[kept[0]].of_chosen:
            return values  # nothing else was computed
        values = self.kept(values)
        return values[:, :, np.array(self.heads[kept])] if kept in self.heads else values

    def shape(self, kept: BufferKey, layer: Layer) -> tuple[int, ...]:
        """Return the shape in which the values of a site in one block are stored."""
        rows = self.tokens.size if self.columns is None else self.columns.size
        if self.pooling:
            rows = self.pooling.slots_of_all
        site, heads = kept[0], tuple(self.heads.get(kept, ()))
        tap = Tap(site, 0, heads, self.tops.get(site, 0))
        moments = (2,) if self.pooling and self.pooling.by == MOMENTS else ()
        return rows, *tap.shape_in(self.arch, self.tokens.shape[1], layer), *moments

    def of_tap(self, tap: Tap, kept: BufferKey, values: Array) -> Array:
        """[rows x kept, heads, ...] -> the heads of this tap, from those that were kept."""
        if not tap.heads:
            return values
        there = self.heads.get(kept) or range(values.shape[1])
        places = [there.index(head) for head in tap.heads]
        return values if len(places) == values.shape[1] else values[:, np.array(places)]

    def watching(self, at: At, probes: Buffers, shapes: str) -> At:
        """Return `at`, which also lets each probe receive the gradient of its site's values.

        Args:
            probes: those of one block, or of what comes before the blocks.
            shapes: the kind of block that they are kept for.
        """
        if self.watched is None:
            return at
        form = self.watched.form

        def seen(site: str, values: Array) -> Array:
            values, kept = at(site, values), (site, shapes)
            if kept not in probes:
                return values
            given = self.columns, self.pooling.slots if self.pooling else None
            return watched(partial(form, kept), values, probes[kept], given)

        return seen

    def kept(self, values: Array) -> Array:
        """[rows, seq, ...] -> [rows, kept, ...]: only the tokens that are kept."""
        return at_columns(values, self.columns)

    def pooled(self, values: Array) -> Array:
        """[rows, kept, ...] -> [rows, slots, ...], if values are pooled."""
        return self.pooling.each_slot(values) if self.pooling else values


@dataclass(frozen=True)
class Watched:
    """The sites whose gradients are collected, and the form in which they leave a backward pass."""

    run: "ForwardPass"  # as if the sites were taps
    dtype: jnp.dtype

    def form(
        self, kept: BufferKey, cotangent: Array, given: tuple[Array | None, Array | None]
    ) -> Array:
        """[rows, seq, ...] -> [rows x kept, ...]; `given`: the columns, and slots of pooled rows.

        (A backward pass may read no array of the forward pass but those that it is given.)
        """
        columns, slots = given
        pooling = self.run.pooling
        if pooling is not None:
            assert slots is not None
            pooling = replace(pooling, slots=slots)
        run = replace(self.run, columns=columns, pooling=pooling)
        return run.flat(run.pooled(run.chosen(kept, cotangent))).astype(self.dtype)


def at_columns(values: Array, columns: KeptColumns | None) -> Array:
    """[rows, seq, ...] -> [rows, columns, ...]; None: all of them."""
    if columns is None:
        return values
    return jax.vmap(lambda row, chosen: row[chosen])(values, columns)


def kept_as(tap: Tap, arch: Arch) -> BufferKey:
    return tap.site, arch.layers[tap.layer or 0].shapes


def layers_by_site(taps: tuple[Tap, ...]) -> dict[str, list[int]]:
    """The layers to keep for each site, ascending; empty for a site without layers."""
    wanted: dict[str, set[int]] = {}
    for tap in map(computed_as, taps):
        layers = wanted.setdefault(tap.site, set())
        if tap.layer is not None and tap.site != "resid_pre":
            layers.add(tap.layer)
    return {site: sorted(layers) for site, layers in wanted.items()}


def layers_kept(run: ForwardPass, wanted: dict[str, list[int]]) -> dict[BufferKey, list[int]]:
    """The layers to keep for each site that has some, by their shapes, ascending."""
    found: dict[BufferKey, list[int]] = {}
    for site, layers in wanted.items():
        for layer in layers:
            found.setdefault((site, run.arch.layers[layer].shapes), []).append(layer)
    return found


def heads_kept(taps: tuple[Tap, ...], arch: Arch, shapes: str | None) -> dict[BufferKey, list[int]]:
    """The heads to keep for each site, except where a tap wants all."""
    heads: dict[BufferKey, set[int]] = {}
    whole: set[BufferKey] = set()
    for tap in taps:
        kept = kept_as(tap, arch) if shapes is None else (tap.site, shapes)
        heads.setdefault(kept, set()).update(tap.heads)
        whole |= set() if tap.heads else {kept}
    return {kept: sorted(some) for kept, some in heads.items() if kept not in whole}
