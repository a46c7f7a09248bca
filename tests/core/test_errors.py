"""Errors: one line for a person, an exit code for a script."""

from collections.abc import Callable

import pytest

from spile.core import errors
from spile.core.config import Recipe, Runtime
from spile.core.errors import (
    ConfigError,
    CorruptError,
    DriftError,
    SpileError,
    WorldError,
    for_python,
    naming_flags,
    printable,
)


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


@pytest.mark.parametrize(
    ("message", "python"),
    [
        ("--taps: no site 'x'", "taps: no site 'x'"),
        ("--taps 'x:1': no site", "taps='x:1': no site"),
        ("--seq-len must be at least 8, got 2", "seq_len= must be at least 8, got 2"),
        ("--corpus gs://b/t*.jsonl: no such file", "corpus='gs://b/t*.jsonl': no such file"),
        ("--encode hook=gs://b/sae: not one", "encode='hook=gs://b/sae': not one"),
        ("--max-docs 1,000 is less; --more never", "max_docs=1,000 is less; more=True never"),
        ("--part holdout needs --holdout, a share", "part='holdout' needs holdout=, a share"),
        ("--fsdp goes with --mesh 3d, not x", "fsdp= goes with mesh='3d', not x"),
        ("choose, e.g. --taps resid_post.3 (of 4)", "choose, e.g. taps='resid_post.3' (of 4)"),
        ("give others (--taps) or another --out", "give others (taps=) or another out="),
        ("--messages turns reads its chats", "messages='turns' reads its chats"),
        (
            "--prompt-column q --response-column a reads its pairs",
            "prompt_column='q' response_column='a' reads its pairs",
        ),
        (
            "choose with --prompt-column and --response-column",
            "choose with prompt_column= and response_column=",
        ),
        ("run `spile drop A --taps B`", "run `spile drop A --taps B`"),  # a command
        ("add --restart, or --taps-of-mine", "add --restart, or --taps-of-mine"),  # of no parameter
        ("a--taps.txt: no such file", "a--taps.txt: no such file"),
    ],
)
def test_python_is_told_of_parameters_and_the_command_of_flags(message: str, python: str) -> None:
    assert for_python(message) == python


@pytest.mark.parametrize(
    ("make", "flag"),
    [(lambda: Recipe(seq_len=2), "--seq-len"), (lambda: Runtime(mesh=""), "--mesh")],
)
def test_errors_of_options_name_what_the_caller_wrote(
    make: Callable[[], object], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_shows_flags", False)  # as in a program
    with pytest.raises(ConfigError) as raised:
        make()
    assert str(raised.value).startswith(f"{flag[2:].replace('-', '_')}= must be")
    with naming_flags():
        assert str(raised.value).startswith(f"{flag} must be")
    assert flag not in str(raised.value)
    assert raised.value.message.startswith(flag)  # what other processes are sent
