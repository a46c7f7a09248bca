"""The one decoder: embeds, runs the blocks in a scan, and returns the tapped values.

Tapped values live in the scan's carry, one buffer per site and kind of shapes, already in the
stored dtype and without the rows that nobody asked for. A block that is not tapped at a site writes
to the slot of the site's next tapped block of its kind, which overwrites it later; only a site that
ends above the deepest scanned block needs a slot to throw away.

On a mesh, a device holds some rows of the batch, and one run of all tokens of the tapped values.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spile.core.errors import ConfigError
from spile.core.pool import MOMENTS
from spile.models.config.arch import (
    ATTENTION,
    GATED_DELTA,
    NO_MIXER,
    SHORT_CONVOLUTION,
    SIDE_BY_SIDE,
    STATE_SPACE,
    Arch,
    Layer,
)
from spile.models.config.specs import DENSE, MLP, SHARED
from spile.models.forward import moe
from spile.models.forward.attended import attended
from spile.models.forward.attention import (
    Attend,
    Attention,
    Keys,
    Queries,
    Scoring,
    TokenPlaces,
    attention_by_heads,
    chunked,
    mixed,
    pattern,
)
from spile.models.forward.mixers.gated_delta import gated_delta
from spile.models.forward.mixers.latent_heads import latent_heads, rotate_last
from spile.models.forward.mixers.short_convolution import short_convolution
from spile.models.forward.mixers.state_space import state_space
from spile.models.forward.next_token import next_token
from spile.models.forward.ops import (
    Float8Weight,
    Heads,
    Hidden,
    Places,
    activate,
    in_slices,
    linear,
    norm,
    rotary_angles,
    rotate,
    scaled,
    softcap,
    widened,
    xielu,
)
from spile.models.forward.pooling import Pooling
from spile.models.forward.probes import by_token, lent, watched
from spile.models.forward.sharding import Shards
from spile.models.forward.splice import At, Change, Changes, in_block, in_scan
from spile.models.forward.weights import Block, LayerSchedule, Params, WeightArrays
from spile.models.sites import AFTER_BLOCKS, SITES
from spile.models.taps import Tap, computed_as

KeptColumns = Int[Array, "rows kept"]
SiteValues = dict[str, Array]  # by site
BufferKey = tuple[str, str]  # a site and `Layer.shapes`: such blocks have values of one shape
Buffers = dict[BufferKey, Array]
# Rotated keys, and values, which later blocks may read, too.
Lent = tuple[Heads, Float[Array, "rows seq heads value_dim"]]

_HEAD_VALUES = 1 << 28  # logits held at once, in float32: 1 GiB


@dataclass(frozen=True)
class _Running:
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
class _Run:
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
    running: _Running = _Running(0, (0,))
    watched: "_Watched | None" = None  # the values whose gradients are collected
    aims: dict[str, list[int]] = field(default_factory=dict[str, list[int]])  # as `wanted`
    remat: bool = False  # blocks are computed again in the backward pass, and keep nothing for it

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
        return _at(values, self.columns)

    def pooled(self, values: Array) -> Array:
        """[rows, kept, ...] -> [rows, slots, ...], if values are pooled."""
        return self.pooling.each_slot(values) if self.pooling else values


@dataclass(frozen=True)
class _Watched:
    """The sites whose gradients are collected, and the form in which they leave a backward pass."""

    run: "_Run"  # as if the sites were taps
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


# What a block reads besides the stream: its own embeddings of the tokens, and borrowed keys and
# values; None where it has or borrows none.
Beside = tuple[Array | None, Lent | None]
# Stages outside the blocks; any other stage is a block, known by its kind.
BEFORE, AFTER = "before_blocks", "after_blocks"
_OUTER = ("embed", "resid_pre")  # sites before the blocks
# Not a tap: distances of an engine's log-probabilities from the model's own, [rows, scored].
GAPS = "gaps"


@dataclass(frozen=True)
class Decoder:
    """A forward pass with its taps and splices: everything that its program is compiled for."""

    arch: Arch
    taps: tuple[Tap, ...]
    store_dtype: str
    attention: Attention | None  # None: no block runs
    shards: Shards | None = None
    splice: Changes = field(default_factory=dict[Tap, Change])
    scores_all: bool = False  # attention weights of some block are tapped, not only of these taps
    pool: str | None = None  # "mean" or "max": values leave it reduced, in float32
    # For a backward pass (`gradient.py`): the taps at whose values it ends, those from which it
    # starts, and whether blocks are computed again instead of keeping what they need.
    sites: tuple[Tap, ...] = ()
    aims: tuple[Tap, ...] = ()
    remat: bool = False

    def forward(self, params: Params, inputs: Inputs, schedule: LayerSchedule) -> dict[str, Array]:
        """Run the model down to the deepest tap; return each tap's values [rows x kept, ...].

        The columns of `inputs` are the positions to keep within each row (all of them, if None).
        With `pool`, the values of each slot are reduced: [rows x slots, ...]. Where the model is
        spliced, it continues with the changed values, and the tap holds those.
        """
        return self.differentiable(params, inputs, schedule, {})[0]

    def differentiable(
        self, params: Params, inputs: Inputs, schedule: LayerSchedule, probes: Buffers
    ) -> tuple[dict[str, Array], dict[str, Array], Buffers]:
        """Run the model; return each tap's values, those of the aims, and the probes.

        The values of aims [rows, seq, ...] are those of all tokens. With sites, only they can be
        differentiated, with respect to the probes (`probes` makes them).
        """
        taps, run = self.taps, self._run(inputs)
        outer_shapes = self.arch.layers[0].shapes
        x, by_layer, outer = _embed(params.outer, run, probes=probes, shapes=outer_shapes)
        dtypes = {tap.site: self._dtype_of(tap) for tap in taps}
        dtypes["resid_post"] = self._dtype_of(Tap("resid_post", 0))  # `resid_pre` is read there
        out = {
            tap.name: run.flat(run.pooled(run.kept(outer[tap.site]))).astype(dtypes[tap.site])
            for tap in map(computed_as, taps)
            if tap.site in outer
        }
        x, found = _run_blocks(params, x, by_layer, run, schedule, dtypes, probes)
        after = {tap.site for tap in taps} & {*AFTER_BLOCKS}
        if after:
            values = _after_blocks(params.outer, x, run)
            pooled = {site: run.pooled(values) for site, values in values.items()}
            out |= {site: run.flat(a).astype(dtypes[site]) for site, a in pooled.items()}
        if inputs.scored is not None:
            out[GAPS] = _gaps(params.outer, x, run, inputs)
        for tap in taps:
            met = computed_as(tap)
            if met.layer is not None and (kept := _kept_as(met, self.arch)) in found.taps:
                values = found.taps[kept][_layers_kept(run, run.wanted)[kept].index(met.layer)]
                out[tap.name] = run.of_tap(tap, kept, values)
        if self.sites:
            out = jax.lax.stop_gradient(out)
        aimed: dict[str, Array] = {}
        for tap in self.aims:
            met = computed_as(tap)
            if tap.site in AFTER_BLOCKS:
                aimed[tap.name] = _aimed_after(params.outer, x, run, tap.site)
            elif met.site in outer:
                aimed[tap.name] = outer[met.site]
            else:
                kept = _kept_as(met, self.arch)
                place = _layers_kept(run, run.aims)[kept].index(met.layer or 0)
                aimed[tap.name] = found.aims[kept][place]
        names = [tap.name for tap in taps] + [GAPS] * (GAPS in out)
        return {name: out[name] for name in names}, aimed, found.probes

    def probes(self, inputs: Inputs, schedule: LayerSchedule) -> Buffers:
        """Return zeros for the gradients of all sites, to differentiate with respect to."""
        watched = self._run(inputs).watched
        assert watched
        found: Buffers = {}
        for site, layers in watched.run.wanted.items():
            if not layers:  # before the blocks
                kept = site, self.arch.layers[0].shapes
                shape = watched.run.shape(kept, self.arch.layers[0])
                found[kept] = jnp.zeros(shape, watched.dtype)
        for kept, layers in _layers_kept(watched.run, watched.run.wanted).items():
            slots = len(layers) + _spare(layers, schedule)
            shape = slots, *watched.run.shape(kept, self.arch.layers[layers[0]])
            found[kept] = jnp.zeros(shape, watched.dtype)
        if self.shards:
            runs = self.shards.runs
            found = {kept: runs(a, lead=int(kept[0] not in _OUTER)) for kept, a in found.items()}
        return found

    def gradients(
        self, found: Buffers, inputs: Inputs, schedule: LayerSchedule
    ) -> dict[str, Array]:
        """Return the gradients of each site [rows x kept, ...], from those of the probes."""
        run = self._run(inputs)
        assert run.watched
        of_sites = run.watched.run
        out: dict[str, Array] = {}
        for tap in self.sites:
            met = computed_as(tap)
            kept = _kept_as(met, self.arch)
            if met.layer is None or met.site == "resid_pre":
                out[tap.name] = found[kept]
                continue
            layers = _layers_kept(of_sites, of_sites.wanted)[kept]
            place = layers.index(met.layer) + _spare(layers, schedule)
            out[tap.name] = of_sites.of_tap(tap, kept, found[kept][place])
        return out

    def stage(
        self,
        kind: Layer | str,
        weights: WeightArrays,
        stream: Hidden | None,
        beside: Beside,
        inputs: Inputs,
    ) -> tuple[Hidden | None, Any, SiteValues]:
        """Run one stage of the model, for a host that runs one after another.

        Taps and splices are those of the stage, each as `of_any_block` returns it.

        Args:
            kind: a block's kind, or `BEFORE` or `AFTER`.
            stream: that enters the stage; for `BEFORE` the tokens' embeddings, or None to look
                them up in `weights`.

        Returns:
            The stream that leaves the stage; the values that later stages need (each block's own
            embeddings from `BEFORE`, keys and values from a block that lends); the tapped values.
        """
        return self.differentiable_stage(kind, weights, stream, beside, inputs, {})[:3]

    def differentiable_stage(
        self,
        kind: Layer | str,
        weights: WeightArrays,
        stream: Hidden | None,
        beside: Beside,
        inputs: Inputs,
        probes: Buffers,
    ) -> tuple[Hidden | None, Any, SiteValues, SiteValues]:
        """The same with probes for the stage's sites; also return the values of its aims."""
        shapes = kind.shapes if isinstance(kind, Layer) else ""
        run = self._run(inputs, shapes)
        if kind == BEFORE:
            x, by_layer, values = _embed(weights, run, stream, probes=probes)
            layers = range(self.arch.num_layers)
            own = () if by_layer is None else tuple(by_layer[:, :, n] for n in layers)
            return x, own, self._as_stored(values, run), self._aimed(values)
        assert stream is not None
        if kind == AFTER:
            flat: SiteValues = {}
            if self.taps:
                values = _after_blocks(weights, stream, run)
                for tap in self.taps:
                    found = run.flat(run.pooled(values[tap.site]))
                    flat[tap.name] = found.astype(self._dtype_of(tap))
            if inputs.scored is not None:
                flat[GAPS] = _gaps(weights, stream, run, inputs)
            aimed = {t.name: _aimed_after(weights, stream, run, t.site) for t in self.aims}
            return None, None, flat, aimed
        assert isinstance(kind, Layer)
        at = run.watching(in_block(run.changes, 0), probes, shapes)
        x, lends, values = _block(stream, weights, kind, run, at, *beside)
        lends = lends if self.arch.lends and not kind.borrows else None
        return x, lends, self._as_stored(values, run, shapes), self._aimed(values)

    def stage_probes(self, kind: Layer | str, inputs: Inputs) -> Buffers:
        """Return zeros for the gradients of a stage's sites."""
        shapes = kind.shapes if isinstance(kind, Layer) else ""
        watched = self._run(inputs, shapes).watched
        found: Buffers = {}
        for tap in self.sites if watched else ():
            assert watched
            layer = kind if isinstance(kind, Layer) else self.arch.layers[0]
            shape = watched.run.shape((tap.site, shapes), layer)
            zeros = jnp.zeros(shape, watched.dtype)
            found[tap.site, shapes] = self.shards.runs(zeros) if self.shards else zeros
        return found

    def stage_gradients(self, kind: Layer | str, found: Buffers, inputs: Inputs) -> SiteValues:
        """Return the gradients of a stage's sites [rows x kept, ...], from those of its probes."""
        shapes = kind.shapes if isinstance(kind, Layer) else ""
        watched = self._run(inputs, shapes).watched
        of_tap = watched.run.of_tap if watched else None
        return {
            tap.name: of_tap(tap, (tap.site, shapes), found[tap.site, shapes])
            for tap in self.sites
            if of_tap
        }

    def _aimed(self, values: SiteValues) -> SiteValues:
        return {tap.name: values[tap.site] for tap in self.aims}

    def _as_stored(self, values: SiteValues, run: _Run, shapes: str = "") -> SiteValues:
        """Return the values of each tap [rows x kept, ...], for the heads that it names."""
        out: SiteValues = {}
        for tap in self.taps:
            kept = tap.site, shapes
            found = run.flat(run.pooled(run.chosen(kept, values[tap.site])))
            out[tap.name] = run.of_tap(tap, kept, found).astype(self._dtype_of(tap))
        return out

    def _dtype_of(self, tap: Tap) -> jnp.dtype:
        return jnp.dtype("float32" if self.pool else tap.dtype(self.store_dtype))

    def _run(self, inputs: Inputs, shapes: str | None = None) -> _Run:
        """`shapes`: of the only block that runs, of which taps say layer 0; None: all blocks do."""
        arch, shards = self.arch, self.shards
        tokens, positions, segments, columns, slots, sizes, _, _ = inputs
        pooling = None
        if self.pool:
            assert slots is not None and sizes is not None
            pooling = Pooling(self.pool, slots, sizes.shape[1])
        attends: dict[int | None, Attend] = {}
        if attention := self.attention:
            whole = partial(attention_by_heads, attention, shards=shards) if shards else attention
            sizes = {layer.chunk for layer in arch.layers}
            attends = {size: whole(*chunked(segments, positions, size)) for size in sizes}
        frequencies = [
            rope.frequencies(dim, arch.rope_positions)
            for rope, dim in zip(arch.ropes, arch.rope_dims, strict=True)
        ]
        wanted, aims = _layers_by_site(self.taps), _layers_by_site(self.aims)
        patterns = "attn_pattern" in {**wanted, **aims}
        run = _Run(
            arch, tokens, positions, segments, columns, pooling,
            tuple(rotary_angles(positions, *each) for each in frequencies),
            attends, wanted, _heads_kept(self.taps, arch, shapes),
            {t.site: t.shape(arch, tokens.shape[1])[-1] for t in self.taps if t.kind.largest_of},
            shards, changed_places(self.splice), self.scores_all or patterns,
            aims=aims, remat=self.remat,
        )  # fmt: skip
        if not self.sites:
            return run
        heads = _heads_kept(self.sites, arch, shapes)
        of_sites = replace(run, wanted=_layers_by_site(self.sites), heads=heads)
        return replace(run, watched=_Watched(of_sites, self._dtype_of(self.sites[0])))


