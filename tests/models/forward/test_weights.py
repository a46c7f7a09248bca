"""Weights on the device equal those of the reference's modules, array by array, exactly."""

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import xxhash

from spile.core.errors import Interrupted
from spile.core.tensors import TensorInfo, as_bytes, write_tensors
from spile.core.threads import cancelled_by
from spile.models.config.arch import Arch, Experts
from spile.models.config.family import Family
from spile.models.config.hf_config import read_config
from spile.models.config.specs import block_specs
from spile.models.files.checkpoint import Checkpoint, open_checkpoint
from spile.models.files.safetensors import read_tensor
from spile.models.forward.ops import Float8Weight
from spile.models.forward.weight_loader import ArrayLoader, ShardBuffer, load_params
from spile.models.forward.weights import LayerSchedule, Params, abstract_params
from spile.objects.paths import AnyPath, RemotePath
from support import families, tiny
from support.marks import some
from support.remote import Counting
from support.stops import StopAtLook

# Three blocks of two kinds in turn: one period, and what does not fill another.
THREE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
# their weights are those of another variant
SAME = ("rope", "yarn", "window", "partial-rotary", "nocap", "unnormed", "sequential")
EVERY: dict[str, Callable[..., Any]] = {
    **{
        name: make
        for name, make in families.FAMILIES.items()
        if name not in families.REFUSED and not name.endswith(SAME)
    },
    "gemma3-multimodal": partial(families.gemma3_multimodal, **THREE),
}
# The modules of these are looked up by name; of every family, numbers are counted.
LOOKED_UP = ("llama-", "mistral", "qwen2-", "qwen3-", "gemma-", "gemma2", "gemma3", "gpt2", "neox",
             "phi3", "olmo2", "mixtral", "qwen3moe", "gptoss", "starcoder2")  # fmt: skip
VARIANTS = {
    name: make
    for name, make in EVERY.items()
    if f"{name}-".startswith(LOOKED_UP) and name != "qwen3moe-mqa-mixed"
}
# One of each way in which blocks are held: before the scan, in it, after it; numbers by block.
FEW_COUNTED = ("gemma4-gqa",)
# families whose tensors differ in names or number
FEW = ("llama-mqa-bias", "gemma2-gqa", "gemma3-multimodal", "gpt2-inner-untied",
       "neox-tied-unbiased", "phi3-gqa", "mixtral-gqa", "gptoss-gqa")  # fmt: skip
FLOAT32 = jnp.dtype(jnp.float32)
FUSED = ("gpt2", "neox", "phi3-gqa", "phi3-mqa", "gptoss-gqa")
FEW_FUSED = ("neox", "phi3-mqa", "gptoss-gqa")


def saved(make: Callable[[], Any], directory: Path) -> tuple[Any, Checkpoint]:
    """A random model of transformers, and its checkpoint on disk."""
    model = families.randomised(make)
    families.save(model, directory)
    tiny.write_tokenizer(directory)
    return model, open_checkpoint(str(directory))


def load(
    checkpoint: Checkpoint, depth: int | None = None, *, whole: bool = True, head: bool = True
) -> tuple[Params, dict[str, str]]:
    arch = checkpoint.arch
    schedule = LayerSchedule.of(arch, arch.num_layers if depth is None else depth, whole=whole)
    return load_params(checkpoint, schedule, head=head, dtype=FLOAT32)


def blocks_of(params: Params, arch: Arch) -> list[dict[str, np.ndarray]]:
    """Yield weights block by block, in order; those of the scan are stacked over its cycles."""
    cycles = len(next(iter(params.cycle[0].values()))) if params.cycle else 0
    scanned = [
        {name: np.asarray(array)[cycle] for name, array in place.items()}
        for cycle in range(cycles)
        for place in params.cycle
    ]
    assert len(params.cycle) in (0, arch.period)
    lead, tail = (
        [{n: np.asarray(array) for n, array in block.items()} for block in blocks]
        for blocks in (params.lead, params.tail)
    )
    return lead + scanned + tail


