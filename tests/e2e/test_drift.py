"""An output has one recipe, one model and one corpus; others are refused."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import Work, check_refused, check_same, check_sound, files, launch, run
from spile.core.config import Recipe
from spile.core.identity import sampled_digest
from spile.core.tensors import read_header, write_tensors
from support import tiny

BASE: dict[str, Any] = {
    "taps": "resid_post:0",
    "where": "pos >= 1",
    "every": 2,
    "seq_len": 64,
    "pack": "ffd",
    "long_docs": "split",
    "special_tokens": "tokenizer",
    "text_column": "text",
    "text_documents": "line",
    "max_docs": 12,
    "max_tokens": 600,
    "unit_tokens": 200,
    "compute_dtype": "float32",
    "store_dtype": "float32",
}
# For each field another value, and how the old and the new are shown.
OTHER: dict[str, tuple[Any, str, str]] = {
    "taps": ("resid_post:1", "resid_post.0", "resid_post.1"),
    "where": ("pos >= 2", "pos >= 1", "pos >= 2"),
    "every": (3, "2", "3"),
    "pool": ("mean", "None", "mean"),
    "seq_len": (32, "64", "32"),
    "pack": ("none", "ffd", "none"),
    "long_docs": ("truncate", "split", "truncate"),
    "special_tokens": ("none", "tokenizer", "none"),
    "text_column": ("body", "text", "body"),
    "text_documents": ("file", "line", "file"),
    "filter": ("body != ''", "None", "body"),
    "shuffle_docs": (7, "None", "7"),
    "fraction": (0.9, "None", "0.9"),
    "holdout": (0.1, "None", "0.1"),
    "dedupe": (True, "False", "True"),
    "min_tokens": (2, "None", "2"),
    "max_doc_tokens": (500, "None", "500"),
    "max_doc_bytes": (1000, "67108864", "1000"),
    "keep": ("url", "['body']", "['url']"),
    "preview": (0, "200", "0"),
    "max_docs": (11, "12", "11"),
    "max_tokens": (700, "600", "700"),
    "unit_tokens": (201, "200", "201"),
    "compute_dtype": ("bfloat16", "float32", "bfloat16"),
    "store_dtype": ("float16", "float32", "float16"),
}


def write_corpus(path: Path, *, padding: int = 0) -> Path:
    """Thirty documents under two keys; `padding` makes the file larger, but not its texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number in range(30):
            text = f"document {number} has a few words, and its own number, {number}"
            record = {"text": text, "body": text.upper(), "x": "." * padding}
            file.write(json.dumps(record) + "\n")
    return path


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Work, Path]:
    folder = tmp_path_factory.mktemp("made")
    work = Work(model, write_corpus(folder / "corpus.jsonl"), BASE)
    work.extract(folder / "out")
    return work, folder / "out"


def begin(work: Work, out: Path) -> None:
    """A dataset with two units done, and the others not."""
    process = launch({"kill": "commit after", "nth": 2}, "extract", *work.flags(out))
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err


