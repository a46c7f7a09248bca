"""`--profile steps=10:15`: a trace of some steps, for TensorBoard, XProf and Perfetto."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from spile.core.errors import ConfigError
from spile.corpus.pack import Batch
from spile.run.step import Step, StepOutput

_DIRECTORY = "spile-profile"
STEP = "spile_step"  # what a step is called in a trace

_log = logging.getLogger("spile")


@dataclass(frozen=True)
class Profile:
    """Which steps, counted from 0 over a run, and where their trace goes."""

    first: int
    end: int
    directory: Path

    @classmethod
    def parse(cls, text: str) -> "Profile":
        """`steps=10:15,dir=DIR`.

        Raises:
            ConfigError: if it says anything else.
        """
        given = {name: value for name, _, value in (p.partition("=") for p in text.split(","))}
        steps = re.fullmatch(r"(\d{1,9}):(\d{1,9})", given.pop("steps", ""), re.ASCII)
        directory = given.pop("dir", _DIRECTORY)
        if given or not directory or not steps or int(steps[1]) >= int(steps[2]):
            raise ConfigError(
                f"--profile {text}: choose e.g. steps=10:15 (the eleventh step to the fifteenth), "
                "or steps=10:15,dir=DIR"
            )
        return cls(int(steps[1]), int(steps[2]), Path(directory))

    def newest(self) -> Path | None:
        """The trace that was made last, as Perfetto opens it."""
        found = self.directory.glob("plugins/profile/*/perfetto_trace.json.gz")
        return max(found, key=lambda path: path.stat().st_mtime_ns, default=None)


class ProfiledStep:
    """A step that traces itself when it is time. Tracing that fails never stops a run."""

    def __init__(self, step: Step, profile: Profile) -> None:
        self._step, self._profile = step, profile
        self._count = 0
        self._tracing = False

    def compile(self, batch: Batch) -> tuple[Any, Any]:
        return self._step.compile(batch)

    def __call__(self, batch: Batch) -> StepOutput:
        number, self._count = self._count, self._count + 1
        if number == self._profile.first:
            self._start()
        with jax.profiler.StepTraceAnnotation(STEP, step_num=number):
            output = self._step(batch)
        if number == self._profile.end - 1:
            output.finished.block_until_ready()  # it was only started
            self.close()
        return output

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # calls of Python would crowd out everything else
        try:
            jax.profiler.start_trace(
                self._profile.directory, create_perfetto_trace=True, profiler_options=options
            )
        except Exception as error:
            _log.warning("--profile: %s; the run goes on without a trace", error)
        else:
            self._tracing = True

    def close(self) -> None:
        """Write the trace, if one is being taken."""
        if self._tracing:
            self._tracing = False
            try:
                jax.profiler.stop_trace()
            except Exception as error:
                _log.warning("--profile: %s; the run goes on without a trace", error)
        elif self._count <= self._profile.first:
            _log.warning("--profile: there were only %d steps; nothing was traced", self._count)
