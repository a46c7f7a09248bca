"""The way back of a sweep: gradients block by block, in reverse order.

The sweep keeps the stream that enters each stage, in host memory. On the way back each stage is
computed again from it, and the cotangent of the stream that left it becomes that of the one that
entered. An objective is a sum over the taps that it reads, so each stage adds its own part.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from spile.models.config.arch import Layer
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.forward.decoder import by_stage, of_any_block
from spile.models.forward.weights import WeightArrays
from spile.models.objectives import Objective
from spile.models.taps import Tap
from spile.run.step.settings import StepInputs, StepSettings
from spile.run.step.stored import Extras


def stages_back(settings: StepSettings, depth: int) -> range:
    """Return the stages of the way back, in its order: from the last aim to the first site."""
    assert settings.objective
    sites = by_stage([tap.source for tap in settings.taps if tap.kind.of], depth)
    aims = by_stage(settings.objective.aims, depth)
    first = min(stage for stage, some in sites.items() if some)
    last = max(stage for stage, some in aims.items() if some)
    return range(last, first - 1, -1)


def local_objective(objective: Objective, aims: tuple[Tap, ...]) -> Objective | None:
    """Return the part of an objective that reads one stage's taps; None if it reads none."""
    if not aims:
        return None
    local = tuple(map(of_any_block, aims))
    named = {tap.name: own.name for tap, own in zip(aims, local, strict=True)}
    functions = {named[tap]: f for tap, f in objective.functions.items() if tap in named}
    return replace(objective, aims=local, functions=functions)


@dataclass(frozen=True)
class BackwardStage:
    """One stage on the way back: its gradients and attributions, and the arrays it needs."""

    kind: Layer | str
    taps: tuple[Tap, ...]  # as they are stored; their places are their slots
    spliced: tuple[Tap, ...]  # as `of_any_block` returns them
    objective: Objective | None  # the part that reads this stage's taps
    encoders: Mapping[str, SparseEncoder]  # by slot
    extras: Extras  # by slot
    starts: bool  # no later stage has sent a cotangent

    @property
    def local(self) -> tuple[Tap, ...]:
        """The taps without their layer."""
        return tuple(tap if tap.layer is None else replace(tap, layer=0) for tap in self.taps)

    @property
    def sources(self) -> tuple[Tap, ...]:
        """The taps that gradients are with respect to, as the stage computes them."""
        return tuple(of_any_block(tap.source) for tap in self.taps)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What identifies the program of this stage: equal for blocks of a kind."""
        changes = self.extras.changes
        return (
            "back",
            self.kind,
            self.local,
            self.sources,
            self.spliced,
            self.objective,
            self.starts,
            tuple(self.encoders.items()),
            jax.tree.structure(changes),
            tuple(array.shape for array in jax.tree.leaves(changes)),
        )

    def program(self, settings: StepSettings, contexts: int, part: int) -> Any:
        """Return the jitted function of this stage, under the name that it has in a trace.

        It takes the weights, the extras, the stream that entered, the cotangent of the one that
        left, and a batch's inputs. It returns what is stored, the cotangent of the stream that
        entered, and a small array that is ready when the others are.
        """
        slots = {str(number): tap for number, tap in enumerate(self.local)}

        def run(
            weights: WeightArrays, extras: Extras, stream: Any, left: Any, inputs: StepInputs
        ) -> tuple[Any, ...]:
            entered, found = settings.stage_gradients(
                self, weights, extras.changes, stream, left, inputs.read, contexts,
                [extras.baselines.get(slot) for slot in slots],
            )  # fmt: skip
            values = dict(zip(slots, found, strict=True))
            made = settings.stored(values, slots, self.encoders, extras, inputs, part, {})
            return made, entered, inputs.counts + 0

        run.__name__ = f"{self.kind if isinstance(self.kind, str) else 'block'}_back"
        return jax.jit(run)
