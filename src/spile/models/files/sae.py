"""Sparse autoencoders: how one encodes a row of activations and reconstructs it, and the file
formats of published ones. No jax.

The arithmetic is SAELens' `encode` and `decode`, written for both numpy and jax.numpy: the device
runs it in the compiled step, and `spile check` runs it on the activations of HF transformers.

`LAYOUTS`, at the end, has a row for each layout of files: a new one is a function and its row.

A key of cfg.json that is neither read nor known to leave the latents unchanged is refused: ignoring
it might give latents other than the encoder's.
"""

import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import xxhash

from spile.core.bounded_json import Json
from spile.core.config import canonical_json
from spile.core.errors import InputError
from spile.core.identity import sampled_digest
from spile.core.npy import read_npy_header
from spile.core.tensors import as_bytes
from spile.models.files.safetensors import open_tensors, read_header, read_tensor
from spile.objects.opened import changed
from spile.objects.paths import AnyPath, files_below, path_of, read_json, size_of

# The tensors of each kind of encoder; a letter is an axis: width, latents.
_TENSORS: dict[str, dict[str, str]] = {
    "standard": {"W_enc": "wl", "b_enc": "l"},
    "topk": {"W_enc": "wl", "b_enc": "l"},
    "jumprelu": {"W_enc": "wl", "b_enc": "l", "threshold": "l"},
    "gated": {"W_enc": "wl", "b_gate": "l", "b_mag": "l", "r_mag": "l"},
}
ARCHITECTURES = tuple(_TENSORS)
NORMALIZATIONS = ("none", "layer_norm", "constant_norm_rescale")
AT_ONCE = 1 << 26  # latents held on a device, in float32: 256 MiB
_KEPT = 64  # latents per row, if the encoder has no k of its own
_LAYER_NORM_EPS = 1e-5

Arrays = Mapping[str, Any]  # numpy or jax arrays, by name

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
_NPZ, _PARAMS, _PARAMS_CONFIG = "params.npz", "params.safetensors", "config.json"
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_MOST = 1 << 24  # latents
_DEFLATED = 1032  # uncompressed bytes per deflated byte, at most

