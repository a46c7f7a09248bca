"""Files of vLLM and speculators: a safetensors file for each request.

    token_ids             [tokens]
    hidden_states         [tokens, layers, width]: layer k is the stream after k blocks
    hidden_states_scales  only if those are float8_e4m3: one float32 for each token

vLLM's connectors name them by the request, speculators `hs_NUMBER.safetensors`. While a file is
written, its writer holds the lock of `NAME.lock`; the lock's file may stay behind.
"""

import fcntl
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from spile.core.errors import InputError, SpileError
from spile.core.tensors import TensorInfo
from spile.core.threads import mapped
from spile.interop.ingest.ingest_format import (
    NO_ROWS,
    NO_TOKENS,
    OTHER_FORM,
    UNREADABLE,
    EngineRun,
    GivenDocument,
    GivenRows,
    IngestFormat,
    identity_of,
)
from spile.models.files.checkpoint import Checkpoint
from spile.models.files.safetensors import open_tensors, read_tensor
from spile.objects.opened import Opened
from spile.objects.paths import AnyPath, files_below

_ROWS, _SCALES, _TOKENS = "hidden_states", "hidden_states_scales", "token_ids"
_THREADS = 4  # files that are opened at a time
_DTYPES = {"bfloat16", "float16", "float32", "float8_e4m3fn"}
_Form = tuple[int, ...]  # layers and width


def _files(source: AnyPath) -> list[AnyPath]:
    """Return the files, in the order of their numbers."""
    found = [path for path in files_below(source) if path.name.endswith(".safetensors")]

    def place(path: AnyPath) -> tuple[Sequence[str], int, str]:
        number = re.search(r"(\d+)\.safetensors$", path.name)
        return path.parts[:-1], int(number[1]) if number else -1, path.name

    return sorted(found, key=place)


def _headers(files: Sequence[AnyPath], folder: AnyPath) -> Iterator[Mapping[str, TensorInfo]]:
    """Yield the headers of those that can be read."""
    for path in files:
        try:
            yield open_tensors(path, folder)[1]
        except SpileError:
            continue


def _recognise(source: AnyPath) -> bool:
    headers = _headers(_files(source)[:3] if source.is_dir() else [], source)
    return any(_ROWS in header for header in headers)


def _open(source: AnyPath, run: EngineRun) -> GivenRows:
    files = _files(source)
    if not files:
        raise InputError(f"{source}: holds no .safetensors file")
    _refuse_unfinished(files)
    usable = (header for header in _headers(files, source) if _ROWS in header)
    info = next((header[_ROWS] for header in usable), None)
    if info is None:
        raise InputError(f"{source}: none of its {len(files)} files holds {_ROWS}")
    form = _form(info)
    if len(form) != 2 or info.dtype.name not in _DTYPES:
        raise InputError(
            f"{source}: {_ROWS} are {info.dtype} of {list(info.shape)}, not [tokens, layers, "
            f"width] in {', '.join(sorted(_DTYPES))}"
        )
    read = partial(_document, source, form, info.dtype)

    def documents(first: int) -> Iterator[GivenDocument]:
        return mapped(read, files[first:], _THREADS)

    dtype = info.dtype.name.removesuffix("fn")
    return GivenRows(form[0], dtype, None, len(files), identity_of(files), documents)


def _refuse_unfinished(files: Sequence[AnyPath]) -> None:
    """Refuse files that are still being written: their lock is held."""
    for path in files:
        lock = path.with_name(f"{path.name}.lock") if isinstance(path, Path) else None
        if lock is None or not lock.exists():
            continue
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"{path}: is still being written ({lock.name} is locked); ingest when the "
                    "engine has finished"
                ) from None
            except OSError:  # files cannot be locked there
                continue


def _form(info: TensorInfo) -> _Form:
    """Return the layers and the width; of [tokens, width] there is one layer."""
    return info.shape[1:] if len(info.shape) != 2 else (1, *info.shape[1:])


def _document(
    folder: AnyPath, form: _Form, dtype: np.dtype[np.generic], path: AnyPath
) -> GivenDocument:
    name = path.name
    try:
        file, header = open_tensors(path, folder)
        if _TOKENS not in header:
            return GivenDocument(name, refused=NO_TOKENS)
        if _ROWS not in header:
            return GivenDocument(name, refused=NO_ROWS)
        info = header[_ROWS]
        if _form(info) != form or info.dtype != dtype:
            why = f"{info.dtype} of {list(info.shape)}"
            return GivenDocument(name, refused=OTHER_FORM, why=why)
        rows = _read(file, info).reshape(info.shape[0], *form)
        scales = None
        if dtype.itemsize == 1:
            given = _read(file, header[_SCALES]) if _SCALES in header else np.empty(0, np.float32)
            scales = _scales(given, len(rows), form[0])
            if scales is None:
                return GivenDocument(name, refused=OTHER_FORM, why=f"no {_SCALES} that fit")
        slots = [
            (rows[:, layer], None if scales is None else scales[:, layer])
            for layer in range(form[0])
        ]
        return GivenDocument(name, _read(file, header[_TOKENS]), slots)
    except SpileError as error:
        return GivenDocument(name, refused=UNREADABLE, why=str(error))


def _read(file: Opened, info: TensorInfo) -> np.ndarray:
    return read_tensor(file, info)  # type: ignore[arg-type]


def _scales(given: np.ndarray, tokens: int, layers: int) -> np.ndarray | None:
    """Return a scale for each token and layer; None if their number fits neither."""
    flat = given.reshape(-1).astype(np.float32)
    if len(flat) == tokens:
        return np.repeat(flat[:, None], layers, axis=1)
    return flat.reshape(tokens, layers) if len(flat) == tokens * layers else None


def _layers(slots: int, checkpoint: Checkpoint) -> str:
    """Say which taps the layers are likely to be."""
    count = checkpoint.arch.num_layers
    likely = [2, count // 2, count - 3, count]
    named = ",".join(f"aux_hidden_states[{number}]" for number in likely)
    if slots != len(likely) or sorted({*likely}) != likely or likely[0] < 1:
        named = "aux_hidden_states[NUMBER],…"
    return f"vLLM was started with the numbers (speculators' own are --taps '{named}')"


VLLM = IngestFormat(
    name="vllm",
    about="vLLM's and speculators' safetensors files, one for each request",
    rows_by="vLLM",
    recognise=_recognise,
    open=_open,
    layers=_layers,
)
