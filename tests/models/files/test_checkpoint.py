"""Model directories: what is found, and what is refused in which words. No weights are loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from spile.core.errors import InputError
from spile.core.tensors import write_tensors
from spile.models.config.specs import block_specs, outer_specs
from spile.models.files.checkpoint import Checkpoint, open_checkpoint, read_arch
from support import tiny

CONFIGS = Path(__file__).parents[2] / "fixtures" / "configs"


def published(name: str, **changes: Any) -> dict[str, Any]:
    """A published config, reduced to the size of a test."""
    return {**json.loads((CONFIGS / f"{name}.json").read_text()), **changes}


INDEX = "model.safetensors.index.json"
GPT2 = published("gpt2", n_embd=16, n_layer=2, n_head=2, n_positions=32, n_ctx=32, vocab_size=40)
NEOX = published(
    "pythia-70m", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    vocab_size=40,
)  # fmt: skip
GEMMA3 = published(
    "gemma-3-4b-it",
    text_config={
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 40,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8,
    },
)  # fmt: skip
MIXTRAL = published(
    "Mixtral-8x7B-v0.1", hidden_size=16, intermediate_size=24, num_hidden_layers=2, vocab_size=40,
    num_attention_heads=2, num_key_value_heads=1, num_local_experts=3,
)  # fmt: skip
LAYER = "model.layers.1."
NORM = LAYER + "input_layernorm.weight"
QUERY = LAYER + "self_attn.q_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model")


def expected() -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in tiny.random_tensors(tiny.CONFIG).items()}


def write(
    directory: Path,
    config: dict[str, Any],
    change: Callable[[dict[str, np.ndarray]], Any] = lambda tensors: None,
) -> Checkpoint:
    """A random checkpoint of this config, its tensors changed in place by `change`."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tiny.write_tokenizer(directory)
    tensors = tiny.random_tensors(config)
    change(tensors)
    (directory / "model.safetensors").unlink(missing_ok=True)
    write_tensors(directory / "model.safetensors", tensors)
    return open_checkpoint(str(directory))


