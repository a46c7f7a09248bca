"""Lenses, as their own projects store them: maps from a layer's stream to the last's. No jax.

* tuned lens (github.com/AlignmentResearch/tuned-lens 0.2): `config.json` and `params.pt`;
  translator i reads the stream before block i, and its output is added to what it reads.
* Jacobian lens (github.com/anthropics/jacobian-lens): `lens.pt`, or any one `.pt` file; J[l] is
  multiplied with the stream after block l.

Layers here are those of `resid_post`. A lens's prediction is the model's own norm and head, applied
to the mapped stream.
"""

import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from spile.core.errors import ConfigError, InputError
from spile.core.identity import full_digest
from spile.core.options import listed
from spile.core.tensors import TensorInfo
from spile.core.torch_zip import read_torch_zip
from spile.core.torch_zip_writer import write_torch_zip
from spile.models.config.arch import Arch
from spile.models.files.safetensors import read_tensor
from spile.objects.opened import Opened, opened
from spile.objects.paths import AnyPath, path_of, read_json

TUNED, JACOBIAN = "tuned", "jacobian"
LENS_KINDS = (TUNED, JACOBIAN)
_CONFIG, _PARAMS, _LENS = "config.json", "params.pt", "lens.pt"
_TRANSLATOR = re.compile(r"(\d{1,6})\.(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class Lens:
    """An opened lens; its matrices are read when they are used."""

    where: str
    kind: str  # one of `LENS_KINDS`
    width: int
    layers: tuple[int, ...]
    identity: str
    file: Opened
    matrices: Mapping[int, TensorInfo]  # by layer
    biases: Mapping[int, TensorInfo]

    @property
    def adds(self) -> bool:
        """Whether what a matrix makes is added to the stream."""
        return self.kind == TUNED

    def load(self, layer: int) -> dict[str, np.ndarray]:
        """Return a layer's arrays in float32: `matrix` [out, in], and `bias` if it has one."""
        found = {"matrix": self.matrices[layer]}
        found |= {"bias": self.biases[layer]} if layer in self.biases else {}
        return {name: read_tensor(self.file, i).astype(np.float32) for name, i in found.items()}


def open_lens(where: str) -> Lens:
    """Open a lens: a directory, or a `.pt` file of a Jacobian lens."""
    folder = path_of(where)
    if folder.is_file():
        return _jacobian(where, folder)
    if (folder / _PARAMS).is_file():
        return _tuned(where, folder)
    if (folder / _LENS).is_file():
        return _jacobian(where, folder / _LENS)
    raise InputError(
        f"--lens {where}: holds no lens: neither {_CONFIG} and {_PARAMS} (a tuned lens) nor "
        f"{_LENS} (a Jacobian lens)"
    )


def refuse_other_model(lens: Lens, layers: tuple[int, ...], arch: Arch) -> None:
    """Raise unless a lens was fitted for a model of this shape, at these layers."""
    if lens.width != arch.width:
        raise ConfigError(
            f"--lens {lens.where}: maps streams of {lens.width} values, but the model's has "
            f"{arch.width}"
        )
    missing = [layer for layer in layers if layer not in lens.layers]
    if missing:
        raise ConfigError(
            f"--lens {lens.where}: has no layer {missing[0]}; it has "
            f"{listed(map(str, lens.layers))}"
        )


# -- tuned lenses ----------------------------------------------------------------------------------


def tuned_files(
    maps: Mapping[int, tuple[np.ndarray, np.ndarray]], *, layers: int, model: str
) -> dict[str, bytes]:
    """Return the files of a tuned lens, by name.

    Args:
        maps: by layer, the matrix and bias of the map whose result is added to the stream after
            that block; layer -1 is the stream before the first block. Missing layers add nothing.
        layers: blocks of the model.
        model: its name, as its own project records it.
    """
    width = len(next(iter(maps.values()))[1])
    nothing = np.zeros((width, width), np.float32), np.zeros(width, np.float32)
    state: dict[str, np.ndarray] = {}
    for number in range(layers):
        matrix, bias = maps.get(number - 1, nothing)
        state |= {f"{number}.weight": matrix.astype(np.float32)}
        state |= {f"{number}.bias": bias.astype(np.float32)}
    config = {
        "base_model_name_or_path": model,
        "d_model": width,
        "num_hidden_layers": layers,
        "bias": True,
        "base_model_revision": None,
        "unembed_hash": None,
        "lens_type": "linear_tuned_lens",
    }
    return {_PARAMS: _saved(state), _CONFIG: json.dumps(config).encode()}


def _tuned(where: str, folder: AnyPath) -> Lens:
    config, file = read_json(folder / _CONFIG), folder / _PARAMS
    whole, found = _open_pt(file)
    width, kind = config.get("d_model"), config.get("lens_type", "linear_tuned_lens")
    if kind != "linear_tuned_lens" or type(width) is not int:
        raise InputError(f"{folder / _CONFIG}: lens_type is {kind!r}; known: linear_tuned_lens")
    arrays: dict[str, dict[int, TensorInfo]] = {"weight": {}, "bias": {}}
    for name, info in found.items():
        match = _TRANSLATOR.fullmatch(str(name))
        shape = (width, width) if match and match[2] == "weight" else (width,)
        if match is None or not isinstance(info, TensorInfo) or info.shape != shape:
            raise InputError(f"{file}: {name!r} is no translator of {width} values")
        arrays[match[2]][int(match[1]) - 1] = info
    layers = tuple(layer for layer in sorted(arrays["weight"]) if layer >= 0)
    return Lens(
        where=where, kind=TUNED, width=width, layers=layers, file=whole,
        identity=full_digest(folder / _CONFIG, file), matrices=arrays["weight"],
        biases=arrays["bias"],
    )  # fmt: skip


# -- Jacobian lenses -------------------------------------------------------------------------------


def jacobian_files(jacobians: Mapping[int, np.ndarray], prompts: int) -> dict[str, bytes]:
    """Return the file of a Jacobian lens.

    Args:
        jacobians: [out, in] by layer, the mean over the prompts.
    """
    value = {
        "J": {layer: each.astype(np.float16) for layer, each in jacobians.items()},
        "n_prompts": prompts,
        "source_layers": sorted(jacobians),
        "d_model": len(next(iter(jacobians.values()))),
    }
    return {_LENS: _saved(value)}


def _jacobian(where: str, file: AnyPath) -> Lens:
    whole, found = _open_pt(file)
    width, matrices = found.get("d_model"), found.get("J")
    known: dict[Any, Any] = cast(dict[Any, Any], matrices) if isinstance(matrices, dict) else {}
    for layer, info in known.items():
        if type(layer) is not int or layer < 0 or not isinstance(info, TensorInfo):
            raise InputError(f"{file}: J[{layer!r}] is no matrix of a layer")
        if info.shape != (width, width):
            raise InputError(f"{file}: J[{layer}] has shape {list(info.shape)}, not d_model twice")
    if not known:
        raise InputError(f"{file}: holds no Jacobian lens (no J, with a matrix for each layer)")
    return Lens(
        where=where, kind=JACOBIAN, width=known[min(known)].shape[0], layers=tuple(sorted(known)),
        file=whole, identity=full_digest(file), matrices=known, biases={},
    )  # fmt: skip


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    write_torch_zip(stream, value)
    return stream.getvalue()


def _open_pt(file: AnyPath) -> tuple[Opened, dict[Any, Any]]:
    """Open a file of `torch.save` that holds a dictionary; nothing in it is executed."""
    whole = opened(file)
    with whole.open("rb") as stream:

        def read(start: int, length: int) -> bytes:
            stream.seek(start)
            return stream.read(length)

        found = read_torch_zip(read, whole.size(), str(file))
    if not isinstance(found, dict):
        raise InputError(f"{file}: holds no dictionary of tensors")
    return whole, cast(dict[Any, Any], found)
