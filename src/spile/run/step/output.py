"""The output of a step: stored rows and their statistics, on their way to the host."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Array

from spile.corpus.pack import Batch
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import scale_name
from spile.models.forward.sharding import PINNED, local_runs
from spile.run.step.stored import PRODUCTS, Reduced

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

        If all tokens are kept, there is only one length: compiling another while steps run would
        make the device wait.
        """
        used, width = batch.leaving
        rows = len(used)
        places = np.concatenate([row * width + np.arange(n) for row, n in enumerate(used)])
        run = rows * width // devices
        ends = np.searchsorted(places, run * np.arange(1, devices + 1))
        by_device = np.split(places, ends[:-1])
        counts = np.diff(ends, prepend=0)
        unit = -(-run // _LENGTHS)
        longest = min(run, -(-int(counts.max()) // unit) * unit)
        if batch.columns is None and batch.sizes is None:
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

    runs: Runs  # of this process's devices, or of all if every device has the rows
    rows: Mapping[str, Array]
    reduced: Mapping[str, Reduced]  # if values are pooled, only the products of covariances
    gathered: bool = False  # whether every device has the rows of all
    gaps: Array | None = None  # of the engine's log-probabilities from the model's
    gap_docs: np.ndarray | None = None  # 1 + the ordinal of the document of each, or 0

    def pieces_of(self, tap: str) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        runs = local_runs(self.rows[tap])
        if self.gathered:
            runs = np.split(runs[0], len(self.runs.counts))
        scale = self.rows.get(scale_name(tap))
        scales = [None] * len(runs) if scale is None else local_runs(scale)
        for count, rows, by_row in zip(self.runs.counts, runs, scales, strict=True):
            yield rows[:count], None if by_row is None else by_row[:count]

    def parts_of(self, tap: str) -> np.ndarray:
        """The parts of pooled rows."""
        return np.concatenate([parts for parts, _ in self.pieces_of(tap)])

    def products_of(self, tap: str) -> list[np.ndarray]:
        """[labels, width, width]: the products of deviations, if covariances are summed.

        There are several to add up, of one device each.
        """
        found = self.reduced.get(tap, {}).get(PRODUCTS)
        if found is None:
            return []
        each = local_runs(found)
        return [products for part in (each[:1] if self.gathered else each) for products in part]

    def nonfinite_of(self, tap: str) -> list[np.ndarray]:
        if "nonfinite" in self.reduced.get(tap, {}):
            return local_runs(self.reduced[tap]["nonfinite"])
        bad = [~np.isfinite(rows).reshape(len(rows), -1) for rows, _ in self.pieces_of(tap)]
        counts = np.concatenate([each.sum(axis=1) for each in bad])
        parts = self.runs.parts.reshape(-1)
        of_parts = np.repeat(np.arange(len(parts)), parts)
        return [np.bincount(of_parts, counts, len(parts)).astype(np.int64)]

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
    batches: tuple[StepRows, ...]  # computed one after another, in stored order
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

    @property
    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Ordinals of documents, and distances of the engine's log-probabilities of their tokens.

        Every process has those of all.
        """
        docs, gaps = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
        for each in self.batches:
            if each.gaps is not None and each.gap_docs is not None:
                known = each.gap_docs > 0
                docs.append(each.gap_docs[known] - 1)
                gaps.append(local_runs(each.gaps)[0][known])
        return np.concatenate(docs), np.concatenate(gaps)

    def nonfinite_of(self, tap: str) -> np.ndarray:
        """The number of nonfinite values, by packed row, or part of one."""
        return np.concatenate([found for each in self.batches for found in each.nonfinite_of(tap)])
