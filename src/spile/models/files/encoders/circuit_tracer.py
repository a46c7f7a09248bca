"""circuit-tracer: transcoders in `layer_{n}.safetensors`, cross-layer transcoders in
`W_enc_{n}.safetensors` and `W_dec_{n}.safetensors`; `config.yaml` names the hooks.
"""

from typing import Any

from spile.core.errors import InputError
from spile.models.files.encoders.sae import MLP_OUT, Sae, StoredTensor, is_size, stored_tensors
from spile.models.files.encoders.settings import read_yaml
from spile.models.files.encoders.tensors import tensor_shapes
from spile.objects.paths import AnyPath

TRANSCODER, CROSS_LAYER = "layer_{layer}.safetensors", "W_enc_{layer}.safetensors"
DECODER, CONFIG = "W_dec_{layer}.safetensors", "config.yaml"

_NAMES = {
    "W_enc": "W_enc T", "threshold": "activation_function.threshold", "W_skip": "W_skip T",
}  # fmt: skip


def read_transcoder(folder: AnyPath, layer: int) -> Sae:
    """A transcoder of one layer."""
    file = folder / TRANSCODER.format(layer=layer)
    shapes = tensor_shapes(file, folder)
    width, latents = _sizes(file, shapes.get("W_enc", ()))
    reads, writes = _hooks(folder, layer)
    return Sae(
        directory=folder, file=file, width=width, latents=latents, subtracts=False,
        architecture="jumprelu" if _NAMES["threshold"] in shapes else "standard",
        skips="W_skip" in shapes, hook=reads, writes=writes, places=stored_tensors(file, _NAMES),
    )  # fmt: skip


def read_cross_layer(folder: AnyPath, layer: int) -> Sae:
    """One layer of a cross-layer transcoder."""
    file = folder / CROSS_LAYER.format(layer=layer)
    shapes = tensor_shapes(file, folder)
    width, latents = _sizes(file, shapes.get(f"W_enc_{layer}", ()))
    reads, writes = _hooks(folder, layer)
    named = {name: f"{name}_{layer}" for name in ("b_enc", "b_dec", "threshold")}
    places = stored_tensors(file, {**named, "W_enc": f"W_enc_{layer} T"})
    places["W_dec"] = StoredTensor(folder / DECODER.format(layer=layer), f"W_dec_{layer}")
    return Sae(
        directory=folder, file=file, width=width, latents=latents, subtracts=False,
        architecture="jumprelu" if named["threshold"] in shapes else "standard",
        hook=reads, writes=writes, writes_from=layer, places=places,
    )  # fmt: skip


def _sizes(file: AnyPath, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2 or not all(map(is_size, shape)):
        raise InputError(f"{file}: holds no matrix W_enc; is it a transcoder?")
    return shape[1], shape[0]


def _hooks(folder: AnyPath, layer: int) -> tuple[str | None, str | None]:
    """Return the hooks that it reads and writes, if `config.yaml` is there to name them."""
    path = folder / CONFIG
    config: dict[str, Any] = read_yaml(path) if path.is_file() else {}
    told = (config.get("feature_input_hook"), config.get("feature_output_hook", MLP_OUT))
    if told[1] == "mlp.hook_out":  # the same values, where no norm follows the MLP
        told = told[0], MLP_OUT
    reads, writes = (f"blocks.{layer}.{hook}" if isinstance(hook, str) else None for hook in told)
    return reads, writes
