"""The one decoder: embeds, runs the blocks in a scan, and returns the tapped values.

Tapped values live in the scan's carry, one buffer per site and kind of shapes, already in the
stored dtype and without the rows that nobody asked for. A block that is not tapped at a site writes
to the slot of the site's next tapped block of its kind, which overwrites it later; only a site that
ends above the deepest scanned block needs a slot to throw away. If one stream alone is tapped, and
leaves the scan, no block writes it.

On a mesh, a device holds some rows of the batch, and one run of all tokens of the tapped values.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from spile.core.errors import ConfigError
from spile.models.config.arch import (
    Arch,
    Layer,
)
from spile.models.forward.attention import (
    Attend,
    Attention,
    attention_by_heads,
    chunked,
)
from spile.models.forward.block import run_block
from spile.models.forward.ends import after_blocks, aimed_after, embedded_tokens, gaps
from spile.models.forward.forward_pass import (
    BufferKey,
    Buffers,
    ForwardPass,
    Inputs,
    Lent,
    Running,
    SiteValues,
    Watched,
    copied,
    heads_kept,
    kept_as,
    layers_by_site,
    layers_kept,
)
from spile.models.forward.ops import (
    Hidden,
    rotary_angles,
)
from spile.models.forward.pooling import Pooling
from spile.models.forward.probes import lent
from spile.models.forward.sharding import Shards
from spile.models.forward.splice import At, Change, Changes, in_block, in_scan
from spile.models.forward.weights import Block, LayerSchedule, Params, WeightArrays
from spile.models.sites import AFTER_BLOCKS, SITES
from spile.models.taps import Tap, computed_as

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
    goes_back: bool = False  # there is a backward pass, perhaps with no site in this stage

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
        x, by_layer, outer = embedded_tokens(params.outer, run, probes=probes, shapes=outer_shapes)
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
            values = after_blocks(params.outer, x, run)
            pooled = {site: run.pooled(values) for site, values in values.items()}
            out |= {site: run.flat(a).astype(dtypes[site]) for site, a in pooled.items()}
        if inputs.scored is not None:
            out[GAPS] = gaps(params.outer, x, run, inputs)
        for tap in taps:
            met = computed_as(tap)
            if met.layer is not None and (kept := kept_as(met, self.arch)) in found.taps:
                values = found.taps[kept][layers_kept(run, run.wanted)[kept].index(met.layer)]
                out[tap.name] = run.of_tap(tap, kept, values)
        if self.sites:
            out = jax.lax.stop_gradient(out)
        aimed: dict[str, Array] = {}
        for tap in self.aims:
            met = computed_as(tap)
            if tap.site in AFTER_BLOCKS:
                aimed[tap.name] = aimed_after(params.outer, x, run, tap.site, inputs.answers)
            elif met.site in outer:
                aimed[tap.name] = outer[met.site]
            else:
                kept = kept_as(met, self.arch)
                place = layers_kept(run, run.aims)[kept].index(met.layer or 0)
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
        for kept, layers in layers_kept(watched.run, watched.run.wanted).items():
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
            kept = kept_as(met, self.arch)
            if met.layer is None or met.site == "resid_pre":
                out[tap.name] = found[kept]
                continue
            layers = layers_kept(of_sites, of_sites.wanted)[kept]
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
            x, by_layer, values = embedded_tokens(weights, run, stream, probes=probes)
            layers = range(self.arch.num_layers)
            own = () if by_layer is None else tuple(by_layer[:, :, n] for n in layers)
            return x, own, self._as_stored(values, run), self._aimed(values)
        assert stream is not None
        if kind == AFTER:
            flat: SiteValues = {}
            if self.taps:
                values = after_blocks(weights, stream, run)
                for tap in self.taps:
                    found = run.flat(run.pooled(values[tap.site]))
                    flat[tap.name] = found.astype(self._dtype_of(tap))
            if inputs.scored is not None:
                flat[GAPS] = gaps(weights, stream, run, inputs)
            aimed = {
                t.name: aimed_after(weights, stream, run, t.site, inputs.answers) for t in self.aims
            }
            return None, None, flat, aimed
        assert isinstance(kind, Layer)
        at = run.watching(in_block(run.changes, 0), probes, shapes)
        x, lends, values = run_block(stream, weights, kind, run, at, *beside)
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

    def _as_stored(self, values: SiteValues, run: ForwardPass, shapes: str = "") -> SiteValues:
        """Return the values of each tap [rows x kept, ...], for the heads that it names."""
        out: SiteValues = {}
        for tap in self.taps:
            kept = tap.site, shapes
            found = run.flat(run.pooled(run.chosen(kept, values[tap.site])))
            out[tap.name] = run.of_tap(tap, kept, found).astype(self._dtype_of(tap))
        return out

    def _dtype_of(self, tap: Tap) -> jnp.dtype:
        return jnp.dtype("float32" if self.pool else tap.dtype(self.store_dtype))

    def _run(self, inputs: Inputs, shapes: str | None = None) -> ForwardPass:
        """`shapes`: of the only block that runs, of which taps say layer 0; None: all blocks do."""
        arch, shards = self.arch, self.shards
        tokens, positions, segments, columns, slots, sizes, *_ = inputs
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
        wanted, aims = layers_by_site(self.taps), layers_by_site(self.aims)
        patterns = "attn_pattern" in {**wanted, **aims}
        run = ForwardPass(
            arch, tokens, positions, segments, columns, pooling,
            tuple(rotary_angles(positions, *each) for each in frequencies),
            attends, wanted, heads_kept(self.taps, arch, shapes),
            {t.site: t.shape(arch, tokens.shape[1])[-1] for t in self.taps if t.kind.largest_of},
            shards, changed_places(self.splice), self.scores_all or patterns,
            aims=aims, remat=self.remat, goes_back=self.goes_back,
        )  # fmt: skip
        if not self.sites:
            return run
        heads = heads_kept(self.sites, arch, shapes)
        of_sites = replace(run, wanted=layers_by_site(self.sites), heads=heads)
        return replace(run, watched=Watched(of_sites, self._dtype_of(self.sites[0])))


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


def of_any_block(tap: Tap) -> Tap:
    """Return a tap as its own block computes it: a tap of block 0."""
    met = replace(computed_as(tap), heads=tap.heads)
    return met if met.layer is None else replace(met, layer=0)


def needs_whole_block(taps: tuple[Tap, ...], depth: int) -> bool:
    """Whether the deepest block must run to its end."""
    deepest = [tap for tap in map(computed_as, taps) if _stage_of(tap, depth) >= depth - 1]
    return any(tap.kind.reach is None for tap in deepest)


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
    run: ForwardPass,
    schedule: LayerSchedule,
    dtypes: dict[str, jnp.dtype],
    probes: Buffers,
) -> tuple[Hidden, _Carried]:
    sites, aims = layers_kept(run, run.wanted), layers_kept(run, run.aims)
    of_probes = run.watched.run.wanted if run.watched and probes else {}
    seen = layers_kept(run, of_probes)
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

    # If the only stream to keep is the one after the last block of the scan, no block stores it: it
    # is what leaves the scan. (On a mesh, XLA would then divide every block's stream as taps are
    # divided.)
    streams = {kept: layers for kept, layers in sites.items() if kept[0] == "resid_post"}
    alone = [*streams.values()] == [[schedule.scanned - 1]]
    leaves = alone and bool(schedule.cycles) and run.shards is None

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
            kept: jax.lax.dynamic_update_index_in_dim(
                buffers[kept], copied(value, slot[kept]), slot[kept], 0
            )
            for kept, value in values.items()
        }

    def run_one(
        x: Hidden,
        block: Block,
        here: ForwardPass,
        layer: Layer,
        at: At,
        own: Array | None,
        probes: Buffers,
    ) -> tuple[Hidden, Lent | None, SiteValues]:
        def made(
            x: Hidden, block: Block, own: Array | None, lent: Lent | None, probes: Buffers
        ) -> tuple[Hidden, Lent | None, SiteValues]:
            watching = here.watching(at, probes, layer.shapes)
            return run_block(x, block, layer, here, watching, own, lent)

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
            here = replace(run, running=Running(layer, (layer,)))
            own: Buffers = {}
            for kept, layers in seen.items():
                if layer in layers:
                    slot = jnp.asarray(layers.index(layer) + spare[kept])
                    own[kept], buffer = lent(watching[kept], slot)
                    watching = {**watching, kept: buffer}
            stream, lends, values = run_one(stream, block, here, kind, at, own_of(layer), own)
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
            here = replace(run, running=Running(layer, alike))
            slot, aim_slot, seen_slot = (
                {kept: each[place] for kept, each in some.items()} for some in slots
            )
            probes, watching = dict[BufferKey, Array](), dict(carried.probes)
            for kept in seen:
                if kept[1] == kind.shapes:
                    probes[kept], watching[kept] = lent(watching[kept], seen_slot[kept])
            stream, _, values = run_one(stream, block, here, kind, at, own_of(layer), probes)
            found = tapped(values, kind)
            if leaves:
                found = {kept: value for kept, value in found.items() if kept not in streams}
            carried = _Carried(
                put(carried.taps, found, slot),
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
        if not (leaves and s in streams)
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
    if leaves:
        stream = tapped({"resid_post": x}, run.arch.layers[schedule.scanned - 1])
        carried.taps.update({kept: value[None] for kept, value in stream.items()})
    return apart(x, carried, params.tail, schedule.scanned)
