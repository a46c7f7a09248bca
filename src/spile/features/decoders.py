"""The decoder rows of a tap's encoder, and the directions that files hold."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spile.core.config import Recipe
from spile.core.errors import ConfigError, InputError
from spile.core.npy import read_npy_header
from spile.core.recipe import LATENTS_ALONE, ResolvedRecipe
from spile.models.config.arch import Arch
from spile.models.files.encoders import with_decoder
from spile.models.files.encoders.sae import Sae
from spile.models.files.encoders.tensors import load_arrays
from spile.models.taps import parse_taps
from spile.plan.encoders import find_encoders


def open_decoder(recipe: ResolvedRecipe, tap: str, arch: Arch, encode: str | None) -> Sae:
    """Open the encoder of an encoded tap, with its decoder; without, if it is of several layers.

    Args:
        recipe: the one that the tap was made by.
        encode: its place now, as for `--encode`, if it has moved.

    Raises:
        ConfigError: if it is another encoder than the dataset's.
    """
    where = encode or recipe.encode_source
    taps = parse_taps(",".join(recipe.taps), arch)
    found = find_encoders(Recipe(encode=where), taps, arch)
    if tap not in found:
        raise ConfigError(f"--encode {where}: names no encoder of {tap}")
    sae = found[tap].sae
    if sae.identity() != recipe.encode[tap].removeprefix(LATENTS_ALONE):
        raise ConfigError(
            f"{sae.directory}: is not the encoder that made the latents of {tap}; give that one as "
            "--encode, or leave the logits out with --logits 0"
        )
    return sae if sae.crosses else with_decoder(sae, str(sae.directory))


def decoder_rows(sae: Sae) -> np.ndarray:
    """Return [latents, width] in float32: what each latent of size 1 adds to a reconstruction."""
    arrays, _ = load_arrays(sae)
    rows = np.asarray(arrays["W_dec"], np.float32) / np.float32(sae.output_scale)
    return rows / arrays["decoder_norm"][:, None] if sae.rescales else rows


def read_directions(files: Sequence[str], width: int) -> tuple[tuple[str, ...], np.ndarray]:
    """Read directions from `.npy` files: one vector each, or a matrix with one in each row.

    Returns:
        Their names: the file's, with the row's number if the file holds several; and the vectors,
        [directions, width] in float32.

    Raises:
        InputError: if a file is not of directions of this width.
    """
    names: list[str] = []
    vectors: list[np.ndarray] = []
    for each in files:
        path = Path(each)
        try:
            with path.open("rb") as file:
                shape, dtype = read_npy_header(file)
                data = file.read()
        except (OSError, ValueError) as error:
            raise InputError(f"--directions {each}: cannot be read as .npy ({error})") from error
        whole = len(data) == dtype.itemsize * math.prod(shape) and len(data) > 0
        values = np.frombuffer(data if whole else b"", dtype)
        if not whole or shape[-1:] != (width,):
            raise InputError(
                f"--directions {each}: holds {list(shape)}, and rows of the tap have {width} "
                "values; save vectors of that length"
            )
        rows = values.reshape(-1, width).astype(np.float32)
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
        if not (np.isfinite(lengths).all() and (lengths > 0).all()):
            raise InputError(f"--directions {each}: a direction must be finite and not zero")
        own = [path.stem] if len(rows) == 1 else [f"{path.stem}[{at}]" for at in range(len(rows))]
        names += own
        vectors += [*rows]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"--directions: two directions are named {twice}; rename a file")
    return tuple(names), np.stack(vectors)
