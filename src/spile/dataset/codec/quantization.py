"""Encode values in eight bits, and decode them. No jax: the device encodes, except for `check`.

float8_e4m3 has one scale per row, from its largest value. int8 has one per channel: a few channels
are hundreds of times larger than all others, and a common scale would erase the small ones. It is
measured once for a dataset; larger values are clipped and counted.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from spile.core.errors import CorruptError
from spile.dataset import format as fmt
from spile.dataset.format import SCALE_DTYPE, TapInfo

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_MAX = 448.0
INT8_MAX = 127.0  # and -127, so that zero is in the middle
DECODED = np.dtype(np.float32)
QUANTIZED = ("float8_e4m3", "int8")

_TINY = np.finfo(SCALE_DTYPE).tiny

# The value of every byte: a lookup is several times faster than a conversion.
_FLOAT8_VALUES = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(DECODED)


def decode(stored: np.ndarray, scale: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Multiply stored values by their scale, which has shape [rows] or that of one row."""
    if out is None:
        out = np.empty(stored.shape, DECODED)
    elif out.dtype != DECODED:  # in the caller's dtype, rounded once, at the end
        out[...] = decode(stored, scale)
        return out
    if stored.dtype == FLOAT8:
        codes = np.ascontiguousarray(stored).view(np.uint8)
        np.take(_FLOAT8_VALUES, codes, out=out, mode="clip")  # with a mode, `out` is not buffered
        out *= scale.reshape(-1, *[1] * (stored.ndim - 1))
    else:
        np.multiply(stored, scale, out=out, dtype=DECODED)
    return out


def encode(values: np.ndarray, info: TapInfo, scale: np.ndarray | None) -> np.ndarray:
    """Return values as they read back after storing, to measure the loss of the stored form.

    Args:
        scale: the scale of each channel, if the tap has them.
    """
    if info.scaled_by is None:
        return values.astype(info.storage)
    wide = values.astype(DECODED)
    if info.scaled_by == "channel":
        assert scale is not None
        steps = np.clip(np.rint(wide / scale), -INT8_MAX, INT8_MAX)
        return decode(np.where(np.isnan(steps), 0, steps).astype(np.int8), scale)
    # Non-finite values are stored as NaN, and must not affect the rest of their row.
    present = np.where(np.isfinite(wide), np.abs(wide), 0.0)
    largest = present.max(axis=tuple(range(1, wide.ndim)), initial=0.0)
    # Never so small that it is rounded or flushed to zero.
    by_row = np.where(largest > 0, np.maximum(largest / FLOAT8_MAX, _TINY), 1.0).astype(SCALE_DTYPE)
    shaped = by_row.reshape(-1, *[1] * (wide.ndim - 1))
    return decode((wide / shaped).astype(FLOAT8), by_row)


def scales_to_json(scales: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Encode scales for a record: exact, and small enough for JSON."""
    return {
        tap: base64.b64encode(scale.astype("<f4").tobytes()).decode()
        for tap, scale in sorted(scales.items())
    }


def scales_from_json(body: Mapping[str, Any], taps: Mapping[str, TapInfo]) -> dict[str, np.ndarray]:
    """Decode the scales of every tap that has them, each in the shape of a row.

    Raises:
        CorruptError: unless there is one positive scale for each channel.
    """
    scales: dict[str, np.ndarray] = {}
    for tap, info in taps.items():
        if info.scaled_by != "channel":
            continue
        try:
            data = base64.b64decode(body[tap], validate=True)
            scale = np.frombuffer(data, "<f4").astype(SCALE_DTYPE).reshape(info.shape)
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise CorruptError(fmt.SCALES, f"holds no scales of {tap}") from error
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise CorruptError(fmt.SCALES, f"holds scales of {tap} that are not positive")
        scales[tap] = scale
    return scales
