"""Packed weights, compared with their libraries' decoders or the published layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import spile
from spile.core.errors import InputError
from spile.core.tensors import TensorInfo, map_tensor, read_header, write_tensors
from spile.models.files import quantized as mxfp4
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.quantized import Quantization, read_quantization
from spile.models.forward.weight_loader import ArrayLoader, load_params
from spile.models.forward.weights import LayerSchedule
from support import families, tiny
from support.marks import some


def random_packed(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and scales of a tensor of this shape; scales as far as bfloat16 reaches."""
    blocks, scales = mxfp4.packed_shapes(shape)
    return (
        rng.integers(0, 256, blocks, dtype=np.uint8),
        rng.integers(10, 240, scales, dtype=np.uint8),
    )


def test_values_are_those_transformers_decodes() -> None:
    blocks, scales = random_packed(np.random.default_rng(0), 3, 64, 20)
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
    ours = mxfp4.decode_mxfp4(np, blocks, scales)
    assert ours.shape == tuple(theirs.shape) == (3, 64, 20)
    assert np.array_equal(ours.astype(np.float32), theirs.float().numpy())
    assert len(np.unique(ours[0, :32, 0].astype(np.float32))) <= 16


def test_a_packed_checkpoint_loads_as_its_decoded_self(tmp_path: Path) -> None:
    changes = {"hidden_size": 64, "intermediate_size": 32}
    model = families.randomised(lambda: families.FAMILIES["gptoss-gqa"](**changes))
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for directory in (plain, packed):
        model.save_pretrained(directory)
        tiny.write_tokenizer(directory)
    tensors = {
        name: np.array(map_tensor(plain / "model.safetensors", info))
        for name, info in read_header(plain / "model.safetensors").items()
    }
    rng, small = np.random.default_rng(1), {}
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = random_packed(rng, *tensors[name].shape)
        scales[...] = 120
        tensors[name] = mxfp4.decode_mxfp4(np, blocks, scales).astype(np.float32)
        small |= {name + mxfp4.BLOCKS: blocks, name + mxfp4.SCALES: scales}
    others = {n: a for n, a in tensors.items() if n + mxfp4.BLOCKS not in small}
    for directory, content in ((plain, tensors), (packed, others | small)):
        (directory / "model.safetensors").unlink()
        write_tensors(directory / "model.safetensors", content)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))

    loaded = []
    for directory in (plain, packed):
        checkpoint = open_checkpoint(str(directory))
        schedule = LayerSchedule.of(checkpoint.arch, 2, whole=True)
        params, digests = load_params(
            checkpoint, schedule, head=False, dtype=jnp.dtype(jnp.float32)
        )
        assert any(name.endswith(mxfp4.SCALES) for name in digests) is (directory == packed)
        loaded.append(params)
    for name, array in loaded[0].cycle[0].items():
        assert np.array_equal(array, loaded[1].cycle[0][name]), name
    stored = {n: a.nbytes for n, a in small.items() if ".layers.0." in n}
    checkpoint = open_checkpoint(str(packed))
    assert sum(checkpoint.packed_bytes().values()) == sum(stored.values())
    loader = ArrayLoader(checkpoint, schedule, jnp.dtype(jnp.float32), None)
    block = loader.put_block(1, loader.host_block(1))
    assert {n: block[n].nbytes for n in stored} == stored, "gate and up are one tensor: copied once"

    config["quantization_config"] = {"quant_method": "hqq"}
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="quantization_config"):
        open_checkpoint(str(packed))


