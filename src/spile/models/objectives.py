"""Objectives: the numbers whose gradients are tapped. No jax.

An objective is a sum over the tokens of a context: a document's, or each part of one that is cut.
Contexts that share a packed row never touch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from spile.core.errors import ConfigError
from spile.models.config.arch import Arch
from spile.models.sites import AFTER_BLOCKS
from spile.models.taps import Tap

LOGPROB = "logprob"


@dataclass(frozen=True)
class Objective:
    """What gradients are of.

    Attributes:
        identity: what it is, without paths: part of the recipe.
        aims: the taps that it reads; their values, over all tokens, are what it is summed from.
    """

    identity: str
    aims: tuple[Tap, ...]

    @property
    def needs_head(self) -> bool:
        return any(aim.site in AFTER_BLOCKS for aim in self.aims)

    def layers_needed(self, arch: Arch) -> int:
        """Number of blocks that must run."""
        return max(aim.layers_needed(arch) for aim in self.aims)


def objective_of(given: str | None, taps: Sequence[Tap], compute_dtype: str) -> Objective | None:
    """Return the objective of a recipe; None if it taps no gradient.

    Raises:
        ConfigError: if it is unknown, or no gradient is tapped.
    """
    gradients = [tap for tap in taps if tap.kind.of]
    if not gradients:
        if given is not None:
            raise ConfigError(
                f"--objective {given}: no tap holds a gradient; add e.g. resid_post_grad:4"
            )
        return None
    if compute_dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"{gradients[0].name}: gradients are computed in bfloat16 or float32, not "
            f"{compute_dtype}; give --compute-dtype"
        )
    if given not in (None, LOGPROB):
        raise ConfigError(f"--objective {given}: choose logprob")
    return Objective(LOGPROB, (Tap("logprob"),))
