"""Read tensors of a published safetensors file, local or remote. No jax."""

import numpy as np

from spile.core.errors import CorruptError, InputError
from spile.core.tensors import TensorInfo, as_bytes, map_tensor, read_header_from
from spile.objects.opened import Opened, OpenedFile, opened
from spile.objects.paths import AnyPath, RemotePath, files_below


def open_tensors(file: AnyPath, folder: AnyPath) -> tuple[Opened, dict[str, TensorInfo]]:
    """Open a file in a folder, and read its header.

    Raises:
        InputError: if there is no such file, or it is not a safetensors file.
    """
    if not file.is_file():
        pickled = any(path.name.endswith(".bin") for path in files_below(folder))
        hint = "; pickled .bin weights are never read" if pickled else ""
        raise InputError(f"{file}: no such file{hint}")
    whole = opened(file)
    with whole.open("rb") as stream:

        def read(start: int, length: int) -> bytes:
            stream.seek(start)
            return stream.read(length)

        try:
            return whole, read_header_from(read, whole.size(), str(file))
        except CorruptError as error:
            raise InputError(str(error)) from error


def read_header(file: AnyPath, folder: AnyPath) -> dict[str, TensorInfo]:
    """Read the header of a file in a folder; see `open_tensors`."""
    return open_tensors(file, folder)[1]


def read_tensor(
    file: OpenedFile | RemotePath, info: TensorInfo, used: slice = slice(None)
) -> np.ndarray:
    """Read one tensor: memory-mapped from a local file, fetched from any other.

    Args:
        used: the bytes that will be read; the others may be undefined.
    """
    if isinstance(file, OpenedFile):
        return map_tensor(file.fileno(), info)
    raw = np.empty(info.stop - info.start, np.uint8)  # uses memory only where it is written
    start, stop, _ = used.indices(raw.nbytes)
    file.read_into(info.start + start, as_bytes(raw)[start:stop])
    return np.ndarray(info.shape, info.dtype, raw.data, 0, info.strides)
