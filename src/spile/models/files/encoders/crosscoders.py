"""Crosscoders: one set of latents for the rows of several models, each with weights of its own.

dictionary_learning (with crosscoders: github.com/jkminder/dictionary_learning) publishes
`model.safetensors` beside `config.json`, and its training saves `ae.pt`. The code that Kissane et
al. published with theirs, which others have built on, saves `cc_weights.pt` beside `cfg.json`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from spile.core.errors import InputError
from spile.models.files.encoders.sae import Sae, StoredTensor, is_size
from spile.models.files.encoders.settings import SaeSettings
from spile.models.files.encoders.tensors import small_tensors, tensor_shapes
from spile.objects.paths import AnyPath, read_json

PUBLISHED, WEIGHTS, SETTINGS = "model.safetensors", "cc_weights.pt", "cfg.json"
CLASSES = ("CrossCoder", "BatchTopKCrossCoder")

_CONFIG = "config.json"
# By the number in `code_normalization_id`: how its norm follows from those of the decoder's rows.
_NORMS = {1: "CROSSCODER", 2: "SAE", 3: "MIXED", 4: "NONE"}
_TINY = 1e-8  # which its code adds to the scale when it undoes it


def read_published_crosscoder(folder: AnyPath) -> Sae:
    path = folder / _CONFIG
    values = read_json(path) if path.is_file() else {}
    return read_crosscoder(folder, folder / PUBLISHED, SaeSettings(str(path), values))


def read_crosscoder(folder: AnyPath, file: AnyPath, config: SaeSettings) -> Sae:
    """A crosscoder of dictionary_learning; with a threshold, the kind that is trained by batches.

    Its latents are those of `encode`. (`get_activations` multiplies them by norms.)
    """
    for name in ("encoder_layers", "num_decoder_layers", "latent_processor"):
        value = config.take(name, None)
        if value is not None and not (name == "num_decoder_layers" and value == 2):
            config.refuse(name, value, "null")
    shapes = tensor_shapes(file, folder)
    sides, width, latents = _sizes(file, shapes.get("encoder.weight", ()))
    kept = ("activation_mean", "activation_std", "activation_global_scale", "code_normalization_id")
    small = small_tensors(file, folder, kept)
    means = [small[name] for name in kept[:2] if name in small]
    centres = len(means) == 2 and not any(np.isnan(each).any() for each in means)
    scale = _number(file, kept[2], small) if centres else 1.0
    decides = "threshold" in shapes
    whole = (sides, latents, width)
    places = {
        "W_enc": StoredTensor(file, "encoder.weight", shape=(sides, width, latents)),
        "b_enc": StoredTensor(file, "encoder.bias"),
        "W_dec": StoredTensor(file, "decoder.weight", shape=whole, side=1),
        "b_dec": StoredTensor(file, "decoder.bias", shape=(sides, width)),
        "mean": StoredTensor(file, "activation_mean", shape=(sides, width)),
        "threshold": StoredTensor(file, "threshold", repeated=True),
    }
    return Sae(
        directory=folder, file=file, architecture="jumprelu" if decides else "standard",
        width=sides * width, latents=latents, sides=sides, subtracts=False, centres=centres,
        scale=scale, output_scale=scale + _TINY if centres else 1.0, places=places,
        norms=_norms(config, _number(file, kept[3], small)) if decides else None,
    )  # fmt: skip


def read_kissane(folder: AnyPath) -> Sae:
    path, file = folder / SETTINGS, folder / WEIGHTS
    config: Mapping[str, Any] = read_json(path) if path.is_file() else {}
    sides, width, latents = _sizes(file, tensor_shapes(file, folder).get("W_enc", ()))
    hook = config.get("hook_point")
    places = {
        "W_enc": StoredTensor(file, "W_enc", shape=(sides, width, latents)),
        "W_dec": StoredTensor(file, "W_dec", shape=(latents, sides, width)),
        "b_dec": StoredTensor(file, "b_dec", shape=(sides, width)),
    }
    return Sae(
        directory=folder, file=file, architecture="standard", width=sides * width,
        latents=latents, sides=sides, subtracts=False, places=places,
        hook=hook if isinstance(hook, str) else None,
    )  # fmt: skip


def _sizes(file: AnyPath, shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3 or not all(map(is_size, shape)) or shape[0] < 2:
        raise InputError(
            f"{file}: holds no encoder of several models [models, width, latents]; is it a "
            "crosscoder?"
        )
    return shape[0], shape[1], shape[2]


def _number(file: AnyPath, name: str, small: Mapping[str, np.ndarray]) -> float:
    """Return a tensor of one number; 1 if it is missing."""
    found = small.get(name, np.ones(()))
    if found.size != 1 or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        raise InputError(f"{file}: {name} is not a number")
    return float(found.reshape(()))


def _norms(config: SaeSettings, number: float) -> tuple[float, float] | None:
    """Return how much of each norm scales a latent before it is compared with the threshold.

    Args:
        number: in the file, or 1 as its own loader takes a missing one.
    """
    config.take("code_normalization", None)  # (the same, by name)
    kind = _NORMS.get(int(number))
    alphas = [config.take(f"code_normalization_alpha_{n}", d) for n, d in (("sae", 1), ("cc", 0.1))]
    if kind == "MIXED" and all(type(each) in (int, float) for each in alphas):
        return float(alphas[0]), float(alphas[1])
    known = {"CROSSCODER": (0.0, 1.0), "SAE": (1.0, 0.0), "NONE": None}
    if kind not in known:
        config.refuse("code_normalization_id", number, ", ".join(_NORMS.values()))
    return known[kind]
