"""The taps of a recipe, with how many values they keep where they keep the largest. No jax."""

from collections.abc import Sequence
from dataclasses import replace

from spile.core.config import Recipe
from spile.core.errors import ConfigError
from spile.core.recipe import TOPS
from spile.models.config.arch import Arch
from spile.models.taps import Tap, parse_taps, parse_writers, with_tops


def taps_of(recipe: Recipe, arch: Arch) -> tuple[Tap, ...]:
    """Return the taps that `--taps` names, in the order in which the model computes them.

    Raises:
        ConfigError: if the model lacks one, or has fewer values than a tap is to keep.
    """
    taps = parse_taps(recipe.taps or "", arch)
    tops = {name: getattr(recipe, name) for name in TOPS}
    found = with_tops(taps, tops, arch, seq_len_of(recipe, arch))
    count = len(writers_of(recipe, found, arch))
    return tuple(replace(tap, top=count) if tap.kind.crossed else tap for tap in found)


def writers_of(recipe: Recipe, taps: Sequence[Tap], arch: Arch) -> tuple[Tap, ...]:
    """Return the taps whose values are multiplied with the gradients that edges read.

    Raises:
        ConfigError: if there are edges and no writers, or the reverse.
    """
    if recipe.writers is not None:
        if recipe.steps and any(tap.kind.crossed for tap in taps):
            raise ConfigError(
                "--steps: edges take the gradient at the values themselves; leave --steps out"
            )
        return parse_writers(recipe.writers, taps, arch)
    edges = next((tap for tap in taps if tap.kind.crossed), None)
    if edges:
        raise ConfigError(
            f"--taps {edges.name}: edges from where? give --writers, e.g. attn_out:all,mlp_out:all"
        )
    return ()


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
