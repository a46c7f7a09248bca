"""Make tests cheaper: programs without optimizations, and things that processes share."""

import fcntl
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

OPTIONS: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jax.__version_info__[:2] == (0, 10):  # elsewhere untried, and an unknown flag ends the process
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
    OPTIONS["xla_cpu_parallel_codegen_split_count"] = 1  # all workers compile at the same time
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
SYNCS: dict[str, Callable[[int], None]] = {"fsync": os.fsync, "fdatasync": os.fdatasync}
_programs: dict[Hashable, dict[Hashable, Any]] = {}  # by step's identity


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the session's first process fills and all processes use."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / name
        if not made.exists():
            make(folder / f"{name}.part")
            (folder / f"{name}.part").rename(made)
    return made


@contextmanager
def shared_programs() -> Iterator[None]:
    """Steps in this process compile a program once, where everything it depends on is equal."""
    from spile.run.step.step import Programs  # noqa: PLC0415 - few tests need it

    made = Programs.__init__

    def shared(programs: Programs, *given: Any) -> None:
        made(programs, *given)
        programs.compiled = _programs.setdefault(programs.identity, programs.compiled)

    Programs.__init__ = shared  # type: ignore[method-assign]
    try:
        yield
    finally:
        Programs.__init__ = made  # type: ignore[method-assign]


@contextmanager
def unsynced() -> Iterator[None]:
    """Files that this process writes reach the disk when the system writes them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in SYNCS:
            patch.setattr(os, name, lambda _descriptor: None)
        yield
