"""Manifests keep their meaning for every text and every YAML parser."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spile.launch.target import to_yaml
from support.launches import HOSTILE

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(HOSTILE)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=5))
def test_a_reader_finds_what_was_written(value: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


def test_scripts_stand_as_lines_and_words_that_look_like_others_do_not() -> None:
    value = {"run": "set -e\n\necho 'a: b'\n", "on": "no", "n": ["1", 1, [], {}, [[2]]]}
    assert to_yaml(value) == (
        'run: |\n  set -e\n\n  echo \'a: b\'\n"on": "no"\n'
        '"n":\n  - "1"\n  - 1\n  - []\n  - {}\n  - - - 2\n'
    )
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize(
    "text", ["y", "N", "1e3", "0o17", "1:30", "~", "2026-11-17", ".5", "=", "*a"]
)
def test_a_text_is_quoted_whatever_a_reader_might_take_it_for(text: str) -> None:
    assert to_yaml({"value": text}) == f'value: "{text}"\n'
    assert to_yaml({text: [text]}) == f'"{text}":\n  - "{text}"\n'


def test_what_comes_twice_is_written_twice_and_keys_keep_their_order() -> None:
    shared = {"z": 1, "a": ["x" * 200]}
    written = f'  z: 1\n  a:\n    - "{"x" * 200}"\n'
    assert to_yaml({"b": shared, "a": shared}) == f"b:\n{written}a:\n{written}"
