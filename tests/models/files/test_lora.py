"""LoRA adapters of PEFT are merged as PEFT merges them; others are refused by name."""

import copy
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel as Model

from spile.core.errors import InputError
from spile.core.tensors import map_tensor, read_header, write_tensors
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.lora import Adapter, read_adapter
from support import tiny
from support.marks import some

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SMALL: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    "attention_bias": True, "bos_token_id": tiny.BOS, "eos_token_id": tiny.EOS,
}  # fmt: skip
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
QUERY = "model.layers.0.self_attn.q_proj"
QUERY_A = f"base_model.model.{QUERY}.lora_A.weight"
QUERY_B = f"base_model.model.{QUERY}.lora_B.weight"


@pytest.fixture(scope="session")
def llama() -> Model:
    """A model with biases."""
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL))


@pytest.fixture(scope="session")
def gpt2() -> Model:
    """A model whose linear weights are stored transposed, one of them square."""
    torch.manual_seed(2)
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 48, "n_layer": 2, "n_head": 4}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


@pytest.fixture
def saved(llama: Model, tmp_path: Path) -> Path:
    """A plain adapter, for a test to damage."""
    return save(llama, tmp_path / "adapter", r=4, target_modules=ATTENTION)


def save(base: Model, directory: Path, *, dtype: str = "float32", **config: Any) -> Path:
    """An adapter made by PEFT, with random factors and biases."""
    import peft  # (it takes seconds)  # noqa: PLC0415

    wrapped = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**config))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or (name.endswith("bias") and parameter.requires_grad):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    wrapped.save_pretrained(str(directory))
    if dtype != "float32":
        to = np.dtype(getattr(ml_dtypes, dtype, dtype))
        rewrite(directory, lambda t: t.update({name: a.astype(to) for name, a in t.items()}))
    return directory


def rewrite(directory: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    """Change an adapter's tensors in place."""
    path = directory / WEIGHTS
    tensors = {name: map_tensor(path, info).copy() for name, info in read_header(path).items()}
    change(tensors)
    path.unlink()
    write_tensors(path, tensors)
    return directory


def configure(directory: Path, **changes: Any) -> Path:
    """Change an adapter's config in place."""
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps({**config, **changes}))
    return directory


def names_of(directory: Path) -> set[str]:
    """Return the base tensors that an adapter's names refer to."""
    return {
        re.sub(r"\.lora_[AB]\.", ".", name.removeprefix("base_model.model."))
        for name in read_header(directory / WEIGHTS)
    }


def in_dtype(model: Any, dtype: str) -> Model:
    return copy.deepcopy(model).to(dtype=getattr(torch, dtype))


def arrays(model: Model) -> dict[str, np.ndarray]:
    """Return a model's tensors without those that share memory with another, as files do."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in dict(model.named_parameters()).items():
        if tensor.dtype == torch.bfloat16:
            found[name] = tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            found[name] = tensor.detach().numpy()
    return found


def check_merged(base: Model, directory: Path) -> Adapter:
    """Check that tensors equal those of `merge_and_unload`, and that only targets change."""
    before = arrays(base)
    import peft  # (it takes seconds)  # noqa: PLC0415

    wrapped = peft.PeftModel.from_pretrained(copy.deepcopy(base), str(directory))
    after = arrays(wrapped.merge_and_unload())
    adapter = read_adapter(directory, before.keys())
    assert adapter.targets == {n for n in before if not np.array_equal(before[n], after[n])}
    assert adapter.targets
    for name, expected in after.items():
        merged = adapter.merge(name, before[name])
        assert (merged.dtype, merged.shape) == (expected.dtype, expected.shape)
        if name in adapter.targets:
            assert_equal(merged, expected)
        else:
            assert merged is before[name]
    return adapter


def assert_equal(merged: np.ndarray, expected: np.ndarray) -> None:
    """Equal to float32's last bits; in half precision bit for bit, but for rare single ulps."""
    rtol, atol = 1e-6, 1e-7 * float(np.abs(expected).max())
    if merged.dtype != np.float32:
        assert np.mean(merged == expected) >= 0.999
        rtol = float(ml_dtypes.finfo(merged.dtype).eps)
    wide, expected = merged.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(wide, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "lora_alpha": 7, "target_modules": ATTENTION},
        {"r": 6, "lora_alpha": 16, "target_modules": "all-linear", "lora_dropout": 0.1},
        {"r": 6, "lora_alpha": 16, "target_modules": ATTENTION, "use_rslora": True},
        {"target_modules": ATTENTION, "layers_to_transform": [1], "exclude_modules": ["k_proj"]},
        {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
        {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    ],
)
def test_float32_weights_merge_as_peft_merges_them(
    llama: Model, tmp_path: Path, config: dict[str, Any]
) -> None:
    check_merged(llama, save(llama, tmp_path, **config))