def renamed(before: str, after: str) -> Callable[[dict[str, np.ndarray]], None]:
    """Rename every tensor whose name begins with this."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith(before)]:
            tensors[after + name.removeprefix(before)] = tensors.pop(name)

    return change


def added(**shapes: tuple[int, ...]) -> Callable[[dict[str, np.ndarray]], None]:
    """Add tensors; `__` in a name stands for a dot."""
    more = {n.replace("__", "."): np.ones(shape, np.float32) for n, shape in shapes.items()}
    return lambda tensors: tensors.update(more)


def rewrite(directory: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Checkpoint:
    """The checkpoint with its tensors changed in place by `change`."""
    tensors = tiny.random_tensors(json.loads((directory / "config.json").read_text()))
    change(tensors)
    (directory / "model.safetensors").unlink()
    write_tensors(directory / "model.safetensors", tensors)
    return open_checkpoint(str(directory))


def shard(directory: Path, parts: int = 3, **changes: Any) -> None:
    """Replace the single file by shards and an index, as transformers lays them out."""
    tensors = tiny.random_tensors(tiny.CONFIG)
    (directory / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for part in range(parts):
        name = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        own = {key: tensors[key] for key in sorted(tensors)[part::parts]}
        save_file(own, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(own, name))
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map, **changes}
    (directory / INDEX).write_text(json.dumps(index))


def test_a_directory_opens_to_its_architecture_and_tensors(directory: Path) -> None:
    checkpoint = open_checkpoint(str(directory))
    assert (checkpoint.arch.num_layers, checkpoint.arch.width) == (3, 32)
    assert {n: info.shape for n, (_, info) in checkpoint.tensors.items()} == expected()
    blocks = {spec.name: spec for spec in block_specs(checkpoint.arch)}
    assert checkpoint.names(blocks["wq"], 1) == [QUERY]
    assert checkpoint.names(outer_specs(checkpoint.arch)[0]) == ["model.embed_tokens.weight"]
    assert checkpoint.shapes() == expected()
    assert checkpoint.adapter is None


def test_a_sharded_directory_opens_to_the_same_tensors(directory: Path) -> None:
    before = open_checkpoint(str(directory))
    shard(directory)
    checkpoint = open_checkpoint(str(directory))
    assert len(checkpoint.files) == 3
    assert {path.name for path, _ in checkpoint.tensors.values()} == {
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }
    assert set(checkpoint.tensors) == set(before.tensors)


def test_all_faults_of_the_tensors_are_named_in_one_error(directory: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        del tensors[NORM]
        tensors["model.layers.1.self_attn.q_norm.weight"] = np.ones(8, np.float32)
        tensors[QUERY] = tensors[QUERY][:, :16]
        tensors["model.norm.weight"] = np.ones(32, np.int8)

    with pytest.raises(InputError) as caught:
        rewrite(directory, spoil)
    message = str(caught.value)
    assert "\n" not in message
    for fault in (
        str(directory),
        f"missing {NORM}",
        "unexpected model.layers.1.self_attn.q_norm.weight",
        f"{QUERY} has shape [32, 16], expected [32, 32]",
        "model.norm.weight holds int8, not float32 or float16 or bfloat16",
    ):
        assert fault in message


def test_many_faults_are_counted_beyond_the_first_five(directory: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if ".layers.2." in name]:
            del tensors[name]

    with pytest.raises(InputError, match=r"(missing model\.layers\.2\..*; ){5}and 4 more"):
        rewrite(directory, spoil)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floats_of_any_usual_width_fit(dtype: Any, directory: Path) -> None:
    def cast(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({name: array.astype(dtype) for name, array in tensors.items()})

    rewrite(directory, cast)


def add_head(tensors: dict[str, np.ndarray]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]


def test_a_tied_head_may_be_stored_twice(directory: Path) -> None:
    rewrite(directory, add_head)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    directory = tiny.write_model(tmp_path / "model", tie_word_embeddings=False)
    assert "lm_head.weight" in open_checkpoint(str(directory)).tensors
    with pytest.raises(InputError, match="missing lm_head.weight"):
        rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))


def test_rotary_buffers_of_old_checkpoints_are_ignored_but_not_lookalikes(
    directory: Path,
) -> None:
    def add(prefix: str) -> Callable[[dict[str, np.ndarray]], None]:
        name = prefix + "self_attn.rotary_emb.inv_freq"
        return lambda tensors: tensors.update({name: np.ones(4, np.float32)})

    rewrite(directory, add(LAYER))
    with pytest.raises(InputError, match="unexpected other"):
        rewrite(directory, add("other." + LAYER))


def test_biases_the_config_does_not_announce_are_refused(directory: Path) -> None:
    name = LAYER + "self_attn.q_proj.bias"
    with pytest.raises(InputError, match=f"unexpected {name}"):
        rewrite(directory, lambda t: t.update({name: np.ones(32, np.float32)}))


def test_gpt2_has_two_names_for_everything(tmp_path: Path) -> None:
    """As transformers saves it, and as it was published in 2019."""
    new = write(tmp_path / "new", GPT2)
    old = write(tmp_path / "old", GPT2, renamed("transformer.", ""))
    assert (new.prefix, old.prefix) == ("transformer.", "")
    assert set(new.tensors) == {"transformer." + name for name in old.tensors}
    assert "h.1.attn.c_attn.weight" in old.tensors
    both = {**GPT2, "tie_word_embeddings": False}
    untied = write(tmp_path / "untied", both, renamed("transformer.", ""))
    assert "lm_head.weight" in untied.tensors, "the head has no prefix"


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_buffers_of_old_checkpoints_are_ignored_but_not_lookalikes(
    prefix: str, tmp_path: Path
) -> None:
    def add(*names: str) -> Callable[[dict[str, np.ndarray]], None]:
        def change(tensors: dict[str, np.ndarray]) -> None:
            renamed("transformer.", prefix)(tensors)
            tensors |= {prefix + name: np.ones((1, 1, 32, 32), np.float32) for name in names}

        return change

    write(tmp_path, GPT2, add("h.0.attn.bias", "h.1.attn.bias", "h.1.attn.masked_bias"))
    with pytest.raises(InputError, match=rf"unexpected {prefix}h\.0\.mlp\.bias"):
        write(tmp_path, GPT2, add("h.0.mlp.bias"))
    with pytest.raises(InputError, match="unexpected"):
        write(tmp_path, GPT2, add("wte.bias"))


def test_gpt2_matrices_are_stored_the_other_way_round(tmp_path: Path) -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    assert write(tmp_path, GPT2).tensors[name][1].shape == (16, 48)
    with pytest.raises(
        InputError, match=r"c_attn.weight has shape \[48, 16\], expected \[16, 48\]"
    ):
        write(tmp_path, GPT2, lambda t: t.update({name: t[name].T.copy()}))


def test_neox_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    stem = "gpt_neox__layers__1__attention__"
    more = {
        f"{stem}bias": (1, 1, 8, 8),
        f"{stem}masked_bias": (),
        f"{stem}rotary_emb__inv_freq": (2,),
    }
    checkpoint = write(tmp_path, NEOX, added(**more))
    assert checkpoint.tensors["embed_out.weight"][1].shape == (40, 32)
    with pytest.raises(InputError, match="missing embed_out.weight"):
        write(tmp_path, NEOX, lambda tensors: tensors.pop("embed_out.weight"))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_a_multimodal_checkpoint_has_its_decoder_under_either_prefix(
    prefix: str, tmp_path: Path
) -> None:
    """Names as published, and as transformers renamed its modules later; the tower is not read."""
    tower = {
        "language_model.model.": ("vision_tower.x.weight", "multi_modal_projector.x.weight"),
        "model.language_model.": (
            "model.vision_tower.x.weight", "model.multi_modal_projector.x.weight"
        ),
    }  # fmt: skip

    def change(tensors: dict[str, np.ndarray]) -> None:
        renamed("language_model.model.", prefix)(tensors)
        tensors |= {name: np.ones((3, 3), np.float32) for name in tower[prefix]}

    checkpoint = write(tmp_path, GEMMA3, change)
    assert checkpoint.prefix == prefix
    assert set(checkpoint.shapes()) == set(checkpoint.tensors) - set(tower[prefix])
    with pytest.raises(InputError, match="unexpected audio_tower.x.weight"):
        write(tmp_path, GEMMA3, added(audio_tower__x__weight=(3,)))


def test_a_multimodal_head_that_is_tied_may_be_stored_too(tmp_path: Path) -> None:
    for name in ("lm_head.weight", "language_model.lm_head.weight"):
        write(
            tmp_path,
            GEMMA3,
            lambda t, name=name: t.update({name: t["language_model.model.embed_tokens.weight"]}),
        )


def test_every_expert_has_to_be_there(tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    checkpoint = write(tmp_path, MIXTRAL)
    spec = next(spec for spec in block_specs(checkpoint.arch) if spec.name == "w_down")
    assert checkpoint.names(spec, 1) == [name.format(expert) for expert in range(3)]
    with pytest.raises(InputError, match=rf"missing {name.format(2)}"):
        write(tmp_path, MIXTRAL, lambda tensors: tensors.pop(name.format(2)))
    with pytest.raises(InputError, match=rf"unexpected {name.format(3)}"):
        write(tmp_path, MIXTRAL, lambda t: t.update({name.format(3): t[name.format(2)]}))


@pytest.mark.parametrize("name", ["model.norm.weight", QUERY])
def test_only_families_published_in_four_bits_are_decoded(name: str, directory: Path) -> None:
    def pack(tensors: dict[str, np.ndarray]) -> None:
        del tensors[name]
        tensors[f"{name}_blocks"] = np.ones((32, 1, 16), np.uint8)
        tensors[f"{name}_scales"] = np.ones((32, 1), np.uint8)

    with pytest.raises(InputError, match=f"missing {name}; unexpected {name}_blocks"):
        rewrite(directory, pack)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.norm.weight", (1, 16)),
        ("model.layers.0.self_attn.sinks", (2, 1, 16)),
        ("model.layers.0.mlp.experts.down_proj", (2, 32, 1, 16)),  # 48 are no groups of 32
    ],
)
def test_what_cannot_be_in_four_bits_is_refused(
    name: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    config = published(
        "gpt-oss-20b", hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=40,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_local_experts=2,
        layer_types=["sliding_attention", "full_attention"], num_experts_per_tok=1,
    )  # fmt: skip

    def pack(tensors: dict[str, np.ndarray]) -> None:
        del tensors[name]
        tensors[f"{name}_blocks"] = np.ones(shape, np.uint8)
        tensors[f"{name}_scales"] = np.ones(shape[:-1], np.uint8)

    write(tmp_path, config)
    with pytest.raises(InputError, match=f"missing {name}; unexpected {name}_blocks"):
        write(tmp_path, config, pack)


@pytest.mark.parametrize("change", [renamed("model.", ""), renamed("model.", "model.model.")])
def test_a_prefix_of_no_family_is_refused(
    change: Callable[[dict[str, np.ndarray]], None], directory: Path
) -> None:
    with pytest.raises(InputError, match="missing model.embed_tokens.weight"):
        rewrite(directory, change)


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", ""]
)
def test_an_index_that_names_files_elsewhere_is_refused(name: str, directory: Path) -> None:
    shutil.copy(directory / "model.safetensors", directory.parent / "secret.safetensors")
    shard(directory, weight_map={NORM: name})
    with pytest.raises(InputError, match="index.json: .* is not a plain file name"):
        open_checkpoint(str(directory))


@pytest.mark.parametrize("weight_map", [None, [], "x", {"a": 1}, {"a": ["model.safetensors"]}])
def test_an_index_without_a_usable_map_is_refused(weight_map: Any, directory: Path) -> None:
    shard(directory, weight_map=weight_map)
    with pytest.raises(InputError, match="no usable weight_map"):
        open_checkpoint(str(directory))


def test_a_missing_shard_is_named(directory: Path) -> None:
    shard(directory)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match="model-00002-of-00003.safetensors: no such file"):
        open_checkpoint(str(directory))


def test_a_tensor_in_two_shards_is_refused_with_both_files(directory: Path) -> None:
    shard(directory)
    first, third = (directory / f"model-0000{i}-of-00003.safetensors" for i in (1, 3))
    shutil.copy(first, third)
    with pytest.raises(InputError, match="is also in model-00001-of-00003.safetensors") as caught:
        open_checkpoint(str(directory))
    assert third.name in str(caught.value)


def test_pickled_weights_are_never_read(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(InputError, match="pickled .bin weights are never read"):
        open_checkpoint(str(directory))


def test_damaged_weights_are_refused_as_input(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated") as caught:
        open_checkpoint(str(directory))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", "config.json: no such file"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "model.safetensors: no such file"),
    ],
)
def test_a_missing_file_is_named(name: str, said: str, directory: Path) -> None:
    (directory / name).unlink()
    with pytest.raises(InputError, match=said):
        open_checkpoint(str(directory))


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_named(content: bytes, directory: Path) -> None:
    (directory / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json: not (valid JSON|a JSON object)"):
        open_checkpoint(str(directory))


def test_a_missing_directory_says_what_a_model_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean openai-community/gpt2-xl, a model of the"):
        open_checkpoint("gpt2-xl")
    with pytest.raises(InputError, match="--model pythia-70m: no such directory.*EleutherAI/"):
        read_arch("pythia-70m")
    for encoder in ("bert-base-uncased", "roberta-large", "distilbert-base-cased", "t5-small"):
        with pytest.raises(InputError, match=f"--model {encoder}: is an encoder, .* causal lang"):
            open_checkpoint(encoder)
    with pytest.raises(InputError, match="--model .*absent: no such directory; give 'demo'"):
        open_checkpoint(str(tmp_path / "absent"))


def test_identity_is_of_contents_and_not_of_place(directory: Path, tmp_path: Path) -> None:
    before = open_checkpoint(str(directory)).identity()
    assert set(before) == {"config", "tokenizer", "weights"}
    shutil.copytree(directory, tmp_path / "moved")
    assert open_checkpoint(str(tmp_path / "moved")).identity() == before


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("config.json", "config"),
        ("tokenizer.json", "tokenizer"),
        ("tokenizer_config.json", "tokenizer"),
        ("model.safetensors", "weights"),
    ],
)
def test_identity_changes_where_a_file_changes(name: str, part: str, directory: Path) -> None:
    before = open_checkpoint(str(directory)).identity()
    path = directory / name
    data = bytearray(path.read_bytes())
    if name == "model.safetensors":
        data[-1] ^= 1
    else:
        data += b"\n"
    path.write_bytes(data)
    after = open_checkpoint(str(directory)).identity()
    assert {key for key in before if before[key] != after[key]} == {part}
