"""Cost of a step on a device, by formula: FLOPs, memory traffic, memory use. No jax.

The compiler's own count is of no use: it counts a loop's body once, however often it runs, and sees
nothing inside a kernel. Rows are assumed to be full, each with a single document.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from spile.core.config import activation_dtype
from spile.core.pool import JACOBIAN, MOMENTS
from spile.core.tensors import DTYPES_BY_NAME
from spile.dataset.codec.quantization import QUANTIZED
from spile.models.config.arch import GATED_DELTA, SHORT_CONVOLUTION, Arch, Layer
from spile.models.config.specs import (
    ParamSpec,
    block_specs,
    head_specs,
    in_float8,
    in_float16,
    in_float32,
    outer_specs,
)
from spile.models.files.encoders.sae import AT_ONCE, SparseEncoder
from spile.models.layout import Cuts
from spile.models.objectives import Objective
from spile.models.sites import AFTER_BLOCKS, ALL_MIXERS, LENSES
from spile.models.splices import Splice
from spile.models.taps import Tap, sites_on_paths, writes_to
from spile.plan.chips import Chip

MEMORY_SHARE = 0.9  # share of a device's memory that a step may fill, by our estimate
# A narrow model has many small kernels, so it needs more tokens in a step. By platform: the largest
# width, and the number of tokens for it.
_STEP_TOKENS = {"gpu": {512: 131072, 1023: 65536, 2047: 32768}, "tpu": {2047: 32768}}
# Each expert multiplies only its share of the tokens, so models with experts need more of them.
_EXPERT_TOKENS, _MOST_FOR_EXPERTS = 2048, 65536
_SCORE = 4  # bytes: scores are float32
_PASSES = 4  # over the scores of heads whose keys are looked at
_SCORES_AT_ONCE = 1 << 26  # of these heads (models/forward/attended.py)
_CHUNK = 64  # tokens per chunk of the gated delta rule or a state space
_SCALE = 4  # bytes of a row's scale, for 8-bit rows
_PART = 4  # bytes of a value of a span, which is float32 on the device
_UNIT_SECONDS, _NOMINAL_CPU = 30, 1e11  # FLOP/s: about eight cores of a laptop
_MOST_CPU_TOKENS = 64_000


def sweet_spot(arch: Arch, platform: str) -> int:
    """Return the tokens in a step beyond which speed no longer grows (docs/benchmarks.md)."""
    if platform == "cpu":
        return 1024
    by_width = _STEP_TOKENS.get(platform, {})
    tokens = next((n for width, n in by_width.items() if arch.width <= width), 16384)
    if platform == "gpu" and arch.experts:
        each = arch.experts.chosen / arch.experts.count  # the share of tokens for one expert
        tokens = max(tokens, min(_MOST_FOR_EXPERTS, round(_EXPERT_TOKENS / each)))
    return tokens


def cpu_unit_tokens(arch: Arch, taps: tuple[Tap, ...], seq_len: int) -> int:
    """Return the tokens of a unit on a CPU: about half a minute of work, so a stop loses little.

    The rate is nominal, not measured: a recipe must give the same units on every machine.
    """
    experts = arch.experts
    backward = any(tap.kind.of for tap in taps)
    depth = arch.num_layers if backward else max(tap.layers_needed(arch) for tap in taps)
    flops = 2 * sum(
        math.prod(spec.shape[-2:]) * (experts.chosen if experts and "experts" in spec.axes else 1)
        for layer in arch.layers[:depth]
        for spec in block_specs(arch, layer)
        if spec.name.startswith("w")
    )
    if backward or any(tap.kind.head for tap in taps):
        flops += 2 * arch.vocab_size * arch.width
    flops *= 3 if backward else 1
    tokens = int(_UNIT_SECONDS * _NOMINAL_CPU / max(1, flops))
    return max(seq_len, min(_MOST_CPU_TOKENS, tokens // 1000 * 1000))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of one model on one mesh; all counts are for one device."""

    arch: Arch
    taps: tuple[Tap, ...]
    cuts: Cuts
    seq_len: int
    rows: int  # in a step, on all devices
    compute_dtype: str
    store_dtype: str
    whole: bool  # whether the deepest block runs to its end
    encoders: Mapping[str, SparseEncoder] = field(
        default_factory=dict[str, SparseEncoder]
    )  # by tap
    splices: tuple[Splice, ...] = ()
    # Bytes of the arrays of a block that can stay packed until they are used, by name.
    packed: Mapping[str, int] = field(default_factory=dict[str, int])
    pool: str | None = None  # how, if the values of spans are reduced: `core.pool.reduces`
    slots: int = 0  # then the places for them in each packed row
    labels: int = 0  # and the labels of a unit, if covariances are summed
    other: Tap | None = None  # that stands beside each tap in a covariance; or of a Jacobian
    objective: Objective | None = None  # what gradients are of, if some are tapped
    remat: bool = True  # then whether blocks are computed again, and keep nothing for it
    compared: int = 0  # values beside each token that attributions are differences from
    writers: tuple[Tap, ...] = ()  # that edges come from
    steps: int = 0  # points on the path of integrated gradients

    @property
    def depth(self) -> int:
        others = () if self.other is None else (self.other,)
        return max(tap.layers_needed(self.arch) for tap in (*self.taps, *others, *self.aims))

    @property
    def head(self) -> bool:
        return any(tap.site in (*AFTER_BLOCKS, *LENSES) for tap in (*self.taps, *self.aims))

    @property
    def aims(self) -> tuple[Tap, ...]:
        """The taps that the objective reads."""
        return self.objective.aims if self.objective else ()

    @property
    def tokens(self) -> int:
        """Tokens read by all devices together."""
        return self.rows * self.seq_len

    @property
    def _own(self) -> int:
        """Tokens of the rows that one device computes."""
        return self.tokens // self.cuts.layout.groups

    @property
    def item(self) -> int:
        """Bytes of a computed value."""
        return DTYPES_BY_NAME[activation_dtype(self.compute_dtype)].itemsize

    def _held_item(self, spec: ParamSpec) -> int:
        """Bytes of a value of an array on the device, before it is rounded to float8."""
        half = self.compute_dtype == "float16" and in_float16(spec.name)
        return 2 if half else self.item

    @cached_property
    def weights(self) -> int:
        """Bytes of the model's arrays, as stored on a device."""
        blocks = (self._weights_of(layer) for layer in self.arch.layers[: self.depth])
        return self.outer_weights() + sum(blocks)

    def outer_weights(self, *, embedding: bool = True) -> int:
        """Bytes of the arrays before and after the blocks, of encoders, and of splices."""
        left_out = set[str]() if self.head else {spec.name for spec in head_specs(self.arch)}
        if not embedding and not (self.head and self.arch.tied_head):
            left_out.add("embed")
        outer = [spec for spec in outer_specs(self.arch) if spec.name not in left_out]
        held = sum(
            math.prod(spec.shape) // self.cuts.share(spec.axes) * self._held_item(spec)
            for spec in outer
        )
        # Encoders and the arrays of splices are replicated on every device.
        values = self._encoding + sum(splice.values for splice in self.splices if splice.sae)
        small = 4 * sum(splice.values for splice in self.splices if not splice.sae)
        values += len(self._lens_layers) * self.arch.width**2
        return held + values * self.item + small

    @cached_property
    def block_weights(self) -> int:
        """Bytes of the arrays of the largest block."""
        return max(map(self._weights_of, set(self.arch.layers[: self.depth])), default=0)

    def _weights_of(self, layer: Layer) -> int:
        return sum(map(self._bytes_of, block_specs(self.arch, layer)))

    @cached_property
    def packed_block(self) -> int:
        """Bytes of the largest block as it is sent to the device, with packed arrays packed."""
        return max(
            sum(self.packed.get(s.name, self._bytes_of(s)) for s in block_specs(self.arch, kind))
            for kind in set(self.arch.layers)
        )

    def _bytes_of(self, spec: ParamSpec) -> int:
        """Bytes of one array of a block."""
        values = math.prod(spec.shape) // self.cuts.share(spec.axes)
        if in_float32(spec.name):
            return 4 * values
        if self.compute_dtype == "float8_e4m3" and in_float8(spec):
            return values + 4 * math.prod(spec.shape[:-1])
        return values * self._held_item(spec)

    @cached_property
    def stored(self) -> int:
        """Bytes of the rows that leave the device."""
        if self.pool == JACOBIAN:
            return _PART * self._products
        if self.pool:
            values = sum(map(self._part_values, self.taps))
            values *= 2 if self.pool == MOMENTS else 1
            parts = self.rows * self.slots * values * _PART // self.cuts.layout.size
            return parts + _PART * self.labels * self._products
        return self._held(sum(self._row_bytes(tap, self.store_dtype) for tap in self.taps))

    @cached_property
    def taps_bytes(self) -> int:
        """Bytes of tapped values, as computed and once more in their compacted form.

        A filter does not count as saving space: the row with the most kept tokens sets the width.
        """
        widest = max(tap.width(self.arch, self.seq_len) for tap in self.taps)
        beside = self.other.width(self.arch, self.seq_len) if self.other else 0
        deviations = 2 * self._own * (widest + beside) * _PART if self.labels else 0
        if self.pool == JACOBIAN:  # and each tap's gradients
            widths = (tap.width(self.arch, self.seq_len) for tap in self.taps)
            return 2 * self.stored + self._own * sum(widths) * self.item
        if self.pool and not self.encoders and not self.labels:  # and one tap's values as computed
            return 2 * self.stored + self._own * widest * self.item
        late = self.store_dtype in QUANTIZED or self.encoders or self.labels or self._lens_layers
        met = activation_dtype(self.compute_dtype) if late else self.store_dtype
        others = () if self.other is None else (self.other,)
        summed = [tap.source for tap in self.taps if tap.kind.summed]  # values, and gradients
        others = (*others, *summed, *summed, *self.writers)
        taken = sum(self._met_bytes(tap, met) for tap in (*self.taps, *others))
        taken += len(self._lens_layers) * self.arch.width * self.item
        # What a layer of a cross-layer transcoder writes, and the sums over layers.
        across = (each.sae.outputs for each in self.encoders.values() if each.sae.across)
        taken += 2 * _PART * max(across, default=0)
        held = self._held(taken)
        return self.stored + held + deviations + 2 * self._own * self.compared * _PART

    def tap_bytes(self, tap: Tap) -> int:
        """Bytes of one tap's rows in their stored form."""
        return self._held(self._row_bytes(tap, self.store_dtype))

    @cached_property
    def beside(self) -> int:
        """Values per token that pass from block to block besides the stream.

        These are per-layer embeddings, and keys and values that later blocks borrow.
        """
        lenders = {layer.window: self.arch.of(layer) for layer in self.arch.layers if layer.borrows}
        lent = sum(2 * own.num_kv_heads * own.head_dim for own in lenders.values())
        return self.arch.num_layers * self.arch.layer_embed + lent

    @property
    def passing(self) -> int:
        """Bytes per token that pass from block to block: the stream, and the values beside it."""
        stream = self.arch.width * (4 if self.arch.wide_stream else self.item)
        return stream + self.beside * self.item

    @cached_property
    def temporaries(self) -> int:
        """Approximate bytes that live at once inside a block, in a fused program."""
        arch = self.arch
        kinds = [arch.of(layer) for layer in dict.fromkeys(arch.layers)]
        inner = max(arch.dense_width, *(kind.mlp_width for kind in kinds))
        if arch.experts:
            routed = arch.mlp_width * arch.experts.chosen + arch.experts.shared
            inner = max(arch.dense_width, routed)
        head_dim = max(kind.head_dim for kind in kinds)
        values = 4 * arch.width + 2 * arch.num_heads * head_dim // self._ways("heads")
        values += self.beside
        values += 3 * inner // max(self._ways("mlp"), self._ways("experts"))
        if delta := arch.delta:
            # In float32, per token: a row of three chunk matrices, and its key and value twice.
            # If channels decay separately, there are four more decayed copies of the key.
            keys = delta.key_dim * (6 if delta.by_channel else 2)
            rows = delta.value_heads * (3 * _CHUNK + keys + 2 * delta.value_dim)
            rule = 2 * delta.channels + rows * _SCORE // self.item
            values += rule // self._ways("delta_heads")
        if space := arch.state_space:
            # In float32, per token: a row of two chunk matrices; value, key and query twice.
            rows = space.heads * 2 * (_CHUNK + space.head_dim) + 4 * space.groups * space.state
            rule = 2 * space.channels + rows * _SCORE // self.item
            values += rule // self._ways("ssm_heads")
        scores = 2 * _SCORE * self.seq_len * arch.num_heads // self._ways("heads")
        held = self._own * (values * self.item + scores * self._scores_all)
        looked = self._own * self.seq_len * max((heads for heads, _ in self._looks), default=0)
        held += 3 * _SCORE * min(_SCORES_AT_ONCE, looked)
        latents = max((each.sae.latents for each in self.encoders.values()), default=0)
        # An encoder runs after the last block, so the larger of the two counts.
        held = max(held, 2 * _SCORE * min(AT_ONCE, self._held(latents)))
        # An autoencoder that replaces values runs inside a block.
        latents = max((each.sae.latents for each in self.splices if each.sae), default=0)
        held += 2 * _SCORE * min(AT_ONCE, self._own * latents)
        if self.pool == JACOBIAN:  # what a pass back reads is kept of every block
            held *= self.depth
        if self.cuts.layout.fsdp == 1:
            return held
        # The running block is gathered, and the next one meanwhile.
        block = max(
            sum(
                math.prod(spec.shape) // self._cut(spec) * self._held_item(spec)
                for spec in block_specs(arch, layer)
            )
            for layer in set(arch.layers)
        )
        return held + 2 * block

    @cached_property
    def kept_for_backward(self) -> int:
        """Approximate bytes that the forward pass keeps for the backward pass.

        Each block's stream, and what its norms, attention and activation read: of every block, or
        of one at a time if blocks are computed again. And the gradients of one block's inner layer,
        of the stream, and the head's.
        """
        if not self.objective:
            return 0
        inside = self._inside_blocks
        every = [sum(each) for each in inside]
        kept = max(every, default=0)
        if not self.remat:
            kept = sum(own for own, _ in inside) + max((back for _, back in inside), default=0)
        return self._own * (kept + (self.depth + 4) * self.passing)

    @cached_property
    def back_through_block(self) -> int:
        """The same for one block at a time, if streams wait in host memory."""
        if not self.objective:
            return 0
        inside = max((sum(each) for each in self._inside_blocks), default=0)
        return self._own * (inside + 4 * self.passing)

    @property
    def _inside_blocks(self) -> list[tuple[int, int]]:
        """Bytes for each token that a backward pass reads of each block, and makes there."""
        arch = self.arch
        found: list[tuple[int, int]] = []
        for layer in arch.layers[: self.depth]:
            own = arch.of(layer)
            inner = max(own.dense_width, own.mlp_width)
            if arch.experts:
                inner = max(own.dense_width, arch.mlp_width * arch.experts.chosen)
            heads = 4 * own.num_heads * own.head_dim // self._ways("heads")
            inner = 2 * inner // max(self._ways("mlp"), self._ways("experts"))
            found.append(((8 * arch.width + heads + inner) * self.item, inner * self.item))
        return found

    @property
    def passes_back(self) -> int:
        """How often the model runs forward and back; 0 if there are no gradients."""
        if not self.objective:
            return 0
        return self.steps * len(sites_on_paths(self.taps)) if self.steps else 1

    @property
    def device_bytes(self) -> int:
        return self.weights + self.taps_bytes + self.temporaries + self.kept_for_backward

    @cached_property
    def flops(self) -> int:
        """FLOPs of matrix products, including attention; for experts, only the chosen ones."""
        total = 0
        for layer, runs in self._blocks():
            total += sum(
                2 * self._per_token(spec) for spec in self._matrices(layer) if spec.name in runs
            )
            if layer.mixer == GATED_DELTA:
                total += self._rule * ("rule" in runs)
            if layer.has_state_space:
                total += self._space * ("space" in runs)
            if not layer.attends:
                continue
            own = self.arch.of(layer)
            dims = own.head_dim * ("scores" in runs) + own.value_dim * ("mixing" in runs)
            each = 2 * self.arch.num_heads * dims * self._keys(layer)
            total += int(each) // self._ways("heads")
        if self.objective:  # with respect to values alone, never to weights
            total *= 3 if self.remat else 2
        total += 2 * self.seq_len * sum(heads * dim for heads, dim in self._looks)
        head = 2 * self.arch.vocab_size * self.arch.width // self._ways("vocab")
        total += head * any(tap.kind.head for tap in self.taps)
        total += 2 * head * any(aim.kind.head for aim in self.aims)
        if self.arch.layer_embed and self.depth:
            total += 2 * self.arch.num_layers * self.arch.layer_embed * self.arch.width
        total += sum(splice.flops for splice in self.splices)
        if self.pool == JACOBIAN and self.other:  # each channel takes a pass back
            total *= 1 + self.other.width(self.arch, self.seq_len)
        total *= max(1, self.passes_back)
        total += self._edges_of_heads
        read = self.arch.vocab_size // self._ways("vocab") + self.arch.width
        beside = self._encoding + (self._products if self.labels else 0)
        beside += len(self._lens_layers) * self.arch.width * read
        return total * self._own + self._held(2 * beside)

    @property
    def _edges_of_heads(self) -> int:
        """FLOPs for each token of gradients through the output projections of heads that write."""
        readers = [tap.source for tap in self.taps if tap.kind.crossed]
        return sum(
            2 * self.arch.width * writer.width(self.arch, 1)
            for writer in {replace(tap, heads=()) for tap in self.writers if tap.heads}
            for reader in readers
            if writes_to(writer, reader, self.arch)
        )

    @cached_property
    def traffic(self) -> int:
        """Bytes to and from the device's memory, if each product reads and writes once."""
        arch, layout = self.arch, self.cuts.layout
        # Weights that are cut along fsdp are received, written and read.
        passes = 3 if layout.fsdp > 1 else 1
        weights = values = 0
        for layer, runs in self._blocks():
            for spec in self._matrices(layer):
                if spec.name not in runs:
                    continue
                weights += math.prod(spec.shape) // self._cut(spec) * self._held_item(spec)
                ways = [self._ways(axis) for axis in spec.axes[-2:]]
                ends = sum(size // w for size, w in zip(spec.shape[-2:], ways, strict=True))
                values += ends * self._chosen(spec)
            values += 6 * arch.width  # norms and sums
            if layer.mixer == GATED_DELTA:
                assert arch.delta
                # The convolution reads and writes its channels; the rule reads and writes once.
                values += 4 * ("rule" in runs) * arch.delta.channels // self._ways("delta_heads")
            if layer.has_state_space:
                assert arch.state_space
                channels = arch.state_space.channels // self._ways("ssm_heads")
                values += 4 * ("space" in runs) * channels
            if layer.mixer == SHORT_CONVOLUTION:
                values += 4 * ("wcx" in runs) * arch.width // self._ways("channels")
            if layer.attends and "scores" in runs:
                # Queries and mixed values of each head; keys and values of each key head.
                own = arch.of(layer)
                heads = (own.num_heads + own.num_kv_heads) * (own.head_dim + own.value_dim)
                values += heads // self._ways("heads")
                if self._scores_all:
                    scores = 4 * _SCORE * arch.num_heads * self.seq_len
                    values += scores // self._ways("heads") // self.item
        # Scores of heads whose keys are looked at are written, and read for their sums and maxima.
        looked = sum(heads for heads, _ in self._looks)
        values += _PASSES * _SCORE * looked * self.seq_len // self.item
        # A splice reads and writes its tap's values once more, and reads its arrays.
        weights += self.item * sum(splice.values for splice in self.splices)
        values += sum(2 * splice.tap.width(arch, self.seq_len) for splice in self.splices)
        # Tapped values are written, read for their statistics, and moved.
        moved = values * self._own * self.item
        if self.objective:
            runs = 3 if self.remat else 2
            moved, passes = runs * moved + 2 * self.kept_for_backward, runs * passes
            moved, passes = (each * self.passes_back for each in (moved, passes))
        return passes * weights + moved + 3 * self.taps_bytes

    def _blocks(self) -> Iterator[tuple[Layer, frozenset[str]]]:
        """Yield each block that runs, with the names of its operations that run."""
        names = (spec.name for spec in block_specs(self.arch))
        everything = frozenset((*ALL_MIXERS, *names))
        for number, layer in enumerate(self.arch.layers[: self.depth]):
            if number < self.depth - 1 or self.whole:
                yield layer, everything
            else:
                reached = (tap.kind.reach or () for tap in self.taps if tap.layer == number)
                yield layer, frozenset(name for names in reached for name in names)

    def _matrices(self, layer: Layer) -> list[ParamSpec]:
        return [spec for spec in block_specs(self.arch, layer) if spec.name.startswith("w")]

    @property
    def _rule(self) -> int:
        """FLOPs of the gated delta rule per token: products within a chunk and with the state."""
        delta = self.arch.delta
        assert delta
        pairs = 4 * _CHUNK * delta.key_dim * delta.key_heads
        in_chunk = 2 * _CHUNK * (delta.key_dim + 2 * delta.value_dim)
        of_state = 6 * delta.key_dim * delta.value_dim
        return (pairs + delta.value_heads * (in_chunk + of_state)) // self._ways("delta_heads")

    @property
    def _space(self) -> int:
        """The same for a state space. (Keys and queries of a single group are not split.)"""
        space = self.arch.state_space
        assert space
        pairs = 2 * _CHUNK * space.state * space.groups // self._ways("ssm_groups")
        of_head = 2 * _CHUNK * space.head_dim + 4 * space.state * space.head_dim
        return pairs + space.heads * of_head // self._ways("ssm_heads")

    def _chosen(self, spec: ParamSpec) -> int:
        """Return how many of an array's matrices a token uses."""
        experts = self.arch.experts
        return experts.chosen if experts and "experts" in spec.axes else 1

    def _per_token(self, spec: ParamSpec) -> int:
        return math.prod(spec.shape[-2:]) * self._chosen(spec) // self._cut(spec)

    def _cut(self, spec: ParamSpec) -> int:
        """Return how many devices share the work with an array; gathered axes do not count."""
        along = self.cuts.along(spec.axes, gathered=True)
        return self.cuts.layout.model if "model" in along else 1

    def _ways(self, axis: str) -> int:
        return self.cuts.layout.model if self.cuts.cut.get(axis) == "model" else 1

    @property
    def _scores_all(self) -> bool:
        return any(tap.site == "attn_pattern" for tap in self.taps)

    @property
    def _looks(self) -> list[tuple[int, int]]:
        """Return heads, and their dimension, for each layer and kind of taps of where heads look.

        (Keys and their weights come from one look.)
        """
        found: dict[tuple[int | None, str, tuple[int, ...]], tuple[int, int]] = {}
        for tap in self.taps:
            if tap.kind.of_chosen:
                heads = tap.shape(self.arch, self.seq_len)[0]
                own = self.arch.of(self.arch.layers[tap.layer or 0])
                found[tap.layer, tap.kind.group, tap.heads] = heads, own.head_dim
        return [*found.values()]

    def _keys(self, layer: Layer) -> float:
        """Return the average number of keys that a query is scored against."""
        seq = self.seq_len
        if self._scores_all:
            return seq
        if layer.chunk is not None and layer.chunk < seq:
            whole, rest = divmod(seq, layer.chunk)
            return (whole * layer.chunk * (layer.chunk + 1) + rest * (rest + 1)) / 2 / seq
        window = min(seq, layer.window or seq)
        return (window * (window + 1) / 2 + (seq - window) * window) / seq

    def _held(self, row: int) -> int:
        """Return the bytes of a device's share of the rows, if a row has `row` bytes."""
        return self.tokens * row // self.cuts.layout.size

    @property
    def _encoding(self) -> int:
        """Number of values in the encoders' matrices, and in decoders that are used."""
        return sum(
            each.sae.latents * (each.sae.width + each.sae.outputs * each.sae.decodes)
            for each in self.encoders.values()
        )

    @property
    def _lens_layers(self) -> set[int | None]:
        """The layers at which a lens predicts."""
        return {tap.layer for tap in self.taps if tap.site in LENSES}

    def _row_bytes(self, tap: Tap, dtype: str) -> int:
        encoder = self.encoders.get(tap.name)
        if encoder is None:
            return self._met_bytes(tap, dtype)
        each = DTYPES_BY_NAME[dtype].itemsize + DTYPES_BY_NAME[encoder.id_dtype].itemsize
        scale = _SCALE if dtype == "float8_e4m3" else 0
        wide = (encoder.sae.target or encoder.sae.width) * DTYPES_BY_NAME[dtype].itemsize
        return encoder.kept * each + scale + (wide + scale if encoder.error_of else 0)

    def _part_values(self, tap: Tap) -> int:
        """Return how many values a span has on the device."""
        encoder = self.encoders.get(tap.name)
        return encoder.sae.latents if encoder else tap.width(self.arch, self.seq_len)

    @property
    def _products(self) -> int:
        """Values of a label's products of deviations, or of Jacobians, over all taps."""
        beside = self.other.width(self.arch, self.seq_len) if self.other else 0
        widths = (tap.width(self.arch, self.seq_len) for tap in self.taps)
        if self.pool == JACOBIAN:
            return sum(width * beside for width in widths)
        return sum((width + beside) ** 2 for width in widths)

    def _met_bytes(self, tap: Tap, dtype: str) -> int:
        stored = tap.dtype(dtype)
        scale = _SCALE if stored == "float8_e4m3" else 0
        return tap.width(self.arch, self.seq_len) * DTYPES_BY_NAME[stored].itemsize + scale


def recomputes(work: Workload, memory: int | None) -> bool:
    """Whether a backward pass computes blocks again: unless a device has room for what they need.

    (A CPU's memory is the host's, which has other uses.)
    """
    keeps = replace(work, remat=False)
    return memory is None or keeps.device_bytes > MEMORY_SHARE * memory


@dataclass(frozen=True)
class Roofline:
    """Lower bounds on the seconds of a step, one for each resource that may limit it."""

    compute: float
    memory: float
    interconnect: float
    host_link: float

    @classmethod
    def of(cls, work: Workload, sent: float, chip: Chip) -> "Roofline":
        """`sent`: bytes that a device sends to others in a step."""
        return cls(
            work.flops / chip.sustained,
            work.traffic / chip.bandwidth,
            sent / chip.interconnect,
            work.stored / chip.host_link,
        )

    @property
    def seconds(self) -> float:
        """Seconds of a step if everything overlaps with the slowest resource."""
        return max(vars(self).values())

    @property
    def one_by_one(self) -> float:
        """Seconds of a step if kernels run one by one, so products and memory traffic add up."""
        return max(self.compute + self.memory, self.interconnect, self.host_link)

    @property
    def limit(self) -> str:
        return max(vars(self), key=lambda name: vars(self)[name])