def flip(path: Path, offset: int) -> None:
    """Change one byte: the lowest bits of a little-endian number."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def refused(work: Work, out: Path, *named: object, code: int = 2, **changes: Any) -> None:
    """Check that the command is refused by name, and that the store has not changed."""
    before = files(out)
    check_refused(run("extract", *work.flags(out, **changes)), code, *named)
    kept = files(out)
    assert {name: kept[name] for name in before} == before
    assert {name.split("/")[0] for name in set(kept) - set(before)} <= {"workers"}


def test_every_field_of_the_recipe_is_tried() -> None:
    chats = {"messages", "prompt_column", "response_column", "prompt_prefix", "prompt_suffix",
             "system", "template", "generation_prompt"}  # fmt: skip
    # (Of no text: test_token_ids.py and test_rollouts.py.)
    ids = {"tokens_column", "roles_column", "logprobs_column", "tokens_dtype", "doc_separator"}
    encoders = {"encode", "latents", "encode_error"}  # test_encode.py
    # (plan/test_resolve.py, plan/test_passes.py and plan/test_growth.py try those that grow.)
    grown = {"add_taps", "more", "add_corpus"}
    # (test_splice.py, test_reduce.py, test_top_logits.py, test_gradients.py, test_baselines.py and
    # test_lens_top.py try these.)
    others = {"splice", "reduce", "by", "top_logits", "attn_top", "lens"}
    others |= {"objective", "baseline", "steps", "writers"}
    elsewhere = {*chats, *ids, *encoders, *grown, *others, "part", "like"}
    assert {*OTHER, *elsewhere, "model", "lora", "corpus"} == set(Recipe.names())


def test_the_other_part_of_a_corpus_is_another_dataset(
    made: tuple[Work, Path], tmp_path: Path
) -> None:
    work, _ = made
    work.extract(tmp_path / "out", holdout=0.3)
    refused(work, tmp_path / "out", "part: stored", holdout=0.3, part="holdout")


def test_another_chat_is_another_dataset(made: tuple[Work, Path], tmp_path: Path) -> None:
    work, _ = made
    chat = {"text_column": None, "prompt_column": "text", "template": "none"}
    work.extract(tmp_path / "out", **chat)
    for field, value in (("prompt_column", "body"), ("response_column", "body"),
                         ("prompt_prefix", "Q"), ("prompt_suffix", "A")):  # fmt: skip
        refused(work, tmp_path / "out", f"{field}: stored", **{**chat, field: value})


@pytest.mark.parametrize("field", OTHER)
def test_another_value_of_a_field_is_refused_with_both_values(
    field: str, made: tuple[Work, Path]
) -> None:
    work, out = made
    value, old, new = OTHER[field]
    before = files(out)
    result = run("extract", *work.flags(out, **{field: value}))
    check_refused(result, 2, out, f"{field}: stored", "now")
    _, _, shown = result.err.partition(f"{field}: stored ")
    stored, _, asked = shown.partition(", now ")
    assert old in stored
    assert new in asked.partition(")")[0]
    assert files(out) == before


def test_other_taps_are_refused_with_the_flag_that_adds_them(made: tuple[Work, Path]) -> None:
    work, out = made
    added = "give --add-taps 'embed,resid_post.1' in place of --taps"
    refused(work, out, added, taps="embed,resid_post:0+1")
    result = run("extract", *work.flags(out, taps="resid_post:1", every=3))
    check_refused(result, 2, "use the stored values or another --out")  # more than taps differ


def test_a_field_that_was_left_open_cannot_be_set_later(
    made: tuple[Work, Path], tmp_path: Path
) -> None:
    work, _ = made
    out, fields = tmp_path / "out", ("text_column", "max_docs", "max_tokens", "where", "every")
    left = {**dict.fromkeys(fields), "taps": "embed"}
    work.extract(out, **left)
    for field in fields:
        value = OTHER[field][0]
        refused(work, out, f"{field}: stored None", repr(value), **{**left, field: value})


def test_several_differences_are_named_at_once(made: tuple[Work, Path]) -> None:
    work, out = made
    refused(work, out, "seq_len", "pack", "store_dtype", seq_len=32, pack="none",
            store_dtype="bfloat16")  # fmt: skip


def test_another_model_is_refused(made: tuple[Work, Path], tmp_path: Path) -> None:
    work, out = made
    other = tiny.write_model(tmp_path / "other", seed=1)
    old = sampled_digest(work.model / "model.safetensors")
    new = sampled_digest(other / "model.safetensors")
    refused(work, out, "model weights", old, new, model=other)


def test_another_corpus_is_refused(made: tuple[Work, Path], tmp_path: Path) -> None:
    work, out = made
    other = tiny.write_corpus(tmp_path / "other.jsonl", 30)
    old, new = sampled_digest(work.corpus), sampled_digest(other)
    refused(work, out, other, old, new, corpus=other)


@pytest.mark.parametrize("tensor", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_one_changed_byte_of_the_weights_is_refused(
    tensor: str, made: tuple[Work, Path], tmp_path: Path
) -> None:
    work, out = made
    other = Path(shutil.copytree(work.model, tmp_path / "model"))
    info = read_header(other / "model.safetensors")[tensor]
    flip(other / "model.safetensors", (info.start + info.stop) // 8 * 4)
    refused(work, out, "model weights", "stored", "now", model=other)


@pytest.mark.parametrize(
    ("name", "part"), [("config.json", "config"), ("tokenizer.json", "tokenizer"),
                       ("tokenizer_config.json", "tokenizer")],
)  # fmt: skip
def test_a_changed_file_beside_the_weights_is_refused(
    name: str, part: str, made: tuple[Work, Path], tmp_path: Path
) -> None:
    work, out = made
    other = Path(shutil.copytree(work.model, tmp_path / "model"))
    (other / name).write_text((other / name).read_text() + "\n")
    refused(work, out, f"model {part}", "stored", "now", model=other)


@pytest.mark.full
def test_a_changed_byte_that_sampling_misses_is_found_before_a_commit(
    tmp_path: Path,
) -> None:
    model = tiny.write_model(tmp_path / "model", hidden_size=256, intermediate_size=768)
    work = Work(model, write_corpus(tmp_path / "corpus.jsonl"), BASE)
    out = tmp_path / "out"
    begin(work, out)
    weights = model / "model.safetensors"
    name = "model.layers.0.mlp.gate_proj.weight"
    info, before = read_header(weights)[name], sampled_digest(weights)
    for offset in range(info.start, info.stop, 65536):
        flip(weights, offset)
        if sampled_digest(weights) == before:
            break
        flip(weights, offset)
    else:
        raise AssertionError("every block of the tensor is sampled")
    refused(work, out, name, "stored", "now", model=model)
    flip(weights, offset)
    assert run("extract", *work.flags(out)).code == 0


def write_adapter(folder: Path, *, seed: int) -> Path:
    """A LoRA of rank 2 on the queries of the first block."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng, name = np.random.default_rng(seed), "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{name}.lora_A.weight": rng.standard_normal((2, 32)).astype(np.float32),
        f"{name}.lora_B.weight": rng.standard_normal((32, 2)).astype(np.float32),
    }
    write_tensors(folder / "adapter_model.safetensors", tensors)
    return folder


