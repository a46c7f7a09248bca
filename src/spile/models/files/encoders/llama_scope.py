"""Llama Scope: `hyperparams.json`, `checkpoints/final.safetensors`; autoencoders, transcoders.

Rows are scaled to the mean length that they had in training, and so is the one threshold, as
SAELens does: latents are in that scale, too.
"""

import math
from typing import Any, cast

from spile.models.files.encoders.sae import Sae, is_size, stored_tensors
from spile.models.files.encoders.settings import SaeSettings
from spile.objects.paths import AnyPath, read_json

CONFIG, FILE = "hyperparams.json", "final.safetensors"

_NAMES = {
    "W_enc": "encoder.weight T", "b_enc": "encoder.bias", "W_dec": "decoder.weight T",
    "b_dec": "decoder.bias",
}  # fmt: skip
# Other settings that change the latents: the value that is known, and that of a missing one.
_KNOWN = {
    "act_fn": ("jumprelu", "jumprelu"), "use_glu_encoder": (False, False),
    "apply_decoder_bias_to_pre_encoder": (False, True), "use_decoder_bias": (True, True),
    "norm_activation": ("dataset-wise", "token-wise"),
}  # fmt: skip


def read_llama_scope(folder: AnyPath) -> Sae:
    path, file = folder / CONFIG, folder / "checkpoints" / FILE
    config = SaeSettings(str(path), read_json(path))
    for name, (known, usual) in _KNOWN.items():
        if (value := config.take(name, usual)) != known:
            config.refuse(name, value, str(known).lower())
    width, latents = config.take("d_model", None), config.take("d_sae", None)
    if not is_size(width) or not is_size(latents):
        config.refuse("d_model and d_sae", f"{width} and {latents}", "two numbers")
    given: Any = config.take("dataset_average_activation_norm", None)
    lengths = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    scale, output_scale = (_scale(config, width, lengths.get(way)) for way in ("in", "out"))
    threshold = config.take("jump_relu_threshold", None)
    if type(threshold) not in (int, float) or not 0 <= threshold < math.inf:
        config.refuse("jump_relu_threshold", threshold, "a number")
    reads, writes = (config.take(f"hook_point_{way}", None) for way in ("in", "out"))
    return Sae(
        directory=folder, file=file, architecture="jumprelu", width=width, latents=latents,
        subtracts=False, threshold=threshold * scale, scale=scale, output_scale=output_scale,
        hook=reads if isinstance(reads, str) else None,
        writes=writes if isinstance(writes, str) and writes != reads else None,
        places=stored_tensors(file, _NAMES),
    )  # fmt: skip


def _scale(config: SaeSettings, width: int, length: Any) -> float:
    """Return the factor that gives rows of a mean length the length that they had in training."""
    if type(length) not in (int, float) or not 0 < length < math.inf:
        config.refuse("dataset_average_activation_norm", length, "a length in and out")
    return math.sqrt(width) / length
