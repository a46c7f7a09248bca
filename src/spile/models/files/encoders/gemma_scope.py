"""Gemma Scope's own files: `params.npz`, and of Gemma Scope 2 `params.safetensors`, or
`params_layer_{n}.safetensors` of a cross-layer transcoder.
"""

import re
from typing import Any

from spile.core.errors import InputError
from spile.models.files.encoders.sae import Sae, is_size, stored_tensors
from spile.models.files.encoders.tensors import tensor_shapes
from spile.objects.paths import AnyPath, read_json

NPZ, PARAMS, CONFIG = "params.npz", "params.safetensors", "config.json"
CROSS_LAYER = "params_layer_{layer}.safetensors"

_SKIP = "affine_skip_connection"
_HOOKS = {  # of TransformerLens, by the place in Hugging Face's block
    "output": "hook_resid_post", "self_attn.o_proj.input": "attn.hook_z",
    "pre_feedforward_layernorm.output": "mlp.hook_in",
    "post_feedforward_layernorm.output": "hook_mlp_out",
}  # fmt: skip


def read_gemma_scope(folder: AnyPath) -> Sae:
    """An encoder of Gemma Scope. (Nothing says what it reads, nor whether it is a transcoder.)"""
    return _read(folder, folder / NPZ)


def read_gemma_scope_2(folder: AnyPath) -> Sae:
    config = folder / CONFIG
    told = read_json(config) if config.is_file() else {}
    architecture = told.get("architecture", "jump_relu")
    if architecture not in ("jump_relu", "jumprelu"):
        raise InputError(f"{config}: architecture is {architecture!r}; known: jump_relu")
    reads, writes = (_hook(told.get(f"hf_hook_point_{way}")) for way in ("in", "out"))
    return _read(folder, folder / PARAMS, hook=reads, writes=None if writes == reads else writes)


def read_cross_layer(folder: AnyPath, layer: int) -> Sae:
    """One layer of a cross-layer transcoder. (Its decoder has zeros for the layers before it.)"""
    file = folder / CROSS_LAYER.format(layer=layer)
    block = f"blocks.{layer}."
    hooks = {"hook": f"{block}mlp.hook_in", "writes": f"{block}hook_mlp_out"}
    return _read(folder, file, writes_from=0, **hooks)


def _read(folder: AnyPath, file: AnyPath, **settings: Any) -> Sae:
    shapes = tensor_shapes(file, folder)
    shape = shapes.get("W_enc", ())
    if len(shape) != 2 or not all(map(is_size, shape)):
        raise InputError(f"{file}: holds no matrix W_enc; is it an encoder?")
    return Sae(
        directory=folder, file=file, architecture="jumprelu", width=shape[0], latents=shape[1],
        subtracts=False, raw=True, skips=_SKIP in shapes,
        places=stored_tensors(file, {"W_skip": _SKIP}), **settings,
    )  # fmt: skip


def _hook(told: object) -> str | None:
    """Return TransformerLens's name of a place in a block."""
    found = re.search(r"(?:^|\.)layers\.(\d+)\.(.+)$", str(told))
    return f"blocks.{found[1]}.{_HOOKS[found[2]]}" if found and found[2] in _HOOKS else None