def test_packed_tensors_of_the_wrong_shape_are_refused(tmp_path: Path) -> None:
    model = families.randomised(
        lambda: families.FAMILIES["gptoss-gqa"](hidden_size=64, intermediate_size=32)
    )
    model.save_pretrained(tmp_path)
    tiny.write_tokenizer(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: np.array(map_tensor(path, info)) for name, info in read_header(path).items()}
    name = "model.layers.0.mlp.experts.down_proj"
    blocks, scales = random_packed(np.random.default_rng(2), *tensors.pop(name).shape)
    path.unlink()
    write_tensors(path, {**tensors, name + mxfp4.BLOCKS: blocks, name + mxfp4.SCALES: scales[:1]})
    with pytest.raises(InputError, match="down_proj_scales has shape"):
        open_checkpoint(str(tmp_path))


# -- the others, in any family ---------------------------------------------------------------------

ROWS, COLUMNS, EACH = 64, 96, 32


def words(values: np.ndarray, bits: int) -> np.ndarray:
    """Whole numbers, packed into 32-bit words along the last axis, the lowest bits first."""
    each = 32 // bits
    padded = np.pad(values, [*[(0, 0)] * (values.ndim - 1), (0, -values.shape[-1] % each)])
    grouped = padded.reshape(*padded.shape[:-1], -1, each).astype(np.uint64)
    packed = np.bitwise_or.reduce(
        grouped << (np.uint64(bits) * np.arange(each, dtype=np.uint64)), -1
    )
    return packed.astype(np.uint32).view(np.int32)


