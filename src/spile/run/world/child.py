"""The thin parent of a process in a world: it explains aborts of jax. No jax.

When a world has died, jax ends its processes by an abort, without returning to Python. So a child
does the work. The parent only waits, and looks into the store when the child was aborted: every
process writes a heartbeat there before it joins.
"""

import ctypes
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from spile.dataset.records.heartbeat import process_ended
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import every_worker
from spile.objects import Objects
from spile.run.world.rank import RESTART, Rank

_log = logging.getLogger("spile.run")

CHILD = "SPILE_WORLD_CHILD"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_OUT_OF_MEMORY = ", as the kernel does when memory runs out"


def is_child() -> bool:
    return os.environ.get(CHILD) == str(os.getppid())


class Child:
    """A child process that does the work; it ends when this one ends."""

    def __init__(self, argv: Sequence[str], rank: Rank | None, objects: Objects) -> None:
        self._rank, self._objects = rank, objects
        self._before = {n: record.get("counter") for n, record in _heartbeats(objects).items()}
        me, libc = os.getpid(), ctypes.CDLL(None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "spile.cli", *argv],
            env={**os.environ, CHILD: str(me)},
            preexec_fn=lambda: _die_with(me, libc),
        )

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait for it; return its exit code as a shell does: 128 plus the number of a signal."""
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def signalled(self) -> str | None:
        """Why the process was ended by a signal; None if it exited by itself."""
        code = self._process.returncode
        if code >= 0:
            return None
        if code == -signal.SIGABRT and self._rank:
            return _why(self._rank, self._objects, self._before, self._process.pid)
        why = f"its process was ended by signal {-code} ({signal.strsignal(-code)})"
        return why + (_OUT_OF_MEMORY if code == -signal.SIGKILL else "")

    def said(self) -> list[Mapping[str, Any]]:
        """The heartbeats that it, or any process of its world, has written into the store.

        `folder` of each is that of a pass, if taps are being added, or empty.
        """
        workers = _heartbeats(self._objects).items()
        new = [r for name, r in workers if r.get("counter") != self._before.get(name)]
        if self._rank:
            where = self._rank.coordinator
            return [r for r in new if _world(r).get("coordinator") == where]
        host = socket.gethostname()
        return [r for r in new if r.get("pid") == self._process.pid and r.get("host") == host]


def accompany(argv: Sequence[str], rank: Rank, objects: Objects) -> int:
    """Run the same command in a child. Return its exit code; log the reason if it was aborted."""
    child = Child(argv, rank, objects)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: child.signal(number))
    code = child.wait()
    why = child.signalled()
    if why:
        _log.error("%s; %s", why, RESTART)
    return code


def free_stdout() -> None:
    """Let only `sys.stdout` write to stdout from now on; gloo would print its connections there."""
    sys.stdout.flush()
    sys.stdout = open(os.dup(1), "w", encoding=sys.stdout.encoding)  # noqa: SIM115 - kept open
    os.dup2(2, 1)


def _die_with(parent: int, libc: ctypes.CDLL) -> None:
    """Ask the kernel to end this process with its parent; exit if the parent is already gone."""
    if sys.platform == "linux":
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _heartbeats(objects: Objects) -> dict[str, dict[str, Any]]:
    return every_worker(Ledger(objects))


def _world(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The world that a heartbeat names, if its process has one."""
    return record.get("world") or {}


def _why(rank: Rank, objects: Objects, before: Mapping[str, Any], child: int) -> str:
    """Say which processes had joined, by the heartbeats written since this process began."""
    came: dict[int, list[Mapping[str, Any]]] = {}
    worked = False  # if so, all had joined, whatever address they use for the coordinator
    for name, record in _heartbeats(objects).items():
        world = _world(record)
        mine = record.get("pid") == child and world.get("process") == rank.process
        worked |= mine and record.get("state") == "running"
        if world.get("coordinator") == rank.coordinator and (
            record.get("counter") != before.get(name)
        ):
            came.setdefault(int(world["process"]), []).append(record)
    for process, records in came.items():
        # A process that `supervise` has restarted has two records too, but of one parent.
        if len({(record.get("host"), record.get("parent")) for record in records}) < 2:
            continue
        hosts = " and ".join(sorted(str(record.get("host")) for record in records))
        return f"two processes have the id {process} ({hosts}); give each its own"
    missing = [n for n in range(rank.processes) if n not in came]
    if missing and not worked:
        names = ", ".join(map(str, missing))
        return (
            f"{'processes' if len(missing) > 1 else 'process'} {names} of "
            f"{rank.processes} never joined; start all of them"
        )
    others = {n: records for n, records in came.items() if n != rank.process}
    gone = [n for n, records in others.items() if all(map(process_ended, records))]
    who = f"process {', '.join(map(str, gone))} is gone" if gone else "a process stopped answering"
    if len(gone) > 1:
        who = f"processes {', '.join(map(str, sorted(gone)))} are gone"
    return f"{who}, and the world ended with it"
