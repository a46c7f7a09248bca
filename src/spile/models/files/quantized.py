"""MXFP4, the 4-bit format of gpt-oss: pairs of codes, and a power of two for every 32 values.

Every value is exact in bfloat16, so decoding loses nothing. No jax.
"""

import ml_dtypes
import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of the two tensors' names
GROUP = 32  # values that share a scale
_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_CODES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
# One byte holds two values, the low half first.
_PAIRS = np.stack([np.tile(_CODES, 16), np.repeat(_CODES, 16)], axis=-1).astype(ml_dtypes.bfloat16)
_BIAS = 127


def packable(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and shape[-2] % GROUP == 0


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of blocks and scales, stored [..., out, in], for a tensor [..., in, out]."""
    *lead, inputs, outputs = shape
    groups = inputs // GROUP
    return (*lead, outputs, groups, GROUP // 2), (*lead, outputs, groups)


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decode the tensor [..., in, out], in bfloat16."""
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS).astype(ml_dtypes.bfloat16)
    values = np.multiply(_PAIRS[blocks].reshape(*scales.shape, GROUP), powers[..., None])
    return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)
