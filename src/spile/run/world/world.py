"""Processes that do units together: how they exchange values, and how they end together.

All of it goes through jax's own coordination service, which process 0 runs: small values by name,
and its heartbeat. That service's client has no public name in jax; only this module uses it. A
process that vanishes ends all others by an abort (exit 134), which this module cannot see:
`child.py` reports it. A process that fails in an orderly way first tells the others why.
"""

import importlib
import itertools
import json
import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from spile.core.config import Runtime
from spile.core.errors import ConfigError, Interrupted, SpileError, WorldError
from spile.core.system import system
from spile.core.threads import cancellation
from spile.core.units import Unit
from spile.dataset.records.heartbeat import Presence
from spile.dataset.records.ledger import Ledger
from spile.metrics import Counters
from spile.run.world.child import free_stdout, is_child
from spile.run.world.rank import ABORTED, RESTART, Rank

_log = logging.getLogger("spile.run")
_POLL_MS = 500
_GRACE = 5.0  # seconds for a process to stop by itself once another has failed
_PARTING = 2 * _GRACE  # for the leader to wait for those that did not stop, and were ended
_LEAVING = 0.5  # for their last log messages, after that
_END = "spile/end"
_SAID = 200  # characters of a jax error that are passed on
_JAX_ERROR: Any = importlib.import_module("jax.errors").JaxRuntimeError


class World(ABC):
    """The processes that do units together, as one of them sees the others."""

    process: int  # this one, from 0
    processes: int
    leads: bool  # whether this one decides and commits

    @abstractmethod
    def share(self, name: str, value: Any) -> Any:
        """Return the leader's value, in every process."""

    @abstractmethod
    def gather(self, name: str, value: Any) -> list[Any] | None:
        """Return every process's value, in order, to the leader, and None to the others."""

    @abstractmethod
    def units(self, picked: Iterator[Unit], known: Sequence[Unit]) -> Iterator[tuple[Unit, str]]:
        """Yield the units to do, each with its attempt's name; the leader picks them."""

    @abstractmethod
    def close(self) -> None:
        """Leave, once everybody is done."""

    @abstractmethod
    def failed(self, error: BaseException) -> BaseException:
        """Tell the others; return the first error of the world."""


class SingleWorld(World):
    """A world of one process, which has nobody to tell."""

    process, processes, leads = 0, 1, True

    def share(self, name: str, value: Any) -> Any:
        return value

    def gather(self, name: str, value: Any) -> list[Any] | None:
        return [value]

    def units(self, picked: Iterator[Unit], known: Sequence[Unit]) -> Iterator[tuple[Unit, str]]:
        return ((unit, system().token(8)) for unit in picked)

    def close(self) -> None:
        pass

    def failed(self, error: BaseException) -> BaseException:
        return error


@dataclass(frozen=True)
class RunContext:
    """The state that every stage of this process's run shares."""

    ledger: Ledger
    runtime: Runtime
    world: World
    presence: Presence
    counters: Counters