def fp8(rng: np.random.Generator, rows: int, columns: int) -> Any:
    """Weights in float8, decoded by transformers."""
    weight = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.01, 0.1, (rows // 16, columns // 16)).astype(np.float32)
    ours = torch.tensor(weight.astype(np.float32))
    wanted = Fp8Dequantize(None)._dequantize_one(ours, torch.tensor(scale), torch.float32).numpy()
    return {"weight": weight, "weight_scale_inv": scale}, wanted


def channels(rng: np.random.Generator, rows: int, columns: int, dtype: Any = np.int8) -> Any:
    """As compressed-tensors decodes it: eight bits, a scale for each row."""
    if dtype == np.int8:
        weight = rng.integers(-127, 128, (rows, columns)).astype(dtype)
    else:
        weight = rng.standard_normal((rows, columns)).astype(dtype)
    scale = rng.uniform(0.01, 0.1, (rows, 1)).astype(ml_dtypes.bfloat16)
    kind = QuantizationType.INT if dtype == np.int8 else QuantizationType.FLOAT
    by_row = QuantizationStrategy.CHANNEL
    args = QuantizationArgs(num_bits=8, type=kind, strategy=by_row, symmetric=True)
    wanted = by_compressed_tensors(weight.astype(np.float32), scale, None, args)
    return {"weight": weight, "weight_scale": scale}, wanted


def float_channels(rng: np.random.Generator, rows: int, columns: int) -> Any:
    return channels(rng, rows, columns, ml_dtypes.float8_e4m3fn)


def packed_groups(rng: np.random.Generator, rows: int, columns: int, *, zeros: bool = False) -> Any:
    """As compressed-tensors packs and decodes it: four bits, a scale for each group."""
    values = rng.integers(-8, 8, (rows, columns)).astype(np.int8)
    scale = rng.uniform(0.01, 0.1, (rows, columns // EACH)).astype(ml_dtypes.bfloat16)
    zero = rng.integers(-8, 8, scale.shape).astype(np.int8) if zeros else None
    args = QuantizationArgs(
        num_bits=4,
        type=QuantizationType.INT,
        strategy=QuantizationStrategy.GROUP,
        group_size=EACH,
        symmetric=not zeros,
    )
    stored = {
        "weight_packed": pack_to_int32(torch.tensor(values), 4).numpy(),
        "weight_scale": scale,
        "weight_shape": np.array([rows, columns], np.int64),
    }
    if zero is not None:
        packed = pack_to_int32(torch.tensor(zero), 4, packed_dim=0)
        stored["weight_zero_point"] = packed.contiguous().numpy()
    return stored, by_compressed_tensors(values.astype(np.float32), scale, zero, args)


def packed_with_zeros(rng: np.random.Generator, rows: int, columns: int) -> Any:
    return packed_groups(rng, rows, columns, zeros=True)


def by_compressed_tensors(
    values: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, args: Any
) -> np.ndarray:
    half = torch.tensor(scale.astype(np.float32)).to(torch.bfloat16)
    zeros = None if zero is None else torch.tensor(zero)
    found = dequantize(torch.tensor(values), half, zeros, args)
    assert found.dtype == torch.bfloat16
    return found.float().numpy()


def gptq(rng: np.random.Generator, rows: int, columns: int, *, offset: int = 1) -> Any:
    """Decoded by the published layout: its library has no wheel for every machine."""
    values = rng.integers(0, 16, (rows, columns))
    zeros = rng.integers(1, 16, (rows, columns // EACH))
    scale = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    group = rng.permutation(np.arange(columns) // EACH).astype(np.int32)
    stored = {
        "qweight": np.ascontiguousarray(words(values, 4).T),
        "qzeros": words(zeros.T - offset, 4),
        "scales": np.ascontiguousarray(scale.T),
        "g_idx": group,
    }
    wanted = (values - zeros[:, group]).astype(np.float16) * scale[:, group]
    return stored, wanted.astype(np.float32)


def gptq_v2(rng: np.random.Generator, rows: int, columns: int) -> Any:
    return gptq(rng, rows, columns, offset=0)


def awq(rng: np.random.Generator, rows: int, columns: int) -> Any:
    """Decoded by the published layout: eight outputs are stored in the order 0 2 4 6 1 3 5 7."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    values = rng.integers(0, 16, (columns, rows))
    zeros = rng.integers(0, 16, (columns // EACH, rows))
    scale = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)

    def packed(given: np.ndarray) -> np.ndarray:
        return words(given.reshape(len(given), -1, 8)[:, :, order].reshape(len(given), -1), 4)

    group = np.arange(columns) // EACH
    wanted = (values - zeros[group]).astype(np.float16) * scale[group]
    stored = {"qweight": packed(values), "qzeros": packed(zeros), "scales": scale}
    return stored, wanted.T.astype(np.float32)


INT4 = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}
FORMATS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "int8 by channel": (
        channels, {"quant_method": "compressed-tensors", "format": "int-quantized"},
    ),
    "fp8 by channel": (
        float_channels, {"quant_method": "compressed-tensors", "format": "float-quantized"},
    ),
    "int4 by group": (
        packed_groups,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": INT4},
    ),
    "int4 with zeros": (
        packed_with_zeros,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": INT4},
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": EACH}),
    "gptq v2": (gptq_v2, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
def test_a_packed_matrix_is_decoded_as_by_its_reference(kind: str, library: Any) -> None:
    make, settings = FORMATS[kind]
    stored, wanted = make(np.random.default_rng(3), ROWS, COLUMNS)
    way = read_quantization({"quantization_config": settings}, "test")
    assert way
    tensors = {f"a.{n}": (Path(), TensorInfo(n, a.dtype, a.shape, 0, 0)) for n, a in stored.items()}
    packed = way.packed("a.weight", (ROWS, COLUMNS), tensors)
    assert packed
    assert {part.name: part.shape for part in packed.parts} == {
        name: info.shape for name, (_, info) in tensors.items()
    }
    found = packed.decode(library, *(library.asarray(stored[p.name[2:]]) for p in packed.parts))
    assert found.shape == (ROWS, COLUMNS)
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted)


@pytest.mark.parametrize("kind", some(FORMATS, "gptq"))
def test_rows_of_a_packed_model_are_those_of_its_decoded_self(kind: str, tmp_path: Path) -> None:
    make, settings = FORMATS[kind]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    plain = tiny.write_model(tmp_path / "plain", **sizes)
    packed = tiny.write_model(tmp_path / "packed", **sizes, quantization_config=settings)
    tensors = tiny.random_tensors({**tiny.CONFIG, **sizes})
    rng, small, decoded = np.random.default_rng(4), dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.ndim == 2:
            stored, decoded[name] = make(rng, *tensor.shape)
            del small[name]
            small |= {f"{name.removesuffix('weight')}{part}": a for part, a in stored.items()}
    for folder, content in ((plain, decoded), (packed, small)):
        (folder / "model.safetensors").unlink()
        write_tensors(folder / "model.safetensors", content)
    corpus = tiny.write_corpus(tmp_path / "docs.jsonl", 8)
    found = []
    for folder, kept in ((plain, "resident"), (packed, "resident"), (packed, "disk")):
        out = tmp_path / f"{folder.name}-{kept}"
        spile.extract(
            spile.Recipe(model=str(folder), corpus=str(corpus), taps="resid_post:all", seq_len=64,
                         store_dtype="float32"),
            out, spile.Runtime(weights=kept),
        )  # fmt: skip
        ds = spile.open(out)
        found.append(ds.read("resid_post.2", 0, ds.num_tokens))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_deepseek_as_published_is_read_with_its_extra_layer(tmp_path: Path) -> None:
    """Keys and values of all heads lie in one packed tensor, after a latent and keys' last part."""
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 2, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "intermediate_size": 32,
    }  # fmt: skip
    families.save(
        families.randomised(lambda: families.FAMILIES["deepseek3"](**sizes)), tmp_path / "plain"
    )
    (file,) = (tmp_path / "plain").glob("*.safetensors")
    tensors = {name: map_tensor(file, info) for name, info in read_header(file).items()}
    rng, small, decoded = np.random.default_rng(4), dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "_proj" in name:
            stored, decoded[name] = fp8(rng, *tensor.shape)
            del small[name]
            small |= {f"{name.removesuffix('weight')}{part}": a for part, a in stored.items()}
    own = {name: array for name, array in small.items() if ".layers.1." in name}
    small |= {name.replace(".layers.1.", ".layers.61."): array for name, array in own.items()}
    small["model.layers.61.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    config = json.loads((tmp_path / "plain/config.json").read_text())
    config["quantization_config"] = FORMATS["fp8"][1]
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/config.json").write_text(json.dumps(config))
    file.unlink()
    write_tensors(file, decoded)
    write_tensors(tmp_path / "packed/model.safetensors", small)
    found = []
    for folder in ("plain", "packed"):
        tiny.write_tokenizer(tmp_path / folder)
        checkpoint = open_checkpoint(str(tmp_path / folder))
        schedule = LayerSchedule.of(checkpoint.arch, 2, whole=True)
        params, _ = load_params(checkpoint, schedule, head=True, dtype=jnp.dtype("float32"))
        found.append(params)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, found), strict=True))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3; Spile decodes 4 and 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        ("int4", "must be an object"),
    ],
)
def test_a_form_that_is_not_understood_is_refused_by_name(settings: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_quantization({"quantization_config": settings}, "config.json")


def test_scales_of_another_shape_are_refused() -> None:
    stored, _ = gptq(np.random.default_rng(5), ROWS, COLUMNS)
    stored["scales"] = stored["scales"][:2, :]
    tensors = {f"a.{n}": (Path(), TensorInfo(n, a.dtype, a.shape, 0, 0)) for n, a in stored.items()}
    way = Quantization("gptq", bits=4, zero_offset=1)
    packed = way.packed("a.weight", (ROWS, COLUMNS), tensors)
    assert packed
    assert (
        tensors["a.qzeros"][1].shape != packed.parts[1].shape
    )  # which a checkpoint is refused for
    stored["scales"] = stored["scales"][:0, :]
    tensors["a.scales"] = (Path(), TensorInfo("", np.dtype(np.float16), (5, ROWS), 0, 0))
    with pytest.raises(InputError, match="a.scales has shape"):
        way.packed("a.weight", (ROWS, COLUMNS), tensors)
