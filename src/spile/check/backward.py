"""What `spile check` reads to recompute a backward pass, and what it leaves out. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from spile.core.recipe import ResolvedRecipe
from spile.core.tap_order import of_backward_pass
from spile.dataset import format as fmt
from spile.models.config.arch import Arch
from spile.models.objectives import DIRECTION, FUNCTION, LOGIT_DIFF, LOSS, Objective
from spile.models.sites import SPLICED
from spile.models.taps import Tap
from spile.plan.job import ExtractionJob, PreparedUnit

DIRECTION_OF = re.compile(rf"{DIRECTION} (\w+)")


@dataclass(frozen=True)
class ContextAim:
    """What the objective of one context reads; see `hf_gradients.objective_of`.

    Attributes:
        counts: of a role's loss, 1 for each token that counts when it is predicted.
        answers: of a difference of logits after the last token; None if the document goes on.
        tap: of a direction, the tap that it reads, and `vector`.
    """

    kind: str
    counts: np.ndarray | None = None
    answers: tuple[int, int] | None = None
    tap: str | None = None
    vector: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """How the gradients of one context, and what follows from them, are made.

    Attributes:
        aim: what the objective reads; None: the log-probability of the next tokens.
        baseline: what attributions are differences from, by tap: [tokens, ...], or a row.
        steps: points on the path of integrated gradients.
        writers: that edges come from, and the model's architecture.
        encoded: taps whose latents have attributions: they are values beside gradients,
            [tokens, 2, width].
    """

    aim: ContextAim | None = None
    baseline: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    steps: int | None = None
    writers: tuple[Tap, ...] = ()
    arch: Arch | None = None
    encoded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class UnitBackward:
    """How the gradients of a unit's documents are made."""

    job: ExtractionJob
    objective: Objective
    prepared: PreparedUnit

    @classmethod
    def of(cls, job: ExtractionJob, prepared: PreparedUnit | None) -> Self | None:
        """Return it for a unit; None if nothing has gradients, or rows were ingested."""
        return cls(job, job.objective, prepared) if job.objective and prepared else None

    def of_context(self, doc: int, start: int, stop: int) -> BackwardPass:
        """Return how those of a context are made: tokens start..stop of a document."""
        job = self.job
        return BackwardPass(
            aim=self._aim(doc, start, stop),
            baseline=job.baseline.of_context(doc, start, stop) if job.baseline else {},
            steps=job.recipe.steps,
            writers=job.writers,
            arch=job.checkpoint.arch,
            encoded=frozenset(tap for tap in job.encoders if of_backward_pass(tap)),
        )

    def _aim(self, doc: int, start: int, stop: int) -> ContextAim:
        kind, unit = self.objective.kind, self.prepared
        if kind == LOSS:
            return ContextAim(kind, counts=unit.said[doc][start:stop].astype(np.float32))
        if kind == LOGIT_DIFF:
            last = stop >= unit.packed.doc_tokens[doc]
            return ContextAim(kind, answers=unit.answers[doc] if last else None)
        if kind == DIRECTION:
            (tap,) = self.objective.aims
            return ContextAim(kind, tap=tap.name, vector=self.objective.vector)
        return ContextAim(kind)


def why_unchecked(recipe: ResolvedRecipe) -> str | None:
    """Return why a recipe's gradients are not recomputed; None if they are."""
    if recipe.objective is None:
        return None
    read = DIRECTION_OF.match(recipe.objective)
    if read and read[1] not in SPLICED:
        return f"check does not recompute gradients along a direction of {fmt.shown(read[1])}"
    if recipe.compute_dtype not in ("float32", "bfloat16"):
        return f"check does not recompute gradients in {recipe.compute_dtype}"
    return None


def checkable(recipe: ResolvedRecipe) -> tuple[tuple[str, ...], str | None]:
    """Return the taps to check, and a line about those that are left out."""
    if (recipe.objective or "").startswith(FUNCTION):
        told = ", ".join(recipe.taps)
        return (), f"check runs no function of your own, and {told} were made with one"
    why = why_unchecked(recipe)
    if why is None:
        return recipe.taps, None
    left_out = [tap for tap in recipe.taps if of_backward_pass(tap)]
    kept = tuple(tap for tap in recipe.taps if tap not in left_out)
    return kept, f"{why}: {', '.join(left_out)} left out"
