"""Weights in fewer bytes, as large models are published: how they are stored and decoded. No jax.

Values are decoded as the reference does: computed exactly or in float32, then rounded to the dtype
of the scales (except fp8, which is not rounded). `decode` takes numpy, or jax.numpy: a block that
is streamed is copied as it is stored, and decoded on the device.

| method             | tensors in place of `NAME.weight`                                  |
|--------------------|--------------------------------------------------------------------|
| fp8                | weight, weight_scale_inv: a scale for each square                  |
| compressed-tensors | weight, weight_scale: 8 bits, a scale for all, a row or a group    |
|                    | weight_packed, weight_scale, ...: 4 or 8 bits, a scale for a group |
| gptq               | qweight, qzeros, scales, g_idx                                     |
| awq                | qweight, qzeros, scales                                            |
| mxfp4              | NAME_blocks, NAME_scales: pairs of codes, a power of two for 32    |
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import ml_dtypes
import numpy as np

from spile.core.errors import InputError
from spile.core.tensors import TensorInfo

Shape = tuple[int, ...]
BLOCKS, SCALES = "_blocks", "_scales"  # suffixes of MXFP4's two tensors
GROUP = 32  # of MXFP4's values share a scale
_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_CODES = np.array([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
# One byte holds two values, the low half first.
_PAIRS = np.stack([np.tile(_CODES, 16), np.repeat(_CODES, 16)], axis=-1)
_BIAS = 127
_WORD = 32  # bits of the integers that others pack values into
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where each of eight values is in a word
_FLOATS = ("float32", "float16", "bfloat16")
_FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True)
class Part:
    """A stored tensor: what it must hold."""

    name: str
    shape: Shape
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class PackedTensor:
    """The stored tensors of one tensor, and how they become its values."""

    parts: tuple[Part, ...]
    # from numpy or jax.numpy, and the stored tensors, to the tensor
    decode: Callable[..., Any]


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's `quantization_config`, as far as tensors depend on it."""

    method: str
    bits: int = 8
    block: tuple[int, int] = (128, 128)  # of fp8
    zero_offset: int = 0  # added to stored zero points

    def packed(
        self, name: str, shape: Shape, tensors: Mapping[str, tuple[Any, TensorInfo]]
    ) -> PackedTensor | None:
        """How a tensor is stored; None if it is not packed."""
        if self.method == "mxfp4":
            packable = len(shape) > 1 and shape[-2] % GROUP == 0
            return _mxfp4(name, shape) if packable and name + BLOCKS in tensors else None
        stem, _, last = name.rpartition(".")
        if last != "weight" or len(shape) != 2:
            return None
        info = {
            part: tensors[f"{stem}.{part}"][1] for part in _PARTS if f"{stem}.{part}" in tensors
        }
        if self.method == "fp8" and "weight_scale_inv" in info:
            return self._fp8(stem, shape)
        if self.method == "compressed-tensors" and "weight_packed" in info:
            return self._packed_words(stem, shape, info)
        if self.method == "compressed-tensors" and "weight_scale" in info:
            return _scaled(stem, shape, info)
        if self.method == "gptq" and "qweight" in info:
            return self._gptq(stem, shape, info)
        if self.method == "awq" and "qweight" in info:
            return _awq(stem, shape, info)
        return None

    def _fp8(self, stem: str, shape: Shape) -> PackedTensor:
        rows, columns = self.block
        grid = (-(-shape[0] // rows), -(-shape[1] // columns))

        def decode(xp: Any, weight: Any, scale: Any) -> Any:
            wide = xp.repeat(scale.astype(np.float32), rows, axis=0)[: shape[0]]
            return weight.astype(np.float32) * xp.repeat(wide, columns, axis=1)[:, : shape[1]]

        return PackedTensor(
            (
                Part(f"{stem}.weight", shape, (_FLOAT8,)),
                Part(f"{stem}.weight_scale_inv", grid, _FLOATS),
            ),
            decode,
        )

    def _packed_words(
        self, stem: str, shape: Shape, info: Mapping[str, TensorInfo]
    ) -> PackedTensor:
        bits, (rows, columns) = self.bits, shape
        groups = _groups(info.get("weight_scale"), f"{stem}.weight_scale", shape)
        parts = [
            Part(f"{stem}.weight_packed", (rows, _words(columns, bits)), ("int32",)),
            Part(f"{stem}.weight_scale", (rows, groups), _FLOATS),
            Part(f"{stem}.weight_shape", (2,), ("int64", "int32")),
        ]
        zeros, ordered = "weight_zero_point" in info, "weight_g_idx" in info
        if zeros:
            words = (_words(rows, bits), groups)
            parts.append(Part(f"{stem}.weight_zero_point", words, ("int32",)))
        if ordered:
            parts.append(Part(f"{stem}.weight_g_idx", (columns,), ("int32", "int64")))

        def decode(xp: Any, packed: Any, scale: Any, _: Any, *others: Any) -> Any:
            values = _unpacked(xp, packed, bits)[:, :columns]
            # Values are stored with an offset, and so are zero points.
            half = 1 << (bits - 1)
            zero: Any = xp.full(scale.shape, half, np.int32)
            if zeros:
                zero = _unpacked(xp, others[0].swapaxes(0, 1), bits)[:, :rows].swapaxes(0, 1)
            group = others[-1] if ordered else _group_of(columns, groups)
            return _times(xp, values - zero[:, group], scale[:, group])

        return PackedTensor(tuple(parts), decode)

    def _gptq(self, stem: str, shape: Shape, info: Mapping[str, TensorInfo]) -> PackedTensor:
        bits, (rows, columns) = self.bits, shape
        groups = _groups(info.get("scales"), f"{stem}.scales", shape, axis=0)

        def decode(xp: Any, qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
            values = _unpacked(xp, qweight.swapaxes(0, 1), bits)[:, :columns]
            zeros = (_unpacked(xp, qzeros, bits)[:, :rows] + self.zero_offset) & (2**bits - 1)
            zeros, scale = zeros.swapaxes(0, 1), scales.swapaxes(0, 1)
            return _times(xp, values - zeros[:, g_idx], scale[:, g_idx])

        return PackedTensor(
            (
                Part(f"{stem}.qweight", (_words(columns, bits), rows), ("int32",)),
                Part(f"{stem}.qzeros", (groups, _words(rows, bits)), ("int32",)),
                Part(f"{stem}.scales", (groups, rows), _FLOATS),
                Part(f"{stem}.g_idx", (columns,), ("int32", "int64")),
            ),
            decode,
        )


_PARTS = (
    "weight_scale_inv", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx",
    "weight", "qweight", "scales",
)  # fmt: skip


def _scaled(stem: str, shape: Shape, info: Mapping[str, TensorInfo]) -> PackedTensor:
    """Eight bits; a scale for the tensor, for each row, or for groups of each row."""
    found = info["weight_scale"].shape
    groups = found[1] if len(found) == 2 else 1
    if found not in ((), (1,), (shape[0],)) and not (
        len(found) == 2 and found[0] in (1, shape[0]) and groups and shape[1] % groups == 0
    ):
        raise InputError(f"{stem}.weight_scale has shape {list(found)}, for {list(shape)}")
    parts = [
        Part(f"{stem}.weight", shape, (_FLOAT8, "int8")),
        Part(f"{stem}.weight_scale", found, _FLOATS),
    ]
    if "weight_zero_point" in info:
        zero = info["weight_zero_point"].shape
        parts.append(Part(f"{stem}.weight_zero_point", zero, (_FLOAT8, "int8")))

    def wide(xp: Any, values: Any) -> Any:
        values = values.astype(np.float32)
        values = values.reshape(-1, 1) if values.ndim < 2 else values
        return xp.repeat(values, shape[1] // values.shape[1], axis=1)

    def decode(xp: Any, weight: Any, scale: Any, *zero: Any) -> Any:
        values = weight.astype(np.float32)
        for each in zero:
            values = values - wide(xp, each)
        return (values * wide(xp, scale)).astype(scale.dtype)

    return PackedTensor(tuple(parts), decode)


def _awq(stem: str, shape: Shape, info: Mapping[str, TensorInfo]) -> PackedTensor:
    rows, columns = shape
    groups = _groups(info.get("scales"), f"{stem}.scales", shape, axis=0)
    words = _words(rows, 4)

    def ordered(xp: Any, packed: Any) -> Any:
        eights = _unpacked(xp, packed, 4).reshape(len(packed), -1, 8)
        return eights[..., np.array(_AWQ_ORDER)].reshape(len(packed), -1)

    def decode(xp: Any, qweight: Any, qzeros: Any, scales: Any) -> Any:
        group = _group_of(columns, groups)
        values = ordered(xp, qweight) - ordered(xp, qzeros)[group]
        return _times(xp, values, scales[group]).swapaxes(0, 1)

    return PackedTensor(
        (
            Part(f"{stem}.qweight", (columns, words), ("int32",)),
            Part(f"{stem}.qzeros", (groups, words), ("int32",)),
            Part(f"{stem}.scales", (groups, rows), _FLOATS),
        ),
        decode,
    )


def _mxfp4(name: str, shape: Shape) -> PackedTensor:
    """Stored [..., out, in], for a tensor [..., in, out]. Every value is exact in bfloat16."""
    blocks, scales = packed_shapes(shape)
    return PackedTensor(
        (Part(name + BLOCKS, blocks, ("uint8",)), Part(name + SCALES, scales, ("uint8",))),
        decode_mxfp4,
    )


def packed_shapes(shape: Shape) -> tuple[Shape, Shape]:
    """Shapes of MXFP4's blocks and scales, stored [..., out, in], for a tensor [..., in, out]."""
    *lead, inputs, outputs = shape
    groups = inputs // GROUP
    return (*lead, outputs, groups, GROUP // 2), (*lead, outputs, groups)


def decode_mxfp4(xp: Any, blocks: Any, scales: Any) -> Any:
    """Decode the tensor [..., in, out], in bfloat16."""
    powers = xp.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS).astype(ml_dtypes.bfloat16)
    pairs = xp.asarray(_PAIRS.astype(ml_dtypes.bfloat16))
    values = pairs[blocks].reshape(*scales.shape, GROUP) * powers[..., None]
    return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)


def _words(count: int, bits: int) -> int:
    return -(-count * bits // _WORD)


def _groups(info: TensorInfo | None, name: str, shape: Shape, axis: int = 1) -> int:
    """How many groups of inputs have scales of their own."""
    found = info.shape if info else ()
    if len(found) != 2 or not found[axis] or shape[1] % found[axis]:
        raise InputError(f"{name} has shape {list(found)}, for {list(shape)}")
    return found[axis]


def _group_of(inputs: int, groups: int) -> np.ndarray:
    return np.arange(inputs) // (inputs // groups)


def _unpacked(xp: Any, words: Any, bits: int) -> Any:
    """The values in the last axis of 32-bit words, the lowest bits first."""
    shifts = np.arange(0, _WORD, bits, dtype=np.int32).reshape(*[1] * words.ndim, -1)
    values = xp.right_shift(words[..., None], shifts) & np.int32(2**bits - 1)
    return values.reshape(*words.shape[:-1], -1)


def _times(xp: Any, values: Any, scale: Any) -> Any:
    """Small whole numbers times their scales, rounded once to the scales' dtype."""
    return (values.astype(np.float32) * scale.astype(np.float32)).astype(scale.dtype)


# -- what a config says ----------------------------------------------------------------------------


def read_quantization(values: Mapping[str, Any], where: str) -> Quantization | None:
    """Read `quantization_config`; refuse by name what cannot be decoded.

    Raises:
        InputError: if the format, or one of its settings, is not known.
    """
    found: Any = values.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise InputError(f"{where}: quantization_config must be an object, got {found!r}")
    given = cast("Mapping[str, Any]", found)
    method = str(given.get("quant_method"))

    def refuse(key: str, known: str) -> InputError:
        return InputError(
            f"{where}: quantization_config has {key} {given.get(key)!r}; Spile decodes {known}"
        )

    match method:
        case "mxfp4":
            return Quantization(method)
        case "fp8":
            sizes: Any = given.get("weight_block_size")
            block = cast("list[Any]", sizes) if isinstance(sizes, list) else []
            if len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
                raise refuse("weight_block_size", "a pair of sizes, such as [128, 128]")
            if given.get("fmt") not in (None, "e4m3"):
                raise refuse("fmt", "e4m3")
            return Quantization(method, block=(block[0], block[1]))
        case "gptq":
            if given.get("bits") not in (4, 8):
                raise refuse("bits", "4 and 8")
            form = given.get("checkpoint_format") or "gptq"
            if form not in ("gptq", "gptq_v2"):
                raise refuse("checkpoint_format", "gptq and gptq_v2")
            return Quantization(method, bits=given["bits"], zero_offset=int(form == "gptq"))
        case "awq":
            if given.get("bits", given.get("w_bit")) != 4:
                raise refuse("bits", "4")
            if str(given.get("version", "gemm")).lower() != "gemm":
                raise refuse("version", "gemm")
            if given.get("zero_point", True) is not True:
                raise refuse("zero_point", "true")
            return Quantization(method, bits=4)
        case "compressed-tensors":
            return _compressed(given, refuse)
        case _:
            raise refuse("quant_method", "fp8, compressed-tensors, gptq, awq and gpt-oss' mxfp4")


def _compressed(given: Mapping[str, Any], refuse: Callable[[str, str], InputError]) -> Quantization:
    form = given.get("format")
    known = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
    if form not in known:
        raise refuse("format", ", ".join(known))
    if given.get("sparsity_config") not in (None, {}):
        raise refuse("sparsity_config", "none")

    def inside(outer: Any) -> Mapping[str, Any]:
        return cast("Mapping[str, Any]", outer) if isinstance(outer, Mapping) else {}

    groups = inside(given.get("config_groups")).values()
    widths = {inside(inside(group).get("weights")).get("num_bits") for group in groups}
    if form == "pack-quantized" and (len(widths) != 1 or not widths <= {4, 8}):
        raise refuse("config_groups", "weights of 4 or of 8 bits, one of them in all groups")
    return Quantization("compressed-tensors", bits=4 if widths == {4} else 8)