# Keys of cfg.json about the training. None of them changes the latents.
_IGNORED = frozenset((
    "dtype", "device", "metadata", "model_name", "model_class_name", "hook_layer", "context_size",
    "model_from_pretrained_kwargs", "prepend_bos", "exclude_special_tokens", "neuronpedia_id",
    "seqpos_slice", "dataset_path", "dataset_trust_remote_code", "sae_lens_version",
    "sae_lens_training_version", "hf_hook_name", "finetuning_scaling_factor",
    # (these belong to the decoder and to training)
    "l1_coefficient", "lp_norm", "l1_warm_up_steps", "use_ghost_grads", "noise_scale",
    "normalize_sae_decoder", "decoder_orthogonal_init", "decoder_heuristic_init",
    "decoder_heuristic_init_norm", "decoder_init_norm", "init_encoder_as_decoder_transpose",
    "scale_sparsity_penalty_by_decoder_norm", "mse_loss_normalization", "aux_loss_coefficient",
    "use_sparse_activations", "jumprelu_init_threshold", "jumprelu_bandwidth",
    "jumprelu_sparsity_loss_mode", "jumprelu_tanh_scale", "l0_coefficient", "l0_warm_up_steps",
    "pre_act_loss_coefficient", "n_batches_for_norm_estimate", "use_ste",
))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sae:
    """A published encoder: its settings, and its files."""

    directory: AnyPath
    file: AnyPath  # its tensors
    architecture: str
    width: int  # values in a row that it reads
    latents: int
    k: int | None = None  # active latents per row, if that number is fixed
    normalize: str = "none"
    subtracts: bool = True  # whether it subtracts the decoder's bias from its input
    rescales: bool = False  # whether it scales latents by the norms of their decoder rows
    hook: str | None = None  # TransformerLens name of the hook it was trained on
    raw: bool = False  # in Gemma Scope's own format
    decodes: bool = False  # whether its decoder is used, too
    sampled: str = ""  # digest of sampled blocks of its tensors, as they were when it was opened

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The tensors to read, and the shape of each."""
        sizes = {"w": self.width, "l": self.latents}
        axes = dict(_TENSORS[self.architecture])
        if self.subtracts or self.decodes:
            axes["b_dec"] = "w"
        if self.rescales or self.decodes:
            axes["W_dec"] = "lw"
        return {name: tuple(sizes[axis] for axis in each) for name, each in axes.items()}

    def arithmetic(self) -> dict[str, Any]:
        """The settings, beside the tensors, that its latents depend on."""
        names = ("architecture", "width", "latents", "k", "normalize", "subtracts", "rescales")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class SparseEncoder:
    """An encoder, and the number of latents kept per row."""

    sae: Sae
    kept: int

    @classmethod
    def of(cls, sae: Sae, asked: int | None, *, pooled: bool = False) -> "SparseEncoder":
        """Args:
        asked: the number to keep; capped at the number that can be active.
        pooled: whether rows are of several tokens, which may have other latents active.
        """
        most = sae.latents if pooled else sae.k or sae.latents
        return cls(sae, min(asked or sae.k or _KEPT, most))

    @property
    def id_dtype(self) -> str:
        return "int16" if self.sae.latents <= 1 << 15 else "int32"


def activations(
    sae: Sae, arrays: Arrays, rows: Any, xp: Any, product: Callable[[Any, Any], Any]
) -> Any:
    """Compute [..., latents] from [..., width] in float32; for `topk` before the choice of k.

    A nonfinite value in a row makes every latent that may depend on it nonfinite.

    Args:
        xp: numpy or jax.numpy, matching the arrays.
        product: multiplies two matrices, in float32.
    """
    if sae.normalize == "layer_norm":
        rows = rows - rows.mean(axis=-1, keepdims=True)
        deviation = xp.sqrt((rows * rows).sum(axis=-1, keepdims=True) / (sae.width - 1))
        rows = rows / (deviation + _LAYER_NORM_EPS)
    elif sae.normalize == "constant_norm_rescale":
        length = xp.sqrt((rows * rows).sum(axis=-1, keepdims=True))
        rows = rows * (math.sqrt(sae.width) / length)
    if sae.subtracts:
        rows = rows - arrays["b_dec"]
    found = product(rows, arrays["W_enc"])
    if sae.architecture == "gated":
        size = xp.maximum(found * xp.exp(arrays["r_mag"]) + arrays["b_mag"], 0.0)
        return xp.where(found + arrays["b_gate"] <= 0, 0.0, size)
    found = found + arrays["b_enc"]
    if sae.rescales:
        found = found * arrays["decoder_norm"]
    active = xp.maximum(found, 0.0)
    if sae.architecture != "jumprelu":
        return active
    # (Tests `<=` and not `>`, so that NaN does not become zero.)
    return xp.where(found <= arrays["threshold"], 0.0, active)


def latents_of(
    sae: Sae,
    arrays: Arrays,
    rows: Any,
    xp: Any,
    product: Callable[[Any, Any], Any],
    kth: Callable[[Any, int], Any],
) -> Any:
    """Compute all latents of rows, as `activations`; for `topk` with k of them active.

    Args:
        kth: returns the k-th largest of the last axis, which it keeps.
    """
    found = activations(sae, arrays, rows, xp, product)
    return found if sae.k is None else xp.where(found < kth(found, sae.k), 0.0, found)


def reconstruction(
    sae: Sae,
    arrays: Arrays,
    rows: Any,
    xp: Any,
    product: Callable[[Any, Any], Any],
    kth: Callable[[Any, int], Any],
) -> Any:
    """Compute the decoder's reconstruction of rows [..., width], from their latents, in float32.

    The arguments are those of `latents_of`.
    """
    found = latents_of(sae, arrays, rows, xp, product, kth)
    if sae.rescales:
        found = found / arrays["decoder_norm"]
    made = product(found, arrays["W_dec"]) + arrays["b_dec"]
    if sae.normalize == "layer_norm":
        mean = rows.mean(axis=-1, keepdims=True)
        squares = xp.square(rows - mean).sum(axis=-1, keepdims=True)
        return made * xp.sqrt(squares / (sae.width - 1)) + mean
    if sae.normalize == "constant_norm_rescale":
        length = xp.sqrt((rows * rows).sum(axis=-1, keepdims=True))
        return made / (math.sqrt(sae.width) / length)
    return made


# -- published files -------------------------------------------------------------------------------


def is_sae(folder: AnyPath) -> bool:
    """Whether a directory holds an encoder itself, and not directories of encoders."""
    return _layout_of(folder) is not None


def open_sae(where: str, *, flag: str = "--encode", decodes: bool = False) -> Sae:
    """Open an encoder by its directory or URL; check its settings and its tensors' shapes.

    Args:
        flag: the one that names it, for errors.
        decodes: whether its decoder is needed, too.
    """
    folder = path_of(where)
    layout = _layout_of(folder)
    if layout is None:
        known = ", ".join(f"{each.file} ({each.tool})" for each in LAYOUTS)
        raise InputError(f"{flag} {where}: has none of the files {known}{_hint(folder)}")
    sae = layout.read(folder)
    sae = replace(sae, decodes=decodes, sampled=sampled_digest(sae.file))
    _check_tensors(sae)
    return sae


def identity(sae: Sae) -> str:
    """An encoder's identity, without its name: its arithmetic and sampled blocks of its tensors."""
    digest = xxhash.xxh3_128_hexdigest(canonical_json(sae.arithmetic()))
    return f"{sae.architecture} {sae.latents} {digest}-{sae.sampled}"