def changed_places(splice: Changes) -> dict[Tap, Change]:
    """Return the changes by the place where each happens; refuse two at one place."""
    changes = {computed_as(tap): change for tap, change in splice.items()}
    if len(changes) < len(splice):
        raise ConfigError("splice: resid_pre of a block is resid_post of the one before; name one")
    return changes


def stage_kinds(arch: Arch, depth: int) -> tuple[Layer | str, ...]:
    """Return the kinds of all stages of a model's first blocks; stage -1 comes first."""
    return BEFORE, *arch.layers[:depth], AFTER


def by_stage(taps: Iterable[Tap], depth: int) -> dict[int, list[Tap]]:
    """Group taps by the stage that computes them; -1: before the blocks, `depth`: after them."""
    found: dict[int, list[Tap]] = {stage: [] for stage in range(-1, depth + 1)}
    for tap in taps:
        found[_stage_of(tap, depth)].append(tap)
    return found


def _stage_of(tap: Tap, depth: int) -> int:
    met = computed_as(tap)
    if tap.site in AFTER_BLOCKS:
        return depth
    return -1 if met.layer is None or met.site == "resid_pre" else met.layer


def _embed(
    outer: WeightArrays,
    run: _Run,
    embedded: Hidden | None = None,
    *,
    probes: Buffers | None = None,
    shapes: str = "",
) -> tuple[Hidden, Float[Array, "rows seq layers inner"] | None, SiteValues]:
    """The stream that enters the first block, the embeddings of all blocks' own, if they have some,
    and the values that can be tapped before the blocks.

    `embedded`: the tokens' rows of the embedding, if they were looked up elsewhere.
    """
    arch = run.arch
    found = outer["embed"][run.tokens] if embedded is None else embedded
    found = run.by_rows(widened(found))
    found = scaled(found, arch.embed_scale)
    if arch.embed_bare_norm:
        found = norm(found, None, None, arch.norm, arch.norm_eps)
    x = found = run.watching(in_block(run.changes), probes or {}, shapes)("embed", found)
    by_layer = _layer_embeds(outer, found, run) if arch.layer_embed else None
    x = _normed(x, "embed_norm", block=outer, arch=arch)
    if "positions" in outer:
        x = x + outer["positions"][run.positions + arch.position_offset]
    if arch.wide_stream:
        x = x.astype(jnp.float32)
    x = run.watching(in_block(run.changes, 0), probes or {}, shapes)("resid_pre", x)
    return x, by_layer, {"embed": found, "resid_pre": x}


