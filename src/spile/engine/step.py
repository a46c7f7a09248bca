"""The compiled step: one fixed-shape batch in, every tap's rows and their statistics out.

The same function whatever the engine: it is compiled for one shape, or a few where rows
are filtered.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Shaped

from spile.data.pack import Batch
from spile.models import attention
from spile.models.arch import Arch
from spile.models.decoder import forward
from spile.models.params import Params, Schedule
from spile.models.taps import Tap
from spile.store.stats import TapStats

# Per packed row and channel or per packed row: see `_reduce`.
Reduced = dict[str, Array]


@dataclass(frozen=True)
class StepOutput:
    """What a step leaves on the device; reading any of it waits for the step."""

    lengths: np.ndarray  # tokens of each packed row
    counts: np.ndarray  # of them, how many were kept
    rows: Mapping[str, Array]
    reduced: Mapping[str, Reduced]

    def rows_of(self, tap: str) -> np.ndarray:
        """[rows, kept, ...] on the host; a view where host and device share memory."""
        return np.asarray(self.rows[tap])

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
            )
            for row, count in enumerate(self.counts)
            if count
        ]


class Step:
    """Runs batches of one shape through the model."""

    def __init__(
        self,
        params: Params,
        arch: Arch,
        taps: tuple[Tap, ...],
        schedule: Schedule,
        *,
        compute_dtype: str,
        store_dtype: str,
        platform: str,
    ) -> None:
        self._params = params
        # float32 means float32: on accelerators the default would be a faster, coarser product.
        precision = "highest" if compute_dtype == "float32" else "default"

        def run(
            params: Params,
            tokens: Array,
            positions: Array,
            segments: Array,
            counts: Array,
            columns: Array | None,
        ) -> tuple:
            with jax.default_matmul_precision(precision):
                rows = forward(
                    params,
                    tokens,
                    positions,
                    segments,
                    columns,
                    arch=arch,
                    taps=taps,
                    schedule=schedule,
                    attention=attention.for_platform(platform),
                    store_dtype=store_dtype,
                )
                width = (tokens if columns is None else columns).shape[1]
                real = jnp.arange(width)[None, :] < counts[:, None]
                return rows, {tap: _reduce(values, real) for tap, values in rows.items()}

        self._run = jax.jit(run)

    def __call__(self, batch: Batch) -> StepOutput:
        """Start a step; returns at once, the device works on."""
        inputs = (batch.tokens, batch.positions, batch.segments, batch.counts, batch.columns)
        rows, reduced = self._run(self._params, *jax.device_put(inputs))
        return StepOutput(batch.lengths, batch.counts, rows, reduced)


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
        "max_abs": jnp.abs(present).max(axis=(1, 2)),
        "nonfinite": (weight & ~jnp.isfinite(wide)).sum(axis=(1, 2)),
    }
