"""Compiling in a hurry: what a test runs for a moment gains nothing by being optimized."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

OPTIONS: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if jax.__version_info__[:2] == (0, 10):  # elsewhere untried, and an unknown flag ends the process
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
_programs: dict[Any, Any] = {}


@contextmanager
def shared_programs() -> Iterator[None]:
    """Extractions in this process trace a step once, where all that it depends on is the same."""
    from spile.run.step import Step  # noqa: PLC0415 - few tests need it

    init = Step.__init__

    def shared(step: Any, params: Any, arch: Any, taps: Any, schedule: Any, **given: Any) -> None:
        init(step, params, arch, taps, schedule, **given)
        if not given.get("shards") and not given.get("encoders"):
            key = arch, taps, schedule, given["compute_dtype"], given["store_dtype"]
            traced = _programs.setdefault((*key, given["device"]), (step._run, step._compact))
            step._run, step._compact = traced

    Step.__init__ = shared  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Step.__init__ = init
