"""OpenMOSS's own format since Llama Scope 2: `sae_weights.safetensors`, `config.json`.

Rows are scaled to the mean length that they had in training, if the settings say so. Whether a
latent is active is decided by its activation times the norm of its decoder row; `encode` returns it
without that norm.
"""

import math
from typing import Any

from spile.models.files.encoders.sae import Sae, is_size, stored_tensors
from spile.models.files.encoders.settings import SaeSettings
from spile.models.files.encoders.tensors import small_tensors
from spile.objects.paths import AnyPath, read_json

FILE, CONFIG = "sae_weights.safetensors", "config.json"

_ACTIVATIONS = {"relu": "standard", "jumprelu": "jumprelu", "topk": "topk"}
_LENGTH = "dataset_average_activation_norm."
_NAMES = {
    "W_enc": "W_E", "b_enc": "b_E", "W_dec": "W_D", "b_dec": "b_D",
    "threshold": "activation_function.log_jumprelu_threshold log",
}  # fmt: skip


def read_openmoss(folder: AnyPath) -> Sae:
    """An autoencoder or a transcoder of one layer."""
    path, file = folder / CONFIG, folder / FILE
    config = SaeSettings(str(path), read_json(path))
    for name, known in (
        ("sae_type", "sae"), ("use_glu_encoder", False), ("use_decoder_bias", True)
    ):  # fmt: skip
        if (value := config.take(name, known)) != known:
            config.refuse(name, value, str(known).lower())
    width, times = config.take("d_model", None), config.take("expansion_factor", None)
    latents = int(width * times) if is_size(width) and type(times) in (int, float) else 0
    if not is_size(width) or not is_size(latents):
        config.refuse("d_model and expansion_factor", f"{width} and {times}", "two numbers")
    activation, k = config.take("act_fn", "relu"), config.take("top_k", 50)
    if activation not in _ACTIVATIONS:
        config.refuse("act_fn", activation, ", ".join(_ACTIVATIONS))
    architecture = _ACTIVATIONS[activation]
    if not is_size(k):
        config.refuse("top_k", k, "a number")
    scales = config.take("norm_activation", "dataset-wise")
    if scales not in ("dataset-wise", "inference"):
        config.refuse("norm_activation", scales, "dataset-wise, inference")
    by_norm = config.take("sparsity_include_decoder_norm", True)
    if type(by_norm) is not bool:
        config.refuse("sparsity_include_decoder_norm", by_norm, "a switch")
    hooks = [config.take(f"hook_point_{way}", None) for way in ("in", "out")]
    if not all(isinstance(hook, str) for hook in hooks):
        config.refuse("hook_point_in and hook_point_out", hooks, "two names")
    reads, writes = hooks
    scale, output_scale = (
        _scale(config, file, folder, width, hook) if scales == "dataset-wise" else 1.0
        for hook in hooks
    )
    chosen = architecture if by_norm else ""
    return Sae(
        directory=folder, file=file, architecture=architecture, width=width, latents=latents,
        k=min(k, latents) if architecture == "topk" else None, subtracts=False, scale=scale,
        output_scale=output_scale, norms=(1.0, 0.0) if chosen == "jumprelu" else None,
        weighted=chosen == "topk", hook=reads, writes=writes if writes != reads else None,
        places=stored_tensors(file, _NAMES),
    )  # fmt: skip


def _scale(config: SaeSettings, file: AnyPath, folder: AnyPath, width: int, hook: Any) -> float:
    """Return the factor that gives rows of a mean length the length that they had in training."""
    found = small_tensors(file, folder, [_LENGTH + hook]).get(_LENGTH + hook)
    length = float(found.reshape(-1)[0]) if found is not None and found.size == 1 else 0.0
    if not 0 < length < math.inf:
        config.refuse(f"norm_activation is dataset-wise, and the length of {hook}", length, "one")
    return math.sqrt(width) / length
