"""The compiled step: one fixed-shape batch in, every tap's rows and their statistics out.

It is compiled for each of a few shapes before its first use. A call runs the compiled program
itself, so a new shape cannot cause an unnoticed recompilation.
"""

# jax's arrays, shardings and devices are only partly typed: strict would want casts everywhere.
# pyright: standard

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int, Shaped

from spile.core.config import activation_dtype
from spile.core.recipe import latent_names
from spile.corpus.pack import Batch
from spile.dataset.codec.quantization import FLOAT8, FLOAT8_MAX, INT8_MAX, QUANTIZED
from spile.dataset.codec.statistics import TapStats
from spile.dataset.records.format import scale_name
from spile.models.config.arch import Arch
from spile.models.files.sae import Arrays, SparseEncoder
from spile.models.forward.attention import Attention
from spile.models.forward.decoder import forward
from spile.models.forward.kernels import chosen_kernels, for_platform
from spile.models.forward.sharding import PINNED, P, Shards, local_runs, put
from spile.models.forward.sparse_latents import top_latents
from spile.models.forward.weights import LayerSchedule, Params
from spile.models.layout import AXES
from spile.models.taps import Tap

_log = logging.getLogger("spile.run")

# Per part of a run and channel, or per part: see `_reduce`.
Reduced = dict[str, Array]

_LENGTHS = 8  # distinct numbers of rows that may leave the device; each has its own program