def _layer_embeds(outer: WeightArrays, embedded: Hidden, run: _Run) -> Array:
    """Each block's own embedding of the tokens: its row of a table, and a part of the usual one."""
    arch = run.arch

    def split(values: Array) -> Float[Array, "rows seq layers inner"]:
        return values.reshape(*embedded.shape[:2], arch.num_layers, arch.layer_embed)

    found = widened(outer["layer_embeds"][run.tokens])
    found = run.by_rows(scaled(found, arch.layer_embed**0.5))
    part = split(scaled(linear(embedded, outer["layer_embeds_from"]), arch.width**-0.5))
    part = _normed(part, "layer_embeds_norm", block=outer, arch=arch)
    return run.by_rows(scaled(part + split(found), 2.0**-0.5))


def of_any_block(tap: Tap) -> Tap:
    """Return a tap as its own block computes it: a tap of block 0."""
    met = replace(computed_as(tap), heads=tap.heads)
    return met if met.layer is None else replace(met, layer=0)


def needs_whole_block(taps: tuple[Tap, ...], depth: int) -> bool:
    """Whether the deepest block must run to its end."""
    deepest = [tap for tap in map(computed_as, taps) if _stage_of(tap, depth) >= depth - 1]
    return any(tap.kind.reach is None for tap in deepest)


