"""Options: what is refused and in what words, and what makes two recipes the same dataset."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from spile.core.config import (
    Recipe,
    Runtime,
    build,
    canonical_json,
    flag_of,
    load_toml,
    parse_count,
)
from spile.core.errors import ConfigError
from spile.core.recipe import ResolvedRecipe

RESOLVED = ResolvedRecipe(
    model_source="models/a",
    lora_source=None,
    corpus_source="texts/a",
    model={"config": "c1", "weights": "w1"},
    corpus=("1-aa", "2-bb"),
    taps=("embed", "resid_post.1"),
    where=None,
    every=None,
    seq_len=128,
    pack="ffd",
    long_docs="split",
    special_tokens="tokenizer",
    text_column=None,
    text_documents="line",
    max_docs=None,
    max_tokens=None,
    unit_tokens=64_000,
    compute_dtype="float32",
    store_dtype="bfloat16",
)
OTHER: dict[str, Any] = {
    "model_source": "models/b",
    "lora_source": "adapters/b",
    "corpus_source": "texts/b",
    "model": {"config": "c1", "weights": "w2"},
    "corpus": ("2-bb", "1-aa"),
    "taps": ("embed", "resid_post.2"),
    "where": "not bos",
    "every": 2,
    "seq_len": 129,
    "pack": "none",
    "long_docs": "truncate",
    "special_tokens": "bos",
    "text_column": "text",
    "text_documents": "file",
    "tokens_column": "input_ids",
    "tokens_dtype": "uint32",
    "doc_separator": "none",
    "template_source": "b.jinja",
    "encode_source": "saes/b",
    "encode": {"embed": "topk 16 2-cd"},
    "latents": 8,
    "messages": "chats",
    "prompt_column": "question",
    "response_column": "answer",
    "prompt_prefix": "Q: ",
    "prompt_suffix": " A:",
    "system": "Be brief.",
    "template": "b2",
    "generation_prompt": True,
    "filter": "score > 1",
    "shuffle_docs": 0,
    "fraction": 0.5,
    "holdout": 0.5,
    "part": "holdout",
    "dedupe": True,
    "min_tokens": 1,
    "max_doc_tokens": 1,
    "max_doc_bytes": 1,
    "keep": ("id", "url"),
    "preview": 0,
    "max_docs": 1,
    "max_tokens": 1,
    "unit_tokens": 64_001,
    "compute_dtype": "bfloat16",
    "store_dtype": "float32",
}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("seq_len", 7, ["--seq-len", "at least 8", "7"]),
        ("seq_len", "7", ["--seq-len", "at least 8", "7"]),
        ("seq_len", "64x", ["--seq-len", "64k", "'64x'"]),
        ("seq_len", 64.0, ["--seq-len", "whole number", "64.0"]),
        ("max_docs", True, ["--max-docs", "whole number", "True"]),
        ("max_tokens", 0, ["--max-tokens", "at least 1", "0"]),
        ("max_tokens", -5, ["--max-tokens", "at least 1", "-5"]),
        ("unit_tokens", [], ["--unit-tokens", "whole number", "[]"]),
        ("every", 0, ["--every", "at least 1", "0"]),
        ("every", 2.5, ["--every", "whole number", "2.5"]),
        ("where", "", ["--where", "non-empty", "''"]),
        ("where", ["bos"], ["--where", "text", "['bos']"]),
        ("lora", "", ["--lora", "non-empty", "''"]),
        ("pack", "best", ["--pack", "ffd, none", "'best'"]),
        ("store_dtype", "int4", ["--store-dtype", "float32, float8_e4m3, int8", "'int4'"]),
        ("taps", "", ["--taps", "non-empty", "''"]),
        ("model", 3, ["--model", "text", "3"]),
        ("text_column", "", ["--text-column", "non-empty", "''"]),
    ],
)
def test_a_bad_recipe_value_is_one_line_with_flag_value_and_what_is_allowed(
    name: str, value: Any, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Recipe(**{name: value})
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in said), message


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("shard_bytes", 100, ["--shard-bytes", "at least 4096", "100"]),
        ("shard_bytes", "many", ["--shard-bytes", "1GiB", "'many'"]),
        ("queue_depth", 0, ["--queue-depth", "at least 1", "0"]),
        ("ignore_space", "yes", ["--ignore-space", "true or false", "'yes'"]),
        ("allow_nonfinite", 1, ["--allow-nonfinite", "true or false", "1"]),
        ("threads", "two\nthree", ["--threads", "'two\\nthree'"]),
    ],
)
def test_a_bad_runtime_value_is_one_line_with_flag_value_and_what_is_allowed(
    name: str, value: Any, said: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Runtime(**{name: value})
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in said), message


@pytest.mark.parametrize("kind", [Recipe, Runtime])
def test_every_option_with_choices_takes_each_and_lists_all_when_refusing(kind: type) -> None:
    for f in dataclasses.fields(kind):
        choices = f.metadata["choices"]
        for choice in choices:
            assert getattr(kind(**{f.name: choice}), f.name) == choice
        if choices:
            with pytest.raises(ConfigError) as caught:
                kind(**{f.name: "no such choice"})
            assert flag_of(f.name) in str(caught.value)
            assert ", ".join(choices) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("64k", 64_000),
        ("64K", 64_000),
        ("4M", 4_000_000),
        ("1.5M", 1_500_000),
        ("1.001M", 1_001_000),
        ("2.3G", 2_300_000_000),
        ("1_000", 1000),
        ("1GiB", 1 << 30),
        ("500MB", 500_000_000),
        ("0.5KiB", 512),
        (" 2 TiB ", 1 << 41),
    ],
)
def test_counts_and_sizes_are_exact(text: str, value: int) -> None:
    assert parse_count(text) == value
    assert Recipe(max_tokens=text).max_tokens == value  # type: ignore[arg-type]
    if value >= 4096:
        assert Runtime(shard_bytes=text).shard_bytes == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "k", "-1", "+1", "1e6", "0x10", "1,000", "1..5k", "12 parsecs", "1k5", "٣", "inf"]
)
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-docs"):
        Recipe(max_docs=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1.5", "9.99", "1.0005k"])
def test_a_count_that_is_not_whole_is_refused_rather_than_cut(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-docs must be a whole number"):
        Recipe(max_docs=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["batch_tokens", "unit_tokens", "seq_len", "threads"])
def test_auto_means_not_given_where_spile_settles_a_count(name: str) -> None:
    assert build({name: "auto"}) == build({name: None}) == build({})


def test_auto_is_taken_from_flags_and_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('batch-tokens = "auto"\nunit_tokens = "auto"\nseq-len = "auto"\n')
    assert build(load_toml(path)) == build({}) == (Recipe(), Runtime())
    assert build({"batch_tokens": "auto", "threads": 2}) == (Recipe(), Runtime(threads=2))


def test_auto_is_refused_where_there_is_a_fixed_default() -> None:
    fixed = [f for f in dataclasses.fields(Runtime) if f.default not in (None, "auto")]
    assert {"shard_bytes", "queue_depth"} < {f.name for f in fixed}
    for f in fixed:
        with pytest.raises(ConfigError, match=f"{flag_of(f.name)} must be .*'auto'"):
            build({f.name: "auto"})


@pytest.mark.parametrize("text", ["Auto", " auto", "automatic", "none", ""])
def test_only_the_very_word_auto_is_taken(text: str) -> None:
    with pytest.raises(ConfigError, match="--batch-tokens"):
        Runtime(batch_tokens=text)  # type: ignore[arg-type]


def test_toml_keys_may_have_dashes_or_underscores(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('seq-len = "1k"\nstore_dtype = "float32"\nqueue-depth = 3\nout = "acts"\n')
    options = load_toml(path)
    assert options == {"seq_len": "1k", "store_dtype": "float32", "queue_depth": 3, "out": "acts"}
    recipe, runtime = build(options)
    assert (recipe.seq_len, recipe.store_dtype, runtime.queue_depth) == (1000, "float32", 3)


@pytest.mark.parametrize(
    ("key", "near"),
    [("seq-length", "seq_len"), ("taps_", "taps"), ("shard-byte", "shard_bytes")],
)
def test_an_unknown_toml_key_is_named_with_the_nearest_known_one(
    tmp_path: Path, key: str, near: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'model = "demo"\n{key} = 1\n')
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    message = str(caught.value)
    assert f"--config {path}" in message
    assert repr(key) in message
    assert f"did you mean {near!r}" in message


def test_an_unknown_toml_key_like_no_other_is_named_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("zzz = 1\n")
    with pytest.raises(ConfigError, match="unknown key 'zzz'$"):
        load_toml(path)


@pytest.mark.parametrize("content", [b"seq-len 8\n", b"\xff\xfe", b"[recipe]\nmodel = 'demo'\n"])
def test_an_unusable_toml_file_is_one_line_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_toml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*absent\.toml: No such file"):
        load_toml(tmp_path / "absent.toml")


def test_a_toml_value_of_the_wrong_type_is_refused_by_flag(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seq-len = 12.5\n")
    with pytest.raises(ConfigError, match=r"--seq-len .* 12\.5"):
        build(load_toml(path))


def test_build_sorts_options_into_recipe_and_runtime_and_drops_what_was_not_given() -> None:
    recipe, runtime = build({"model": "demo", "threads": 2, "seq_len": None, "shard_bytes": None})
    assert recipe == Recipe(model="demo")
    assert runtime == Runtime(threads=2)


def test_recipe_and_runtime_share_no_option() -> None:
    assert not set(Recipe.names()) & set(Runtime.names())


def test_every_resolved_field_has_another_value_to_test_with() -> None:
    assert set(OTHER) == {f.name for f in dataclasses.fields(ResolvedRecipe)}


@pytest.mark.parametrize("name", OTHER)
def test_the_fingerprint_changes_with_identity_and_not_with_sources(name: str) -> None:
    changed = dataclasses.replace(RESOLVED, **{name: OTHER[name]})
    assert getattr(changed, name) != getattr(RESOLVED, name)
    is_source = name.endswith("_source")
    assert (changed.fingerprint() == RESOLVED.fingerprint()) is is_source
    assert (changed.identity() == RESOLVED.identity()) is is_source


def test_the_fingerprint_does_not_depend_on_the_order_of_keys() -> None:
    turned = {key: RESOLVED.model[key] for key in reversed(list(RESOLVED.model))}
    assert list(turned) != list(RESOLVED.model)
    assert dataclasses.replace(RESOLVED, model=turned).fingerprint() == RESOLVED.fingerprint()


@pytest.mark.parametrize(
    ("where", "every", "all_kept"),
    [(None, None, True), (None, 1, True), (None, 2, False), ("pos >= 0", None, False),
     ("end", 3, False)],
)  # fmt: skip
def test_a_recipe_says_whether_every_token_is_kept(
    where: str | None, every: int | None, all_kept: bool
) -> None:
    assert dataclasses.replace(RESOLVED, where=where, every=every).keeps_all is all_kept


def test_a_resolved_recipe_survives_json() -> None:
    for recipe in (RESOLVED, ResolvedRecipe(**OTHER)):
        back = ResolvedRecipe.from_json(json.loads(json.dumps(recipe.to_json())))
        assert back == recipe
        assert back.fingerprint() == recipe.fingerprint()


def test_a_stored_recipe_with_missing_or_unknown_fields_is_refused_by_name() -> None:
    stored = RESOLVED.to_json()
    del stored["pack"]
    stored["colour"] = "red"
    with pytest.raises(ConfigError, match="colour, pack"):
        ResolvedRecipe.from_json(stored)


def test_canonical_json_is_these_bytes() -> None:
    value = {"b": [1, 2.5, None], "a": "é", "c": {"z": True, "y": False}}
    expected = b'{"a":"\\u00e9","b":[1,2.5,null],"c":{"y":false,"z":true}}'
    assert canonical_json(value) == expected


def test_canonical_json_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError):
        canonical_json({"a": float("nan")})
