"""Less work for the same tests: programs that are not optimized, and what is made once for all."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

OPTIONS: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jax.__version_info__[:2] == (0, 10):  # elsewhere untried, and an unknown flag ends the process
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
_programs: dict[Any, Any] = {}
_KEYED = {"compute_dtype", "store_dtype", "device"}


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first of a session's processes fills, for all of them."""
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
    """Extractions in this process trace a step once, where all that it depends on is the same."""
    from spile.run.step import Step  # noqa: PLC0415 - few tests need it

    init = Step.__init__

    def shared(step: Any, params: Any, arch: Any, taps: Any, schedule: Any, **given: Any) -> None:
        init(step, params, arch, taps, schedule, **given)
        # What else a step is given is part of its program: such steps are traced each time.
        if not any(given.get(name) for name in given.keys() - _KEYED):
            key = arch, taps, schedule, given["compute_dtype"], given["store_dtype"]
            traced = _programs.setdefault((*key, given["device"]), (step._run, step._compact))
            step._run, step._compact = traced

    Step.__init__ = shared  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Step.__init__ = init
