"""Hostile settings, models and corpora: read, or refused by a Spile error."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from security.hostile import (
    DEEP,
    JSON,
    NAMES,
    NUMBERS,
    changed,
    damaged,
    fuzz,
    only_our_errors,
    refused,
)  # fmt: skip
from spile.core.config import Recipe, Runtime, build, load_toml, parse_count
from spile.core.expressions import RowFilter
from spile.core.index import INDEX_DTYPE
from spile.core.recipe import ResolvedRecipe
from spile.core.tensors import write_tensors
from spile.models.config.hf_config import read_config
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.lora import read_adapter
from spile.models.taps import parse_taps
from spile.objects.paths import read_json
from support import tiny

TOML = """
model = "demo"
taps = "resid_post:all"
where = '''not bos and
  pos >= 1'''
seq-len = "4k"
unit_tokens = 64_000
shard-bytes = "1GiB"
compress = true
"""
MODULE = "model.layers.0.self_attn.q_proj"
ADAPTER = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "use_rslora": False,
    "rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"^model\\.layers\\.0\\..*": 3.0},
    "init_lora_weights": True, "fan_in_fan_out": False, "target_modules": ["q_proj"],
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("hostile") / "model")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter")
    (path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    factors = {"lora_A": np.ones((2, 32), np.float32), "lora_B": np.ones((32, 2), np.float32)}
    named = {f"base_model.model.{MODULE}.{n}.weight": a for n, a in factors.items()}
    write_tensors(path / "adapter_model.safetensors", named)
    return path


def settle(path: Path) -> None:
    recipe, runtime = build(load_toml(path))
    assert recipe.seq_len is None or 8 <= recipe.seq_len < 1 << 63
    assert 4096 <= runtime.shard_bytes < 1 << 63
    RowFilter(recipe.where, recipe.every)


@fuzz(120)
@given(data=damaged(TOML.encode()) | st.binary(max_size=80))
def test_settings_of_any_bytes_are_refused_or_understood(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(data)
    with only_our_errors():
        settle(tmp_path / "c.toml")


@fuzz(120)
@given(st.dictionaries(st.sampled_from([*Recipe.names(), *Runtime.names()]), JSON, max_size=4))
def test_settings_of_any_kind_are_refused_or_understood(options: dict[str, Any]) -> None:
    with only_our_errors():
        build(options)


@pytest.mark.parametrize(
    "text",
    ["seq_len = " + "9" * 5000, "seq_len = 0x" + "f" * 9000, "pack = 0x" + "f" * 9000,
     "compress = 0x" + "f" * 9000, "seq_len = 1e400", "seq_len = nan", f"seq_len = '{'9' * 4299}t'",
     f"seq_len = '{'9' * 30}'", "seq_len = -0x" + "f" * 40, "taps = " + "[" * DEEP,
     "taps = " + "{a=" * DEEP, "x" * DEEP + " = 1", "a." * 5000 + "a = 1",
     "seq_len = 1\nseq-len = '",
     "model = '\udcff'", "model = '''" + "x" * DEEP, "pack = '" + "x" * DEEP + "'",
     "taps = 1979-99-99", "taps = '\0'"],
    ids=range(19),
)  # fmt: skip
def test_hostile_settings_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(text.encode(errors="surrogateescape"))
    with refused("^--"):
        settle(tmp_path / "c.toml")


@fuzz(120)
@given(st.text("0123456789_.kKmMgGiIbBtT eE+-\0é٣", max_size=30))
def test_a_count_is_a_whole_number_or_refused(text: str) -> None:
    try:
        assert parse_count(text) >= 0
    except ValueError:
        with refused("must be"):
            Recipe(seq_len=text)  # type: ignore[arg-type]


@fuzz(100)
@given(where=damaged(b"not bos and (pos - 1) % 4 in (1, 2) or doc // 3 > -5").map(
    lambda data: data.decode("latin-1")
))  # fmt: skip
def test_a_filter_is_refused_or_says_of_each_row_whether_it_is_kept(where: str) -> None:
    with only_our_errors():
        assert RowFilter(where, None).mask(np.zeros(3, INDEX_DTYPE)).shape == (3,)


@pytest.mark.parametrize(
    "where",
    ["(" * 900 + "pos" + ")" * 900, "not " * 240 + "bos", "-" * 990 + "1 > 0",
     "pos > 0x" + "f" * 900,
     "pos > " + "9" * 990, "2 ** 9 ** 9 > pos", "__import__('os').system('x')", "pos.real > 0",
     "[pos for pos in doc]", "(lambda: 1)() > 0", "f'{pos}' > 0", "pos if bos else doc", "bos\0"],
)  # fmt: skip
def test_a_filter_of_anything_but_arithmetic_is_refused(where: str) -> None:
    with refused("^--where"):
        RowFilter(where, None)


@fuzz(100)
@given(taps=damaged(b"resid_post:0-2/2+-1,blocks.1.hook_resid_post,embed,hidden_states[3]").map(
    lambda data: data.decode("latin-1")
) | NAMES)  # fmt: skip
def test_taps_are_refused_or_of_the_model(taps: str) -> None:
    arch = read_config(tiny.CONFIG, "c")[1]
    with only_our_errors():
        assert all(tap.layer is None or 0 <= tap.layer < 3 for tap in parse_taps(taps, arch))


@fuzz(100)
@given(data=st.data())
def test_a_stored_recipe_is_refused_or_of_the_types_it_declares(data: st.DataObject) -> None:
    good = ResolvedRecipe(
        model_source="m", lora_source=None, corpus_source="c", model={"config": "1"},
        corpus=("2",), taps=("embed",), where=None, every=None, seq_len=8, pack="ffd",
        long_docs="split", special_tokens="none", text_column=None, text_documents="line",
        max_docs=None, max_tokens=3, unit_tokens=64, compute_dtype="float32",
        store_dtype="float32",
    )  # fmt: skip
    with only_our_errors():
        try:
            recipe = ResolvedRecipe.from_json(data.draw(changed(good.to_json())))
        except TypeError:  # the value is no list; the ledger turns this into our error
            return
        assert {*map(type, (*recipe.taps, *recipe.corpus, *recipe.model.values()))} <= {str}
        assert all(0 < n < 1 << 63 for n in (recipe.seq_len, recipe.unit_tokens))
        assert type(recipe.pack) is str


@fuzz(50)
@given(data=st.data())
def test_a_models_files_are_refused_or_fit_each_other(
    llama: Path, data: st.DataObject, tmp_path: Path
) -> None:
    name = data.draw(st.sampled_from(["config.json", "model.safetensors.index.json"]))
    for each in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / each).write_bytes((llama / each).read_bytes())
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "x": "model.safetensors"}}
    good = tiny.CONFIG if name == "config.json" else index
    text = json.dumps(data.draw(changed(good) | JSON)).encode()
    (tmp_path / name).write_bytes(data.draw(st.just(text) | damaged(json.dumps(good).encode())))
    with only_our_errors():
        found = open_checkpoint(str(tmp_path))
        assert {Path(str(path)).parent for path, _ in found.tensors.values()} == {tmp_path}
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)


@pytest.mark.parametrize("depth", [40, 300, 900, DEEP])
@pytest.mark.parametrize("key", ["architectures", "rope_scaling", "hidden_act", "vocab_size", "x"])
def test_a_config_that_is_nested_deeply_is_refused(key: str, depth: int, tmp_path: Path) -> None:
    text = json.dumps({**tiny.CONFIG, key: "HERE"})
    path = tmp_path / "config.json"
    path.write_text(text.replace('"HERE"', "[" * depth + "]" * depth))
    with refused("not valid JSON|nested too deeply"):
        read_config(read_json(path), str(path))


@pytest.mark.parametrize("number", NUMBERS[:-2])  # the others may be an epsilon
@pytest.mark.parametrize("key", ["hidden_size", "rope_theta", "rms_norm_eps", "num_hidden_layers"])
def test_a_config_with_an_impossible_number_is_refused(
    key: str, number: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**tiny.CONFIG, key: "HERE"}).replace('"HERE"', number))
    with refused(r"config\.json: "):
        read_config(read_json(path), str(path))


def test_more_experts_than_could_be_listed_are_refused() -> None:
    config = {
        **tiny.CONFIG, "architectures": ["MixtralForCausalLM"], "num_local_experts": 1 << 30,
        "num_experts_per_tok": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    config.pop("model_type")
    with refused("experts in 3 layers are too many"):
        read_config(config, "c")


def test_a_config_larger_than_any_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with refused("larger than"):
        read_json(tmp_path / "config.json")
    with refused("directory"):
        read_json(tmp_path)


@fuzz(50)
@given(data=st.data())
def test_an_adapter_is_refused_or_fits_the_model(
    llama: Path, adapter: Path, data: st.DataObject, tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in adapter.iterdir()}
    config = json.dumps(data.draw(changed(ADAPTER))).encode()
    spoilt = {
        "adapter_config.json": st.just(config) | damaged(files["adapter_config.json"]),
        "adapter_model.safetensors": damaged(files["adapter_model.safetensors"]),
    }
    name = data.draw(st.sampled_from(sorted(spoilt)))
    for each, content in {**files, name: data.draw(spoilt[name])}.items():
        (tmp_path / each).write_bytes(content)
    with only_our_errors():
        names = open_checkpoint(str(llama)).shapes()
        found = read_adapter(tmp_path, names)
        assert found.targets <= {*names}
        weight = np.ones((32, 32), np.float32)
        assert found.merge(f"{MODULE}.weight", weight).shape == weight.shape


@pytest.mark.parametrize(
    "pattern",
    ["(.*)*x", "(.+)+x", "(.|.)" * 30 + "x", ".?" * 40 + "x", ".*" * 20 + "x", "(a|a)*b", "((a))",
     "(?=.*)x", r"(.)\1", ".{1,99}" * 9, "(?:.|.)" * 30, "[^a]", "(" * 5000, "[" * 900],
)  # fmt: skip
def test_a_pattern_that_could_take_forever_is_refused(
    pattern: str, adapter: Path, tmp_path: Path
) -> None:
    for path in adapter.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = {**ADAPTER, "rank_pattern": {pattern: 2}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    began = time.monotonic()
    with refused("rank_pattern has .*no regex"):
        read_adapter(tmp_path, [f"{MODULE}.weight"])
    assert time.monotonic() - began < 5
