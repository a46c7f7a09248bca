"""The order of rows, and the share of each rank: a function of the seed, the epoch and few numbers.

Blocks of consecutive rows are permuted, consecutive blocks of that permutation fill a window, and
the rows of a window are permuted. Reads are therefore long and forward, and memory is bounded by a
window, whatever the dataset's size. Ranks take parts of the same batches, so the order does not
depend on their number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import xxhash

from spile.core.errors import ConfigError
from spile.core.expressions import RowFilter
from spile.core.options import parse_count
from spile.dataset.read.choice import RowChoice
from spile.dataset.read.rows import Rows, StoredRows

_BLOCK = 256  # rows read together: long enough for a disk, short enough to mix
_BLOCK_BYTES = 8 << 20  # for a bucket, where requests cost more than less thorough mixing
_SCANNED = 1 << 20  # rows whose index is scanned together

Shuffle = Literal["window", "full"] | bool | None
Normalize = Literal["mean", "std", "norm"] | None
WindowPlace = tuple[int, int]  # an epoch, and the number of a window in it


@dataclass(frozen=True)
class BatchOptions:
    """Options of shuffled batches; `Dataset.batches` describes each field.

    Raises:
        ConfigError: if a field has an invalid value.
    """

    batch_size: int
    index: bool = True
    seed: int = 0
    shuffle: Shuffle = "window"
    window: int | str = 1 << 16
    block: int | None = None
    epochs: int | None = 1
    where: str | None = None
    normalize: Normalize = None
    dtype: npt.DTypeLike | None = None
    encoded: bool = False
    rank: int = 0
    world: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.normalize not in ("mean", "std", "norm", None):
            raise ConfigError(f"normalize is 'mean', 'std', 'norm' or None, not {self.normalize!r}")
        self.window_rows(1)
        if isinstance(self.shuffle, bool):
            object.__setattr__(self, "shuffle", "window" if self.shuffle else None)
        if self.shuffle not in ("window", "full", None):
            raise ConfigError(f"shuffle is True, False, 'window' or 'full', not {self.shuffle!r}")
        if type(self.seed) is not int or self.seed < 0:
            raise ConfigError(f"seed must be a whole number, 0 or more; got {self.seed!r}")
        if self.block is not None and self.block < 1:
            raise ConfigError(f"block must be at least one row, got {self.block}")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}")
        if not 0 <= self.rank < self.world:
            raise ConfigError(
                f"rank must be 0 to world - 1, got rank {self.rank} of world {self.world}"
            )
        if self.epochs is not None and self.epochs < 0:
            raise ConfigError(f"epochs must be 0 or more, or None for no end; got {self.epochs}")

    def window_rows(self, row_bytes: int) -> int:
        """Return the rows of a window, which may be given in bytes."""
        window = self.window
        try:
            rows = parse_count(window) // max(1, row_bytes) if isinstance(window, str) else window
        except ValueError:
            rows = 0
        if rows < 1:
            raise ConfigError(
                f"window must be a number of rows, or bytes of them, as in '512MiB'; got {window!r}"
            )
        return rows


class EpochCursor:
    """The position of a shuffled iteration: an epoch, and how many of its rows have been returned.

    An epoch that has ended is counted at once: after its last batch, the position is the start of
    the next epoch.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        epochs: int | None,
        what: str,
        taps: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        identity: what the order follows from, as JSON.
        what: its name in errors.
        taps: the fingerprint of each tap's recipe. A state of other taps is accepted, but not one
            of the same taps by another recipe.
        """
        self.epoch, self.position, self._taps = 0, 0, dict(taps or {})
        self._identity, self._epochs, self._what = dict(identity), epochs, what

    @property
    def ended(self) -> bool:
        """Whether no epoch is left."""
        return self._epochs is not None and self.epoch >= self._epochs

    def advance(self, rows: int, *, ends: bool) -> None:
        """Count rows that were returned (by all ranks); `ends`: whether they end the epoch."""
        self.position += rows
        if ends:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON."""
        taps = {"taps": self._taps} if self._taps else {}
        return {"epoch": self.epoch, "position": self.position, **self._identity, **taps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to the position of a state.

        Raises:
            ConfigError: if the state belongs to another order or to taps of other recipes, or is
                invalid.
        """
        mine = self._identity
        changed = [key for key in mine if key not in state or state[key] != mine[key]]
        if changed:
            told = ", ".join(f"{k} {state.get(k)!r} there, {mine[k]!r} here" for k in changed)
            raise ConfigError(f"this state is of another {self._what}: {told}")
        told = state.get("taps")
        theirs = cast(dict[str, Any], told) if isinstance(told, dict) else {}
        taps = [tap for tap, made in self._taps.items() if theirs.get(tap, made) != made]
        if taps:
            raise ConfigError(
                f"this state is of another {self._what}: there {', '.join(taps)} had another "
                "recipe (ds.recipe_of); begin without it"
            )
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int or min(epoch, position) < 0:
            raise ConfigError(
                f"no state of this {self._what}: epoch {epoch!r}, position {position!r}"
            )
        self.epoch, self.position = epoch, position


def default_block(stored: StoredRows) -> int:
    """Return the rows of a block, by the kind of store and the width of rows."""
    if stored.is_local:
        return _BLOCK
    return max(_BLOCK, _BLOCK_BYTES // max(info.row_bytes for info in stored.table.taps.values()))


class Order:
    """The order of every epoch's rows, cut into windows.

    Attributes:
        rows: rows in an epoch.
        capacity: upper bound on the rows of a window.
        ends: a function of the epoch; returns the number of rows up to the end of each window.
    """

    def __init__(
        self,
        stored: StoredRows,
        options: BatchOptions,
        row_bytes: int,
        choice: RowChoice | None = None,
    ) -> None:
        """Args:
        row_bytes: bytes that a window holds of each row.
        choice: the rows to return; by default those that `options.where` chooses.
        """
        if choice is None and options.where is not None:
            choice = RowChoice(options.where, RowFilter(options.where, None))
        self._stored, self._seed, self._shuffle = stored, options.seed, options.shuffle
        self._window = window = options.window_rows(row_bytes)
        self._block = default_block(stored) if options.block is None else options.block
        self._filter = choice
        self._counts, self._kept = self._scan()
        self.rows = int(self._counts.sum())
        self.capacity = min(self.rows, window + self._block - 1)
        self._blocks = lru_cache(2)(self._draw_blocks)  # the current epoch, and the one read ahead
        self._all = lru_cache(2)(self._draw_all)
        self.ends = lru_cache(2)(self._ends)

    @property
    def identity(self) -> dict[str, Any]:
        """What the order follows from, as JSON."""
        return {
            "dataset": self._stored.table.order,
            "seed": self._seed,
            "rows": self.rows,
            "shuffle": self._shuffle,
            "window": self._window if self._shuffle == "window" else None,
            "block": self._block if self._shuffle == "window" else None,
            **(self._filter.identity if self._filter else {"where": None}),
            # Another version of numpy may draw other numbers: then the state must not be loaded.
            "drawn": drawn_digest(self._seed),
        }

    def _ends(self, epoch: int) -> Rows:
        if self._shuffle == "full":
            return np.minimum(np.arange(0, self.rows, self._window) + self._window, self.rows)
        order, firsts = self._blocks(epoch)
        return np.cumsum(np.add.reduceat(self._counts[order], firsts)) if len(firsts) else firsts

    def window(self, place: WindowPlace) -> tuple[Rows, Rows]:
        """Return the rows of a window, ascending, and their positions in the order of output."""
        epoch, number = place
        if self._shuffle == "full":
            chosen = self._all(epoch)[number * self._window : (number + 1) * self._window]
            by_row = np.argsort(chosen)
            places = np.empty_like(by_row)
            places[by_row] = np.arange(len(by_row))
            return chosen[by_row], places
        order, firsts = self._blocks(epoch)
        stop = firsts[number + 1] if number + 1 < len(firsts) else len(order)
        blocks = np.sort(order[firsts[number] : stop])
        rows = (blocks[:, None] * self._block + np.arange(self._block)).reshape(-1)
        rows = rows[: np.searchsorted(rows, self._stored.count)]
        if self._filter:
            entries = np.empty(len(rows), self._stored.table.index_dtype)
            for job in self._stored.index_jobs(rows, entries):
                job()
            rows = rows[self._filter.mask(entries)]
        if self._shuffle is None:
            return rows, np.arange(len(rows))
        return rows, drawn(len(rows), self._seed, epoch, 1, number)

    def _scan(self) -> tuple[Rows, Rows | None]:
        """Return how many rows each block has; for a full shuffle with a filter, also which."""
        count, block = self._stored.count, self._block
        counts = np.full(-(-count // block), block, np.int64)
        if not self._filter:
            counts[-1:] = count - block * (len(counts) - 1)
            return counts, None
        kept = [np.empty(0, np.int64)]
        scanned = max(1, _SCANNED // block) * block
        for start in range(0, count, scanned):
            mask = self._filter.mask(self._stored.index(start, min(start + scanned, count)))
            firsts = np.arange(0, len(mask), block)
            at = start // block
            counts[at : at + len(firsts)] = np.add.reduceat(mask, firsts, dtype=np.int64)
            if self._shuffle == "full":
                kept.append(np.flatnonzero(mask) + start)
        return counts, np.concatenate(kept) if self._shuffle == "full" else None

    def _draw_blocks(self, epoch: int) -> tuple[Rows, Rows]:
        """Return the permuted blocks, and the first block of each window."""
        order = np.flatnonzero(self._counts)
        if self._shuffle == "window":
            order = order[drawn(len(order), self._seed, epoch, 0)]
        before = np.cumsum(self._counts[order]) - self._counts[order]
        return order, np.flatnonzero(np.diff(before // self._window, prepend=-1))

    def _draw_all(self, epoch: int) -> Rows:
        order = drawn(self.rows, self._seed, epoch, 0)
        return order if self._kept is None else self._kept[order]


def drawn(count: int, *key: int) -> Rows:
    """Return a permutation that is determined by a key."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key))).permutation(count)


def drawn_digest(seed: int) -> str:
    """Return a digest of numpy's random numbers for this seed."""
    return xxhash.xxh3_64_hexdigest(drawn(1000, seed).astype("<i8").tobytes())


@dataclass(frozen=True)
class RankShare:
    """The share of one rank in each batch, and of one worker among the batches.

    The parts of a batch differ by at most one row, and so do their sums over batches, because the
    extra rows rotate among ranks. The workers of one rank take whole batches in turn.
    """

    batch_size: int
    rank: int = 0
    world: int = 1
    worker: int = 0
    workers: int = 1

    def part(self, position: int, size: int, before: int = 0) -> tuple[int, int]:
        """Return the rows of this rank in a batch that begins at a position of its epoch.

        Args:
            before: rows in earlier epochs.
        """
        each, extra = divmod(size, self.world)
        # As many ranks get one more row as there are extra rows; the first of them rotates.
        first = (before + position) % self.world
        before = each * self.rank + sum(
            1 for rank in range(self.rank) if (rank - first) % self.world < extra
        )
        mine = each + ((self.rank - first) % self.world < extra)
        return position + before, position + before + mine

    def parts(
        self, begin: int, low: int, high: int, total: int, turn: int, before: int
    ) -> Iterator[tuple[int, int]]:
        """Yield the stretches of rows low..high of an epoch that belong to this rank and worker.

        Args:
            begin: the row from which the epoch's batches are counted.
            turn: the number of the batch that begins there, for workers.
        """
        number = max(0, low - begin) // self.batch_size
        while (position := begin + number * self.batch_size) < high:
            if (turn + number) % self.workers == self.worker:
                size = min(self.batch_size, total - position)
                first, last = self.part(position, size, before)
                if max(first, low) < min(last, high):
                    yield max(first, low), min(last, high)
            number += 1


@dataclass(frozen=True)
class EpochSchedule:
    """The batches, counted from `begin`: an epoch, and a row of it."""

    order: Order
    share: RankShare
    epochs: int | None
    drop_last: bool
    begin: tuple[int, int] = (0, 0)

    def batches_from(self, position: int) -> int:
        """Return the number of batches in an epoch, from one of its rows on."""
        whole, rest = divmod(max(0, self.order.rows - position), self.share.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def parts(self, place: WindowPlace) -> Iterator[tuple[int, int]]:
        """Yield the stretches of a window that belong to this share."""
        epoch, number = place
        first, position = self.begin
        turn = 0
        if epoch > first:
            turn = self.batches_from(position) + (epoch - first - 1) * self.batches_from(0)
            position = 0
        ends = self.order.ends(epoch)
        low = int(ends[number - 1]) if number else 0
        high, rows = int(ends[number]), self.order.rows
        return self.share.parts(position, low, high, rows, turn, self.given_before(epoch))

    def given_before(self, epoch: int) -> int:
        """Return the rows in earlier epochs, over all ranks."""
        rows, size = self.order.rows, self.share.batch_size
        return epoch * (rows // size * size if self.drop_last else rows)

    def following(self, place: WindowPlace) -> WindowPlace | None:
        """Return the next window, maybe of the next epoch; None at the end."""
        epoch, number = place
        if number + 1 < len(self.order.ends(epoch)):
            return epoch, number + 1
        return (epoch + 1, 0) if self.epochs is None or epoch + 1 < self.epochs else None
