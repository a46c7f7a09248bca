"""Read the header of an untrusted .npy file. Pickles are never read."""

import tokenize
import warnings
from typing import IO, Any

import numpy as np

_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype; the stream is then at the first value, and no value is checked.

    Raises:
        ValueError: if there is no header of an array of plain numbers.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about headers that Python 2 wrote
            read = _READERS[np.lib.format.read_magic(stream)]
            shape, _, dtype = read(stream)
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        SyntaxError,
        tokenize.TokenError,  # numpy tokenizes the header as Python code
        RecursionError,
        MemoryError,
    ) as error:
        raise ValueError(f"no .npy header ({' '.join(str(error).split())[:100]})") from None
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"no shape: {str(shape)[:100]}")
    if dtype.hasobject or dtype.kind not in "fiu":
        raise ValueError(f"holds {str(dtype)[:100]}, not plain numbers")
    return shape, dtype
