"""Gemma Scope's own files: `params.npz`, and of Gemma Scope 2 `params.safetensors`."""

from spile.core.errors import InputError
from spile.models.files.encoders.sae import Sae, is_size
from spile.models.files.encoders.tensors import tensor_shapes
from spile.objects.paths import AnyPath, read_json

NPZ, PARAMS, CONFIG = "params.npz", "params.safetensors", "config.json"


def read_gemma_scope_2(folder: AnyPath) -> Sae:
    config = folder / CONFIG
    if config.is_file():
        architecture = read_json(config).get("architecture")
        if architecture not in ("jump_relu", "jumprelu"):
            raise InputError(f"{config}: architecture is {architecture!r}; known: jump_relu")
    return read_gemma_scope(folder, PARAMS)


def read_gemma_scope(folder: AnyPath, name: str = NPZ) -> Sae:
    file = folder / name
    shape = tensor_shapes(file, folder).get("W_enc", ())
    if len(shape) != 2 or not all(map(is_size, shape)):
        raise InputError(f"{file}: holds no matrix W_enc; is it an encoder?")
    return Sae(
        directory=folder, file=file, architecture="jumprelu", width=shape[0], latents=shape[1],
        subtracts=False, raw=True,
    )  # fmt: skip