def _linear(module: Any, name: str) -> dict[str, torch.Tensor]:
    found = {f"w{name}": module.weight}
    return found if module.bias is None else {**found, f"b{name}": module.bias}


def _norm(module: Any, name: str) -> dict[str, torch.Tensor]:
    bias = getattr(module, "bias", None)
    return {name: module.weight} if bias is None else {name: module.weight, f"{name}_bias": bias}


def _split(
    module: Any, split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], *names: str
) -> dict[str, torch.Tensor]:
    """Arrays of a fused layer, out of what it gives for each unit vector and for none.

    `split` is applied to outputs, as the reference's forward pass does.
    """
    inputs = module.weight.shape[0 if type(module).__name__ == "Conv1D" else 1]
    none = split(module(torch.zeros(1, inputs)))
    units = split(module(torch.eye(inputs)))
    biased = getattr(module, "bias", None) is not None
    found: dict[str, torch.Tensor] = {}
    for name, unit, bias in zip(names, units, none, strict=True):
        rows, flat = unit.reshape(inputs, -1), bias.reshape(-1)
        found |= {f"w{name}": (rows - flat).T, **({f"b{name}": flat} if biased else {})}
    return found


def expected_attention(attention: Any, arch: Arch) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    if hasattr(attention, "q_proj"):
        for name in "qkv":
            found |= _linear(getattr(attention, f"{name}_proj"), name)
    elif hasattr(attention, "c_attn"):
        split = partial(torch.split, split_size_or_sections=attention.split_size, dim=-1)
        found |= _split(attention.c_attn, split, "q", "k", "v")
    elif hasattr(attention, "query_key_value"):

        def by_head(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return out.view(len(out), -1, 3 * attention.head_size).chunk(3, dim=-1)

        found |= _split(attention.query_key_value, by_head, "q", "k", "v")
    else:
        sizes = [n * arch.head_dim for n in (arch.num_heads, *[arch.num_kv_heads] * 2)]
        split = partial(torch.split, split_size_or_sections=sizes, dim=-1)
        found |= _split(attention.qkv_proj, split, "q", "k", "v")
    for name in ("o_proj", "c_proj", "dense"):
        if hasattr(attention, name):
            found |= _linear(getattr(attention, name), "o")
    if type(getattr(attention, "c_proj", None)).__name__ == "Conv1D":
        found["wo"] = found["wo"].T
    for name in ("q_norm", "k_norm", "sinks"):
        if (part := getattr(attention, name, None)) is not None:
            found[name] = part if name == "sinks" else part.weight
    return found


def expected_mlp(mlp: Any) -> dict[str, torch.Tensor]:
    if hasattr(mlp, "experts"):
        return _expected_experts(mlp)
    found: dict[str, torch.Tensor] = {}
    if hasattr(mlp, "gate_up_proj"):
        found |= _split(mlp.gate_up_proj, partial(torch.chunk, chunks=2, dim=-1), "_gate", "_up")
    ours = {
        "gate_proj": "_gate", "up_proj": "_up", "down_proj": "_down", "c_fc": "_up",
        "c_proj": "_down", "dense_h_to_4h": "_up", "dense_4h_to_h": "_down",
    }  # fmt: skip
    for name, module in mlp.named_children():
        if name in ours:
            found |= _linear(module, ours[name])
            if type(module).__name__ == "Conv1D":
                found[f"w{ours[name]}"] = module.weight.T
    return found


def _expected_experts(mlp: Any) -> dict[str, torch.Tensor]:
    experts = mlp.experts
    router = _norm(mlp.router if hasattr(mlp, "router") else mlp.gate, "w_router")
    found = {name.replace("w_router_bias", "b_router"): array for name, array in router.items()}
    if hasattr(experts, "gate_up_proj_bias"):  # gpt-oss: [expert, in, out], gate and up alternate
        both, bias = experts.gate_up_proj, experts.gate_up_proj_bias
        return found | {
            "w_gate": both[..., ::2].mT, "w_up": both[..., 1::2].mT, "b_gate": bias[..., ::2],
            "b_up": bias[..., 1::2], "w_down": experts.down_proj.mT,
            "b_down": experts.down_proj_bias,
        }  # fmt: skip
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    return found | {"w_gate": gate, "w_up": up, "w_down": experts.down_proj}


def expected_block(block: Any, arch: Arch) -> dict[str, torch.Tensor]:
    norms = {
        "input_layernorm": "attn_norm", "ln_1": "attn_norm", "ln_2": "mlp_norm",
        "post_attention_layernorm": "mlp_norm", "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    }  # fmt: skip
    if hasattr(block, "post_feedforward_layernorm"):  # Gemma 2, Gemma 3 and OLMo 2
        norms["post_attention_layernorm"] = "attn_post_norm"
    found: dict[str, torch.Tensor] = {}
    for name, module in block.named_children():
        if name in norms:
            found |= _norm(module, norms[name])
        elif name in ("self_attn", "attention", "attn"):
            found |= expected_attention(module, arch)
        elif name == "mlp":
            found |= expected_mlp(module)
    return found


def expected_outer(model: Any, base: Any, arch: Arch) -> dict[str, torch.Tensor]:
    norm = next(getattr(base, n) for n in ("norm", "ln_f", "final_layer_norm") if hasattr(base, n))
    found = {"embed": base.get_input_embeddings().weight, **_norm(norm, "final_norm")}
    if hasattr(base, "wpe"):
        found["positions"] = base.wpe.weight
    if not arch.tied_head:
        found["head"] = model.get_output_embeddings().weight
    return found


def assert_same(
    found: Mapping[str, Any], wanted: Mapping[str, torch.Tensor], family: Family
) -> None:
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        ours, theirs = np.asarray(found[name]), array.detach().numpy()
        assert ours.dtype == np.float32
        # what a fused layer gives has its bias in it, and is rounded with it
        tolerance = 1e-6 if name in family.weights and family.weights[name].parts else 0
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", some(VARIANTS, *FEW))
def test_arrays_are_those_of_the_references_modules(name: str, tmp_path: Path) -> None:
    model, checkpoint = saved(VARIANTS[name], tmp_path)
    arch = checkpoint.arch
    params, digests = load(checkpoint)
    base = getattr(model.base_model, "language_model", model.base_model)
    assert_same(params.outer, expected_outer(model, base, arch), checkpoint.family)
    blocks = blocks_of(params, arch)
    theirs = base.h if hasattr(base, "h") else base.layers
    assert len(blocks) == len(theirs) == arch.num_layers
    for ours, block in zip(blocks, theirs, strict=True):
        assert_same(ours, expected_block(block, arch), checkpoint.family)
    assert set(digests) == set(checkpoint.shapes())


def numbers(arrays: Iterable[Any]) -> np.ndarray:
    """Return all values, sorted: no two random tensors are alike."""
    flat = [np.asarray(array, np.float32).ravel() for array in arrays]
    return np.sort(np.concatenate(flat))


def learned(module: Any) -> dict[int, np.ndarray]:
    """The parameters of a module, each once, and the buffers that are stored beside them."""
    kept = module.state_dict(keep_vars=True)
    # (xIELU's constants, which are stored, too)
    named = {n: tensor for n, tensor in kept.items() if not n.endswith(("act_fn.beta", "fn.eps"))}
    return {id(tensor): tensor.detach().numpy() for tensor in named.values()}


@pytest.mark.parametrize("name", some(EVERY, *FEW_COUNTED))
def test_every_number_of_the_reference_is_in_one_array_of_its_block(
    name: str, tmp_path: Path
) -> None:
    """tests/models/forward/test_decoder.py checks tap by tap that it is the right one."""
    model, checkpoint = saved(EVERY[name], tmp_path)
    arch = checkpoint.arch
    params, _ = load(checkpoint)
    base = model.model if model.base_model is model else model.base_model
    base = getattr(base, "language_model", base)
    base = getattr(base, "decoder", base)
    theirs = next(getattr(base, n) for n in ("layers", "h", "blocks") if hasattr(base, n))
    blocks = blocks_of(params, arch)
    assert len(blocks) == len(theirs) == arch.num_layers
    for layer, (ours, block) in enumerate(zip(blocks, theirs, strict=True)):
        specs = {spec.name: spec.shape for spec in block_specs(arch, arch.layers[layer])}
        assert {name: array.shape for name, array in ours.items()} == specs
        assert np.array_equal(numbers(ours.values()), numbers(learned(block).values())), layer
    outside = {**learned(base), **learned(model.get_output_embeddings())}
    for number in learned(theirs):
        del outside[number]
    assert np.array_equal(numbers(params.outer.values()), numbers(outside.values()))


@pytest.mark.parametrize("name", some(FUSED, *FEW_FUSED))
def test_parts_of_a_fused_tensor_are_exact_to_the_bit(name: str, tmp_path: Path) -> None:
    """The tolerance above is for the sums of the test alone."""
    _, checkpoint = saved(VARIANTS[name], tmp_path)
    blocks = blocks_of(load(checkpoint)[0], checkpoint.arch)
    for layer, block in enumerate(blocks):
        fused = {n: s for n, s in checkpoint.family.weights.items() if s.parts and n in block}
        assert fused
        for tensor in {source.name for source in fused.values()}:
            stored = checkpoint.prefix + tensor.format(layer=layer)
            whole = read_tensor(*checkpoint.tensors[stored])
            parts = [block[n].ravel() for n, source in fused.items() if source.name == tensor]
            assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(whole.ravel()))


@pytest.mark.parametrize(
    "name", some(["three", "llama-gqa", "gemma3-gqa", "gemma2-gqa", "gpt2"], "three")
)
def test_only_the_blocks_that_will_run_are_read(name: str, tmp_path: Path) -> None:
    three = partial(VARIANTS["gemma3-gqa"], **THREE)
    _, checkpoint = saved({**VARIANTS, "three": three}[name], tmp_path)
    arch = checkpoint.arch
    every = blocks_of(load(checkpoint)[0], arch)
    stem = checkpoint.prefix + ("h." if name == "gpt2" else "layers.")
    for depth in range(arch.num_layers + 1):
        for whole in (True, False):
            params, digests = load(checkpoint, depth, whole=whole, head=False)
            assert not {"final_norm", "final_norm_bias", "head"} & set(params.outer)
            assert "embed" in params.outer
            read = {n.removeprefix(stem).split(".")[0] for n in digests if n.startswith(stem)}
            assert read == {str(layer) for layer in range(depth)}
            blocks = blocks_of(params, arch)
            assert len(blocks) == depth
            for block, wanted in zip(blocks, every, strict=False):
                assert all(np.array_equal(block[n], wanted[n]) for n in wanted)
            if not whole and depth:
                assert params.tail, "the last block stands apart"


def test_digests_are_of_the_stored_bytes_and_there_is_one_for_each_tensor(tmp_path: Path) -> None:
    for name in ("gpt2", "mixtral-gqa", "phi3-gqa"):
        _, checkpoint = saved(VARIANTS[name], tmp_path / name)
        _, digests = load(checkpoint)
        assert digests == {
            stored: xxhash.xxh3_128_hexdigest(as_bytes(read_tensor(path, info)))
            for stored, (path, info) in checkpoint.tensors.items()
        }


def write(directory: Path, tensors: dict[str, np.ndarray], parts: int = 1) -> Checkpoint:
    """The tiny Llama with these tensors, in as many files."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny.CONFIG))
    tiny.write_tokenizer(directory)
    if parts == 1:
        write_tensors(directory / "model.safetensors", tensors)
        return open_checkpoint(str(directory))
    weight_map: dict[str, str] = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        own = {name: tensors[name] for name in sorted(tensors)[part::parts]}
        write_tensors(directory / file, own)
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return open_checkpoint(str(directory))


def leaves(params: Params, arch: Arch) -> list[np.ndarray]:
    outer = [np.asarray(array) for _, array in sorted(params.outer.items())]
    return outer + [a for b in blocks_of(params, arch) for _, a in sorted(b.items())]


def test_floats_of_any_width_load_to_the_same_values(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    # few enough bits for all three
    exact = {
        name: rng.integers(-64, 64, array.shape).astype(np.float32) / 64
        for name, array in tiny.random_tensors(tiny.CONFIG).items()
    }
    loaded = []
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        cast = {name: array.astype(dtype) for name, array in exact.items()}
        checkpoint = write(tmp_path / np.dtype(dtype).name, cast)
        loaded.append(leaves(load(checkpoint)[0], checkpoint.arch))
    for wanted, *others in zip(*loaded, strict=True):
        assert len(np.unique(wanted)) > 20
        assert all(np.array_equal(wanted, other) for other in others)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_are_of_the_dtype_that_is_computed_in(dtype: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "model", tiny.random_tensors(tiny.CONFIG))
    schedule = LayerSchedule.of(checkpoint.arch, 3, whole=True)
    params, _ = load_params(checkpoint, schedule, head=True, dtype=jnp.dtype(dtype))
    assert {str(a.dtype) for a in params.outer.values()} == {dtype}
    assert {str(a.dtype) for block in params.cycle for a in block.values()} == {dtype}
    stored = read_tensor(*checkpoint.tensors["model.norm.weight"])
    assert np.array_equal(np.asarray(params.outer["final_norm"]), stored.astype(jnp.dtype(dtype)))


def test_matrices_are_of_float8_with_scales_and_the_rest_of_bfloat16(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "model", tiny.random_tensors(tiny.CONFIG))
    schedule = LayerSchedule.of(checkpoint.arch, 2, whole=True)
    params, _ = load_params(checkpoint, schedule, head=True, dtype=jnp.dtype(jnp.float8_e4m3fn))
    (block,) = params.cycle
    narrow = {name for name, array in block.items() if isinstance(array, Float8Weight)}
    assert narrow == {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"}
    others = [a for n, a in block.items() if n not in narrow] + [*params.outer.values()]
    assert {str(array.dtype) for array in others} == {"bfloat16"}
    exact, _ = load_params(checkpoint, schedule, head=True, dtype=jnp.dtype("float32"))
    for name in narrow:
        values, scale = block[name]
        found = np.asarray(values, np.float32) * np.asarray(scale)[..., None]
        wanted = np.asarray(exact.cycle[0][name])
        assert 0 < np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted), name


def test_matrices_are_of_float16_and_the_rest_of_float32(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "model", tiny.random_tensors(tiny.CONFIG))
    schedule = LayerSchedule.of(checkpoint.arch, 2, whole=True)
    params, _ = load_params(checkpoint, schedule, head=True, dtype=jnp.dtype("float16"))
    (block,) = params.cycle
    dtypes = {name: str(array.dtype) for name, array in (block | params.outer).items()}
    narrow = {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", "embed"}
    assert {name for name, dtype in dtypes.items() if dtype == "float16"} == narrow
    assert set(dtypes.values()) == {"float16", "float32"}
    same = abstract_params(checkpoint.arch, schedule, head=True, dtype=jnp.dtype("float16"))
    found = jax.tree.map(lambda array: (array.shape, array.dtype), (params, same))
    assert found[0] == found[1]


def test_experts_of_widths_that_no_kernel_takes_are_not_of_float8(tmp_path: Path) -> None:
    """The shared one is, and so is the plain MLP of the first layer. The router's correction is
    not rounded.
    """
    _, checkpoint = saved(EVERY["glm4moe-gqa"], tmp_path)
    schedule = LayerSchedule.of(checkpoint.arch, 4, whole=True)
    params, _ = load_params(checkpoint, schedule, head=True, dtype=jnp.dtype(jnp.float8_e4m3fn))
    (plain,), (routed,) = params.lead, params.cycle
    for block, stem in ((plain, "wd_"), (routed, "ws_")):
        narrow = {name for name, array in block.items() if isinstance(array, Float8Weight)}
        assert narrow == {"wq", "wk", "wv", "wo", *(stem + n for n in ("gate", "up", "down"))}
    assert {str(routed[name].dtype) for name in ("w_up", "w_router")} == {"bfloat16"}
    assert str(routed["correction"].dtype) == "float32"


def test_experts_are_of_float8_with_a_scale_for_each_channel_of_each() -> None:
    _, tiny_arch = read_config(tiny.CONFIG, "test")
    arch = replace(tiny_arch, width=256, mlp_width=192, experts=Experts(4, 2, normalised=True))
    schedule = LayerSchedule.of(arch, 2, whole=True)
    dtype = jnp.dtype(jnp.float8_e4m3fn)
    (block,) = abstract_params(arch, schedule, head=True, dtype=dtype).cycle
    for name in ("w_gate", "w_up"):
        assert (block[name].values.shape, block[name].scale.shape) == (
            (2, 4, 192, 256),
            (2, 4, 192),
        )
    assert block["w_down"].dtype == jnp.bfloat16  # 192 is not a multiple of 128


def test_many_files_load_as_one(tmp_path: Path) -> None:
    tensors = tiny.random_tensors(tiny.CONFIG)
    one, many = write(tmp_path / "one", tensors), write(tmp_path / "many", tensors, parts=3)
    assert (len(one.files), len(many.files)) == (1, 3)
    (first, digests), (second, others) = load(one), load(many)
    assert digests == others
    for a, b in zip(leaves(first, one.arch), leaves(second, many.arch), strict=True):
        assert np.array_equal(a, b)


def write_adapter(directory: Path, module: str, out: int, into: int) -> np.ndarray:
    """A LoRA of rank 2 on one module, as PEFT saves it; what it adds to the weight [out, in]."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, into), (out, 2)))
    stem = f"base_model.model.{module}.lora"
    write_tensors(
        directory / "adapter_model.safetensors", {f"{stem}_A.weight": a, f"{stem}_B.weight": b}
    )
    return 6 / 2 * b @ a


def test_a_merged_adapter_reaches_the_arrays_and_not_the_digests(tmp_path: Path) -> None:
    base = write(tmp_path / "model", tiny.random_tensors(tiny.CONFIG))
    change = write_adapter(tmp_path / "lora", "model.layers.1.self_attn.q_proj", 32, 32)
    merged = open_checkpoint(str(base.directory), str(tmp_path / "lora"))
    assert merged.identity() == {**base.identity(), "lora": merged.identity()["lora"]}
    (plain, digests), (tuned, others) = load(base), load(merged)
    assert digests == others, "they are of the files, which did not change"
    pairs = zip(blocks_of(plain, base.arch), blocks_of(tuned, base.arch), strict=True)
    for layer, (before, after) in enumerate(pairs):
        for name, array in before.items():
            if (layer, name) == (1, "wq"):
                np.testing.assert_allclose(after[name], array + change, rtol=1e-5, atol=1e-5)
                assert np.abs(change).max() > 1
            else:
                assert np.array_equal(after[name], array)


def test_an_adapter_of_a_fused_tensor_reaches_each_of_its_parts(tmp_path: Path) -> None:
    _, base = saved(VARIANTS["phi3-gqa"], tmp_path / "model")
    whole = write_adapter(tmp_path / "lora", "model.layers.0.self_attn.qkv_proj", 96, 48)
    merged = open_checkpoint(str(base.directory), str(tmp_path / "lora"))
    before = blocks_of(load(base)[0], base.arch)[0]
    after = blocks_of(load(merged)[0], base.arch)[0]
    for name, change in zip(("wq", "wk", "wv"), np.split(whole, [48, 72]), strict=True):
        np.testing.assert_allclose(after[name], before[name] + change, rtol=1e-5, atol=1e-5)
        assert np.abs(change).max() > 1
    assert np.array_equal(after["wo"], before["wo"])


def in_memory(directory: Path) -> tuple[Counting, Checkpoint]:
    """A model as if in a bucket, which records what was fetched."""
    objects = Counting()
    for path in directory.iterdir():
        objects.create(path.name, path.read_bytes())
    checkpoint = open_checkpoint(str(directory))
    tensors: dict[str, tuple[AnyPath, TensorInfo]] = {
        name: (RemotePath(objects, file.name), info)
        for name, (file, info) in checkpoint.tensors.items()
    }
    return objects, replace(checkpoint, tensors=tensors)


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "neox", "phi3-gqa", "gptoss-gqa", "mixtral"])
def test_weights_in_a_bucket_load_as_those_of_a_disk(name: str, tmp_path: Path) -> None:
    (name, *_) = [variant for variant in VARIANTS if variant.startswith(name)]
    _, local = saved(VARIANTS[name], tmp_path)
    _, remote = in_memory(tmp_path)
    check_same(load(remote), load(local))