def _layers_by_site(taps: tuple[Tap, ...]) -> dict[str, list[int]]:
    """The layers to keep for each site, ascending; empty for a site without layers."""
    wanted: dict[str, set[int]] = {}
    for tap in map(computed_as, taps):
        layers = wanted.setdefault(tap.site, set())
        if tap.layer is not None and tap.site != "resid_pre":
            layers.add(tap.layer)
    return {site: sorted(layers) for site, layers in wanted.items()}


def _kept_as(tap: Tap, arch: Arch) -> BufferKey:
    return tap.site, arch.layers[tap.layer or 0].shapes


def _layers_kept(run: _Run, wanted: dict[str, list[int]]) -> dict[BufferKey, list[int]]:
    """The layers to keep for each site that has some, by their shapes, ascending."""
    found: dict[BufferKey, list[int]] = {}
    for site, layers in wanted.items():
        for layer in layers:
            found.setdefault((site, run.arch.layers[layer].shapes), []).append(layer)
    return found


def _heads_kept(
    taps: tuple[Tap, ...], arch: Arch, shapes: str | None
) -> dict[BufferKey, list[int]]:
    """The heads to keep for each site, except where a tap wants all."""
    heads: dict[BufferKey, set[int]] = {}
    whole: set[BufferKey] = set()
    for tap in taps:
        kept = _kept_as(tap, arch) if shapes is None else (tap.site, shapes)
        heads.setdefault(kept, set()).update(tap.heads)
        whole |= set() if tap.heads else {kept}
    return {kept: sorted(some) for kept, some in heads.items() if kept not in whole}


class _Carried(NamedTuple):
    """What passes from block to block beside the stream."""

    taps: Buffers
    aims: Buffers
    probes: Buffers


def _spare(layers: list[int], schedule: LayerSchedule) -> int:
    """The slots of a site's probes that collect what nobody asked for: 1, or none.

    In a backward pass a scanned block that is not asked for writes to the slot of the next one
    below, which overwrites it later; the last of them may need a slot to throw away.
    """
    return int(any(schedule.lead <= n < layers[0] for n in range(schedule.scanned)))


