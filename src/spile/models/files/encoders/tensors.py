"""The tensors of an encoder: their shapes, and their values in float32, from safetensors, npz or
`torch.save`. No jax.
"""

import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import xxhash

from spile.core.errors import InputError
from spile.core.identity import sampled_digest
from spile.core.npy import read_npy_header
from spile.core.tensors import TensorInfo, as_bytes
from spile.models.files.encoders.sae import Sae, StoredTensor
from spile.models.files.safetensors import open_tensors, read_tensor
from spile.models.files.torch_files import open_saved
from spile.objects.opened import changed
from spile.objects.paths import AnyPath, size_of

TORCH = (".pt", ".pth")  # files of torch.save
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_DEFLATED = 1032  # uncompressed bytes per deflated byte, at most


@dataclass(frozen=True)
class _Tensor:
    """A tensor of an opened file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]


def tensor_shapes(file: AnyPath, folder: AnyPath) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a file's tensors, by our names; see `_named`.

    Args:
        folder: the one that the file is in, for hints.
    """
    with _tensors(file, folder) as found:
        return {_named(name): tensor.shape for name, tensor in found.items()}


def small_tensors(file: AnyPath, folder: AnyPath, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read those of some tensors that are there, of any dtype."""
    with _tensors(file, folder) as found:
        return {name: np.array(found[name].read()) for name in names if name in found}


def check_tensors(sae: Sae) -> None:
    """Raise with all faults of the needed tensors; others (of the decoder) may be present."""
    faults: list[str] = []
    shapes = sae.tensors()
    for file, places in sae.by_file():
        with _tensors(file, sae.directory) as found:
            for name, place in places.items():
                shape = shapes[name]
                tensor = found.get(place.name)
                if tensor is None:
                    faults.append(f"no {place.name}")
                    continue
                if tensor.dtype.name not in _FLOATS:
                    raise InputError(
                        f"{file}: {place.name} holds {tensor.dtype}, not {', '.join(_FLOATS)}"
                    )
                stored = () if place.repeated else shape[::-1] if place.turned else shape
                stored = place.shape or stored
                if place.picked:
                    stored = _with_picked(tensor.shape, shape, place)
                if tensor.shape != stored:
                    faults.append(
                        f"{place.name} has shape {list(tensor.shape)}, expected {list(stored)}"
                    )
    if faults:
        raise InputError(f"{sae.file}: tensors do not fit a {sae.architecture} encoder of "
                         f"{sae.width} to {sae.latents}: {'; '.join(faults)}")  # fmt: skip


def _with_picked(
    found: tuple[int, ...], used: tuple[int, ...], place: StoredTensor
) -> tuple[int, ...]:
    """Return the shape of a stored tensor of which only some places of its second axis are used."""
    latents, values = used
    least = max(place.picked) + 1
    most = max(least, found[1]) if len(found) == 3 else least
    return (latents, most, values // len(place.picked))


def sampled_files(sae: Sae) -> str:
    """Return the digest of sampled blocks of an encoder's files.

    (The decoder of a cross-layer transcoder may lie in a file of its own. That is not sampled, so
    that the encoder is the same with and without it; its hash is compared when it is loaded.)
    """
    own = replace(sae, across=(), decodes=False) if sae.across else sae
    return "+".join(sampled_digest(file) for file, _ in own.by_file())


def load_arrays(sae: Sae) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Load the float32 arrays for `activations`, for `reconstruction` if it decodes, and the full
    hash of every tensor.

    Raises:
        DataError: if a file has changed since the encoder was opened.
    """
    arrays: dict[str, np.ndarray] = {}
    digests: dict[str, str] = {}
    shapes = sae.tensors()
    for file, places in sae.by_file():
        with _tensors(file, sae.directory) as found:
            for name, place in places.items():
                # (A copy: what was hashed is what is used, even if the file is written to later.)
                read = found[place.name].read()
                stored = np.array(read[:, place.picked] if place.picked else read, order="C")
                digests[name] = xxhash.xxh3_128_hexdigest(as_bytes(stored))
                arrays[name] = _as_used(stored, place, shapes[name])
    if sampled_files(sae) != sae.sampled:
        raise changed(sae.file, "the encoder has other values now")
    if sae.threshold is not None:
        arrays["threshold"] = np.full(sae.latents, sae.threshold, np.float32)
    if sae.gain:  # x / gain @ W is x @ (W / gain)
        gain = np.frombuffer(sae.gain, np.float32)[:, None]
        arrays |= {name: arrays[name] / gain for name in ("W_enc", "W_skip") if name in arrays}
    if sae.rescales or sae.weighted:
        arrays["decoder_norm"] = np.linalg.norm(arrays["W_dec"], axis=1)
    if sae.norms is not None:
        arrays["threshold"] = _of_unscaled(arrays["threshold"], arrays["W_dec"], sae)
    if not sae.decodes:
        arrays.pop("W_dec", None)
    return arrays, digests


def _of_unscaled(threshold: np.ndarray, decoder: np.ndarray, sae: Sae) -> np.ndarray:
    """Return the thresholds of latents themselves, from those of latents times norms."""
    assert sae.norms is not None
    of_whole, of_sides = sae.norms
    by_side = np.linalg.norm(decoder.reshape(sae.latents, sae.sides, -1), axis=2)
    norms = of_whole * np.linalg.norm(by_side, axis=1) + of_sides * by_side.sum(axis=1)
    never = np.where(threshold < 0, -np.inf, np.inf)  # a latent without norm times it is zero
    found = np.divide(threshold, norms, out=never, where=norms > 0)
    return found.astype(np.float32)


def _as_used(stored: np.ndarray, place: StoredTensor, shape: tuple[int, ...]) -> np.ndarray:
    """Return the values that the arithmetic uses, in C order."""
    wide = np.asarray(stored, np.float32)
    if place.picked:
        return wide.reshape(shape)
    if place.logarithm:
        wide = np.exp(wide)
    if place.shape:
        return np.ascontiguousarray(np.moveaxis(wide, 0, place.side)).reshape(shape)
    if place.repeated:
        return np.full(shape, wide)
    return np.ascontiguousarray(wide.T) if place.turned else wide


def _named(name: str) -> str:
    """Our name of a tensor; Gemma Scope 2 writes matrices in lower case."""
    return "W_" + name[2:] if name.startswith("w_") else name


# -- files -----------------------------------------------------------------------------------------


@contextmanager
def _tensors(file: AnyPath, folder: AnyPath) -> Generator[dict[str, _Tensor], None, None]:
    """The tensors of a file while it is open, by our names."""
    if file.name.endswith(".npz"):
        with _opened_npz(file) as archive:
            yield {_named(name.removesuffix(".npy")): _npy(archive, name, size_of(file))
                   for name in archive.namelist()}  # fmt: skip
        return
    if file.name.endswith(TORCH):
        opened, value = open_saved(file)
        infos = _flat(value, str(file))
    else:
        opened, infos = open_tensors(file, folder)
    yield {
        _named(name): _Tensor(info.shape, info.dtype, partial(read_tensor, opened, info))
        for name, info in infos.items()
    }


def _flat(value: Any, where: str) -> dict[str, TensorInfo]:
    """Return the tensors of a saved dictionary; those of one inside have its name before theirs."""
    if not isinstance(value, dict):
        raise InputError(f"{where}: holds a {type(value).__name__}, not a dictionary of tensors")
    level = cast("dict[Any, Any]", value)
    inside = {
        f"{outer}.{name}": tensor
        for outer, each in level.items()
        if isinstance(each, dict)
        for name, tensor in cast("dict[Any, Any]", each).items()
    }
    return {str(n): each for n, each in (level | inside).items() if isinstance(each, TensorInfo)}


@contextmanager
def _opened_npz(file: AnyPath) -> Generator[zipfile.ZipFile, None, None]:
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            yield archive
    except (
        zipfile.BadZipFile, zlib.error, struct.error, ValueError, KeyError, EOFError, OSError,
        OverflowError, RuntimeError, NotImplementedError,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{file}: not an npz file of plain arrays ({reason})") from None


def _npy(archive: zipfile.ZipFile, entry: str, most: int) -> _Tensor:
    """Find an array; check its shape against the bytes present, before anything is allocated.

    Args:
        most: bytes of the whole file.
    """
    with archive.open(entry) as stream:
        shape, dtype = read_npy_header(stream)
        size = stream.tell() + dtype.itemsize * math.prod(shape)
    about = archive.getinfo(entry)
    if dtype.kind != "f" or about.file_size != size:
        raise ValueError(f"{entry} holds no plain numbers")
    if about.compress_size > most or size > about.compress_size * _DEFLATED:
        raise ValueError(f"{entry}: {about.compress_size} compressed bytes cannot hold {size}")

    def read() -> np.ndarray:
        with archive.open(entry) as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)

    return _Tensor(shape, dtype, read)