@dataclass(frozen=True)
class Runs:
    """The kept tokens of a batch, by device; each device has one run of the flattened rows."""

    places: np.ndarray  # [devices x longest]: places of kept tokens in a device's run, then zeros
    counts: np.ndarray  # [devices]: kept tokens of each
    parts: np.ndarray  # [devices, parts of a run]: kept tokens of each part
    size: int  # tokens in a part

    @classmethod
    def of(cls, batch: Batch, devices: int) -> "Runs":
        """Pad places to one of a few lengths, each of which is compiled once.

        Where all tokens are kept, there is one length: to compile another while steps run makes
        the device wait.
        """
        rows, width = (batch.tokens if batch.columns is None else batch.columns).shape
        places = np.concatenate([row * width + np.arange(n) for row, n in enumerate(batch.counts)])
        run = rows * width // devices
        ends = np.searchsorted(places, run * np.arange(1, devices + 1))
        by_device = np.split(places, ends[:-1])
        counts = np.diff(ends, prepend=0)
        unit = -(-run // _LENGTHS)
        longest = min(run, -(-int(counts.max()) // unit) * unit)
        if batch.columns is None:
            longest = run
        padded = np.zeros((devices, longest), np.int32)
        for device, own in enumerate(by_device):
            padded[device, : len(own)] = own - device * run
        size = width if run % width == 0 else run
        parts = np.bincount(places // size, minlength=rows * width // size)
        return cls(padded.reshape(-1), counts, parts.reshape(devices, -1), size)

    def __getitem__(self, devices: slice) -> "Runs":
        """The runs of some of the devices."""
        return replace(self, counts=self.counts[devices], parts=self.parts[devices])


@dataclass(frozen=True)
class StepRows:
    """Stored rows and their statistics, on their way to the host."""

    runs: Runs  # of this process's devices
    rows: Mapping[str, Array]
    reduced: Mapping[str, Reduced]

    def pieces_of(self, tap: str) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        runs = local_runs(self.rows[tap])
        scale = self.rows.get(scale_name(tap))
        scales = [None] * len(runs) if scale is None else local_runs(scale)
        for count, rows, by_row in zip(self.runs.counts, runs, scales, strict=True):
            yield rows[:count], None if by_row is None else by_row[:count]

    def stats_of(self, tap: str) -> list[TapStats]:
        host = {name: np.concatenate(local_runs(a)) for name, a in self.reduced[tap].items()}
        # (In channels that hold infinities the rest is not finite: take it as 0.)
        rest = np.nan_to_num(host["rest"].astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        mean = host["mean"] + rest
        return [
            TapStats(
                int(count),
                mean[part],
                np.maximum(host["m2"][part] - int(count) * rest[part] ** 2, 0.0),
                float(host["norm_sum"][part]),
                float(host["max_abs"][part]),
                int(host["nonfinite"][part]),
                int(host["clipped"][part]) if "clipped" in host else 0,
                int(host["truncated"][part]) if "truncated" in host else 0,
            )
            for part, count in enumerate(self.runs.parts.reshape(-1))
            if count
        ]


@dataclass(frozen=True)
class StepOutput:
    """The output of a step; reading any of it waits for it to arrive on the host."""

    tokens: int  # read by all devices
    batches: tuple[StepRows, ...]  # that it computed one after another, in stored order
    started: float  # when the step was handed to the device (`time.perf_counter`)
    finished: Array  # ready when the device has finished the step, even if copies still run

    @property
    def num_rows(self) -> int:
        return sum(int(each.runs.counts.sum()) for each in self.batches)

    @property
    def counts(self) -> np.ndarray:
        """The kept tokens of each packed row, or part of one."""
        return np.concatenate([each.runs.parts.reshape(-1) for each in self.batches])

    def pieces_of(self, tap: str) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """[kept rows, ...] on the host, in stored order, device by device: views, not copies.

        Each comes with the scale of each row, if rows have scales.
        """
        for each in self.batches:
            yield from each.pieces_of(tap)

    def copied_of(self, tap: str) -> int:
        """Bytes of a tap copied from this process's devices; 0 if the host is the device."""
        return sum(
            shard.data.nbytes
            for each in self.batches
            if each.rows[tap].sharding.memory_kind == PINNED
            for shard in each.rows[tap].addressable_shards
        )

    def rows_of(self, tap: str) -> np.ndarray:
        pieces = [rows for rows, _ in self.pieces_of(tap)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def stats_of(self, tap: str) -> list[TapStats]:
        """One entry per packed row, or part of one, that holds kept tokens, in order."""
        return [stats for each in self.batches for stats in each.stats_of(tap)]

    def nonfinite_of(self, tap: str) -> np.ndarray:
        """The number of nonfinite values, by packed row, or part of one."""
        arrays = [each.reduced[tap]["nonfinite"] for each in self.batches]
        return np.concatenate([run for array in arrays for run in local_runs(array)])


@dataclass(frozen=True)
class StepSettings:
    """The settings that a step's programs are compiled for; it holds no arrays."""

    arch: Arch
    taps: tuple[Tap, ...]
    schedule: LayerSchedule
    computed: str  # dtype of activations
    carried: str  # dtype of tapped values, until they are stored
    store_dtype: str
    precision: str  # of products
    platform: str
    attention: str  # kernel, as `--attention` has it
    encoders: Mapping[str, SparseEncoder]  # by tap
    spliced: tuple[Tap, ...]
    shards: Shards | None

    def forward(
        self,
        params: Params,
        scales: Mapping[str, Array],
        arrays: Mapping[str, Arrays],
        changes: tuple[Partial, ...],
        tokens: Array,
        positions: Array,
        segments: Array,
        counts: Array,
        columns: Array | None,
        contexts: int,
        part: int,
    ) -> tuple[dict[str, Array], dict[str, Reduced]]:
        with jax.default_matmul_precision(self.precision):
            values = forward(
                params,
                tokens,
                positions,
                segments,
                columns,
                arch=self.arch,
                taps=self.taps,
                schedule=self.schedule,
                attention=self.attend(tokens.shape[1], contexts),
                store_dtype=self.carried,
                shards=self.shards,
                splice=dict(zip(self.spliced, changes, strict=True)),
            )
            return stored_values(
                values,
                scales,
                arrays,
                (counts, columns),
                tokens.shape[1],
                part,
                taps={tap.name: tap for tap in self.taps},
                encoders=self.encoders,
                store_dtype=self.store_dtype,
                shards=self.shards,
            )

    def attend(self, seq_len: int, contexts: int) -> Attention:
        return for_platform(
            self.platform,
            self.arch,
            self.computed,
            seq_len=seq_len,
            contexts=contexts,
            wanted=self.attention,
        )

    def contexts(self, batch: Batch) -> int:
        """The number of contexts to compile for; 0 if the kernel takes any number."""
        choices = chosen_kernels(
            self.platform,
            self.arch,
            self.computed,
            batch.tokens.shape[1],
            self.attention,
        )
        counted = any(choice.name == "cudnn" for choice in choices.values())
        return batch.contexts if counted else 0


class Step:
    """Runs batches through the model. It can be compiled before the model is loaded."""

    def __init__(
        self,
        params: Params | Future[Params],
        arch: Arch,
        taps: tuple[Tap, ...],
        schedule: LayerSchedule,
        *,
        compute_dtype: str,
        store_dtype: str,
        device: Any,
        shards: Shards | None = None,
        scales: Mapping[str, Any] | None = None,
        encoders: Mapping[str, tuple[SparseEncoder, Arrays]] | None = None,
        splices: Mapping[Tap, Partial] | None = None,
        attention: str = "auto",
        shapes: Params | None = None,
    ) -> None:
        """Args:
        params: the model, or what will be the model; then `shapes` tells what to compile for.
        device: one of those it runs on; the only one, if there are no `shards`.
        scales: of each channel, for taps that are stored with them.
        encoders: of taps that are stored as latents, each with its arrays.
        splices: the changes of taps after which the model continues, with their arrays.
        attention: the kernel, as `--attention` has it.
        """
        self._given, self._shards, self._device = params, shards, device
        self._shapes = params if shapes is None else shapes
        place = shards.whole if shards else None
        encoders = encoders or {}

        def put(given: Any) -> Any:  # (a step that is only compiled has shapes instead of arrays)
            abstract = isinstance(given, jax.ShapeDtypeStruct)
            return given if abstract else jax.device_put(given, place)

        self._scales = {tap: put(scale) for tap, scale in (scales or {}).items()}
        self._encoders = {
            tap: {n: put(a) for n, a in arrays.items()} for tap, (_, arrays) in encoders.items()
        }
        self._changes = {tap: jax.tree.map(put, each) for tap, each in (splices or {}).items()}
        # float32 means float32: on accelerators the default would be a faster, coarser product.
        precision = "highest" if compute_dtype == "float32" else "default"
        # Quantized values and latents are made from computed values, after the last block.
        computed = activation_dtype(compute_dtype)
        late = store_dtype in QUANTIZED or encoders
        self.settings = StepSettings(
            arch,
            taps,
            schedule,
            computed=computed,
            carried=computed if late else store_dtype,
            store_dtype=store_dtype,
            precision=precision,
            platform=device.platform,
            attention=attention,
            encoders={tap: encoder for tap, (encoder, _) in encoders.items()},
            spliced=tuple(self._changes),
            shards=shards,
        )
        self._run = jax.jit(self.settings.forward, static_argnums=(9, 10))
        self._compact = jax.jit(_on_each(shards, _compact, 2))
        self._programs: dict[Any, Any] = {}
        self._rooms: dict[tuple[int, ...], dict[int, int]] = {}
        self._compiling = threading.Lock()

    def __call__(self, batch: Batch) -> StepOutput:
        """Start a step; return at once, while the device works."""
        rows, reduced = self.compute(batch)
        started = time.perf_counter()  # the lines below may take longer than the step itself
        finished = next(iter(reduced.values()))["norm_sum"]
        if self._host is not None:
            rows, reduced = jax.device_put((rows, reduced), self._host)
        runs = Runs.of(self._divisible(batch), self._devices)[self._own]
        found = (StepRows(runs, rows, reduced),)
        return StepOutput(int(batch.lengths.sum()), found, started, finished)

    def compute(self, batch: Batch) -> tuple[dict[str, Array], dict[str, Reduced]]:
        """Compute a step, and leave everything on the device."""
        batch = self._divisible(batch)
        runs = Runs.of(batch, self._devices)
        run, compact = self._programs_for(batch, runs)
        kept, inputs = self._put(runs.places, _inputs(batch))
        changes = tuple(self._changes.values())
        rows, reduced = run(self.params, self._scales, self._encoders, changes, *inputs)
        return compact(rows, kept), reduced

    def compile(self, batch: Batch) -> tuple[Any, Any]:
        """Compile the programs for a batch of this shape, if that has not been done."""
        batch = self._divisible(batch)
        return self._programs_for(batch, Runs.of(batch, self._devices))

    def loaded(self, seconds: float) -> bool:
        """Wait up to `seconds` for the model; return whether loading it has ended."""
        return not isinstance(self._given, Future) or bool(wait([self._given], seconds).done)

    @cached_property
    def params(self) -> Params:
        """The model; waits until it is loaded, and raises what went wrong there."""
        return self._given.result() if isinstance(self._given, Future) else self._given

    @cached_property
    def _host(self) -> Any:
        """The sharding of rows that leave the device; None if there is nothing to copy.

        Copies into pinned memory run at the link's full rate and beside the next step; ordinary
        copies do neither. On a CPU, host and device memory are the same.
        """
        if self._device.platform == "cpu":
            return None
        if self._shards:
            return self._shards.by_runs(PINNED)
        return SingleDeviceSharding(self._device, memory_kind=PINNED)

    @property
    def _devices(self) -> int:
        return self._shards.layout.size if self._shards else 1

    @property
    def _own(self) -> slice:
        """This process's devices, as a slice of all."""
        if self._shards is None:
            return slice(None)
        owners = [device.process_index for device in self._shards.mesh.devices.flat]
        first = owners.index(jax.process_index())
        return slice(first, first + owners.count(jax.process_index()))

    def _divisible(self, batch: Batch) -> Batch:
        """Pad the columns, so that every device has the same number of tokens that may be kept."""
        rows, width = (batch.tokens if batch.columns is None else batch.columns).shape
        if rows * width % self._devices == 0:
            return batch
        assert self._shards
        columns = batch.columns
        if columns is None:
            columns = np.broadcast_to(np.arange(width, dtype=np.int32), (rows, width))
        more = -width % self._shards.layout.model
        return replace(batch, columns=np.pad(columns, ((0, 0), (0, more))))

    def _put(self, kept: np.ndarray, inputs: tuple[np.ndarray | None, ...]) -> Any:
        if self._shards is None:
            return jax.device_put((kept, inputs))
        by_rows = self._shards.by_rows
        return put(kept, self._shards.by_runs()), [
            None if array is None else put(array, by_rows) for array in inputs
        ]

    def _programs_for(self, batch: Batch, runs: Runs) -> tuple[Any, Any]:
        by_rows = self._shards.by_rows if self._shards else None
        by_runs = self._shards.by_runs() if self._shards else None

        def like(array: Any, sharding: Any) -> Any:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        inputs = _inputs(batch)
        shapes = tuple(None if a is None else a.shape for a in inputs)
        contexts = self._contexts(batch)
        run = self._program(
            (shapes, contexts),
            self._run,
            lambda: (
                self._shapes,
                self._scales,
                self._encoders,
                tuple(self._changes.values()),
                *[None if a is None else like(a, by_rows) for a in inputs],
                contexts,
                runs.size,
            ),
        )
        compact = self._program(
            (shapes, runs.places.shape),
            self._compact,
            lambda: (
                {name: like(rows, by_runs) for name, rows in run.out_info[0].items()},
                like(runs.places, by_runs),
            ),
        )
        return run, compact

    def _contexts(self, batch: Batch) -> int:
        """The number of contexts that a batch's program has room for.

        A program with more room serves, too: to compile another while steps run makes the device
        wait. This is decided when a batch is first compiled, so all processes decide alike.
        """
        wanted = self.settings.contexts(batch)
        rooms = self._rooms.setdefault(batch.tokens.shape, {})
        if wanted not in rooms:
            rooms[wanted] = min((r for r in rooms.values() if r >= wanted), default=wanted)
        return rooms[wanted]

    def _program(self, shapes: Any, function: Any, arguments: Callable[[], Any]) -> Any:
        if shapes not in self._programs:
            with self._compiling:  # one at a time; programs that are already compiled do not wait
                if shapes not in self._programs:
                    begin = time.perf_counter()
                    self._programs[shapes] = function.lower(*arguments()).compile()
                    seconds = time.perf_counter() - begin
                    _log.debug("compiled a step for %s in %.1f s", shapes, seconds)
        return self._programs[shapes]


def stored_values(
    values: Mapping[str, Array],
    scales: Mapping[str, Array],
    arrays: Mapping[str, Arrays],
    kept: tuple[Array, Array | None],
    seq_len: int,
    part: int,
    *,
    taps: Mapping[str, Tap],
    encoders: Mapping[str, SparseEncoder],
    store_dtype: str,
    shards: Shards | None,
) -> tuple[dict[str, Array], dict[str, Reduced]]:
    """Computed values in their stored form, by stored name, and their statistics.

    Args:
        values: of each tap, by name, as the decoder returns them.
        scales: of each channel, by stored name.
        arrays: of each encoder, by tap.
        kept: the number of kept tokens of each row, and their columns unless all may be kept.
        part: tokens that have statistics of their own.
        encoders: by tap.
    """
    counts, columns = kept
    width = seq_len if columns is None else columns.shape[1]
    real = (jnp.arange(width)[None, :] < counts[:, None]).reshape(-1)
    reduce = _on_each(shards, partial(_reduce, part=part), 3)
    rows: dict[str, Array] = {}
    reduced: dict[str, Reduced] = {}

    def keep(name: str, found: Array, dtype: str, **counted: Array) -> None:
        if dtype not in QUANTIZED:
            found = found.astype(dtype)
        encoded = encode_rows(found, dtype, scales.get(name))
        rows[name] = encoded.stored
        if encoded.scale is not None:
            rows[scale_name(name)] = encoded.scale
        counted["nonfinite"] = _per_token(~jnp.isfinite(found))
        if encoded.clipped is not None:
            counted["clipped"] = encoded.clipped
        reduced[name] = reduce(encoded.decoded, real, counted)

    for name, tap in taps.items():
        if name not in encoders:
            keep(name, values[name], tap.dtype(store_dtype))
            continue
        top = _encode(shards, encoders[name])(arrays[name], values[name])
        latents, ids = latent_names(name)
        keep(latents, top.values, store_dtype, truncated=top.beyond.astype(jnp.int32))
        keep(ids, top.ids, encoders[name].id_dtype)
    return rows, reduced


def _inputs(batch: Batch) -> tuple[np.ndarray | None, ...]:
    return (batch.tokens, batch.positions, batch.segments, batch.counts, batch.columns)


def _encode(shards: Shards | None, encoder: SparseEncoder) -> Any:
    """Return a function that encodes runs of tokens; every device has the whole encoder."""
    function = partial(top_latents, encoder=encoder)
    return shards.each(function, [P(), P(AXES)], P(AXES)) if shards else function


def _on_each(shards: Shards | None, function: Callable[..., Any], arguments: int) -> Any:
    """Return `function` applied by every device to its own runs of tokens."""
    if shards is None:
        return function
    return shards.each(function, [P(AXES)] * arguments, P(AXES))


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
    """Moments of the stored values over the kept tokens of each part of a run."""
    wide = values.reshape(-1, part, math.prod(values.shape[1:])).astype(jnp.float32)
    real = real.reshape(-1, part)
    weight = real[..., None]
    count = jnp.maximum(real.sum(axis=1), 1).astype(jnp.float32)[:, None]
    masked = partial(jnp.where, weight)
    mean = _rounded(masked(wide, 0.0).sum(axis=1) / count)
    deviation = masked(wide - mean[:, None], 0.0)
    present = masked(wide, 0.0)
    return {
        "mean": mean,
        "rest": deviation.sum(axis=1) / count,
        "m2": (deviation * deviation).sum(axis=1),
        "norm_sum": jnp.sqrt((present * present).sum(axis=-1)).sum(axis=-1),
        "max_abs": jnp.where(jnp.isfinite(present), jnp.abs(present), 0.0).max(axis=(1, 2)),
    } | {
        name: jnp.where(real, counts.reshape(-1, part), 0).sum(axis=1)
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
