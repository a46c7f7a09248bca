"""`--lens`: the lens whose predictions a recipe's taps hold. No jax."""

from collections.abc import Sequence

from spile.core.config import Recipe
from spile.core.errors import ConfigError
from spile.models.config.arch import Arch
from spile.models.files.lenses import Lens, open_lens, refuse_other_model
from spile.models.sites import LENS_TOP, LENSES
from spile.models.taps import Tap


def find_lens(recipe: Recipe, taps: Sequence[Tap], arch: Arch) -> Lens | None:
    """Open the lens that taps read; None if no tap reads one.

    Raises:
        ConfigError: if there is none, no tap reads it, or it does not fit the model.
    """
    layers = tuple(sorted({tap.layer or 0 for tap in taps if tap.site in LENSES}))
    if recipe.lens is None:
        if layers:
            raise ConfigError(f"--taps {LENS_TOP} needs --lens, the directory of a lens")
        return None
    if not layers:
        raise ConfigError(f"--lens {recipe.lens}: no tap reads it; add {LENS_TOP}:LAYERS to --taps")
    lens = open_lens(recipe.lens)
    refuse_other_model(lens, layers, arch)
    return lens


def refuse_lens(taps: Sequence[Tap], told: str) -> None:
    """Refuse taps of a lens where there is none; `told`: what was asked to compute them."""
    if any(tap.site in LENSES for tap in taps):
        raise ConfigError(
            f"{told}: only spile extract --lens computes a lens's predictions; leave {LENS_TOP} out"
        )
