"""Shuffled minibatches with bounded memory, every row once, resumable to the exact next batch.

The epoch's order is fixed by the seed: blocks of consecutive rows are permuted, consecutive
blocks fill a window, and the window's rows are permuted. Reads are therefore long and
sequential, and memory is one window, whatever the dataset's size.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from spile.errors import ConfigError

_BLOCK = 256  # rows read together: long enough for a disk, short enough to mix


class RowSource(Protocol):
    """What a shuffle reads from (a `Dataset`)."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    def dtype(self, tap: str) -> np.dtype[Any]: ...
    def shape(self, tap: str) -> tuple[int, ...]: ...
    def read_into(self, tap: str, start: int, out: np.ndarray) -> None: ...
    def index(self, start: int, stop: int) -> np.ndarray: ...


class Batches:
    """An iterator over one epoch; `state_dict` may be taken between any two batches."""

    def __init__(
        self,
        source: RowSource,
        taps: Sequence[str],
        batch_size: int,
        *,
        seed: int,
        shuffle: bool,
        window: int,
        drop_last: bool,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        self._source, self._taps, self._batch = source, list(taps), batch_size
        self._seed, self._shuffle = seed, shuffle
        self._blocks_per_window = max(1, window // _BLOCK)
        self._rows = source.num_tokens
        self._drop_last = drop_last
        self._position = 0  # rows given out so far
        count = -(-self._rows // _BLOCK)
        order = np.arange(count)
        if shuffle:
            np.random.default_rng((seed, 0)).shuffle(order)
        sizes = np.minimum(_BLOCK, self._rows - order * _BLOCK)
        windows = range(0, count, self._blocks_per_window)
        self._windows = [order[i : i + self._blocks_per_window] for i in windows]
        self._ends = np.cumsum([int(sizes[i : i + self._blocks_per_window].sum()) for i in windows])
        self._loaded: tuple[int, dict[str, np.ndarray], np.ndarray] | None = None
        self._buffers: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        whole, rest = divmod(self._rows, self._batch)
        return whole + (1 if rest and not self._drop_last else 0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self._position,
            "dataset": self._source.fingerprint,
            "seed": self._seed,
            "rows": self._rows,
            "window": self._blocks_per_window * _BLOCK,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another iterator over the same dataset stood."""
        mine = self.state_dict()
        changed = [k for k in mine if k != "position" and state.get(k) != mine[k]]
        if changed:
            what = ", ".join(f"{k} {state.get(k)!r} there, {mine[k]!r} here" for k in changed)
            raise ConfigError(f"this state is of another iteration: {what}")
        self._position = int(state["position"])

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        size = min(self._batch, self._rows - self._position)
        if size <= 0 or (self._drop_last and size < self._batch):
            raise StopIteration
        out = {
            tap: np.empty((size, *self._source.shape(tap)), self._source.dtype(tap))
            for tap in self._taps
        }
        pieces: list[np.ndarray] = []
        filled, position = 0, self._position
        while filled < size:
            number = int(np.searchsorted(self._ends, position, side="right"))
            rows, index, order = self._window(number)
            begin = position - (int(self._ends[number - 1]) if number else 0)
            chosen = order[begin : begin + size - filled]
            for tap in self._taps:
                target = out[tap][filled : filled + len(chosen)]
                np.take(rows[tap], chosen, axis=0, out=target, mode="clip")
            pieces.append(index[chosen])
            filled += len(chosen)
            position += len(chosen)
        out["index"] = np.concatenate(pieces)
        self._position = position  # last: rows not handed out are not counted
        return out

    def _window(self, number: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """The rows of a window, in file order, and the order in which to give them out."""
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = None  # its buffers are about to be overwritten
            self._loaded = (number, *self._load(number))
        _, rows, order = self._loaded
        return rows, rows["index"], order

    def _load(self, number: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        # Sorted, so that the disk is read forwards; which rows form the window stays random.
        blocks = np.sort(self._windows[number])
        starts = blocks * _BLOCK
        sizes = np.minimum(_BLOCK, self._rows - starts)
        total = int(sizes.sum())
        rows: dict[str, np.ndarray] = {}
        for tap in self._taps:
            if tap not in self._buffers:
                capacity = min(self._rows, self._blocks_per_window * _BLOCK)
                shape = (capacity, *self._source.shape(tap))
                self._buffers[tap] = np.empty(shape, self._source.dtype(tap))
            rows[tap] = self._buffers[tap][:total]
        entries: list[np.ndarray] = []
        at = 0
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            for tap in self._taps:
                self._source.read_into(tap, start, rows[tap][at : at + size])
            entries.append(self._source.index(start, start + size))
            at += size
        rows["index"] = np.concatenate(entries)
        order = np.arange(total)
        if self._shuffle:
            np.random.default_rng((self._seed, 1, number)).shuffle(order)
        return rows, order
