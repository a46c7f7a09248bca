"""Qwen-Scope: `layer{n}.sae.pt`, a top-k autoencoder of the residual stream after each block.

The number of active latents stands only in the repository's name, e.g.
`Qwen/SAE-Res-Qwen3-1.7B-Base-W32K-L0_50`. The decoder's bias is not subtracted from the input.
"""

import re

from spile.core.errors import InputError
from spile.models.files.encoders.sae import Sae, is_size, stored_tensors
from spile.models.files.encoders.tensors import tensor_shapes
from spile.objects.paths import AnyPath

FILE = "layer{layer}.sae.pt"


def read_qwen_scope(folder: AnyPath, layer: int) -> Sae:
    file = folder / FILE.format(layer=layer)
    active = re.findall(r"-L0_(\d{1,6})(?!\d)", str(folder))
    if not active or not int(active[-1]):
        raise InputError(
            f"{file}: the number of active latents stands only in the repository's name; keep the "
            "end of that name, e.g. -L0_50, in the directory's"
        )
    shape = tensor_shapes(file, folder).get("W_enc", ())
    if len(shape) != 2 or not all(map(is_size, shape)):
        raise InputError(f"{file}: holds no matrix W_enc; is it an encoder?")
    latents, width = shape
    return Sae(
        directory=folder, file=file, architecture="topk", width=width, latents=latents,
        k=min(int(active[-1]), latents), subtracts=False,
        hook=f"blocks.{layer}.hook_resid_post",
        places=stored_tensors(file, {"W_enc": "W_enc T", "W_dec": "W_dec T"}),
    )  # fmt: skip