def _run_blocks(
    params: Params,
    x: Hidden,
    by_layer: Array | None,
    run: _Run,
    schedule: LayerSchedule,
    dtypes: dict[str, jnp.dtype],
    probes: Buffers,
) -> tuple[Hidden, _Carried]:
    sites, aims = _layers_kept(run, run.wanted), _layers_kept(run, run.aims)
    of_probes = run.watched.run.wanted if run.watched and probes else {}
    seen = _layers_kept(run, of_probes)
    # Only blocks before the scan lend: see `Arch.lead`.
    lending: dict[int | None, Lent | None] = {}
    # slots[kept][layer]: where that block's value goes (see the module docstring)
    scanned = np.arange(schedule.scanned)
    slots, aim_slots = (
        {s: np.searchsorted(layers, scanned) for s, layers in each.items()}
        for each in (sites, aims)
    )
    spare = {s: _spare(layers, schedule) for s, layers in seen.items()}
    seen_slots = {
        s: np.maximum(np.searchsorted(layers, scanned, side="right") - 1 + spare[s], 0)
        for s, layers in seen.items()
    }

    def tapped(values: SiteValues, layer: Layer) -> Buffers:
        """The kept values of the sites that this block has."""
        own = [kept for kept in sites if kept[1] == layer.shapes and kept[0] in values]
        chosen = {kept: run.chosen(kept, values[kept[0]]) for kept in own}
        found = {kept: run.flat(run.pooled(a)) for kept, a in chosen.items()}
        stored = {kept: a.astype(dtypes[kept[0]]) for kept, a in found.items()}
        return jax.lax.stop_gradient(stored) if run.watched else stored

    def aimed(values: SiteValues, layer: Layer) -> Buffers:
        own = [s for s in aims if s[1] == layer.shapes and s[0] in values]
        return {s: values[s[0]].astype(aim_buffers[s].dtype) for s in own}

    def put(buffers: Buffers, values: Buffers, slot: Buffers) -> Buffers:
        return buffers | {
            kept: jax.lax.dynamic_update_index_in_dim(buffers[kept], value, slot[kept], 0)
            for kept, value in values.items()
        }

    def run_block(
        x: Hidden,
        block: Block,
        here: _Run,
        layer: Layer,
        at: At,
        own: Array | None,
        probes: Buffers,
    ) -> tuple[Hidden, Lent | None, SiteValues]:
        def made(
            x: Hidden, block: Block, own: Array | None, lent: Lent | None, probes: Buffers
        ) -> tuple[Hidden, Lent | None, SiteValues]:
            watching = here.watching(at, probes, layer.shapes)
            return _block(x, block, layer, here, watching, own, lent)

        # (In a scan nothing merges the two computations; elsewhere a barrier must prevent it.)
        alone = isinstance(here.running.layer, int)
        again = jax.checkpoint(made, prevent_cse=alone) if run.remat else made
        return again(x, block, own, lending.get(layer.window), probes)

    def apart(
        stream: Hidden, carried: _Carried, blocks: tuple[Block, ...], first: int
    ) -> tuple[Hidden, _Carried]:
        taps, aim_values, watching = carried
        for layer, block in enumerate(blocks, first):
            at, kind = in_block(run.changes, layer), run.arch.layers[layer]
            here = replace(run, running=_Running(layer, (layer,)))
            own: Buffers = {}
            for kept, layers in seen.items():
                if layer in layers:
                    slot = jnp.asarray(layers.index(layer) + spare[kept])
                    own[kept], buffer = lent(watching[kept], slot)
                    watching = {**watching, kept: buffer}
            stream, lends, values = run_block(stream, block, here, kind, at, own_of(layer), own)
            lending[kind.window] = lends or lending.get(kind.window)
            for kept, value in tapped(values, kind).items():
                if layer in sites[kept]:
                    taps[kept] = taps[kept].at[sites[kept].index(layer)].set(value)
            for kept, value in aimed(values, kind).items():
                if layer in aims[kept]:
                    at_slot = aim_values[kept].at[aims[kept].index(layer)]
                    aim_values = {**aim_values, kept: at_slot.set(value)}
        return stream, _Carried(taps, aim_values, watching)

    def cycle(
        carry: tuple[Hidden, _Carried],
        layers: tuple[tuple[Block, ...], tuple[Buffers, Buffers, Buffers], Array | None],
    ) -> tuple[tuple[Hidden, _Carried], None]:
        stream, carried = carry
        blocks, slots, number = layers
        for place, block in enumerate(blocks):
            at, kind = in_scan(run.changes, place, schedule, number), repeated[place]
            first = schedule.lead + place
            layer = None if number is None else first + schedule.period * number
            alike = range(first, schedule.scanned, schedule.period)
            here = replace(run, running=_Running(layer, alike))
            slot, aim_slot, seen_slot = (
                {kept: each[place] for kept, each in some.items()} for some in slots
            )
            probes, watching = dict[BufferKey, Array](), dict(carried.probes)
            for kept in seen:
                if kept[1] == kind.shapes:
                    probes[kept], watching[kept] = lent(watching[kept], seen_slot[kept])
            stream, _, values = run_block(stream, block, here, kind, at, own_of(layer), probes)
            carried = _Carried(
                put(carried.taps, tapped(values, kind), slot),
                put(carried.aims, aimed(values, kind), aim_slot),
                watching,
            )
        return (stream, carried), None

    def own_of(layer: Array | int | None) -> Array | None:
        if by_layer is None:
            return None
        return jax.lax.dynamic_index_in_dim(by_layer, layer, axis=2, keepdims=False)

    def by_cycle(slots: dict[BufferKey, np.ndarray]) -> Buffers:
        scanned = {s: each[schedule.lead :] for s, each in slots.items()}
        return {s: jnp.asarray(each.reshape(-1, schedule.period)) for s, each in scanned.items()}

    repeated = run.arch.layers[schedule.lead :]
    most = {s: max(len(layers), int(slots[s].max(initial=0)) + 1) for s, layers in sites.items()}
    buffers = {
        s: jnp.zeros((most[s], *run.shape(s, run.arch.layers[layers[0]])), dtypes[s[0]])
        for s, layers in sites.items()
    }
    if run.shards:
        buffers = {s: run.shards.runs(buffer, lead=1) for s, buffer in buffers.items()}
    aim_buffers: Buffers = {}
    for s, layers in aims.items():
        rows = max(len(layers), int(aim_slots[s].max(initial=0)) + 1)
        shape = Tap(s[0], layers[0]).shape(run.arch, run.tokens.shape[1])
        dtype = jnp.float32 if SITES[s[0]].dtype == "float32" else x.dtype
        aim_buffers[s] = jnp.zeros((rows, *run.tokens.shape, *shape), dtype)
    carried = _Carried(buffers, aim_buffers, probes)
    x, carried = apart(x, carried, params.lead, 0)
    if schedule.cycles:
        xs = params.cycle, (by_cycle(slots), by_cycle(aim_slots), by_cycle(seen_slots))
        looks = any(SITES[site].of_chosen for site in run.wanted)
        counted = run.changes or by_layer is not None or looks
        numbers = jnp.arange(schedule.cycles) if counted else None
        (x, carried), _ = jax.lax.scan(cycle, (x, carried), (*xs, numbers))
    return apart(x, carried, params.tail, schedule.scanned)


