"""Model directories: what is found, what is refused and in which words. No weights are loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import tiny
from spile.errors import InputError
from spile.models.checkpoint import Checkpoint, open_checkpoint
from spile.tensors import write_tensors

INDEX = "model.safetensors.index.json"
LAYER = "model.layers.1."
NORM = LAYER + "input_layernorm.weight"
QUERY = LAYER + "self_attn.q_proj.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model")


def expected() -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in tiny.random_tensors(tiny.CONFIG).items()}


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
    assert checkpoint.source("wq", 1) == QUERY
    assert checkpoint.source("embed") == "model.embed_tokens.weight"


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
        "model.norm.weight holds int8, not floats",
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


def test_rotary_buffers_of_old_checkpoints_are_ignored_and_lookalikes_are_not(
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