@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys")
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(
    "patterns",
    [
        {"rank_pattern": {"q_proj": 3}},
        {"alpha_pattern": {"q_proj": 32, "layers.1.self_attn.k_proj": 5}},
        {"rank_pattern": {r"^model\.layers\.0\..*": 2}, "alpha_pattern": {r".*\.[vo]_proj": 1}},
        # The first in the file that fits counts (PEFT saves them sorted), if it fits whole parts.
        {"alpha_pattern": {"q_proj": 2, QUERY: 5, "proj": 7, "_proj": 99}},
    ],
)
def test_patterns_choose_rank_and_alpha_as_in_peft(
    llama: Model, tmp_path: Path, patterns: dict[str, Any], rslora: bool
) -> None:
    config = {"r": 4, "lora_alpha": 12, "target_modules": ATTENTION, "use_rslora": rslora}
    check_merged(llama, save(llama, tmp_path, **config, **patterns))


@pytest.mark.parametrize(
    ("base", "stored"),
    some(
        itertools.product(*[["float32", "bfloat16", "float16"]] * 2),
        *(("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")),
    ),
)
def test_every_pair_of_dtypes_rounds_as_peft_rounds(
    llama: Model, tmp_path: Path, base: str, stored: str
) -> None:
    directory = save(llama, tmp_path, dtype=stored, r=4, target_modules="all-linear")
    check_merged(in_dtype(llama, base), directory)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("base", ["float32", "bfloat16"])
def test_embeddings_and_heads_merge_with_the_base_weights_peft_stores(
    llama: Model, tmp_path: Path, base: str
) -> None:
    modules = ["embed_tokens", "lm_head"]
    directory = save(llama, tmp_path, r=4, target_modules=modules)
    stored = [name for name in read_header(directory / WEIGHTS) if "base_layer" in name]
    assert len(stored) == 2
    # Twice the base weight there, to see that the stored one is what counts.
    rewrite(directory, lambda tensors: tensors.update({n: tensors[n] * 2 for n in stored}))
    check_merged(in_dtype(llama, base), directory)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.filterwarnings("ignore:Model (has|with) `tie_word_embeddings=True`")
def test_an_adapter_of_a_tied_embedding_warns_once_as_peft_does(
    llama: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    tied = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, "tie_word_embeddings": True}))
    for name, base in (("tied", tied), ("apart", llama)):
        base.save_pretrained(str(tmp_path / name))
        tiny.write_tokenizer(tmp_path / name)
    embedding = save(tied, tmp_path / "embedding", r=4, target_modules=["embed_tokens"])
    other = save(tied, tmp_path / "other", r=4, target_modules=["q_proj"])
    for model, adapter, warns in (
        ("tied", embedding, True), ("tied", other, False), ("apart", embedding, False)
    ):  # fmt: skip
        caplog.clear()
        open_checkpoint(str(tmp_path / model), str(adapter))
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == warns, (model, adapter)
        if warns:
            (line,) = said
            assert line.startswith(f"{embedding}: changes model.embed_tokens.weight, which is")
            assert "tie_word_embeddings" in line and "\n" not in line
    # What the line says of merging is so.
    import peft  # (it takes seconds)  # noqa: PLC0415

    wrapped = peft.PeftModel.from_pretrained(copy.deepcopy(tied), str(embedding))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        apart = wrapped(ids).logits
        with pytest.warns(UserWarning, match="`tie_word_embeddings=True`"):
            merged = wrapped.merge_and_unload()
        together = merged(ids).logits
    assert not torch.allclose(apart, together, atol=1e-3)
    check_merged(tied, embedding)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("base", ["float32", "bfloat16"])
def test_weights_stored_transposed_merge_even_where_they_are_square(
    gpt2: Model, tmp_path: Path, base: str
) -> None:
    directory = save(gpt2, tmp_path, r=4, target_modules=["c_attn", "c_proj"])
    adapter = check_merged(in_dtype(gpt2, base), directory)
    weight = arrays(gpt2)["transformer.h.1.attn.c_proj.weight"]
    assert weight.shape == (48, 48)
    assert adapter.merge("transformer.h.1.attn.c_proj.weight", weight).flags.c_contiguous