def test_another_adapter_is_refused_and_the_same_one_elsewhere_is_not(
    made: tuple[Work, Path], tmp_path: Path
) -> None:
    work, plain = made
    first, second = (write_adapter(tmp_path / f"lora{seed}", seed=seed) for seed in (1, 2))
    out = tmp_path / "out"
    work.extract(out, lora=str(first))
    before = spile.open(str(plain))
    rows = [ds.read("resid_post.0", 0, ds.num_tokens) for ds in (before, spile.open(str(out)))]
    assert rows[0].shape == rows[1].shape
    assert np.abs(rows[0] - rows[1]).max() > 0.01, "an adapter that changes nothing tests nothing"

    refused(work, out, "model lora: stored", "now", lora=second)
    refused(work, plain, "model lora: stored None, now", lora=first)
    moved = Path(shutil.copytree(first, tmp_path / "moved"))
    for lora in (first, moved, None):  # not given: from the store
        result = run("extract", *work.flags(out, lora=lora))
        assert result.code == 0, result.err
    flip(
        moved / "adapter_model.safetensors",
        (moved / "adapter_model.safetensors").stat().st_size - 4,
    )
    refused(work, out, "model lora: stored", "now", lora=moved)


def test_one_changed_byte_of_the_corpus_is_refused(made: tuple[Work, Path], tmp_path: Path) -> None:
    work, out = made
    other = Path(shutil.copy(work.corpus, tmp_path / "corpus.jsonl"))
    old = sampled_digest(other)
    flip(other, other.stat().st_size // 2)
    refused(work, out, other, old, sampled_digest(other), corpus=other)


@pytest.mark.full
def test_a_changed_byte_of_a_large_corpus_is_found_when_it_is_read(
    model: Path, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", padding=200_000)
    work = Work(model, corpus, {**BASE, "max_docs": None, "max_tokens": None})
    out = tmp_path / "out"
    begin(work, out)
    before = sampled_digest(corpus)
    offset = corpus.read_bytes().rindex(b"document 2") + 10  # of the last unit
    flip(corpus, offset)
    assert sampled_digest(corpus) == before, "this byte is in a sampled block; choose another"
    result = run("extract", *work.flags(out))
    check_refused(result, 3, corpus, "changed")
    assert run("verify", out, "--partial").code == 0
    flip(corpus, offset)
    assert run("extract", *work.flags(out)).code == 0
    check_sound(out)


def test_an_added_file_is_refused_and_a_renamed_one_recognised(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    write_corpus(folder / "a.jsonl")
    tiny.write_corpus(folder / "b.jsonl", 20)
    work, out = Work(model, folder, BASE), tmp_path / "out"
    work.extract(out)
    tiny.write_corpus(folder / "c.jsonl", 3, seed=9)
    refused(work, out, "corpus", "2 file", "3 file")
    (folder / "a.jsonl").rename(folder / "c.jsonl")
    before = files(out)
    work.extract(out)  # (in another order by name; the units name files in the stored order)
    assert files(out) == before


def test_moved_directories_with_the_same_content_are_accepted(
    model: Path, made: tuple[Work, Path], tmp_path: Path
) -> None:
    first = Work(
        Path(shutil.copytree(model, tmp_path / "here" / "model")),
        write_corpus(tmp_path / "here" / "corpus" / "a.jsonl").parent,
        BASE,
    )
    out = tmp_path / "out"
    begin(first, out)
    (tmp_path / "here").rename(tmp_path / "there")
    second = Work(tmp_path / "there" / "model", tmp_path / "there" / "corpus", BASE)
    result = run("extract", *second.flags(out))
    assert result.code == 0, result.err
    check_same(out, made[1])
