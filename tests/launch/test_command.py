"""Commands are shown as a shell takes them, and many run at once."""

import subprocess
import sys
import time

import pytest

from spile.core.errors import LaunchError
from spile.launch.command import FILE, Command, check_all, run, run_all, shown
from support.launches import HOSTILE


def test_what_is_shown_is_what_a_shell_would_run() -> None:
    """A shell that gets the shown text does the same, whatever words, variables and input hold."""
    script = "import os, sys; print([sys.argv[1:], os.environ['A'], sys.stdin.read()])"
    for word in HOSTILE:
        text = f"{word}\nEND\nend\n"
        argv = (sys.executable, "-c", script, word)
        command = Command(argv=argv, env={"A": word}, stdin=text)
        done = subprocess.run(["sh"], input=str(command), capture_output=True, text=True)
        assert done.stderr == ""
        assert done.stdout == run(command).out == f"{[[word], word, text]}\n"


def test_words_that_are_no_text_come_back_as_they_went() -> None:
    word = b"\xff\xfe".decode("utf-8", "surrogateescape")
    result = run(Command(argv=("cat",), stdin=word))
    assert result.out == word
    assert result.said == "\\udcff\\udcfe"


def test_a_file_is_shown_as_a_comment_and_gone_when_it_was_read() -> None:
    command = Command(argv=("cat", FILE), file="one\ntwo\n", where="there")
    assert shown([command]) == (
        "# there\n# {file}, for this command only, mode 0600:\n#   one\n#   two\ncat '{file}'"
    )
    assert run(command).out == "one\ntwo\n"
    path = run(Command(argv=("echo", FILE), file="x")).out.strip()
    assert subprocess.run(["test", "-e", path]).returncode == 1


def test_many_run_at_once_and_answer_in_order() -> None:
    began = time.monotonic()
    words = [("sh", "-c", f"sleep 0.{9 - number}; echo {number}") for number in range(8)]
    results = run_all([Command(argv=word) for word in words])
    assert [result.out.strip() for result in results] == [str(number) for number in range(8)]
    assert time.monotonic() - began < 3.5  # they take 4.4 seconds in a row


def test_what_failed_is_named_in_one_line() -> None:
    commands = [
        Command(argv=("sh", "-c", "echo first >&2; echo 'last\tword' >&2; exit 3"), where="h1"),
        Command(argv=("true",), where="h2"),
        Command(argv=("/no/such/program",), where="h3"),
    ]
    with pytest.raises(LaunchError) as caught:
        check_all(run_all(commands), "try again")
    assert str(caught.value) == (
        "2 of 3 failed: h1: last\\tword; h3: /no/such/program is not installed here; try again"
    )


def test_one_that_takes_too_long_is_given_up() -> None:
    result = run(Command(argv=("sleep", "30")), 0.1)
    assert (result.code, result.said) == (1, "no answer within 0.1 s")