class JoinedWorld(World):
    """Several processes, joined."""

    def __init__(self, rank: Rank, client: Any, stop: threading.Event) -> None:
        self.rank = rank
        self.process, self.processes, self.leads = rank.process, rank.processes, rank.leads
        self._client, self._stop = client, stop
        self._cause: dict[str, Any] | None = None
        self._left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="world", daemon=True)
        self._watcher.start()

    def share(self, name: str, value: Any) -> Any:
        key = f"spile/share/{name}"
        if self.leads:
            self._set(key, value)
            return value
        return self._get(key)

    def gather(self, name: str, value: Any) -> list[Any] | None:
        key = f"spile/gather/{name}"
        if not self.leads:
            self._set(f"{key}/{self.process}", value)
            return None
        found = [value, *(self._get(f"{key}/{n}") for n in range(1, self.processes))]
        self._client.key_value_delete(key)  # a long run has many, and process 0 holds them all
        return found

    def units(self, picked: Iterator[Unit], known: Sequence[Unit]) -> Iterator[tuple[Unit, str]]:
        if not self.leads:
            return self._told_units(known)
        return self._tell_units(picked)

    def _tell_units(self, picked: Iterator[Unit]) -> Iterator[tuple[Unit, str]]:
        number = 0
        for unit in picked:
            attempt = system().token(8)
            self.share(f"unit/{number}", [unit.id, attempt])
            number += 1
            yield unit, attempt
        if not self._stop.is_set():
            self.share(f"unit/{number}", None)

    def _told_units(self, known: Sequence[Unit]) -> Iterator[tuple[Unit, str]]:
        for number in itertools.count():
            told = self.share(f"unit/{number}", None)
            if told is None:
                return
            yield known[told[0]], told[1]

    def close(self) -> None:
        # Nobody leaves before the leader has committed the last unit.
        self.share("finished", True)
        self._left.set()
        self._watcher.join()
        jax.distributed.shutdown()

    def failed(self, error: BaseException) -> BaseException:
        if not isinstance(error, SpileError | KeyboardInterrupt) and not _lost_contact(error):
            _log.error("process %d failed", self.process, exc_info=error)
        if self._cause is None:
            self._tell(error)
        cause = self._cause or {}
        self._left.set()
        self._part()
        if cause.get("process", self.process) == self.process and isinstance(error, Interrupted):
            return error
        return _world_error(cause)

    def _tell(self, error: BaseException) -> None:
        text, code = f"{type(error).__name__}: {error}", 1
        if isinstance(error, SpileError):
            text, code = error.message, error.exit_code
        elif _lost_contact(error):
            said = str(error).splitlines()[0][:_SAID]
            text = f"lost another process in the middle of a step ({said}); {RESTART}"
            code = ABORTED
        mine = {"process": self.process, "host": socket.gethostname(), "text": text, "code": code}
        try:
            self._client.key_value_set(_END, json.dumps(mine))
            self._cause = mine
        except Exception:
            # Another process failed first.
            self._cause = self._ended() or mine

    def _part(self) -> None:
        """Let the leader, which runs the service, leave last: the others need it to say why."""
        deadline = time.monotonic() + _PARTING
        try:
            if not self.leads:
                self._client.key_value_set(f"spile/left/{self.process}", "1")
            for other in range(1, self.processes) if self.leads else ():
                left = max(1, int(1000 * (deadline - time.monotonic())))
                self._client.blocking_key_value_get(f"spile/left/{other}", left)
        except Exception as error:
            _log.debug("while parting: %s", error)
        if self.leads:
            time.sleep(_LEAVING)

    # -- the service -------------------------------------------------------------------------

    def _set(self, key: str, value: Any) -> None:
        self._client.key_value_set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        """Wait for a value; raise if another process has failed, or this one was told to stop."""
        while True:
            self._check()
            try:
                return json.loads(self._client.blocking_key_value_get(key, _POLL_MS))
            except _JAX_ERROR as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise WorldError(0, f"{self._without_leader()}; {RESTART}", ABORTED) from error

    def _without_leader(self) -> str:
        return f"process 0, at {self.rank.coordinator}, no longer answers"

    def _check(self) -> None:
        if self._cause is not None:
            raise _world_error(self._cause)
        if self._stop.is_set():
            raise Interrupted

    def _ended(self) -> dict[str, Any] | None:
        try:
            return json.loads(self._client.key_value_try_get(_END))
        except Exception:
            return None

    def _watch(self) -> None:
        """Watch for the failure of another process; end this one if it stays stuck after that."""
        while not self._left.wait(_POLL_MS / 1000):
            cause = self._ended()
            if cause is None:
                continue
            self._cause = self._cause or cause
            self._stop.set()
            if not self._left.wait(_GRACE):
                _log.error("%s", _world_error(self._cause))
                self._part()
                os._exit(int(self._cause["code"]))
            return


