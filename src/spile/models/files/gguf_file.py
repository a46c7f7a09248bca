"""A GGUF file as a stranger may have written it: metadata and tensors, read within bounds."""

from pathlib import Path
from typing import Any

import numpy as np

from spile.core.errors import InputError

_MOST_PARTS = 1 << 23  # numbers and texts; a vocabulary of 256k with its merges is a quarter of it


def read_gguf(gguf: Any, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata and the tensors of a file, each by name.

    Args:
        gguf: the package of that name.

    Raises:
        InputError: if the file is not whole, or holds what no model does.
    """

    class Reader(gguf.GGUFReader):
        """The package's own takes what lies beyond the end for an empty array, and counts on."""

        parts = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            self.parts += 1
            if len(found) != int(count) or self.parts > _MOST_PARTS:
                raise IndexError(f"{count} values do not fit at byte {offset}")
            return found

    try:
        with np.errstate(all="ignore"):  # sizes that overflow do not fit their data either
            reader = Reader(path)
        meta = {name: entry.contents() for name, entry in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = ascii(str(error))[1:-1][:200]
        raise InputError(f"{path}: not a GGUF file, or truncated ({reason})") from error
    return meta, {tensor.name: tensor for tensor in reader.tensors}