def _block(
    x: Hidden,
    block: Block,
    layer: Layer,
    run: _Run,
    at: At,
    own: Array | None = None,
    lent: Lent | None = None,
) -> tuple[Hidden, Lent | None, SiteValues]:
    """Run one block.

    Args:
        own: its own embeddings of the tokens, if it has some.
        lent: the keys and values that it borrows, if it does.

    Returns:
        The stream that leaves it, the keys and values that later blocks can borrow, and the values
        that can be tapped inside.
    """
    run = replace(run, arch=run.arch.of(layer))
    arch, block = run.arch, run.used(block)
    normed = partial(_normed, block=block, arch=arch)

    def entering(stream: Hidden, name: str) -> Hidden:
        return normed(stream.astype(block[name].dtype) if arch.wide_stream else stream, name)

    def added(site: str, out: Hidden) -> Hidden:
        out = normed(out, site.replace("_out", "_post_norm"))
        return at(site, scaled(out, arch.residual_scale))

    # Without the barriers, XLA computes the norms after attention and MLP again in each kernel that
    # reads the stream, which then runs at half of the memory's rate.
    normed_after = "mlp_post_norm" in arch.norms_of(layer)
    materialized = jax.lax.optimization_barrier if normed_after else lambda stream: stream
    values: SiteValues = {}
    lends: Lent | None = None
    post = reads = x
    if mixers := _MIXERS[layer.mixer]:
        reads = entering(x, "attn_norm")
        for name, mix in mixers.items():
            given = at(f"{name}_in", reads)
            result, kept, inside = mix(given, block, layer, run, at, lent)
            lends = kept or lends
            out = added(f"{name}_out", result)
            post = post + out.astype(x.dtype)
            values |= {**inside, f"{name}_in": given, f"{name}_out": out}
        if layer.mlp:
            values["resid_mid"] = post = materialized(at("resid_mid", post))
    if layer.mlp:
        stream = x if arch.parallel else post
        if not arch.shared_norm:
            reads = entering(stream, "mlp_norm")
        mlp_in = at("mlp_in", reads)
        mlp, inside = _mlp(mlp_in, stream, block, run, at)
        mlp_out = added("mlp_out", mlp)
        post = post + mlp_out.astype(x.dtype)
        values |= {**inside, "mlp_in": mlp_in, "mlp_out": mlp_out}
    if own is not None:
        values["layer_embed"] = own = at("layer_embed", own)
        gated = activate(own, linear(post, block["wlg"]), arch.activation, None)
        values["layer_embed_out"] = more = added("layer_embed_out", linear(gated, block["wlo"]))
        post = post + more.astype(x.dtype)
    if arch.block_scale:
        post = post * block["block_scale"].reshape(1, 1, 1)
    values["resid_post"] = post = materialized(run.by_rows(at("resid_post", post)))
    return post, lends, values


def _normed(
    x: Float[Array, "rows seq *heads width"],
    name: str,
    *,
    block: Block,
    arch: Arch,
    rotated: bool = False,
) -> Float[Array, "rows seq *heads width"]:
    """Apply a norm of the block, if it has that one."""
    bare = arch.norm == "layer_bare" and name in (*arch.norms, "final_norm")
    if name not in block and not bare:
        return x
    weight, bias = block.get(name), block.get(f"{name}_bias")
    kind = arch.last_norm if name == "final_norm" and arch.last_norm else arch.norm
    eps = arch.norm_eps
    if arch.post_norm_eps is not None and name in ("attn_post_norm", "mlp_post_norm"):
        eps = arch.post_norm_eps
    return norm(x, weight, bias, kind, eps, rotated=rotated)


def _attend(
    x: Hidden, block: Block, layer: Layer, run: _Run, at: At, lent: Lent | None
) -> tuple[Hidden, Lent, SiteValues]:
    arch = run.arch
    x = scaled(x, arch.attn_in_scale)
    values = (latent_heads if arch.latent else _heads)(x, block, arch, at)
    q = _met(values["q"], "q_norm", block, layer, run, arch.query_scale)
    if layer.borrows:
        assert lent is not None
        k, v = lent
    else:
        k = _met(scaled(values["k"], arch.key_scale), "k_norm", block, layer, run)
        v = _limited(values["v"], arch)
        v = norm(v, None, None, arch.norm, arch.norm_eps) if arch.v_norm else v
    rotated = _rotates(layer, run)
    if arch.attn_growth and not rotated:
        q = _grown(q, run.positions, *arch.attn_growth)
    values |= {"q_rot": q, "k_rot": k}
    slopes = jnp.asarray(arch.alibi, jnp.float32) if arch.alibi else None
    scoring = Scoring(
        arch.attn_scale, layer.window, arch.attn_softcap, sinks=block.get("sinks"), slopes=slopes
    )
    if run.scores_all:
        places = chunked(run.segments, run.positions, layer.chunk)
        weights = pattern(q, k, *places, scoring)
        if "attn_pattern" in run.wanted:
            values["attn_pattern"] = _from_context_start(weights, run.positions)
        z = mixed(weights, v)
    else:
        z = run.attends[layer.chunk](q, k, v, scoring)
    values |= _looked_at(q, k, layer, scoring, run)
    if arch.attn_gate:
        gate = jax.nn.sigmoid(linear(x, block["wg"], block.get("bg")))
        values["attn_gate"] = gate = at("attn_gate", gate.reshape(z.shape))
        z = z * gate
    values["z"] = z = at("z", z)
    out = linear(z.reshape(*x.shape[:2], -1), block["wo"], block.get("bo"))
    return scaled(out, arch.attn_out_scale), (k, v), values


