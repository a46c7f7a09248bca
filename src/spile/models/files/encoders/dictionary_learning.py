"""dictionary_learning: `ae.pt`, the state of a module, beside `config.json`, which names its class.

`AutoEncoder.from_pretrained` scales each latent by the norm of its decoder vector, and so do we.
BatchTopK and Matryoshka encoders use their threshold, as `encode` does by default.
"""

import re
from collections.abc import Mapping
from typing import Any

from spile.core.bounded_json import Json
from spile.models.files.encoders.crosscoders import CLASSES, read_crosscoder
from spile.models.files.encoders.sae import Sae, is_size, stored_tensors
from spile.models.files.encoders.settings import SaeSettings
from spile.objects.paths import AnyPath, read_json

FILE, CONFIG = "ae.pt", "config.json"

_LINEAR = {"W_enc": "encoder.weight T", "b_enc": "encoder.bias", "W_dec": "decoder.weight T"}
_THRESHOLD = {"threshold": "threshold 1"}
# For each class: its kind, its settings, and names of its tensors other than ours. T: transposed;
# 1: one number for all latents.
_CLASSES: dict[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
    "AutoEncoder": ("standard", {"rescales": True}, {**_LINEAR, "b_dec": "bias"}),
    "AutoEncoderNew": ("standard", {"subtracts": False}, {**_LINEAR, "b_dec": "decoder.bias"}),
    "GatedAutoEncoder": ("gated", {}, {
        "W_enc": "encoder.weight T", "W_dec": "decoder.weight T", "b_dec": "decoder_bias",
        "b_gate": "gate_bias", "b_mag": "mag_bias",
    }),
    "JumpReluAutoEncoder": ("jumprelu", {"subtracts": False}, {}),
    "AutoEncoderTopK": ("topk", {}, _LINEAR),
    "BatchTopKSAE": ("jumprelu", {}, {**_LINEAR, **_THRESHOLD}),
    "MatryoshkaBatchTopKSAE": ("jumprelu", {}, _THRESHOLD),
}  # fmt: skip


def read_dictionary_learning(folder: AnyPath) -> Sae:
    path, file = folder / CONFIG, folder / FILE
    trainer: Json = read_json(path).get("trainer")
    config = SaeSettings(f"{path}: trainer", trainer if isinstance(trainer, dict) else {})
    kind = config.take("dict_class", None)
    if kind in CLASSES:
        return read_crosscoder(folder, file, config)
    if not isinstance(kind, str) or kind not in _CLASSES:
        config.refuse("dict_class", kind, ", ".join((*_CLASSES, *CLASSES)))
    architecture, settings, names = _CLASSES[kind]
    width, latents = config.take("activation_dim", None), config.take("dict_size", None)
    if not is_size(width) or not is_size(latents):
        config.refuse("activation_dim and dict_size", f"{width} and {latents}", "two numbers")
    k = config.take("k", None) if architecture == "topk" else None
    if architecture == "topk" and not is_size(k):
        config.refuse("k", k, "a number")
    return Sae(
        directory=folder, file=file, architecture=architecture, width=width, latents=latents,
        k=min(k, latents) if k else None, hook=_hook(config),
        places=stored_tensors(file, names), **settings,
    )  # fmt: skip


def _hook(config: SaeSettings) -> str | None:
    """Return the hook that it was trained on, if the trainer's module has a usual name."""
    name, layer = config.take("submodule_name", None), config.take("layer", None)
    found = re.match(r"(resid_post|mlp_out|attn_out)(_layer_(\d+))?$", str(name))
    number = found[3] if found and found[3] else layer
    return f"blocks.{number}.hook_{found[1]}" if found and number is not None else None
