"""The gradients and attributions that `spile check` cannot recompute, and why. No torch."""

from spile.core.recipe import ResolvedRecipe
from spile.core.tap_order import EDGES, of_backward_pass
from spile.dataset import format as fmt
from spile.models.objectives import LOGPROB


def why_unchecked(recipe: ResolvedRecipe) -> str | None:
    """Return why a recipe's gradients are not recomputed; None if they are."""
    if recipe.objective is None:
        return None
    if recipe.steps is not None:
        return "check does not recompute integrated gradients"
    if recipe.objective != LOGPROB:
        told = fmt.shown(recipe.objective)
        return f"check recomputes gradients of {LOGPROB} alone, and these are of {told}"
    if recipe.splice:
        return "check does not recompute gradients of a model with --splice"
    if recipe.compute_dtype not in ("float32", "bfloat16"):
        return f"check does not recompute gradients in {recipe.compute_dtype}"
    return None


def checkable(recipe: ResolvedRecipe) -> tuple[tuple[str, ...], str | None]:
    """Return the taps to check, and a line about those that are left out."""
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
