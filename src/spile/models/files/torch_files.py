"""Read a published file of `torch.save`, local or remote, without unpickling. No jax."""

from typing import Any

from spile.core.torch_zip import read_torch_zip
from spile.objects.opened import Opened, opened
from spile.objects.paths import AnyPath


def open_saved(file: AnyPath) -> tuple[Opened, Any]:
    """Open a file, and read its plain values; `read_tensor` reads the tensors among them.

    Raises:
        InputError: if it holds anything else; nothing of it is executed.
    """
    whole = opened(file)
    with whole.open("rb") as stream:

        def read(start: int, length: int) -> bytes:
            stream.seek(start)
            return stream.read(length)

        return whole, read_torch_zip(read, whole.size(), str(file))