def load_arrays(sae: Sae) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Load the float32 arrays for `activations`, for `reconstruction` if it decodes, and the full
    hash of every tensor.

    Raises:
        DataError: if the file has changed since the encoder was opened.
    """
    arrays: dict[str, np.ndarray] = {}
    digests: dict[str, str] = {}
    read = _npz_arrays if sae.file.name.endswith(".npz") else _safetensors_arrays
    for name, tensor in read(sae).items():
        digests[name] = xxhash.xxh3_128_hexdigest(as_bytes(tensor))
        arrays[name] = np.asarray(tensor, np.float32)
    if sampled_digest(sae.file) != sae.sampled:
        raise changed(sae.file, "the encoder has other values now")
    if sae.rescales:
        arrays["decoder_norm"] = np.linalg.norm(arrays["W_dec"], axis=1)
        if not sae.decodes:
            del arrays["W_dec"]
    return arrays, digests


# -- SAELens -----------------------------------------------------------------------------------


def _saelens(folder: AnyPath) -> Sae:
    path = folder / CONFIG
    config = _Config(str(path), read_json(path))
    architecture, k = config.take("architecture", "standard"), config.take("k", None)
    activation = config.take("activation_fn", config.take("activation_fn_str", "relu"))
    given: Json = config.take("activation_fn_kwargs", None) or {}
    if not isinstance(given, dict):
        config.refuse("activation_fn_kwargs", given, "an object")
    # How SAELens before version 6 says it.
    if activation == "topk":
        architecture, k = "topk", given.get("k")
    if architecture not in ARCHITECTURES:
        config.refuse("architecture", architecture, ", ".join(ARCHITECTURES))
    if activation not in ("relu", "topk") or (given and {*given} != {"k"}):
        config.refuse("activation_fn", f"{activation} {given or ''}".strip(), "relu or topk")
    if (architecture == "topk") != (k is not None) or (k is not None and not _is_size(k)):
        config.refuse("k", k, "a number for topk, and for nothing else")
    normalize = config.take("normalize_activations", None) or "none"
    normalize = "expected_average_only_in" if normalize is True else normalize
    if normalize not in NORMALIZATIONS:
        config.refuse(
            "normalize_activations", normalize,
            f"{', '.join(NORMALIZATIONS)}; if what it divides by is known, fold it into the "
            "weights (sae.fold_activation_norm_scaling_factor) and save it again",
        )  # fmt: skip
    reshape = config.take("reshape_activations", "none")
    if reshape not in ("none", "hook_z"):
        config.refuse("reshape_activations", reshape, "none or hook_z")
    about: Json = config.values.get("metadata")
    told = {**about, **config.values} if isinstance(about, dict) else config.values
    head = told.get("hook_head_index", config.take("hook_head_index", None))
    if head is not None:
        config.refuse("hook_head_index", head, "an encoder of all heads together")
    hook = told.get("hook_name", told.get("hook_point"))
    width, latents = config.take("d_in", None), config.take("d_sae", None)
    if not _is_size(width) or not _is_size(latents):
        config.refuse("d_in and d_sae", f"{width} and {latents}", "two numbers")
    subtracts = config.take("apply_b_dec_to_input", True)
    rescales = config.take("rescale_acts_by_decoder_norm", False)
    if type(subtracts) is not bool or type(rescales) is not bool:
        config.refuse("apply_b_dec_to_input or rescale_acts_by_decoder_norm", "neither", "a switch")
    config.refuse_unknown("hook_name", "hook_point", "hook_point_head_index", "hook_head_index")
    return Sae(
        directory=folder, file=folder / WEIGHTS, architecture=architecture, width=width,
        latents=latents, k=min(k, latents) if k else None, normalize=normalize,
        subtracts=subtracts, rescales=rescales and architecture == "topk",
        hook=hook if isinstance(hook, str) else None,
    )  # fmt: skip


class _Config:
    """A cfg.json that records which keys were read."""

    def __init__(self, path: str, values: Mapping[str, Any]) -> None:
        self.path, self.values, self._read = path, values, set[str]()

    def take(self, name: str, default: Any) -> Any:
        self._read.add(name)
        return self.values.get(name, default)

    def refuse(self, name: str, value: object, known: str) -> NoReturn:
        raise InputError(f"{self.path}: {name} is {str(value)[:100]}; known: {known}")

    def refuse_unknown(self, *also: str) -> None:
        odd = sorted({*self.values} - self._read - _IGNORED - {*also})
        if odd:
            raise InputError(
                f"{self.path}: unknown key {odd[0]!r}: whether it changes the latents is not "
                "known, so none are computed"
            )


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MOST


# -- Gemma Scope -------------------------------------------------------------------------------


def _gemma_scope_2(folder: AnyPath) -> Sae:
    config = folder / _PARAMS_CONFIG
    if config.is_file():
        architecture = read_json(config).get("architecture")
        if architecture not in ("jump_relu", "jumprelu"):
            raise InputError(f"{config}: architecture is {architecture!r}; known: jump_relu")
    return _gemma_scope(folder, _PARAMS)


def _gemma_scope(folder: AnyPath, name: str = _NPZ) -> Sae:
    file = folder / name
    shape = _shapes(file, folder).get("W_enc", ())
    if len(shape) != 2 or not all(map(_is_size, shape)):
        raise InputError(f"{file}: holds no matrix W_enc; is it an encoder?")
    return Sae(
        directory=folder, file=file, architecture="jumprelu", width=shape[0], latents=shape[1],
        subtracts=False, raw=True,
    )  # fmt: skip


# -- tensors -----------------------------------------------------------------------------------


def _check_tensors(sae: Sae) -> None:
    """Raise with all faults of the needed tensors; others (of the decoder) may be present."""
    found = _shapes(sae.file, sae.directory)
    faults = [f"no {name}" for name in sae.tensors() if name not in found]
    faults += [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in sae.tensors().items()
        if name in found and found[name] != shape
    ]
    if faults:
        raise InputError(f"{sae.file}: tensors do not fit a {sae.architecture} encoder of "
                         f"{sae.width} to {sae.latents}: {'; '.join(faults)}")  # fmt: skip


def _shapes(file: AnyPath, folder: AnyPath) -> dict[str, tuple[int, ...]]:
    if not file.name.endswith(".npz"):
        header = read_header(file, folder)
        for name, info in header.items():
            if info.dtype.name not in _FLOATS and _named(name) in ("W_enc", "b_enc", "threshold"):
                raise InputError(f"{file}: {name} holds {info.dtype}, not {', '.join(_FLOATS)}")
        return {_named(name): info.shape for name, info in header.items()}
    with _opened_npz(file) as archive:
        return {
            _named(entry.removesuffix(".npy")): _npy_shape(archive, entry, size_of(file))
            for entry in archive.namelist()
        }


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


def _npy_shape(archive: zipfile.ZipFile, entry: str, most: int) -> tuple[int, ...]:
    """Read an array's shape and check it against the bytes present, before anything is allocated.

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
    return shape


