"""`spile supervise`: run a slice, and restart it when it fails. No jax.

The exit code decides about a restart: 0 means that the work is done, 2 an error that a restart
cannot fix. Any other failure (a store that does not answer, a signal, a lost process of the world)
may be temporary. A signal to this process is passed on to the child, and ends the restarts.
"""

import logging
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from spile.core.errors import ConfigError, Interrupted, SpileError, printable
from spile.core.retry import backoff
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import every_done
from spile.objects import Objects
from spile.run.world.child import Child
from spile.run.world.rank import ABORTED, Rank

_log = logging.getLogger("spile.fleet")
_STOPPED = Interrupted.exit_code
_JITTER = 0.25  # share of a pause, so that a fleet does not restart all at once
_MEANING = {
    1: "an unexpected error (exit 1)",
    SpileError.exit_code: "a data or store fault (exit 3)",
    _STOPPED: "another process of its world was told to stop (exit 130)",
    ABORTED: "a process of its world was lost (exit 134)",
}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often to restart, and after what delay."""

    max_restarts: int = 10  # restarts in a row without a finished unit
    backoff: float = 1.0  # seconds before the first restart; doubled each time
    max_backoff: float = 60.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0:
            raise ConfigError(f"--max-restarts must be at least 0, got {self.max_restarts}")
        if not 0 <= self.backoff <= self.max_backoff:
            raise ConfigError(
                f"--backoff must be from 0 to --max-backoff ({self.max_backoff:g} seconds), got "
                f"{self.backoff:g}"
            )

    def pause(self, failures: int) -> float:
        """Seconds to wait before the n-th restart in a row."""
        return backoff(failures, self.backoff, self.max_backoff, jitter=_JITTER)


class Supervisor:
    """Runs one command until its work is done, or restarts cannot help."""

    def __init__(
        self,
        argv: Sequence[str],
        rank: Rank | None,
        objects: Objects,
        patience: Patience,
        *,
        drives: bool = False,
    ) -> None:
        """`drives`: whether the command drives other workers, so that any new unit is progress."""
        self._argv, self._rank, self._objects = argv, rank, objects
        self._patience, self._drives = patience, drives
        self._stopping = threading.Event()
        self._child: Child | None = None

    def run(self) -> int:
        """Run to the end; return an exit code that says whether to start again (docs/fleets.md)."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        failures, worked = 0, False
        while not self._stopping.is_set():
            before = self._done()
            self._child = child = Child(self._argv, self._rank, self._objects)
            if self._stopping.is_set():  # a signal arrived while the child was starting
                child.signal(signal.SIGTERM)
            code = child.wait()
            if code == 0:
                return 0
            if self._stopping.is_set():
                return code if code in (ConfigError.exit_code, SpileError.exit_code) else _STOPPED
            progress = self._progressed(child, before)
            worked |= progress or code == ABORTED
            if code == ConfigError.exit_code and not (worked and self._alone()):
                _log.error("not restarted: exit code 2 means bad input, which a restart cannot fix")
                return code
            failures = 1 if progress else failures + 1
            why = child.signalled() or self._reported(child) or _MEANING.get(code, f"exit {code}")
            if failures > self._patience.max_restarts:
                _log.error("%s; giving up after %d restarts without a unit done", why, failures - 1)
                return code
            pause = self._patience.pause(failures)
            _log.warning(
                "%s; restart %d of %d in %.1f s; committed units stay",
                why,
                failures,
                self._patience.max_restarts,
                pause,
            )
            self._stopping.wait(pause)
        return _STOPPED

    def _stop(self, number: int, frame: object) -> None:
        self._stopping.set()
        if self._child:
            self._child.signal(number)

    def _progressed(self, child: Child, before: set[tuple[str, int]]) -> bool:
        """Return whether the child has finished a unit, by its heartbeat or the done records."""
        new = self._done() - before
        return (self._drives and bool(new)) or any(
            record.get("units_done")
            or any((record["folder"], unit) in new for unit in record["units"])
            for record in child.said()
        )

    def _done(self) -> set[tuple[str, int]]:
        return every_done(Ledger(self._objects))

    def _reported(self, child: Child) -> str | None:
        """Return the error that the child ended with, if it was recorded."""
        if self._rank:
            return None  # (the record may be another process's; the exit code says enough)
        errors = [str(record["error"]) for record in child.said() if record.get("error")]
        return printable(errors[0].splitlines()[0]) if errors else None

    def _alone(self) -> bool:
        """Return whether the coordinator is down; processes of a world do not restart at once."""
        if self._rank is None or self._rank.leads:
            return False
        host, _, port = self._rank.coordinator.rpartition(":")
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            return False
        return True
