"""The thin parent of a process in a world: it says what jax's aborts do not. No jax.

jax ends a process whose world has died by an abort, without Python. So the work is done by a
child, and the parent, which only waits, looks into the store when that happens: every process
writes a sign of life there before it joins.
"""

import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from spile.engine.place import RESTART, Place
from spile.objects import Objects
from spile.store.presence import process_ended, read_workers

_log = logging.getLogger("spile")

CHILD = "SPILE_WORLD_CHILD"
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_OUT_OF_MEMORY = ", as the kernel does when memory runs out"


def is_child() -> bool:
    return os.environ.get(CHILD) == str(os.getppid())


def supervise(argv: Sequence[str], place: Place, objects: Objects) -> int:
    """Run the same command in a child; returns its exit code, and says why if it was aborted."""
    before = {name: record.get("counter") for name, record in read_workers(objects).items()}
    me, libc = os.getpid(), ctypes.CDLL(None)
    child = subprocess.Popen(
        [sys.executable, "-m", "spile.cli", *argv],
        env={**os.environ, CHILD: str(me)},
        preexec_fn=lambda: _die_with(me, libc),
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    if code >= 0:
        return code
    if code == -signal.SIGABRT:
        _log.error("%s", _why(place, objects, before, child.pid))
    else:
        _log.error("its process was ended by signal %d (%s)%s; %s", -code, signal.strsignal(-code),
                   _OUT_OF_MEMORY if code == -signal.SIGKILL else "", RESTART)  # fmt: skip
    return 128 - code


def free_stdout() -> None:
    """From here on only `sys.stdout` writes there: gloo would tell of its connections."""
    sys.stdout.flush()
    sys.stdout = open(os.dup(1), "w", encoding=sys.stdout.encoding)  # noqa: SIM115 - kept open
    os.dup2(2, 1)


def _die_with(parent: int, libc: ctypes.CDLL) -> None:
    """Ask the kernel to end this process with its parent, and look whether that is gone already."""
    if sys.platform == "linux":
        libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _why(place: Place, objects: Objects, before: Mapping[str, Any], child: int) -> str:
    """Who was there, by the signs of life that are new since this process began."""
    came: dict[int, list[Mapping[str, Any]]] = {}
    worked = False  # so all had come, whatever they call the coordinator
    for name, record in read_workers(objects).items():
        world = record.get("world") or {}
        mine = record.get("pid") == child and world.get("process") == place.process
        worked |= mine and record.get("state") == "running"
        if world.get("coordinator") == place.coordinator and (
            record.get("counter") != before.get(name)
        ):
            came.setdefault(int(world["process"]), []).append(record)
    twice = {process: records for process, records in came.items() if len(records) > 1}
    for process, records in twice.items():
        hosts = " and ".join(sorted(str(record.get("host")) for record in records))
        return f"two processes have the id {process} ({hosts}); give each its own"
    missing = [n for n in range(place.processes) if n not in came]
    if missing and not worked:
        names = ", ".join(map(str, missing))
        return (
            f"{'processes' if len(missing) > 1 else 'process'} {names} of "
            f"{place.processes} never came; start every one of them; {RESTART}"
        )
    gone = [n for n, (record,) in came.items() if n != place.process and process_ended(record)]
    who = f"process {', '.join(map(str, gone))} is gone" if gone else "a process was not heard of"
    if len(gone) > 1:
        who = f"processes {', '.join(map(str, sorted(gone)))} are gone"
    return f"{who}, and the world ended with it; {RESTART}"