def _looked_at(q: Queries, k: Keys, layer: Layer, scoring: Scoring, run: _Run) -> SiteValues:
    """Where heads look, if it is tapped: only in the tapped layers, and for the chosen heads."""
    together: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for site, layers in run.wanted.items():
        if SITES[site].of_chosen:
            heads = run.heads.get((site, layer.shapes)) or range(q.shape[2])
            together.setdefault((tuple(heads), tuple(layers)), []).append(site)
    segments, positions = chunked(run.segments, run.positions, layer.chunk)
    order = jnp.broadcast_to(jnp.arange(q.shape[1]), segments.shape)
    keys = TokenPlaces(order, segments, positions)
    found: SiteValues = {}
    for (heads, layers), sites in together.items():

        def look(heads: tuple[int, ...] = heads, sites: list[str] = sites) -> SiteValues:
            chosen = np.array(heads)
            several = q.shape[2] // k.shape[2]
            whole = len(heads) == q.shape[2]
            own = scoring if whole else scoring.of_heads(chosen)
            return attended(
                run.kept(q if whole else q[:, :, chosen]),
                k if whole else k[:, :, chosen // several],
                TokenPlaces(*map(run.kept, keys)),
                keys,
                run.kept(run.positions),
                own,
                sites,
                max(run.tops.get(site, 0) for site in sites),
            )

        here = run.running.is_among(layers)
        if isinstance(here, bool):
            found |= look() if here else _zeros(look)
        else:
            found |= jax.lax.cond(here, look, partial(_zeros, look))
    return found


def _zeros(function: Callable[[], SiteValues]) -> SiteValues:
    return {n: jnp.zeros(a.shape, a.dtype) for n, a in jax.eval_shape(function).items()}


def _rotates(layer: Layer, run: _Run) -> bool:
    return bool(run.angles) and layer.rope is not None


def _limited(x: Heads, arch: Arch) -> Heads:
    return x if arch.qkv_limit is None else jnp.clip(x, -arch.qkv_limit, arch.qkv_limit)


def _met(x: Heads, name: str, block: Block, layer: Layer, run: _Run, scale: float = 1.0) -> Heads:
    """Queries or keys as attention compares them: normalised and rotated, if the model does so."""
    arch, rotated = run.arch, _rotates(layer, run)
    normed = partial(_head_norm, block=block, name=name, arch=arch, rotated=rotated)
    x = _limited(x, arch)
    if not arch.qk_norm_last:
        x = normed(x)
    x = scaled(x, scale)
    if rotated:
        turn = partial(rotate, interleaved=arch.rope_interleaved)
        if arch.latent:
            turn = partial(
                rotate_last, interleaved=arch.rope_interleaved, regrouped=arch.latent.regrouped
            )
        x = turn(x, *run.angles[layer.rope or 0])
    return normed(x) if arch.qk_norm_last else x


def _gated_delta(
    x: Hidden, block: Block, layer: Layer, run: _Run, at: At, lent: Lent | None
) -> tuple[Hidden, None, SiteValues]:
    norms = "delta_state_norm" in run.wanted
    out, values = gated_delta(
        x, block, run.segments, run.arch, at, shards=run.shards, state_norms=norms
    )
    return out, None, values


def _state_space(
    x: Hidden, block: Block, layer: Layer, run: _Run, at: At, lent: Lent | None
) -> tuple[Hidden, None, SiteValues]:
    out, values = state_space(x, block, run.segments, run.arch, at, shards=run.shards)
    return out, None, values


def _convolve(
    x: Hidden, block: Block, layer: Layer, run: _Run, at: At, lent: Lent | None
) -> tuple[Hidden, None, SiteValues]:
    out, values = short_convolution(x, block, run.segments, at, shards=run.shards)
    return out, None, values


# The mixers of a block, by the sites before and after each. All mixers of a block read the same
# input, and their outputs are added. Attention reads the keys and values of an earlier block, if it
# borrows, and returns those that later ones can borrow.
_MIXERS: dict[str, dict[str, Callable[..., tuple[Hidden, Lent | None, SiteValues]]]] = {
    ATTENTION: {"attn": _attend},
    GATED_DELTA: {"attn": _gated_delta},
    SHORT_CONVOLUTION: {"attn": _convolve},
    STATE_SPACE: {"ssm": _state_space},
    SIDE_BY_SIDE: {"attn": _attend, "ssm": _state_space},
    NO_MIXER: {},
}


def _grown(q: Heads, positions: Places, share: float, step: int) -> Heads:
    """Sharpen attention with the number of keys (arXiv:2501.19399), step by step."""
    steps = jnp.floor((positions + 1).astype(jnp.float32) / step)
    growth = 1.0 + share * jnp.log1p(steps)
    return (q.astype(jnp.float32) * growth[:, :, None, None]).astype(q.dtype)


def _heads(x: Hidden, block: Block, arch: Arch, at: At) -> SiteValues:
    """Queries, keys and values, as projected from the stream; of a block that borrows, queries."""

    def heads(name: str) -> Heads:
        projected = linear(x, block[f"w{name}"], block.get(f"b{name}"))
        return projected.reshape(*x.shape[:2], -1, arch.head_dim)

    found = {name: heads(name) for name in "qkv" if f"w{name}" in block}
    if "k" in found:
        found.setdefault("v", found["k"])
    return {name: at(name, values) for name, values in found.items()}


def _head_norm(x: Heads, *, block: Block, name: str, arch: Arch, rotated: bool) -> Heads:
    if arch.qk_norm_rotated and not rotated:
        return x
    if arch.qk_norm == "bare":
        return norm(x, None, None, arch.norm, arch.norm_eps, rotated=rotated)
    normed = partial(_normed, name=name, block=block, arch=arch, rotated=rotated)
    if arch.qk_norm != "full":
        return normed(x)
    return normed(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


def _from_context_start(
    weights: Float[Array, "rows heads seq keys"], positions: Places
) -> Float[Array, "rows seq heads keys"]:
    """Index keys by their position in the query's own context, so that packing does not show."""
    seq = weights.shape[-1]
    starts = jnp.arange(seq)[None, :] - positions
    places = (starts[:, :, None] + jnp.arange(seq)[None, None, :])[:, None]
    visible = jnp.arange(seq)[None, None, None, :] <= positions[:, None, :, None]
    moved = jnp.take_along_axis(weights, jnp.minimum(places, seq - 1), axis=-1)
    return jnp.where(visible, moved, 0.0).swapaxes(1, 2)


def _mlp(x: Hidden, stream: Hidden, block: Block, run: _Run, at: At) -> tuple[Hidden, SiteValues]:
    """The MLP, or experts in its place. `stream`: the values whose norm is `x`."""
    arch, experts = run.arch, run.arch.experts
    if "w_router" not in block:
        out, hidden = _dense_mlp(x, block, DENSE if "wd_up" in block else MLP, arch, at)
        return out, {"mlp_hidden": hidden}
    assert experts
    normed = partial(_normed, block=block, arch=arch)
    asked = given = x
    if experts.apart:
        asked = norm(stream, None, None, arch.norm, arch.norm_eps)
        asked = scaled(asked * block["router_scale"].reshape(1, 1, -1), arch.width**-0.5)
        given = normed(stream, "experts_norm")
    logits, weights, ids = moe.route(asked, block, experts)
    # Where the router saw NaN it chose nothing: ids are the only values that could hide that.
    known = jnp.isfinite(logits).all(axis=-1, keepdims=True)
    chosen = jnp.where(known, ids, -1)
    values = {"router_logits": logits, "expert_weights": weights, "expert_ids": chosen}
    if run.shards:
        out = moe.mixed_experts(given, weights, ids, block, arch, run.shards)
    else:
        out = moe.mix(given, weights, ids, block, arch)
    out = normed(out, "experts_post_norm")
    if experts.shared:
        within = at if experts.apart else in_block({})
        shared, hidden = _dense_mlp(x, block, SHARED, arch, within)
        values |= {"mlp_hidden": hidden} if experts.apart else {}
        shared = normed(shared, "shared_post_norm")
        if experts.shared_gate:
            shared = shared * jax.nn.sigmoid(linear(x, block["ws_router"]))
        values["shared_expert_out"] = shared = at("shared_expert_out", shared)
        out = out + shared
    return out, values


def _dense_mlp(
    x: Hidden, block: Block, stem: str, arch: Arch, at: At
) -> tuple[Hidden, Float[Array, "rows seq mlp"]]:
    """The MLP whose arrays' names begin with `stem`: its output, and what its last layer reads."""
    bias = stem.replace("w", "b")
    of_gate, of_output = arch.mlp_scales
    gate = None
    if arch.gated:
        gate = scaled(linear(x, block[f"{stem}gate"], block.get(f"{bias}gate")), of_gate)
    up = linear(x, block[f"{stem}up"], block.get(f"{bias}up"))
    if arch.activation == "xielu":
        inner = xielu(up, block["xielu_up"], block["xielu_down"])
    else:
        inner = activate(up, gate, arch.activation, arch.glu_limit)
    hidden = at("mlp_hidden", inner)
    if isinstance(block[f"{stem}down"], Float8Weight):
        # Or XLA computes it twice: for the largest value of each token, and to scale by that.
        hidden = jax.lax.optimization_barrier(hidden)
    out = linear(hidden, block[f"{stem}down"], block.get(f"{bias}down"))
    return scaled(out, of_output), hidden


def _after_blocks(outer: WeightArrays, x: Hidden, run: _Run) -> SiteValues:
    """Apply the final norm, and the head to the kept rows only, in slices: logits are large."""
    arch, wanted = run.arch, run.wanted
    normed = _normed(run.kept(x), "final_norm", block=outer, arch=arch)
    out = {"final_norm": normed} if "final_norm" in wanted else {}
    if not any(SITES[site].head for site in wanted):
        return out
    weights, following, has_next = _head_of(outer, run)
    tokens = run.kept(following), run.kept(has_next)
    predict = partial(_predicted, arch, wanted, run.tops)
    found = partial(predict, weights=weights)
    return out | in_slices(found, (normed, *tokens), _head_slices(normed, arch))


def _aimed_after(outer: WeightArrays, x: Hidden, run: _Run, site: str) -> Array:
    """The values of all tokens at a site after the blocks, to be differentiated."""
    arch = run.arch
    normed = _normed(x, "final_norm", block=outer, arch=arch)
    if site == "final_norm":
        return normed
    weights, following, has_next = _head_of(outer, run)

    def predict(hidden: Hidden, targets: Places, known: Array, weights: WeightArrays) -> Array:
        return _predicted(arch, {site: []}, {}, hidden, targets, known, weights)[site]

    if SITES[site].shape:
        return predict(normed, following, has_next, weights)
    return by_token(predict, _head_slices(normed, arch), normed, (following, has_next), weights)


def _gaps(outer: WeightArrays, x: Hidden, run: _Run, inputs: Inputs) -> Float[Array, "rows scored"]:
    """Return how far an engine's log-probabilities are from the model's own."""
    arch, scored, claimed = run.arch, inputs.scored, inputs.claimed
    assert scored is not None and claimed is not None
    normed = _normed(_at(x, scored), "final_norm", block=outer, arch=arch)
    weights, following, has_next = _head_of(outer, run)
    predict = partial(_predicted, arch, {"logprob": []}, {}, weights=weights)
    tokens = _at(following, scored), _at(has_next, scored)
    own = in_slices(predict, (normed, *tokens), _head_slices(normed, arch))["logprob"]
    return jnp.abs(own - claimed)


def _head_of(outer: WeightArrays, run: _Run) -> tuple[WeightArrays, Places, Array]:
    """Return the head's arrays, the token after each, and whether there is one."""
    head = outer["embed"] if "head" not in outer else outer["head"]
    bias = {"head_bias": outer["head_bias"]} if "head_bias" in outer else {}
    following = jnp.roll(run.tokens, -1, axis=1)
    has_next = (jnp.roll(run.segments, -1, axis=1) == run.segments).at[:, -1].set(False)
    return {"head": head, **bias}, following, has_next


def _head_slices(hidden: Hidden, arch: Arch) -> int:
    return -(-hidden.shape[0] * hidden.shape[1] * arch.vocab_size // _HEAD_VALUES)


def _predicted(
    arch: Arch,
    wanted: dict[str, list[int]],
    tops: dict[str, int],
    hidden: Hidden,
    targets: Places,
    known: Array,
    weights: WeightArrays,
) -> SiteValues:
    """The values of sites that need the head, from normalised values."""
    head = weights["head"]
    logits = linear(hidden.astype(head.dtype), head, weights.get("head_bias"))
    logits = scaled(logits, arch.logit_scale)
    logits = softcap(logits, arch.logit_softcap)
    found = next_token(logits, targets, known, wanted, tops)
    return found | ({"logits": logits} if "logits" in wanted else {})


def _at(values: Array, columns: KeptColumns | None) -> Array:
    """[rows, seq, ...] -> [rows, columns, ...]; None: all of them."""
    if columns is None:
        return values
    return jax.vmap(lambda row, chosen: row[chosen])(values, columns)
