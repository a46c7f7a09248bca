"""Options: which values are refused, in which words, and when two recipes are one dataset."""

import dataclasses
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
)
from spile.core.errors import ConfigError


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
def test_a_bad_recipe_value_is_refused_with_flag_value_and_choices(
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
def test_a_bad_runtime_value_is_refused_with_flag_value_and_choices(
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


def test_build_sorts_given_options_into_recipe_and_runtime() -> None:
    recipe, runtime = build({"model": "demo", "threads": 2, "seq_len": None, "shard_bytes": None})
    assert recipe == Recipe(model="demo")
    assert runtime == Runtime(threads=2)


def test_recipe_and_runtime_share_no_option() -> None:
    assert not set(Recipe.names()) & set(Runtime.names())


def test_canonical_json_is_these_bytes() -> None:
    value = {"b": [1, 2.5, None], "a": "é", "c": {"z": True, "y": False}}
    expected = b'{"a":"\\u00e9","b":[1,2.5,null],"c":{"y":false,"z":true}}'
    assert canonical_json(value) == expected


def test_canonical_json_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError):
        canonical_json({"a": float("nan")})
