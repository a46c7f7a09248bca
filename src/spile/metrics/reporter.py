"""A thread that reads the counters every few seconds and reports to every backend."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from spile.metrics.backends import Backend, line
from spile.metrics.counters import Counters
from spile.metrics.values import step_times, values_between

_log = logging.getLogger("spile.metrics")
_PATIENCE = 60.0  # seconds to wait for backends at the end of a run


class Reporter:
    """Reports while its context is entered, and once more on exit, even after an error.

    A backend that fails is reported once, and not called again: metrics never stop a run.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        counters: Counters,
        every: float,
        *,
        more: Callable[[], Mapping[str, float]] = dict,
        tokens_before: int = 0,
    ) -> None:
        """Args:
        more: returns further gauges and sums, under names that `counters` does not use.
        tokens_before: tokens of earlier runs; reports continue from there.
        """
        self._backends, self._counters, self._every = dict(backends), counters, every
        self._more, self._tokens_before = more, tokens_before
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def __enter__(self) -> "Reporter":
        self._last, self._at = self._look(), time.monotonic()
        if self._backends:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._thread.is_alive():
            return
        self._stop.set()
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            _log.warning("--metrics: backends not finished after %.0f s; not waiting", _PATIENCE)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            self._report()
        self._report()
        for name, backend in list(self._backends.items()):
            self._try(name, backend.close)

    def _look(self) -> dict[str, float]:
        return {**self._counters.snapshot(), **self._more()}

    def _report(self) -> None:
        now, at = self._look(), time.monotonic()
        values = values_between(self._last, now, at - self._at)
        values |= self._counters.take_largest()
        values |= step_times(self._counters.take_samples().get("step_seconds", []))
        self._last, self._at = now, at
        tokens = self._tokens_before + int(values["progress/tokens"])
        for name, backend in list(self._backends.items()):
            self._try(name, lambda backend=backend: backend.log(tokens, values))

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            _log.warning("--metrics %s: %s; the run continues without it", name, line(error))
            self._backends.pop(name, None)
