"""The resident step: the devices hold the whole model, and one program runs all of it."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownMemberType=false

import time
from concurrent.futures import Future, wait
from functools import cached_property

import jax

from spile.corpus.pack import Batch
from spile.models.forward.weights import Params
from spile.run.step.output import Runs, StepOutput, StepRows
from spile.run.step.settings import Computed, StepInputs, StepSettings
from spile.run.step.step import Programs, StagePrograms, input_shapes, step_inputs
from spile.run.step.stored import Extras


class ResidentStep:
    """Runs batches through a model that the devices hold whole."""

    def __init__(
        self,
        params: Params | Future[Params],
        settings: StepSettings,
        extras: Extras | None = None,
        shapes: Params | None = None,
    ) -> None:
        """Args:
        params: the model, or a future of it; then `shapes` says what to compile for.
        extras: the arrays besides the weights.
        """
        self.settings, self._given = settings, params
        self._place = settings.place
        self._extras = self._place.everywhere(extras or Extras())
        known = params if shapes is None else shapes
        assert isinstance(known, Params)
        self._shapes = known
        self._forward = jax.jit(settings.forward, static_argnums=(3, 4))
        self.programs = Programs(settings, known, self._extras)

    def __call__(self, batch: Batch) -> StepOutput:
        """Start a step; return at once, while the device works."""
        ((rows, reduced, gaps),) = self.compute(batch)
        started = time.perf_counter()  # the lines below may take longer than the step itself
        finished = jax.tree.leaves((reduced, rows))[0]
        gathers = self.settings.gathers
        if (host := self._place.host(gathered=gathers)) is not None:
            rows, reduced = jax.device_put((rows, reduced), host)
        runs = Runs.of(self._place.divisible(batch), self._place.devices)
        own = runs if gathers else runs[self._place.own]
        gaps = self._place.fetch(gaps)
        found = (StepRows(own, rows, reduced, gathers, gaps, batch.scored_docs),)
        return StepOutput(int(batch.lengths.sum()), found, started, finished)

    def compute(self, batch: Batch) -> list[Computed]:
        """Compute a step, and leave everything on the device."""
        batch = self._place.divisible(batch)
        runs = Runs.of(batch, self._place.devices)
        programs = self._programs_for(batch, runs)
        kept, inputs = self._place.put(runs.places, step_inputs(batch))
        found = programs.run(self.params, self._extras, StepInputs(*inputs))
        return [found._replace(rows=programs.compact(found.rows, kept))]

    def compile(self, batch: Batch) -> list[StagePrograms]:
        """Compile the programs for a batch of this shape, if that has not been done."""
        batch = self._place.divisible(batch)
        return [self._programs_for(batch, Runs.of(batch, self._place.devices))]

    def loaded(self, seconds: float) -> bool:
        """Wait up to `seconds` for the model; return whether loading has ended, well or not."""
        return not isinstance(self._given, Future) or bool(wait([self._given], seconds).done)

    def check(self) -> None:
        """Wait for the model, whose hashes are compared when it has been loaded."""
        _ = self.params

    @cached_property
    def params(self) -> Params:
        """The model; waits until it is loaded, and raises the error that ended loading."""
        return self._given.result() if isinstance(self._given, Future) else self._given

    def _programs_for(self, batch: Batch, runs: Runs) -> StagePrograms:
        shapes = tuple(None if a is None else a.shape for a in step_inputs(batch))
        contexts = self.programs.contexts(batch)
        return self.programs.stage(
            (shapes, contexts),
            runs,
            lambda: self._forward,
            lambda: (
                self._shapes,
                self._extras,
                input_shapes(batch, self._place),
                contexts,
                runs.size,
            ),
        )
