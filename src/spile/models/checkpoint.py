"""A model directory as Hugging Face lays it out: config, tokenizer files, safetensors.

Everything that can be known without loading weights: the architecture, where each tensor lies,
whether the set of tensors is exactly the expected one, and the model's identity. No jax.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spile.errors import CorruptError, InputError
from spile.identity import full_digest, sampled_digest
from spile.models.arch import Arch
from spile.models.demo import demo_model
from spile.models.families import Family, read_config
from spile.models.specs import block_specs, outer_specs
from spile.tensors import TensorInfo, read_header

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A model found on disk."""

    directory: Path
    family: Family
    arch: Arch
    tensors: dict[str, tuple[Path, TensorInfo]]
    files: tuple[Path, ...]

    def identity(self) -> dict[str, str]:
        """Digests of what decides the activations; paths are not part of it."""
        weights = [sampled_digest(path) for path in self.files]
        tokenizer = [self.directory / "tokenizer.json", self.directory / "tokenizer_config.json"]
        return {
            "config": full_digest(self.directory / "config.json"),
            "tokenizer": full_digest(*(path for path in tokenizer if path.exists())),
            "weights": "+".join(weights),
        }

    def source(self, name: str, layer: int | None = None) -> str:
        """The checkpoint's name for one of our parameters."""
        return self.family.weights[name].format(layer=layer)


def open_checkpoint(model: str) -> Checkpoint:
    """Find a model by its directory (or `demo`), read its config and headers, and check them."""
    directory = demo_model() if model == "demo" else Path(model)
    if not directory.is_dir():
        raise InputError(
            f"--model {model}: no such directory; give 'demo' or a directory with config.json, "
            "tokenizer.json and *.safetensors"
        )
    if not (directory / "tokenizer.json").exists():
        raise InputError(f"--model {model}: no tokenizer.json there; save the fast tokenizer too")
    family, arch = read_config(_read_json(directory / "config.json"), f"{directory}/config.json")
    files = _weight_files(directory)
    tensors: dict[str, tuple[Path, TensorInfo]] = {}
    for path in files:
        try:
            header = read_header(path)
        except CorruptError as error:
            raise InputError(str(error)) from error
        for name, info in header.items():
            if name in tensors:
                raise InputError(f"{path}: tensor {name} is also in {tensors[name][0].name}")
            tensors[name] = (path, info)
    checkpoint = Checkpoint(directory, family, arch, tensors, files)
    _check_tensors(checkpoint)
    return checkpoint


def _expected_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    arch = checkpoint.arch
    shapes = {checkpoint.source(spec.name): spec.shape for spec in outer_specs(arch)}
    for spec in block_specs(arch):
        for layer in range(arch.num_layers):
            shapes[checkpoint.source(spec.name, layer)] = spec.shape
    return shapes


def _check_tensors(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose tensors are not exactly the expected ones, naming all faults."""
    found, expected = checkpoint.tensors, _expected_shapes(checkpoint)
    unused = [
        re.escape(name).replace(r"\{layer\}", r"\d+") for name in checkpoint.family.unused_weights
    ]
    if checkpoint.arch.tied_head:
        unused.append(re.escape(checkpoint.family.weights["head"]))
    extra = [
        name
        for name in sorted(set(found) - set(expected))
        if not any(re.fullmatch(pattern, name) for pattern in unused)
    ]
    faults = [f"missing {name}" for name in expected if name not in found]
    faults += [f"unexpected {name}" for name in extra]
    faults += [
        f"{name} has shape {list(found[name][1].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name][1].shape != shape
    ]
    faults += [
        f"{name} holds {found[name][1].dtype}, not floats"
        for name in expected
        if name in found and found[name][1].dtype.name not in ("float32", "float16", "bfloat16")
    ]
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise InputError(f"{checkpoint.directory}: tensors do not fit config.json: {shown}")


def _weight_files(directory: Path) -> tuple[Path, ...]:
    if (directory / _INDEX).exists():
        listed = _read_json(directory / _INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
            raise InputError(f"{directory / _INDEX}: has no usable weight_map")
        names = sorted(set(listed.values()))
        if odd := [n for n in names if Path(n).name != n or n in ("", "..")]:
            raise InputError(f"{directory / _INDEX}: {odd[0]!r} is not a plain file name")
        files = tuple(directory / name for name in names)
    else:
        files = (directory / _SINGLE,)
    for path in files:
        if not path.exists():
            hint = "; pickled .bin weights are never read" if any(directory.glob("*.bin")) else ""
            raise InputError(f"{path}: no such file{hint}")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object")
    return value
