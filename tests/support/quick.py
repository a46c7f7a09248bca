"""Make tests cheaper: programs without optimizations, and things that processes share."""

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


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first process of a session fills and all of them use."""
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
    """Extractions in this process compile a program once, where all it depends on is the same."""
    from spile.run.step.resident import Step  # noqa: PLC0415 - few tests need it

    own = Step._program

    def program(step: Any, shapes: Any, function: Any, arguments: Any) -> Any:
        if shapes in step._programs or (known := _compiled_for(step)) is None:
            return own(step, shapes, function, arguments)
        found = _programs.get((known, shapes))
        if found is None:
            found = _programs[known, shapes] = own(step, shapes, function, arguments)
        return step._programs.setdefault(shapes, found)

    Step._program = program
    try:
        yield
    finally:
        Step._program = own


def _compiled_for(step: Any) -> Any:
    """What a step's programs depend on beside its batches; None if that is not compared here."""
    settings = step.settings
    if settings.encoders or settings.spliced or settings.shards:
        return None
    if "_compiled_for" not in step.__dict__:
        arrays = jax.tree.flatten((step._shapes, step._scales))
        shapes = tuple((array.shape, array.dtype.name) for array in arrays[0])
        rest = tuple(v for n, v in vars(settings).items() if n != "encoders")
        looks_up = getattr(step, "_looks_up", None)  # of one that sweeps
        step._compiled_for = type(step), rest, step._device, looks_up, arrays[1], shapes
    return step._compiled_for