def test_modules_are_found_in_a_checkpoint_without_the_wrappers_prefix(
    gpt2: Model, tmp_path: Path
) -> None:
    directory = save(gpt2, tmp_path, target_modules=["c_attn"], fan_in_fan_out=True)
    name, weights = "h.0.attn.c_attn.weight", arrays(gpt2)
    adapter = read_adapter(directory, [n.removeprefix("transformer.") for n in weights])
    assert adapter.targets == {name, name.replace("0", "1")}
    long, weight = "transformer." + name, weights["transformer." + name]
    expected = read_adapter(directory, weights).merge(long, weight)
    np.testing.assert_array_equal(adapter.merge(name, weight), expected)


def test_an_adapter_of_the_bare_decoder_is_found_in_the_whole_model(
    llama: Model, tmp_path: Path
) -> None:
    directory = save(llama.get_decoder(), tmp_path, target_modules=["q_proj"])
    assert QUERY_A.replace("model.model.", "model.") in read_header(directory / WEIGHTS)
    targets = {QUERY + ".weight", QUERY.replace(".0.", ".1.") + ".weight"}
    assert read_adapter(directory, arrays(llama)).targets == targets


def test_a_module_that_two_tensors_could_be_is_refused(saved: Path) -> None:
    names = names_of(saved)
    twice = {"model." + n for n in names} | {n.removeprefix("model.") for n in names}
    with pytest.raises(InputError, match=f"{QUERY}.weight is not a tensor of the base model"):
        read_adapter(saved, twice)


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases_replace_those_of_the_base(llama: Model, tmp_path: Path, bias: str) -> None:
    directory = save(llama, tmp_path, target_modules=["q_proj"], bias=bias)
    adapter = check_merged(in_dtype(llama, "bfloat16"), directory)
    assert QUERY + ".bias" in adapter.targets
    assert (QUERY.replace("q_proj", "k_proj") + ".bias" in adapter.targets) == (bias == "all")


def test_the_identity_follows_the_contents_and_not_the_path(saved: Path, tmp_path: Path) -> None:
    adapter = read_adapter(saved, names_of(saved))
    assert adapter.files == (saved / CONFIG, saved / WEIGHTS)
    other = Path(shutil.copytree(saved, tmp_path / "other"))
    seen = [adapter.identity(), read_adapter(other, names_of(other)).identity()]
    configure(other, lora_alpha=9)
    seen.append(read_adapter(other, names_of(other)).identity())
    rewrite(saved, lambda tensors: tensors.update({QUERY_A: tensors[QUERY_A] * 2}))
    seen.append(read_adapter(saved, names_of(saved)).identity())
    assert seen[0] == seen[1] and len(set(seen)) == 3


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT has remarks on most of these
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"lora_bias": True}, "lora_bias = True is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head'] is not supported"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices = [1, 2] is not"),
        ({"target_parameters": ["o_proj.weight"]}, "target_parameters = ['o_proj.weight'] is not"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' is not supported"),
        ({"init_lora_weights": "olora"}, "init_lora_weights 'olora' is not supported"),
        ({"layer_replication": [(0, 2), (1, 2)]}, "layer_replication = [[0, 2], [1, 2]] is not"),
    ],
)
def test_what_peft_makes_and_a_merge_cannot_hold_is_refused(
    llama: Model, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    directory = save(llama, tmp_path, target_modules=["q_proj"], **config)
    with pytest.raises(InputError, match=re.escape(f"{CONFIG}: {words}")):
        read_adapter(directory, arrays(llama))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported"),
        ({"use_mora": False}, "unknown key 'use_mora'"),
        ({"megatron_config": {}}, "megatron_config = {} is not supported"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying = True is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens = [5] is not supported"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights 'lora_ga' is not supported"),
        ({"bias": "some"}, "bias 'some' is not supported"),
        ({"r": True}, "r must be a positive number, got True"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a finite number, got nan"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a finite number"),
        ({"use_rslora": 1}, "use_rslora must be true or false, got 1"),
        ({"fan_in_fan_out": "no"}, "fan_in_fan_out must be true or false, got 'no'"),
        ({"rank_pattern": ["q"]}, "rank_pattern must be an object, got ['q']"),
        ({"rank_pattern": {"q": 0}}, "rank_pattern 'q' must be a positive number, got 0"),
        ({"alpha_pattern": {"q": "1"}}, "alpha_pattern 'q' must be a finite number, got '1'"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern has '(', no regex"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_its_key(
    saved: Path, changes: dict[str, Any], words: str
) -> None:
    configure(saved, **changes)
    with pytest.raises(InputError, match=re.escape(f"{CONFIG}: {words}")):
        read_adapter(saved, names_of(saved))


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        (QUERY_B, None, f"{QUERY} has lora_A.weight, not lora_A.weight and lora_B.weight"),
        (QUERY_B, np.zeros((48, 3), np.float32), "shapes [4, 48] and [48, 3] at rank 4"),
        (QUERY_A, np.zeros((4, 48), np.int8), f"{QUERY_A} holds int8, not floats"),
        (f"{QUERY}.lora_A.weight", np.zeros((4, 48), np.float32), "is not part of a"),
        (QUERY_A.replace("A.weight", "magnitude_vector"), np.zeros(48, np.float32), "is not part"),
        (QUERY_B.replace("weight", "bias"), np.zeros(48, np.float32), "although bias is 'none'"),
        (f"base_model.model.{QUERY}.bias", np.zeros(48, np.float32), "although bias is 'none'"),
        ("base_model.model.lm_head.weight", np.zeros((9, 48), np.float32), "is not part of a"),
        ("base_model.model.x.base_layer.weight", np.zeros((9, 48), np.float32), "has no LoRA"),
    ],
)
def test_a_tensor_that_is_not_understood_is_refused_by_name(
    saved: Path, name: str, array: np.ndarray | None, words: str
) -> None:
    expected = names_of(saved)
    rewrite(saved, lambda t: t.pop(name) if array is None else t.update({name: array}))
    with pytest.raises(InputError, match=re.escape(words)) as raised:
        read_adapter(saved, expected)
    assert "\n" not in str(raised.value)


