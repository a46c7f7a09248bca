"""One host of a slice on a Ray cluster: the code of the actor. The driver is `driver.py`.

The driver sends units by number, and the actor answers when each is committed. Rows go from here to
the store. Answers are plain values: a failure is its text and exit code, as for a process.
"""

import importlib
import os
import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import spile
from spile.core.config import build
from spile.core.errors import Interrupted, SpileError
from spile.core.units import Unit
from spile.dataset.records.heartbeat import Presence
from spile.metrics import Counters

if TYPE_CHECKING:
    from spile.plan.estimate import Estimate
    from spile.plan.job import ExtractionJob

_WORKER_ID = "TPU_WORKER_ID"
_POLL_SECONDS = 0.5
_COUNTED = ("tokens", "units", "bytes", "durable", "documents", "unit_seconds")


class ToldUnits:
    """A picker whose units come from the driver."""

    def __init__(self) -> None:
        self._known: Sequence[Unit] = ()
        self._presence: Presence
        self._told: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._waiting: dict[int, threading.Event] = {}
        self._over = threading.Event()  # set when no more units will be committed

    def begin(self, job: "ExtractionJob", presence: Presence) -> "ToldUnits":
        self._known = job.units
        self._presence = presence
        return self

    def take(self) -> tuple[Unit | None, bool]:
        try:
            unit = self._told.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return None, True
        if unit is None:
            return None, False
        self._presence.hold(unit)  # visible to others, and to workers without Ray
        return self._known[unit], True

    def done(self, unit: int) -> None:
        self._presence.release(unit)
        if event := self._waiting.get(unit):
            event.set()

    def tell(self, unit: int) -> bool:
        """Pass on a unit and wait until it is committed; return False if it never will be."""
        event = self._waiting[unit] = threading.Event()
        self._told.put(unit)
        while not event.wait(_POLL_SECONDS):
            if self._over.is_set():
                break
        return event.is_set()

    def finish(self) -> None:
        self._told.put(None)

    def end(self) -> None:
        self._over.set()


class RayHost:
    """The actor. `run` lasts as long as the slice; the other calls run concurrently."""

    def __init__(self) -> None:
        self._units, self._counters = ToldUnits(), Counters()
        self._stop, self._begun = threading.Event(), threading.Event()
        self._cost: dict[str, Any] | None = None

    def hello(self) -> dict[str, Any]:
        """Return an address where other hosts can reach this one, and its number in a TPU pod."""
        ray: Any = importlib.import_module("ray")
        with socket.socket() as found:
            found.bind(("", 0))
            port = int(found.getsockname()[1])
        labels: Mapping[str, str] = getattr(ray.get_runtime_context(), "get_node_labels", dict)()
        number: str = os.environ.get(_WORKER_ID) or labels.get("ray.io/tpu-worker-id", "")
        return {
            "address": f"{ray.util.get_node_ip_address()}:{port}",
            "worker": int(number) if number.isdecimal() else None,
            "spile": spile.__version__,
            "node": socket.gethostname(),
            "pid": os.getpid(),
        }

    def run(
        self, options: Mapping[str, Any], out: str, folder: str, environment: Mapping[str, str]
    ) -> dict[str, Any]:
        """Do the units that the driver sends, until `finish`, `stop` or a failure."""
        os.environ.update(environment)  # before jax reads it
        try:
            if Path(folder).is_dir():
                os.chdir(folder)  # the command's folder, if it is shared
            local: Any = importlib.import_module("spile.run.extract")
            recipe, runtime = build(options)
            local.extract(
                recipe,
                out,
                runtime,
                counters=self._counters,
                on_start=self._started,
                stop=self._stop,
                options=local.RunOptions(pick=self._units.begin),
            )
        except SpileError as error:
            interrupted = isinstance(error, Interrupted)
            return {"failed": error.message, "code": error.exit_code, "stopped": interrupted}
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}", "code": 1, "stopped": False}
        finally:
            self._units.end()
            self._begun.set()
        return {}

    def begun(self) -> dict[str, Any] | None:
        """Wait for the unit table, and return the estimate; None if the run ended before."""
        self._begun.wait()
        return self._cost

    def do(self, unit: int) -> dict[str, float] | None:
        """Return the counters when the unit is committed; None if this slice will not do it."""
        return self.counts() if self._units.tell(unit) else None

    def counts(self) -> dict[str, float]:
        return {name: self._counters[name] for name in _COUNTED}

    def finish(self) -> None:
        """Announce that no more units will come."""
        self._units.finish()

    def stop(self) -> None:
        """Stop after committing fully computed units."""
        self._stop.set()

    def _started(self, job: object, cost: "Estimate") -> None:
        self._cost = asdict(cost)
        self._begun.set()