def check_same(found: tuple[Params, dict[str, str]], wanted: tuple[Params, dict[str, str]]) -> None:
    assert found[1] == wanted[1]
    for one, other in zip(jax.tree.leaves(found[0]), jax.tree.leaves(wanted[0]), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_an_adapter_merges_into_a_whole_fused_tensor_of_a_bucket(tmp_path: Path) -> None:
    _, base = saved(VARIANTS["phi3-gqa"], tmp_path / "model")
    write_adapter(tmp_path / "lora", "model.layers.0.self_attn.qkv_proj", 96, 48)
    merged = open_checkpoint(str(base.directory), str(tmp_path / "lora"))
    _, remote = in_memory(tmp_path / "model")
    check_same(load(replace(remote, adapter=merged.adapter)), load(merged))


def test_only_used_weights_of_a_bucket_are_fetched_and_only_once(tmp_path: Path) -> None:
    tiny.write_model(tmp_path)
    objects, remote = in_memory(tmp_path)
    _, digests = load(remote, 1, head=False)
    used = [remote.tensors[name][1] for name in digests]
    assert sorted(objects.ranges) == sorted((info.start, info.stop) for info in used)
    assert "model.norm.weight" not in digests


@pytest.mark.parametrize(
    ("array", "index", "share"), [("wq", (slice(8, 16), slice(None)), 1 / 4),
                                  ("wo", (slice(None), slice(0, 8)), 1)],
)  # fmt: skip
def test_of_a_tensor_in_a_bucket_a_process_fetches_the_rows_it_holds(
    array: str, index: tuple[slice, ...], share: float, tmp_path: Path
) -> None:
    """Columns are scattered in the file, so everything between them is fetched, too."""
    tiny.write_model(tmp_path)
    objects, remote = in_memory(tmp_path)
    loading = ArrayLoader(remote, LayerSchedule.of(remote.arch, 1, whole=True), FLOAT32, None)
    spec = loading.blocks[array]
    tensor = read_tensor(*open_checkpoint(str(tmp_path)).tensors[remote.names(spec, 0)[0]])
    out = np.empty(tensor[index].shape, np.float32)
    loading._fill([ShardBuffer(out, index)], spec, 0)
    assert np.array_equal(out, tensor[index])
    assert share * tensor.nbytes * 0.9 <= objects.fetched <= share * tensor.nbytes


def test_loading_stops_once_the_run_is_cancelled(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny.write_model(tmp_path / "model")))
    schedule = LayerSchedule.of(checkpoint.arch, checkpoint.arch.num_layers, whole=True)
    with cancelled_by(StopAtLook(3)):
        loader = ArrayLoader(checkpoint, schedule, FLOAT32, None)
    with ThreadPoolExecutor(1) as pool, pytest.raises(Interrupted):
        pool.submit(loader.params, head=True).result()
