"""Minibatches: every row once an epoch, in an order fixed by the seed, resumable anywhere."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.dataset.read.order import Order, Schedule, Share, refuse_other
from spile.dataset.read.view import Batch, View
from spile.dataset.read.window import ReadAhead


class Batches:
    """An iterator; `state_dict` may be taken between any two batches.

    A batch's arrays are used again once nobody holds them, or views of them.
    """

    def __init__(
        self, view: View, order: Order, share: Share, *, epochs: int | None, drop_last: bool
    ) -> None:
        if epochs is not None and epochs < 0:
            raise ConfigError(f"epochs must be 0 or more, or None for no end; got {epochs}")
        self.view, self.share = view, share
        self._order, self._epochs = order, epochs
        self._schedule = Schedule(order, share, epochs, drop_last)
        self._epoch, self._position = 0, 0  # rows of the epoch that all ranks have given so far
        self._given = 0
        self._number = 0  # of the next batch, counted from where the schedule begins
        self._ahead = ReadAhead(view, self._schedule)

    def __len__(self) -> int:
        """Batches in all epochs."""
        if self._epochs is None:
            raise TypeError("batches without end have no length")
        return self._epochs * self._schedule.batches_from(0)

    @property
    def rows(self) -> int:
        """Given in an epoch, by all ranks."""
        return self._order.rows

    @property
    def given(self) -> int:
        """Rows of the last batch, of all ranks."""
        return self._given

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands, as JSON: the same for every rank and any number of them."""
        return {"epoch": self._epoch, "position": self._position, **self._order.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another iterator over the same dataset stood."""
        refuse_other(state, self._order.identity, "iteration")
        epoch, position = state.get("epoch"), state.get("position")
        if type(epoch) is not int or type(position) is not int or min(epoch, position) < 0:
            raise ConfigError(f"no state of batches: epoch {epoch!r}, position {position!r}")
        self._epoch, self._position = epoch, position
        self._schedule, self._number = replace(self._schedule, begin=(epoch, position)), 0
        self._ahead.close()  # what it has read may be another share of the rows
        self._ahead = ReadAhead(self.view, self._schedule)

    def in_turn(self, worker: int, workers: int) -> "Batches":
        """The same iteration from here on, for one of a few workers that take batches in turn."""
        share = replace(self.share, worker=worker, workers=workers)
        drop_last = self._schedule.drop_last
        taken = Batches(self.view, self._order, share, epochs=self._epochs, drop_last=drop_last)
        taken.load_state_dict(self.state_dict())
        return taken

    def skip(self) -> bool:
        """Leave out a batch, which others give; whether there was one."""
        size = self._next_size()
        self._advance(size)
        return size > 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while (
            size := self._next_size()
        ) and self._number % self.share.workers != self.share.worker:
            self._advance(size)
        if not size:
            self._ahead = ReadAhead(self.view, self._schedule)  # the windows' memory is given back
            raise StopIteration
        before = self._schedule.given_before(self._epoch)
        low, high = self.share.part(self._position, size, before)
        ends = self._order.ends(self._epoch)
        made = self.view.begin(high - low)
        at = low
        while at < high:
            number = int(np.searchsorted(ends, at, side="right"))
            window = self._ahead.window((self._epoch, number))
            stop = min(high, int(ends[number]))
            made.take(window, window.begins[at], stop - at)
            at = stop
        batch = made.finish()
        self._advance(size)  # last: rows not handed out are not counted
        return batch

    def _next_size(self) -> int:
        """Rows of the next batch, for all ranks; 0 where there is none."""
        while self._epochs is None or self._epoch < self._epochs:
            if self._position < self.rows and self._schedule.batches_from(self._position):
                return min(self.share.batch_size, self.rows - self._position)
            if not self._schedule.batches_from(0):
                return 0
            self._epoch, self._position = self._epoch + 1, 0
        return 0

    def _advance(self, size: int) -> None:
        self._position, self._given = self._position + size, size
        self._number += 1
