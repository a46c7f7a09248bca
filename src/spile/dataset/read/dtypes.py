"""The dtype in which rows are given, and the exact conversion to it.

numpy adds up in the dtype of its operand. In bfloat16 a sum stops growing after a few hundred rows,
so `rows.mean(0)` is wrong, and nothing says so. Rows are therefore given in float32, which holds
every stored value exactly. torch and JAX accumulate in float32 by themselves: their loaders keep
the stored dtype, which is half as large.
"""

import platform
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.core.errors import ConfigError
from spile.core.tensors import DTYPES_BY_NAME
from spile.dataset.codec.quantization import DECODED, decode
from spile.dataset.format import TapInfo

STORED = "stored"
_FLOATS = [name for name in DTYPES_BY_NAME if "float" in name]
_FLOAT16 = np.dtype(np.float16)
_TOGETHER = 1 << 15  # values: their places in the table take 256 KiB

# numpy converts float16 by scalar code on x86: a lookup is nearly twice as fast there. (It casts
# bfloat16 as fast as memory allows.)
_FLOAT16_VALUES = (
    np.arange(1 << 16, dtype=np.uint16).view(_FLOAT16).astype(DECODED)
    if platform.machine().lower() in ("x86_64", "amd64")
    else None
)


def given_dtype(
    info: TapInfo, dtype: npt.DTypeLike | None, *, normalized: bool = False
) -> np.dtype[Any]:
    """Return the dtype in which rows of a tap are given, if a reader is asked for `dtype`.

    Args:
        dtype: None for float32; "stored" for that of the file (float32 for eight bits, whose codes
            mean nothing without their scale); or any float dtype. Integers, the ids of experts and
            of latents, stay what they are.
        normalized: whether the rows are normalized, so that their stored dtype does not matter.

    Raises:
        ConfigError: if it is not a float dtype.
    """
    named = parsed_dtype(dtype)
    if named is None:
        return DECODED if info.scaled_by or normalized else info.storage
    is_integer = info.storage.kind in "iu" and not info.scaled_by
    return info.storage if is_integer and not normalized else named


def parsed_dtype(dtype: npt.DTypeLike | None) -> np.dtype[Any] | None:
    """Return the dtype that a reader's argument names; None for "stored".

    Raises:
        ConfigError: if it is not a float dtype.
    """
    if dtype is None:
        return DECODED
    if isinstance(dtype, str) and dtype in (STORED, *_FLOATS):
        return DTYPES_BY_NAME.get(dtype)
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found not in [DTYPES_BY_NAME[name] for name in _FLOATS]:
        raise ConfigError(
            f"no dtype {dtype!r} for rows: name 'stored', or one of {', '.join(_FLOATS)}"
        )
    return found


def convert(stored: np.ndarray, out: np.ndarray, scale: np.ndarray | None = None) -> None:
    """Write stored values into a buffer of any dtype: exactly, or rounded once.

    Args:
        scale: of eight-bit values, one for each row or in the shape of a row.
    """
    if scale is not None:
        decode(stored, scale, out)
    elif _FLOAT16_VALUES is not None and (stored.dtype, out.dtype) == (_FLOAT16, DECODED):
        codes = stored.view(np.uint16)
        step = max(1, _TOGETHER // max(1, stored[:1].size))
        for low in range(0, len(codes), step):
            part = slice(low, low + step)
            np.take(_FLOAT16_VALUES, codes[part], out=out[part], mode="clip")
    else:
        out[...] = stored