def _named(name: str) -> str:
    """Our name of a tensor; Gemma Scope 2 writes matrices in lower case."""
    return "W_" + name[2:] if name.startswith("w_") else name


def _npz_arrays(sae: Sae) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    with _opened_npz(sae.file) as archive:
        for entry in archive.namelist():
            name = _named(entry.removesuffix(".npy"))
            if name in sae.tensors():
                with archive.open(entry) as stream:
                    arrays[name] = np.lib.format.read_array(stream, allow_pickle=False)
    return {name: arrays[name] for name in sae.tensors()}


def _safetensors_arrays(sae: Sae) -> dict[str, np.ndarray]:
    file, found = open_tensors(sae.file, sae.directory)
    header = {_named(name): info for name, info in found.items()}
    # (Copies: what was hashed is what is used, even if the file is written to later.)
    return {name: np.array(read_tensor(file, header[name])) for name in sae.tensors()}


def _hint(folder: AnyPath) -> str:
    pickles = (".pt", ".pth", ".bin", ".pkl")
    if any(path.name.endswith(pickles) for path in files_below(folder)):
        return "; pickles are never read, as reading them can run any program"
    return ""


# -- the table of layouts --------------------------------------------------------------------------


@dataclass(frozen=True)
class EncoderLayout:
    """How a tool stores an encoder in a directory."""

    tool: str
    file: str  # a directory with this file has this layout
    read: Callable[[AnyPath], Sae]  # reads and checks the settings; tensors are checked later


LAYOUTS = (  # the first whose file is there
    EncoderLayout("SAELens", CONFIG, _saelens),  # of any version, with `sae_weights.safetensors`
    EncoderLayout("Gemma Scope", _NPZ, _gemma_scope),
    EncoderLayout("Gemma Scope 2", _PARAMS, _gemma_scope_2),
)


def _layout_of(folder: AnyPath) -> EncoderLayout | None:
    return next((each for each in LAYOUTS if (folder / each.file).is_file()), None)
