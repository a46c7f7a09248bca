"""The taps of a recipe, with how many values they keep where they keep the largest. No jax."""

from spile.core.config import Recipe
from spile.core.errors import ConfigError
from spile.core.recipe import TOPS
from spile.models.config.arch import Arch
from spile.models.taps import Tap, parse_taps, with_tops


def taps_of(recipe: Recipe, arch: Arch) -> tuple[Tap, ...]:
    """Return the taps that `--taps` names, in the order in which the model computes them.

    Raises:
        ConfigError: if the model lacks one, or has fewer values than a tap is to keep.
    """
    taps = parse_taps(recipe.taps or "", arch)
    tops = {name: getattr(recipe, name) for name in TOPS}
    return with_tops(taps, tops, arch, seq_len_of(recipe, arch))


def seq_len_of(recipe: Recipe, arch: Arch) -> int:
    """Return the tokens of a context: what was given, or 2,048, or the most that the model takes.

    Raises:
        ConfigError: if the model takes fewer.
    """
    seq_len = recipe.seq_len or min(2048, arch.max_positions)
    if seq_len > arch.max_positions:
        raise ConfigError(
            f"--seq-len must be at most {arch.max_positions} for this model, got {seq_len}"
        )
    return seq_len
