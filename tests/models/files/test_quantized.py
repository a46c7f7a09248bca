"""gpt-oss' 4-bit weights, against transformers' own decoder."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import families
import tiny
from spile.core.errors import InputError
from spile.core.tensors import map_tensor, read_header, write_tensors
from spile.models.files import quantized as mxfp4
from spile.models.files.checkpoint import open_checkpoint
from spile.models.forward.weights import LayerSchedule, load_params


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
    ours = mxfp4.decode(blocks, scales)
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
        tensors[name] = mxfp4.decode(blocks, scales).astype(np.float32)
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

    config["quantization_config"] = {"quant_method": "gptq"}
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
