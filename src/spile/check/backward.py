"""The gradients and attributions that `spile check` cannot recompute, and why. No torch."""

import re
from dataclasses import dataclass

import numpy as np

from spile.core.recipe import ResolvedRecipe
from spile.core.tap_order import EDGES, of_backward_pass
from spile.dataset import format as fmt
from spile.models.objectives import DIRECTION, FUNCTION, LOGIT_DIFF, LOSS, Objective
from spile.models.sites import SPLICED
from spile.plan.job import PreparedUnit

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


@dataclass(frozen=True)
class UnitAims:
    """What an objective reads of the documents of a unit."""

    objective: Objective
    prepared: PreparedUnit

    def of_context(self, doc: int, start: int, stop: int) -> ContextAim:
        """Return the aim of a context: tokens start..stop of a document."""
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
    if recipe.steps is not None:
        return "check does not recompute integrated gradients"
    read = DIRECTION_OF.match(recipe.objective)
    if read and read[1] not in SPLICED:
        return f"check does not recompute gradients along a direction of {fmt.shown(read[1])}"
    if recipe.splice:
        return "check does not recompute gradients of a model with --splice"
    if recipe.compute_dtype not in ("float32", "bfloat16"):
        return f"check does not recompute gradients in {recipe.compute_dtype}"
    return None


def checkable(recipe: ResolvedRecipe) -> tuple[tuple[str, ...], str | None]:
    """Return the taps to check, and a line about those that are left out."""
    if (recipe.objective or "").startswith(FUNCTION):
        told = ", ".join(recipe.taps)
        return (), f"check runs no function of your own, and {told} were made with one"
    why, left_out = why_unchecked(recipe), recipe.taps
    if why is None:
        why = "check recomputes neither edges nor attributions of latents"
        edges = (tap for tap in recipe.taps if of_backward_pass(tap) == EDGES)
        left_out = (*recipe.encode, *edges)
    backward = {tap for tap in left_out if of_backward_pass(tap)}
    kept = tuple(tap for tap in recipe.taps if tap not in backward)
    if kept == recipe.taps:
        return kept, None
    left = ", ".join(tap for tap in recipe.taps if tap not in kept)
    return kept, f"{why}: {left} left out"