def test_a_tensor_changed_under_two_names_is_refused(saved: Path) -> None:
    def again(tensors: dict[str, np.ndarray]) -> None:
        short = "base_model.model." + QUERY.removeprefix("model.")
        tensors[short + ".lora_A.weight"] = tensors[QUERY_A]
        tensors[short + ".lora_B.weight"] = tensors[QUERY_B]

    expected = names_of(saved)
    with pytest.raises(InputError, match=f"{QUERY}.weight is changed twice"):
        read_adapter(rewrite(saved, again), expected)


def test_faults_are_named_together_and_five_at_most(saved: Path) -> None:
    with pytest.raises(InputError) as raised:
        read_adapter(saved, ["lm_head.weight"])
    assert str(raised.value).count("is not a tensor of the base model") == 5
    assert str(raised.value).endswith("; and 3 more")


def test_a_base_weight_of_another_shape_is_refused(saved: Path) -> None:
    adapter = read_adapter(saved, names_of(saved))
    with pytest.raises(InputError, match=r"q_proj.weight has shape \[48, 48\], .* has \[48, 64\]$"):
        adapter.merge(QUERY + ".weight", np.zeros((48, 64), np.float32))


def test_a_flag_that_contradicts_the_weights_layout_is_refused(saved: Path) -> None:
    adapter = read_adapter(configure(saved, fan_in_fan_out=True), names_of(saved))
    key = QUERY.replace("q_proj", "k_proj") + ".weight"
    with pytest.raises(InputError, match="fan_in_fan_out in adapter_config.json does not fit"):
        adapter.merge(key, np.zeros((24, 48), np.float32))


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_embedding_of_a_resized_vocabulary_is_refused(llama: Model, tmp_path: Path) -> None:
    adapter = read_adapter(save(llama, tmp_path, target_modules=["embed_tokens"]), arrays(llama))
    with pytest.raises(InputError, match="a resized vocabulary?"):
        adapter.merge("model.embed_tokens.weight", np.zeros((999, 48), np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, 60000.0])
def test_merged_values_that_are_not_finite_are_refused(saved: Path, value: float) -> None:
    expected = names_of(saved)
    rewrite(saved, lambda tensors: [tensors[name].fill(value) for name in (QUERY_A, QUERY_B)])
    with pytest.raises(InputError, match=f"{QUERY}.weight .* are not finite float16"):
        read_adapter(saved, expected).merge(QUERY + ".weight", np.zeros((48, 48), np.float16))


def test_a_directory_that_is_no_adapter_is_refused_by_what_it_lacks(saved: Path) -> None:
    def refused(words: str) -> None:
        with pytest.raises(InputError, match=re.escape(words)):
            read_adapter(str(saved), ["x"])

    (saved / WEIGHTS).write_bytes(b"\xff" * 64)
    refused("not a safetensors file")
    (saved / WEIGHTS).unlink()
    refused(f"{WEIGHTS}: no such file")
    (saved / "adapter_model.bin").touch()
    refused("pickled .bin weights are never read")
    write_tensors(saved / WEIGHTS, {})
    refused(f"{WEIGHTS}: holds no tensors")
    for text, words in {"[]": "not a JSON object", "{": "not valid JSON"}.items():
        (saved / CONFIG).write_text(text)
        refused(f"{CONFIG}: {words}")
    (saved / CONFIG).unlink()
    refused(f"{CONFIG}: no such file")
    shutil.rmtree(saved)
    refused("no such directory; an adapter is one with")
