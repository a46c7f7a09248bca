"""Batches straight from the model, for those who train while it reads: no disk.

The units of the corpus come in a drawn order, and their rows in the order in which they would be
stored; each `window` of them is filled, and then given in a drawn order. The order therefore
follows from the recipe, the seed and the window alone. A state says with which row of which unit
its window begins: whoever continues from it computes from there on.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy.typing as npt

from spile.core.config import Recipe, Runtime
from spile.core.errors import ConfigError, InputError, Interrupted
from spile.core.expressions import RowFilter
from spile.corpus.tokenize import use_threads
from spile.dataset.heartbeat import Presence
from spile.dataset.ledger import Ledger
from spile.dataset.read.order import parse_window, refuse_other
from spile.dataset.read.rows import StoredRows
from spile.dataset.read.view import Batch, View, Window
from spile.metrics import Counters
from spile.models.taps import Tap
from spile.objects import MemoryObjects
from spile.plan.estimate import estimate, planned_cuts
from spile.plan.resolve import resolve, store_table
from spile.run.devices import memory_limit, prepared_device
from spile.run.extract import load_step, steps_of
from spile.run.nonfinite import by_stored_name
from spile.run.pipeline import Worker
from spile.run.rank import find_rank
from spile.run.ring import Begin, Filled, InTurn, Order, Ring
from spile.run.world import SingleWorld


def stream(
    recipe: Recipe,
    runtime: Runtime | None = None,
    *,
    taps: str | Sequence[str] | None = None,
    batch_size: int = 4096,
    index: bool = True,
    seed: int = 0,
    shuffle: Literal["window"] | None = "window",
    window: int | str = 1 << 16,
    epochs: int | None = 1,
    where: str | None = None,
    dtype: npt.DTypeLike | None = None,
    encoded: bool = False,
    drop_last: bool = False,
    counters: Counters | None = None,
) -> "Stream":
    """What `Dataset.batches` gives, from the model itself: `{tap: rows, "index": entries}`.

    The model is loaded at once; it computes from the first batch asked for until `close`, which the
    last batch calls too, or the end of a `with` block. Options are those of `Dataset.batches`.

    Args:
        taps: some of the recipe's; all if not given.
        shuffle: "window": units in a drawn order, and rows within each window; None: as stored.
        window: rows held (and as many computed ahead), or bytes of them, as in "512MiB".
        counters: what the stages count, for those who watch.
    """
    runtime = runtime or Runtime()
    if find_rank(runtime, os.environ):
        raise ConfigError("spile.stream runs in one process, on all of its devices")
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
    if shuffle not in ("window", None):
        raise ConfigError(f"shuffle is 'window' or None, not {shuffle!r}")
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"seed must be a whole number, 0 or more; got {seed!r}")
    if epochs is not None and epochs < 0:
        raise ConfigError(f"epochs must be 0 or more, or None for no end; got {epochs}")
    if where is not None:
        RowFilter(where, None)  # says what is wrong with it
    use_threads(runtime.threads)
    device = prepared_device()
    ledger = Ledger(MemoryObjects("spile.stream"))
    job = resolve(recipe, ledger, device.platform, cache=runtime.cache)
    limit = memory_limit(device)
    cuts = planned_cuts(job, runtime, device.platform, jax.device_count(), limit)
    cost = estimate(
        job, runtime, device.platform, done=set(), free_bytes=None, memory=limit, cuts=cuts
    )
    job = store_table(job, ledger)
    batches = steps_of(cost, cuts, device)
    step = load_step(job, ledger, device, batches, cuts)

    aliases = {alias: tap for tap, info in job.table.taps.items() for alias in info.aliases}
    names = list(job.table.taps) if taps is None else [taps] if isinstance(taps, str) else taps
    for name in names:
        if aliases.get(name, name) not in job.table.taps:
            known = ", ".join(job.table.taps)
            raise ConfigError(f"no tap {name!r} in the recipe; it has {known}")
    stored = StoredRows(ledger.objects, job.table, [], ledger.read_scales(job.table) or {})
    view = View(
        stored, {name: aliases.get(name, name) for name in names}, index=index, normalize=None,
        dtype=dtype, encoded=encoded, statistics=_no_statistics,
    )  # fmt: skip
    order = Order(
        fingerprint=job.table.fingerprint, units=tuple(job.units), seed=seed, shuffle=shuffle,
        window=parse_window(window, view.row_bytes), where=where, epochs=epochs,
    )  # fmt: skip

    def work(ring: Ring, begin: Begin, stop: threading.Event) -> None:
        presence = Presence(ledger.objects, runtime.stale_after)
        Worker(
            job, ledger, step, runtime, batches=batches, made_by={}, presence=presence,
            world=SingleWorld(), counters=counters or Counters(), picker=InTurn(order, begin),
            stop=stop, sink=ring,
        ).run()  # fmt: skip

    watched = {
        name: tap
        for name, tap in by_stored_name(job).items()
        if name in view.taps and (view.taps[name].dtype == "int8" or not runtime.allow_nonfinite)
    }
    return Stream(view, order, work, batch_size, drop_last, watched)


def _no_statistics(tap: str) -> Any:
    raise AssertionError(tap)


Work = Callable[[Ring, Begin, threading.Event], None]


class Stream:
    """An iterator; `state_dict` may be taken between any two batches."""

    def __init__(
        self,
        view: View,
        order: Order,
        work: Work,
        batch_size: int,
        drop_last: bool,
        watched: Mapping[str, Tap],
    ) -> None:
        """`work`: runs a worker whose rows go into a ring; `watched`: see there."""
        self.view, self._order, self._work = view, order, work
        self._batch_size, self._drop_last, self._watched = batch_size, drop_last, watched
        self._begin, self._taken = Begin(), 0  # of the window in hand, and rows given of it
        self._window: tuple[Filled, Window | None] | None = None
        self._ring: Ring | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands, as JSON."""
        begin = self._begin
        return {
            "epoch": begin.epoch,
            "position": begin.position + self._taken,
            "begin": [begin.position, begin.number, begin.unit, begin.row],
            **self._order.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another stream of the same recipe stood."""
        refuse_other(state, self._order.identity, "stream")
        numbers: Any = [state.get("epoch"), state.get("position"), *(state.get("begin") or ())]
        if len(numbers) != 6 or any(type(n) is not int or n < 0 for n in numbers):
            raise ConfigError(f"no state of a stream: {dict(state)!r}")
        epoch, position, first, number, unit, row = numbers
        if not first <= position <= first + self._order.window or unit > len(self._order.units):
            raise ConfigError(f"no state of a stream: {dict(state)!r}")
        self.close()
        self._begin, self._taken = Begin(epoch, first, number, unit, row), position - first

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._stop.set()

    def close(self) -> None:
        """Stop computing; a later batch would go on from here."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = self._ring = self._window = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        epochs = self._order.epochs
        while epochs is None or self._begin.epoch < epochs:
            batch = self._next_of_epoch()
            if batch is not None:
                return batch
        self.close()
        raise StopIteration

    def _next_of_epoch(self) -> Batch | None:
        """A batch of the epoch in hand; None when that has ended, and the next one is in hand."""
        made, missing = self.view.begin(self._batch_size), self._batch_size
        begin, taken, ended = self._begin, self._taken, False
        while missing and not ended:
            filled, window = self._window or self._next_window()
            if filled.begin != begin:
                begin, taken = filled.begin, 0
            count = min(missing, filled.count - taken)
            if window is not None:
                made.take(window, taken, count)
            taken, missing = taken + count, missing - count
            if taken == filled.count:
                self._give_back()
                ended = filled.ends
        given = self._batch_size - missing
        self._begin, self._taken = (Begin(begin.epoch + 1), 0) if ended else (begin, taken)
        if given and not (missing and self._drop_last):
            return made.finish() if not missing else made.shortened().finish()
        if begin.position + taken < (self._batch_size if self._drop_last else 1):
            self._refuse_empty(begin.position + taken)
        return None

    def _next_window(self) -> tuple[Filled, Window | None]:
        try:
            filled = self._running().next()
        except BaseException:
            self.close()
            raise
        window = None
        if filled.room is not None:
            places = self._order.places(filled.begin, filled.count)
            tables = {tap: (held, places) for tap, held in filled.room.taps.items()}
            rank = filled.begin.epoch, filled.begin.number
            window = Window(rank, filled.room, tables, places, {})
        self._window = filled, window
        return self._window

    def _give_back(self) -> None:
        """The window's rows are all given, and its memory may be filled again."""
        assert self._window and self._ring
        filled, self._window = self._window[0], None
        if filled.room is not None:
            self._ring.release(filled.room)

    def _refuse_empty(self, rows: int) -> None:
        """An epoch of which nothing is given would be followed by others without end."""
        if not rows:
            self.close()
            raise InputError("the corpus holds no row that is asked for")
        if self._order.epochs is None:
            self.close()
            raise ConfigError(f"an epoch has {rows} rows, fewer than batch_size {self._batch_size}")

    def _running(self) -> Ring:
        if self._ring is None:
            stop = self._stop = threading.Event()
            ring = Ring(self.view, self._order, self._begin, stop, self._watched)
            arguments = (self._work, ring, self._begin, stop)
            self._thread = threading.Thread(
                target=_run, args=arguments, name="spile-stream", daemon=True
            )
            self._thread.start()
            self._ring = ring
        return self._ring


def _run(work: Work, ring: Ring, begin: Begin, stop: threading.Event) -> None:
    """(No stream is held by its own thread: one that is forgotten stops.)"""
    try:
        work(ring, begin, stop)
    except BaseException as error:
        ring.fail(error)
    else:
        ring.fail(Interrupted())  # whoever waits still waits for what will not come
