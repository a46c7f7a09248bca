"""Published configs load to the right numbers; whatever is not understood is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from spile.errors import InputError
from spile.models.arch import Arch
from spile.models.families import FAMILIES, read_config
from spile.models.rope import Rope
from spile.models.specs import num_params

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192.0,
}


def published(name: str) -> dict[str, Any]:
    """A `config.json` as it is on the Hub."""
    return json.loads((CONFIGS / f"{name}.json").read_text())


def llama(
    vocab: int, width: int, layers: int, heads: int, kv: int, mlp: int, positions: int, rope: Rope,
    *, tied: bool = False,
) -> Arch:  # fmt: skip
    return Arch(
        family="llama", vocab_size=vocab, width=width, num_layers=layers, num_heads=heads,
        num_kv_heads=kv, head_dim=width // heads, mlp_width=mlp, norm_eps=1e-5, activation="silu",
        rope=rope, qkv_bias=False, out_bias=False, mlp_bias=False, tied_head=tied,
        max_positions=positions,
    )  # fmt: skip


def qwen(
    vocab: int, width: int, layers: int, heads: int, kv: int, mlp: int, positions: int, rope: Rope,
    *, tied: bool = False,
) -> Arch:  # fmt: skip
    return Arch(
        family="qwen2", vocab_size=vocab, width=width, num_layers=layers, num_heads=heads,
        num_kv_heads=kv, head_dim=width // heads, mlp_width=mlp, norm_eps=1e-6, activation="silu",
        rope=rope, qkv_bias=True, out_bias=False, mlp_bias=False, tied_head=tied,
        max_positions=positions,
    )  # fmt: skip


YARN = Rope(1e6, "yarn", {"factor": 4.0, "original_max_position_embeddings": 32768.0})
# the architecture, and the number of parameters on the model's page
WANTED: dict[str, tuple[Arch, int]] = {
    "Qwen2-0.5B": (
        qwen(151936, 896, 24, 14, 2, 4864, 131072, Rope(1e6), tied=True), 494_032_768),
    "Qwen2.5-0.5B": (
        qwen(151936, 896, 24, 14, 2, 4864, 32768, Rope(1e6), tied=True), 494_032_768),
    "Qwen2.5-7B": (
        qwen(152064, 3584, 28, 28, 4, 18944, 131072, Rope(1e6)), 7_615_616_512),
    "Qwen2.5-7B-Instruct-yarn": (
        qwen(152064, 3584, 28, 28, 4, 18944, 32768, YARN), 7_615_616_512),
    "Llama-2-7b-hf": (
        llama(32000, 4096, 32, 32, 32, 11008, 4096, Rope(1e4)), 6_738_415_616),
    "Llama-3.1-8B": (
        llama(128256, 4096, 32, 32, 8, 14336, 131072,
              Rope(5e5, "llama3", {"factor": 8.0, **LLAMA3})), 8_030_261_248),
    "Llama-3.2-1B": (
        llama(128256, 2048, 16, 32, 8, 8192, 131072,
              Rope(5e5, "llama3", {"factor": 32.0, **LLAMA3}), tied=True), 1_235_814_400),
    "SmolLM2-135M": (
        llama(49152, 576, 30, 9, 3, 1536, 8192, Rope(1e5), tied=True), 134_515_008),
    "TinyLlama-1.1B": (
        llama(32000, 2048, 22, 32, 4, 5632, 2048, Rope(1e4)), 1_100_048_384),
}  # fmt: skip


def test_every_fixture_is_tested() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(WANTED)


@pytest.mark.parametrize("name", WANTED)
def test_a_published_config_loads_to_its_architecture(name: str) -> None:
    wanted, params = WANTED[name]
    family, arch = read_config(published(name), name)
    assert arch == wanted
    assert family.name == wanted.family
    assert num_params(arch, arch.num_layers, head=True) == params


def test_parameters_are_counted_as_deep_as_they_are_loaded() -> None:
    _, arch = read_config(published("TinyLlama-1.1B"), "test")
    whole = num_params(arch, 22, head=True)
    without_head = num_params(arch, 22, head=False)
    assert whole - without_head == 32000 * 2048 + 2048
    assert without_head - num_params(arch, 21, head=False) == 44_044_288
    assert num_params(arch, 0, head=False) == 32000 * 2048


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        ("Llama-3.1-8B", {"residual_multiplier": 2.0}, "unknown config key 'residual_multiplier'"),
        ("Qwen2.5-7B", {"qk_norm": True}, "unknown config key 'qk_norm'"),
        ("Qwen2.5-7B", {"attention_bias": True}, "unknown config key 'attention_bias'"),
        ("Qwen2.5-7B", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("Qwen2.5-7B", {"use_mrope": True}, "use_mrope = True"),
        ("Llama-2-7b-hf", {"sliding_window": 4096}, "sliding_window is not supported for llama"),
        ("Llama-2-7b-hf", {"pretraining_tp": 2}, "pretraining_tp = 2"),
        ("Llama-2-7b-hf", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("Qwen2-0.5B", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("SmolLM2-135M", {"rope_interleaved": True}, "rope_interleaved = True"),
        ("Llama-2-7b-hf", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("Llama-2-7b-hf", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("Llama-2-7b-hf", {"num_key_value_heads": 5}, "multiple of num_key_value_heads 5"),
        ("Llama-2-7b-hf", {"rope_scaling": {"type": "longrope", "factor": 2}}, "'longrope'"),
        ("Llama-2-7b-hf", {"hidden_size": None}, "hidden_size must be a positive number"),
        ("Llama-2-7b-hf", {"vocab_size": 0}, "vocab_size must be a positive number, got 0"),
        ("Llama-2-7b-hf", {"num_hidden_layers": "32"}, "num_hidden_layers must be a positive"),
        ("Llama-2-7b-hf", {"num_attention_heads": True}, "num_attention_heads must be a positive"),
    ],
)  # fmt: skip
def test_what_would_change_the_activations_is_refused_by_name(
    base: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_config({**published(base), **changes}, "dir/config.json")
    message = str(caught.value)
    assert message.startswith("dir/config.json: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("LlamaForSequenceClassification", "LlamaForCausalLM"),
        ("Qwen3ForCausalLM", "Qwen2ForCausalLM"),
        ("Qwen2MoeForCausalLM", "Qwen2ForCausalLM"),
        ("T5", ""),
    ],
)
def test_an_unknown_architecture_is_refused_with_the_nearest_known_one(
    given: str, nearest: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_config({**published("Llama-2-7b-hf"), "architectures": [given]}, "test")
    message = str(caught.value)
    assert repr(given) in message
    assert f"the nearest is {nearest}" in message
    assert all(name in message for family in FAMILIES for name in family.architectures)


@pytest.mark.parametrize("given", [None, [], ["LlamaForCausalLM"] * 2, "LlamaForCausalLM", [3]])
def test_architectures_must_name_one_class(given: Any) -> None:
    with pytest.raises(InputError, match="'architectures' must name one model class"):
        read_config({**published("Llama-2-7b-hf"), "architectures": given}, "test")


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"] * 24},
        {"layer_types": None},
        {"sliding_window": None},
        {"use_sliding_window": None},
        {"max_window_layers": 3},
        {"_name_or_path": "elsewhere", "transformers_version": "9", "use_cache": False},
        {"dtype": "float32", "pad_token_id": 5},
        {"quantization_config": None},
    ],
)
def test_what_cannot_change_the_activations_is_accepted(changes: dict[str, Any]) -> None:
    config = published("Qwen2.5-0.5B")
    assert read_config({**config, **changes}, "test") == read_config(config, "test")


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("num_key_value_heads", "num_kv_heads", 32),
        ("rms_norm_eps", "norm_eps", 1e-6),
        ("hidden_act", "activation", "silu"),
        ("max_position_embeddings", "max_positions", 2048),
        ("tie_word_embeddings", "tied_head", False),
    ],
)
def test_a_key_that_is_absent_has_the_familys_default(key: str, field: str, value: Any) -> None:
    config = published("Llama-3.1-8B")
    del config[key]
    assert getattr(read_config(config, "test")[1], field) == value


def test_llama_biases_follow_the_config_and_qwen2_biases_do_not_depend_on_it() -> None:
    config = {**published("Llama-3.1-8B"), "attention_bias": True, "mlp_bias": True}
    _, arch = read_config(config, "test")
    assert (arch.qkv_bias, arch.out_bias, arch.mlp_bias) == (True, True, True)
    _, arch = read_config(published("Qwen2-0.5B"), "test")
    assert (arch.qkv_bias, arch.out_bias, arch.mlp_bias) == (True, False, False)


def test_a_head_dim_of_its_own_is_taken() -> None:
    _, arch = read_config({**published("Llama-3.2-1B"), "head_dim": 128}, "test")
    assert (arch.head_dim, arch.width, arch.num_heads) == (128, 2048, 32)


COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "head_dim", "max_position_embeddings",
)  # fmt: skip


@pytest.mark.parametrize("value", [2.5, float("nan"), float("inf")])
def test_a_count_that_is_no_whole_number_is_refused(value: float) -> None:
    for key in COUNTS:
        with pytest.raises(InputError, match=key):
            read_config({**tiny.CONFIG, key: value}, "test")


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 64) | st.floats() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta"]), inner)
    ),
    max_leaves=3,
)
KEYS = st.sampled_from(
    [*tiny.CONFIG, "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "head_dim",
     "quantization_config", "pruned_heads", "attention_bias"]
)  # fmt: skip


@given(KEYS, ODD, st.sampled_from(["LlamaForCausalLM", "Qwen2ForCausalLM"]))
@settings(max_examples=400, deadline=None)
def test_a_strangers_config_loads_or_is_refused_as_input(key: str, value: Any, kind: str) -> None:
    config = {**tiny.CONFIG, "architectures": [kind], key: value}
    try:
        _, arch = read_config(config, "test")
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert arch.num_heads % arch.num_kv_heads == 0
