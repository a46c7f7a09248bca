"""Objectives: the numbers whose gradients are tapped. No jax.

An objective is a sum over the tokens of a context: a document's, or each part of one that is cut.
Contexts that share a packed row never touch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spile.models.config.arch import Arch
from spile.models.sites import AFTER_BLOCKS
from spile.models.taps import Tap

LOGPROB, LOSS, LOGIT_DIFF, DIRECTION = "logprob", "loss", "logit-diff", "direction"
FUNCTION = "function"  # the kind of a user's own


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What gradients are of.

    Attributes:
        kind: `LOGPROB`, `LOSS`, `LOGIT_DIFF`, `DIRECTION` or `FUNCTION`.
        identity: what it is, without paths: part of the recipe.
        aims: the taps that it reads; their values, over all tokens, are what it is summed from.
        vector: of a direction, in the shape of a row of its tap.
        functions: of a user's own, by tap: each returns a number for each token.
    """

    kind: str
    identity: str
    aims: tuple[Tap, ...]
    vector: np.ndarray | None = field(default=None, compare=False, repr=False)
    functions: Mapping[str, Callable[[Any], Any]] = field(
        default_factory=dict[str, Callable[[Any], Any]], hash=False, repr=False
    )

    @property
    def needs_head(self) -> bool:
        return any(aim.site in AFTER_BLOCKS for aim in self.aims)

    def layers_needed(self, arch: Arch) -> int:
        """Number of blocks that must run."""
        return max(aim.layers_needed(arch) for aim in self.aims)


def counted_role(identity: str | None) -> str | None:
    """Return the role whose tokens alone count, of an objective in a recipe."""
    kind, _, role = (identity or "").partition(":")
    return role if kind == LOSS else None


def answer_columns(identity: str | None) -> tuple[str, ...]:
    """Return the columns that name two tokens, of an objective in a recipe."""
    kind, _, columns = (identity or "").partition(":")
    return tuple(columns.split(",")) if kind == LOGIT_DIFF else ()
