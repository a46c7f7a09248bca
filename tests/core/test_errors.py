"""Errors: one line for a person, an exit code for a script."""

import pytest

from spile.core import errors
from spile.core.errors import CorruptError, DriftError, SpileError, WorldError, printable


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("ConfigError", 2), ("InputError", 2), ("StoreError", 3), ("DataError", 3),
        ("LaunchError", 3), ("DriftError", 2), ("CorruptError", 3), ("Interrupted", 130),
    ],
)  # fmt: skip
def test_exit_codes_are_these(name: str, code: int) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, SpileError)
    assert kind.exit_code == code


def test_the_difference_of_two_recipes_is_named_field_by_field() -> None:
    error = DriftError("out", {"seq_len": (128, 256), "pack": ("ffd", "none")})
    assert str(error) == (
        "out was made by another recipe (seq_len: stored 128, now 256; pack: stored 'ffd', now "
        "'none'); use the stored values or another --out"
    )
    assert error.differences["seq_len"] == (128, 256)


def test_damage_names_its_object_and_a_world_ends_as_its_first_process() -> None:
    error = CorruptError("done/1.json", "is not JSON")
    assert (error.key, str(error)) == ("done/1.json", "done/1.json: is not JSON")
    assert WorldError(3, "process 3: out of memory", 137).exit_code == 137


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain\nlines é", "plain\nlines é"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\u202e", "a\\rb\\u202e"),
    ],
)
def test_nothing_speaks_to_the_terminal(text: str, safe: str) -> None:
    assert printable(text) == safe


def test_a_message_that_quotes_a_long_text_is_cut_in_the_middle() -> None:
    said = str(SpileError(f"--filter {'(' * 20_000!r}: is no condition; write another"))
    assert len(said) < 6000
    assert said.startswith("--filter '(((") and said.endswith(": is no condition; write another")
    assert " … " in said
