"""The header of a .npy file, as a stranger may have written it. Pickles are never read."""

import tokenize
import warnings
from typing import IO, Any

import numpy as np

_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype; the stream is then at the first value, of which nothing is known.

    Raises:
        ValueError: if it is no header of an array of plain numbers.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that Python 2 wrote
            read = _READERS[np.lib.format.read_magic(stream)]
            shape, _, dtype = read(stream)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        SyntaxError,
        tokenize.TokenError,  # numpy takes the header for Python's, of versions 2 and 3
        RecursionError,
        MemoryError,
    ) as error:
        raise ValueError(f"no .npy header ({' '.join(str(error).split())[:100]})") from None
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"no shape: {str(shape)[:100]}")
    if dtype.hasobject or dtype.kind not in "fiu":
        raise ValueError(f"holds {str(dtype)[:100]}, not plain numbers")
    return shape, dtype
