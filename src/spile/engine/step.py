"""The compiled step: one fixed-shape batch in, every tap's rows and their statistics out.

The same function whatever the engine. It is compiled ahead of its first use for each of a few
shapes, and what is called is the compiled program itself: another shape cannot slip in and be
compiled again without anyone noticing.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Bool, Shaped

from spile.data.pack import Batch
from spile.engine.quantize import encode
from spile.models.arch import Arch
from spile.models.decoder import forward
from spile.models.kernels import for_platform
from spile.models.params import Params, Schedule
from spile.models.taps import Tap
from spile.store.format import scale_name
from spile.store.quant import QUANTIZED
from spile.store.stats import TapStats

_log = logging.getLogger("spile")

# Per packed row and channel or per packed row: see `_reduce`.
Reduced = dict[str, Array]

_LENGTHS = 8  # different numbers of rows that may leave the device; a program for each


@dataclass(frozen=True)
class StepOutput:
    """What a step gives, on its way to the host; reading any of it waits for it to arrive."""

    lengths: np.ndarray  # tokens of each packed row
    counts: np.ndarray  # of them, how many were kept
    rows: Mapping[str, Array]
    reduced: Mapping[str, Reduced]
    started: float  # when it was handed to the device (`time.perf_counter`)
    finished: Array  # ready when the device has done the step, whatever is still being copied

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    def rows_of(self, tap: str) -> np.ndarray:
        """[kept rows, ...] on the host, in stored order: a view, not a copy."""
        return np.asarray(self.rows[tap])[: self.num_rows]

    def scales_of(self, tap: str) -> np.ndarray | None:
        """The scale of each of those rows, where they have them."""
        scales = self.rows.get(scale_name(tap))
        return None if scales is None else np.asarray(scales)[: self.num_rows]

    def stats_of(self, tap: str) -> list[TapStats]:
        """One entry per packed row that holds kept tokens, in order."""
        host = {name: np.asarray(value) for name, value in self.reduced[tap].items()}
        return [
            TapStats(
                int(count),
                host["mean"][row].astype(np.float64),
                host["m2"][row].astype(np.float64),
                float(host["norm_sum"][row]),
                float(host["max_abs"][row]),
                int(host["nonfinite"][row]),
                int(host["clipped"][row]) if "clipped" in host else 0,
            )
            for row, count in enumerate(self.counts)
            if count
        ]


class Step:
    """Runs batches through the model."""

    def __init__(
        self,
        params: Params,
        arch: Arch,
        taps: tuple[Tap, ...],
        schedule: Schedule,
        *,
        compute_dtype: str,
        store_dtype: str,
        device: Any,
        scales: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """`scales`: of each channel, for taps that are stored with them."""
        self.params = params
        self._scales = jax.device_put(dict(scales or {}))
        self._packs = device.platform == "gpu"  # its kernel is compiled for a number of contexts
        # Copies into pinned memory run at the wire's rate and beside the next step; ordinary
        # ones do neither. Where host and device are one there is nothing to copy.
        self._host = None
        if device.platform != "cpu":
            self._host = SingleDeviceSharding(device, memory_kind="pinned_host")
        # float32 means float32: on accelerators the default would be a faster, coarser product.
        precision = "highest" if compute_dtype == "float32" else "default"
        # Eight bits are made of what the model computed, once the last block has run.
        carried = compute_dtype if store_dtype in QUANTIZED else store_dtype

        def run(
            params: Params,
            scales: Mapping[str, Array],
            tokens: Array,
            positions: Array,
            segments: Array,
            counts: Array,
            columns: Array | None,
            contexts: int,
        ) -> tuple[dict[str, Array], dict[str, Reduced]]:
            seq_len = tokens.shape[1]
            attention = for_platform(
                device.platform, arch, compute_dtype, seq_len=seq_len, contexts=contexts
            )
            with jax.default_matmul_precision(precision):
                values = forward(
                    params,
                    tokens,
                    positions,
                    segments,
                    columns,
                    arch=arch,
                    taps=taps,
                    schedule=schedule,
                    attention=attention,
                    store_dtype=carried,
                )
            width = seq_len if columns is None else columns.shape[1]
            real = jnp.arange(width)[None, :] < counts[:, None]
            rows: dict[str, Array] = {}
            reduced: dict[str, Reduced] = {}
            for tap in taps:
                found = values[tap.name]
                encoded = encode(found, tap.dtype(store_dtype), scales.get(tap.name))
                rows[tap.name] = encoded.stored
                if encoded.scale is not None:
                    rows[scale_name(tap.name)] = encoded.scale
                reduced[tap.name] = _reduce(encoded.decoded, real)
                reduced[tap.name]["nonfinite"] = _count(~jnp.isfinite(found), real)
                if encoded.clipped is not None:
                    reduced[tap.name]["clipped"] = _count(encoded.clipped, real)
            return rows, reduced

        self._run = jax.jit(run, static_argnums=7)
        self._compact = jax.jit(_compact)
        self._programs: dict[Any, Any] = {}
        self._compiling = threading.Lock()

    def __call__(self, batch: Batch) -> StepOutput:
        """Start a step; returns at once, the device works on."""
        rows, reduced = self.compute(batch)
        started = time.perf_counter()  # what follows may take longer than the step itself
        finished = next(iter(reduced.values()))["norm_sum"]
        if self._host is not None:
            rows, reduced = jax.device_put((rows, reduced), self._host)
        return StepOutput(batch.lengths, batch.counts, rows, reduced, started, finished)

    def compute(self, batch: Batch) -> tuple[dict[str, Array], dict[str, Reduced]]:
        """The same, with everything left on the device."""
        run, compact = self._programs_for(batch)
        kept, inputs = jax.device_put((_kept(batch), _inputs(batch)))
        rows, reduced = run(self.params, self._scales, *inputs)
        return compact(rows, kept), reduced

    def compile(self, batch: Batch) -> None:
        """Compile what a batch of this shape needs, if that has not been done."""
        self._programs_for(batch)

    def _programs_for(self, batch: Batch) -> tuple[Any, Any]:
        kept, inputs = _kept(batch), _inputs(batch)
        shapes = tuple(None if a is None else a.shape for a in inputs)
        contexts = batch.contexts if self._packs else 0
        run = self._program(
            (shapes, contexts), self._run, lambda: (self.params, self._scales, *inputs, contexts)
        )
        compact = self._program(
            (shapes, kept.shape), self._compact, lambda: (run.out_info[0], kept)
        )
        return run, compact

    def _program(self, shapes: Any, function: Any, arguments: Callable[[], Any]) -> Any:
        if shapes not in self._programs:
            with self._compiling:  # one at a time; what is compiled already need not wait
                if shapes not in self._programs:
                    begin = time.perf_counter()
                    self._programs[shapes] = function.lower(*arguments()).compile()
                    seconds = time.perf_counter() - begin
                    _log.debug("compiled a step for %s in %.1f s", shapes, seconds)
        return self._programs[shapes]


def _inputs(batch: Batch) -> tuple[np.ndarray | None, ...]:
    return (batch.tokens, batch.positions, batch.segments, batch.counts, batch.columns)


def _kept(batch: Batch) -> np.ndarray:
    """Where the kept tokens lie when rows are laid end to end, in stored order.

    Padded to one of a few lengths (and those repeat the first place): each is compiled once.
    """
    rows, width = (batch.tokens if batch.columns is None else batch.columns).shape
    places = np.concatenate([row * width + np.arange(n) for row, n in enumerate(batch.counts)])
    most = rows * width
    unit = -(-most // _LENGTHS)
    padded = np.zeros(min(most, -(-len(places) // unit) * unit), np.int32)
    padded[: len(places)] = places
    return padded


def _compact(rows: Mapping[str, Array], kept: Array) -> dict[str, Array]:
    """Only what will be stored, without gaps: padding never leaves the device."""
    flat = {name: values.reshape(-1, *values.shape[2:]) for name, values in rows.items()}
    return {name: values[kept] for name, values in flat.items()}


def _reduce(values: Shaped[Array, "rows kept ..."], real: Bool[Array, "rows kept"]) -> Reduced:
    """Moments of each packed row over its kept tokens, of the values as stored."""
    wide = values.reshape(*real.shape, -1).astype(jnp.float32)
    weight = real[..., None]
    count = jnp.maximum(real.sum(axis=1), 1).astype(jnp.float32)[:, None]
    masked = partial(jnp.where, weight)
    mean = masked(wide, 0.0).sum(axis=1) / count
    deviation = masked(wide - mean[:, None], 0.0)
    present = masked(wide, 0.0)
    return {
        "mean": mean,
        "m2": (deviation * deviation).sum(axis=1),
        "norm_sum": jnp.sqrt((present * present).sum(axis=-1)).sum(axis=-1),
        "max_abs": jnp.where(jnp.isfinite(present), jnp.abs(present), 0.0).max(axis=(1, 2)),
    }


def _count(found: Shaped[Array, "rows kept ..."], real: Bool[Array, "rows kept"]) -> Array:
    """How many of each packed row's kept tokens' values."""
    counts = found.reshape(*real.shape, -1).sum(axis=-1, dtype=jnp.int32)
    return jnp.where(real, counts, 0).sum(axis=1)