def _lost_contact(error: BaseException) -> bool:
    """Whether a step failed because a process that takes part in it is gone."""
    lost = ("Gloo", "Connection", "UNAVAILABLE", "peer", "heartbeat", "CANCELLED", "ABORTED")
    return isinstance(error, _JAX_ERROR) and any(s in str(error) for s in lost)


def _world_error(cause: Mapping[str, Any]) -> SpileError:
    where = f"process {cause['process']} ({cause['host']}): {cause['text']}"
    return WorldError(int(cause["process"]), where, int(cause["code"]))


def join(rank: Rank, runtime: Runtime, stop: threading.Event) -> JoinedWorld:
    """Join the world; return when all processes are there.

    `stop`: set once another process fails, so that this one ends, too.
    """
    _log.info("joining %s at %s", rank, rank.coordinator)
    if rank.leads:
        _check_port(rank, runtime.bind_address)
    else:
        _reach(rank, runtime.start_timeout)
    if is_child():
        free_stdout()
    # jax's notifier would swallow SIGTERM; our handler cancels the run.
    config: Any = jax.config
    config.update("jax_enable_preemption_service", False)
    initialize = partial(
        jax.distributed.initialize,
        coordinator_address=rank.coordinator,
        num_processes=rank.processes,
        process_id=rank.process,
        local_device_ids=rank.devices,
        initialization_timeout=runtime.start_timeout,
        heartbeat_timeout_seconds=runtime.heartbeat_timeout,
        coordinator_bind_address=runtime.bind_address,
        cluster_detection_method="deactivate",
    )
    _beside(initialize)
    state: Any = importlib.import_module("jax._src.distributed").global_state
    return JoinedWorld(rank, state.client, stop)


def _beside(work: Callable[[], None]) -> None:
    """Run `work` in another thread: the main thread could not handle signals inside jax."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="join", daemon=True)
    thread.start()
    while thread.is_alive():
        cancellation().check()
        thread.join(0.1)
    if failed:
        raise failed[0]


def _check_port(rank: Rank, bind_address: str | None) -> None:
    """Raise if process 0 cannot listen: jax would crash, or share the port with another one."""
    port = rank.coordinator.rpartition(":")[2]
    address = bind_address or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or f"[::]:{port}"
    host, _, port = address.rpartition(":")
    try:
        (family, *_, where), *_ = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICSERV
        )
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
    except OSError as error:
        raise ConfigError(
            f"process 0 cannot listen on {address} ({error.strerror}): is another process 0 "
            "running here? --coordinator and --bind-address choose the port"
        ) from None


def _reach(rank: Rank, timeout: int) -> None:
    """Wait for the coordinator: tells a wrong address apart from a missing process."""
    host, _, port = rank.coordinator.rpartition(":")
    deadline, told = time.monotonic() + timeout, False
    while True:
        cancellation().check()
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except socket.gaierror as error:
            # A cluster may publish a host's name only after the host has started.
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--coordinator {rank.coordinator}: no such host ({error.strerror}); it is "
                    "the address of process 0, as seen from here"
                ) from None
            if not told:
                _log.warning("%s: no such host yet (%s)", rank.coordinator, error.strerror)
            told = True
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--coordinator {rank.coordinator}: not reached within {timeout} s "
                    f"({error.strerror or error}); is process 0 running there, and is that port "
                    "open to this host?"
                ) from None
        time.sleep(0.2)


def compare(world: World, mine: Mapping[str, Any]) -> None:
    """Check that every process was started alike; name what differs.

    Raises:
        ConfigError: in the leader, which tells the others.
    """
    mine = json.loads(json.dumps({**mine}))  # in the form that the others' values arrive in
    found = world.gather("hello", {"host": socket.gethostname(), **mine})
    for process, other in enumerate(found or []):
        for field, wanted in mine.items():
            if other.get(field) != wanted:
                raise ConfigError(
                    f"process {process} ({other['host']}) has {field} {other.get(field)!r}, "
                    f"process 0 has {wanted!r}: start all of them alike"
                )
