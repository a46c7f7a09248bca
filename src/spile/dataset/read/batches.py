"""Minibatches: every row once an epoch, in an order fixed by the seed, resumable anywhere."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spile.dataset.read.order import BatchOptions, EpochCursor, EpochSchedule, Order, RankShare
from spile.dataset.read.window import ReadAhead, RowBatch, View


class Batches:
    """An iterator of batches; `state_dict` may be called between any two of them.

    A batch's arrays are reused once nobody holds them, or views of them.
    """

    def __init__(
        self,
        views: Sequence[View],
        order: Order,
        options: BatchOptions,
        share: RankShare | None = None,
    ) -> None:
        """Make the batches of a share of the rows; by default it follows from the options.

        Of several views, which show the same rows of aligned datasets, a batch holds all taps.
        """
        self.views, self._order, self._options = views, order, options
        self.share = share or RankShare(options.batch_size, options.rank, options.world)
        self._schedule = EpochSchedule(order, self.share, options.epochs, options.drop_last)
        taps = {name: made[:16] for view in views for name, made in view.made_by.items()}
        self._cursor = EpochCursor(order.identity, options.epochs, "iteration", taps)
        self._given = 0
        self._number = 0  # number of the next batch, counted from the start of the schedule
        self._ahead = ReadAhead(views, self._schedule)

    def __len__(self) -> int:
        """Return the number of batches in all epochs."""
        if self._options.epochs is None:
            raise TypeError("batches without end have no length")
        return self._options.epochs * self._schedule.batches_from(0)

    def __repr__(self) -> str:
        names = ", ".join(name for view in self.views for name in view.names)
        epoch = f"epoch {self._cursor.epoch} of {self._options.epochs or 'no end'}"
        shuffle = self._options.shuffle
        told = f"shuffle={shuffle!r}, seed={self._options.seed}" if shuffle else "in stored order"
        return (
            f"<spile batches of {self._options.batch_size:,} rows ({names}): {self.rows:,} rows an "
            f"epoch, {told}; at row {self._cursor.position:,} of {epoch}>"
        )

    @property
    def rows(self) -> int:
        """The number of rows in an epoch, over all ranks."""
        return self._order.rows

    @property
    def given(self) -> int:
        """The number of rows in the last batch, over all ranks."""
        return self._given

    @property
    def view(self) -> View:
        """The first of `views`, which shows the index."""
        return self.views[0]

    def view_of(self, name: str) -> View:
        """Return the view that shows a tap."""
        return next(view for view in self.views if name in view.names)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON; it is the same for every rank and any number of ranks."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another iterator over the same dataset stood."""
        self._cursor.load_state_dict(state)
        begin = self._cursor.epoch, self._cursor.position
        self._schedule, self._number = replace(self._schedule, begin=begin), 0
        self._ahead.close()  # it may have read another share of the rows
        self._ahead = ReadAhead(self.views, self._schedule)

    def in_turn(self, worker: int, workers: int) -> "Batches":
        """Return the same iteration from here on, for one of several workers that take turns."""
        share = replace(self.share, worker=worker, workers=workers)
        taken = Batches(self.views, self._order, self._options, share)
        taken.load_state_dict(self.state_dict())
        return taken

    def skip(self) -> bool:
        """Skip a batch, which another worker yields; return whether there was one."""
        size = self._next_size()
        self._advance(size)
        return size > 0

    def __iter__(self) -> Iterator[RowBatch]:
        return self

    def __next__(self) -> RowBatch:
        batch = self._next()
        if batch is None:
            raise StopIteration
        return batch

    def unconverted(self) -> Iterator[RowBatch]:
        """Yield the next batches in the stored dtype, unless the options name one.

        For loaders: torch and JAX accumulate in float32 whatever the dtype; numpy does not.
        """
        while (batch := self._next(unconverted=True)) is not None:
            yield batch

    def _next(self, *, unconverted: bool = False) -> RowBatch | None:
        while (
            size := self._next_size()
        ) and self._number % self.share.workers != self.share.worker:
            self._advance(size)
        if not size:
            self._ahead = ReadAhead(self.views, self._schedule)  # frees the memory of the windows
            return None
        epoch = self._cursor.epoch
        before = self._schedule.given_before(epoch)
        low, high = self.share.part(self._cursor.position, size, before)
        ends = self._order.ends(epoch)
        made = [view.begin(high - low, unconverted=unconverted) for view in self.views]
        at = low
        while at < high:
            number = int(np.searchsorted(ends, at, side="right"))
            stop = min(high, int(ends[number]))
            windows = self._ahead.windows((epoch, number))
            for part, window in zip(made, windows, strict=True):
                part.take(window, window.begins[at], stop - at)
            at = stop
        batch: RowBatch = {}
        for part in made:
            batch |= part.finish()
        self._advance(size)  # last: rows not yet returned are not counted
        return batch

    def _next_size(self) -> int:
        """Return the number of rows of the next batch, over all ranks; 0 if there is none."""
        cursor, schedule = self._cursor, self._schedule
        if cursor.position and not schedule.batches_from(cursor.position):
            cursor.advance(0, ends=True)  # a loaded state is at the end of an epoch
        if cursor.ended or not schedule.batches_from(cursor.position):
            return 0
        return min(self.share.batch_size, self.rows - cursor.position)

    def _advance(self, size: int) -> None:
        reached = self._cursor.position + size
        self._cursor.advance(size, ends=not self._schedule.batches_from(reached))
        self._given = size
        self._number += 1
