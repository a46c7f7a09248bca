"""The rows whose latents are counted: stored latents, or dense rows times directions."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spile.core.errors import CorruptError
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.dtypes import STORED

_TOGETHER = 1 << 19  # latents of rows that are looked at together: they stay in a cache


@dataclass(frozen=True)
class ActiveRows:
    """Consecutive rows of a unit.

    Attributes:
        first: the first row within the unit.
        rows, latents, values: one element for each active latent: its row in the window, its id,
            and its value in float32; ascending by row.
        ids: [rows, width]: the ids of each row, −1 where none is active.
        tokens: of each row.
    """

    first: int
    count: int
    rows: np.ndarray
    latents: np.ndarray
    values: np.ndarray
    ids: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class StoredLatents:
    """The latents of an encoded tap: its two taps, of values and of ids."""

    dataset: Dataset
    taps: tuple[str, str]

    @property
    def latents(self) -> int:
        return self.dataset.num_latents(self.taps[0])

    @property
    def width(self) -> int:
        return self.dataset.width(self.taps[0])

    def windows(self, start: int, stop: int) -> Iterator[ActiveRows]:
        """Yield the rows from start to stop of the dataset, those of a unit."""
        step = max(1, _TOGETHER // self.width)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            values = np.asarray(self.dataset.read(self.taps[0], low, high, dtype=STORED))
            values = values.astype(np.float32)
            ids = np.asarray(self.dataset.read(self.taps[1], low, high)).astype(np.int64)
            active = values > 0
            chosen = np.flatnonzero(active)
            latents = ids.reshape(-1)[chosen]
            if len(latents) and not (latents.min() >= 0 and latents.max() < self.latents):
                raise CorruptError(self.taps[1], f"names latents that are not among {self.latents}")
            yield ActiveRows(
                low - start,
                high - low,
                chosen // self.width,
                latents,
                values.reshape(-1)[chosen],
                np.where(active, ids, -1),
                self.dataset.index(low, high)["token_id"],
            )


@dataclass(frozen=True)
class AlongDirections:
    """Dense rows times directions, in float32; each row has a value along every direction."""

    dataset: Dataset
    tap: str
    vectors: np.ndarray  # [directions, width]

    @property
    def latents(self) -> int:
        return len(self.vectors)

    @property
    def width(self) -> int:
        return 0  # rows are not sparse: no two directions are active together more than others

    def windows(self, start: int, stop: int) -> Iterator[ActiveRows]:
        """Yield the rows from start to stop of the dataset, those of a unit."""
        wide = max(self.vectors.shape)
        step = max(1, _TOGETHER // wide)
        for low in range(start, stop, step):
            high = min(low + step, stop)
            rows = self.dataset.read(self.tap, low, high).reshape(high - low, -1)
            values = (rows @ self.vectors.T).reshape(-1)
            chosen = np.flatnonzero(np.isfinite(values))
            yield ActiveRows(
                low - start,
                high - low,
                chosen // self.latents,
                chosen % self.latents,
                values[chosen],
                np.zeros((high - low, 0), np.int64),
                self.dataset.index(low, high)["token_id"],
            )
