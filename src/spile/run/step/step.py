"""Steps: what they share, and what comes out of one.

A step takes one batch of fixed shape and returns the rows of every tap and their statistics. It has
two forms: in `resident.py` the devices hold the whole model; `sweep.py` runs it block by block.
Programs are compiled for each of a few shapes before their first use. A call runs the compiled
program itself, so a new shape cannot cause an unnoticed recompilation.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from spile.corpus.pack import Batch
from spile.models.forward.weights import Params
from spile.run.step.devices import StepDevices
from spile.run.step.output import Runs, StepOutput
from spile.run.step.settings import Computed, StepInputs, StepSettings
from spile.run.step.stored import Extras, packing

_log = logging.getLogger("spile.run")


class StagePrograms(NamedTuple):
    """The compiled program of a stage, and the one that packs its rows (None: it stores none)."""

    run: Any
    compact: Any


class Step(Protocol):
    """Runs batches through a model. It can be compiled before the model is loaded."""

    def __call__(self, batch: Batch) -> StepOutput:
        """Start a step; return its output, which is still being computed."""
        ...

    def compile(self, batch: Batch) -> Sequence[StagePrograms]:
        """Compile every program that a batch of this shape needs, if that has not been done."""
        ...

    def loaded(self, seconds: float) -> bool:
        """Wait up to `seconds` for the model; return whether loading has ended, well or not."""
        ...

    def check(self) -> None:
        """Raise if the model could not be loaded, or is not that of the dataset's other units.

        Called before each unit is committed: from then on the hashes of the weights are stored.
        """
        ...


class Programs:
    """The compiled programs of one step; each is compiled once, whichever thread asks first."""

    def __init__(
        self, settings: StepSettings, shapes: Params, extras: Extras, *more: Hashable
    ) -> None:
        """Args:
        shapes: of the model's arrays, or the arrays.
        more: whatever else the programs depend on, besides a batch's shape.
        """
        arrays, tree = jax.tree.flatten((shapes, extras))
        # Two steps with equal identities have equal programs for batches of equal shape.
        self.identity: Hashable = (
            settings, tree, tuple((array.shape, array.dtype) for array in arrays), more
        )  # fmt: skip
        self.compiled: dict[Hashable, Any] = {}
        self._settings, self._place = settings, settings.place
        self._compact = jax.jit(packing(settings.place.shards, gathers=settings.gathers))
        self._stages: dict[Hashable, StagePrograms] = {}
        self._rooms: dict[tuple[int, ...], dict[int, int]] = {}
        self._compiling = threading.Lock()

    def stage(
        self,
        key: Hashable,
        runs: Runs,
        function: Callable[[], Any],
        arguments: Callable[[], tuple[Any, ...]],
    ) -> StagePrograms:
        """Return a stage's programs; compile those that are missing.

        Args:
            key: what the stage's program depends on besides `identity`.
            function: makes the jitted function. It returns `Computed`, alone or first.
            arguments: makes the arguments to lower it with.
        """
        known = key, runs.places.shape
        if known not in self._stages:
            run = self._get(key, function, arguments)
            made = run.out_info if isinstance(run.out_info, Computed) else run.out_info[0]
            rows = {
                name: self._place.by_runs(array.shape, array.dtype)
                for name, array in made.rows.items()
            }
            places = self._place.by_runs(runs.places.shape, runs.places.dtype)
            sizes = tuple((name, each.shape, each.dtype) for name, each in rows.items())
            compact = None
            if rows:
                packed = sizes, places.shape
                compact = self._get(packed, lambda: self._compact, lambda: (rows, places))
            self._stages[known] = StagePrograms(run, compact)
        return self._stages[known]

    def contexts(self, batch: Batch) -> int:
        """The number of contexts that a batch's program has room for.

        A program with more room serves, too: compiling another while steps run would make the
        device wait. This is decided when a batch is first compiled, so all processes decide alike.
        """
        wanted = self._settings.contexts(batch)
        rooms = self._rooms.setdefault(batch.tokens.shape, {})
        if wanted not in rooms:
            rooms[wanted] = min((r for r in rooms.values() if r >= wanted), default=wanted)
        return rooms[wanted]

    def _get(
        self, key: Hashable, function: Callable[[], Any], arguments: Callable[[], tuple[Any, ...]]
    ) -> Any:
        if key not in self.compiled:
            with self._compiling:  # one at a time; programs that are already compiled do not wait
                if key not in self.compiled:
                    begin = time.perf_counter()
                    lowered = function().lower(*arguments())
                    options = self._settings.compiler_options
                    self.compiled[key] = lowered.compile(compiler_options=options or None)
                    seconds = time.perf_counter() - begin
                    _log.debug("compiled a step for %s in %.1f s", key, seconds)
        return self.compiled[key]


def step_inputs(batch: Batch) -> StepInputs:
    return StepInputs(*(getattr(batch, name) for name in StepInputs._fields))


def input_shapes(batch: Batch, place: StepDevices) -> StepInputs:
    """The shapes of a batch's arrays on the devices."""
    return StepInputs(
        *(
            None if array is None else place.by_rows(array.shape, array.dtype)
            for array in step_inputs(batch)
        )
    )
