"""sparsify: `sae.safetensors` and `cfg.json`; autoencoders and transcoders, some with a skip."""

import re
from typing import Any

from spile.models.files.encoders.sae import MLP_OUT, Sae, is_size, stored_tensors
from spile.models.files.encoders.settings import SaeSettings
from spile.objects.paths import AnyPath, read_json

FILE, CONFIG = "sae.safetensors", "cfg.json"

_NAMES = {"W_enc": "encoder.weight T", "b_enc": "encoder.bias", "W_skip": "W_skip T"}
_IGNORED = frozenset(("normalize_decoder", "multi_topk"))  # these are about the training


def read_sparsify(folder: AnyPath) -> Sae:
    path = folder / CONFIG
    config = SaeSettings(str(path), read_json(path))
    if (activation := config.take("activation", "topk")) != "topk":
        config.refuse("activation", activation, "topk")
    if (signed := config.take("signed", False)) is not False:
        config.refuse("signed", signed, "false")
    width, k = config.take("d_in", None), config.take("k", None)
    if not is_size(width) or not is_size(k):
        config.refuse("d_in and k", f"{width} and {k}", "two numbers")
    latents: Any = config.take("num_latents", 0)
    times: Any = config.take("expansion_factor", 32)
    latents = latents or (width * times if is_size(times) else None)
    if not is_size(latents):
        config.refuse("num_latents", latents, "a number, or expansion_factor")
    transcodes, skips = config.take("transcode", False), config.take("skip_connection", False)
    if type(transcodes) is not bool or type(skips) is not bool:
        config.refuse("transcode or skip_connection", "neither", "a switch")
    config.refuse_unknown(_IGNORED)
    reads, writes = _hooks(folder.name, transcodes=transcodes)
    return Sae(
        directory=folder, file=folder / FILE, architecture="topk", width=width, latents=latents,
        k=min(k, latents), subtracts=not transcodes, hook=reads, writes=writes, skips=skips,
        places=stored_tensors(folder / FILE, _NAMES),
    )  # fmt: skip


def _hooks(module: str, *, transcodes: bool) -> tuple[str | None, str | None]:
    """Return the hooks that it reads and writes, from the name of the module, its folder's name."""
    found = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(\.mlp)?$", module)
    if found is None:
        return None, MLP_OUT if transcodes else None
    block = f"blocks.{found[1]}."
    if not found[2]:
        return f"{block}hook_resid_post", None
    return (
        (f"{block}mlp.hook_in", f"{block}{MLP_OUT}") if transcodes else (f"{block}{MLP_OUT}", None)
    )
