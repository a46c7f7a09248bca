"""The command as a whole: its verbs, its exit codes, and how it reports errors."""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from spile import __version__, cli
from spile.core.errors import ConfigError, Interrupted, SpileError, StoreError

VERBS = {
    "make a dataset": [
        "extract",
        "ingest",
        "encode",
        "plan",
        "rollouts",
        "lens",
        "taps",
        "fetch",
        "convert",
        "legacy",
    ],  # fmt: skip
    "look at one": ["features", "status", "ls", "serve", "doctor"],
    "read one": ["export", "shuffle", "serve-rows"],
    "move one": ["copy", "merge", "push"],
    "maintain one": ["verify", "check", "sign", "compact", "drop", "gc", "rm"],
    "run elsewhere": ["launch", "supervise", "compile"],
}


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """`run` replaces signal handlers; restore those of the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def verbs() -> dict[str, argparse.ArgumentParser]:
    (group,) = (
        action
        for action in cli.make_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return group.choices


def test_the_verbs_are_listed_in_groups_one_line_each() -> None:
    told = cli.make_parser().format_help()
    lines = told[told.index("make a dataset") :].splitlines()
    assert max(map(len, lines)) <= 80
    found: dict[str, list[str]] = {}
    for line in filter(None, lines):
        if not line.startswith(" "):
            found[line] = []
        else:
            found[[*found][-1]].append(line.split()[0])
    assert found == VERBS
    assert [*verbs()] == [verb for group in VERBS.values() for verb in group]


def test_every_verb_has_a_function_and_speaks_json() -> None:
    for name, parser in verbs().items():
        assert callable(parser.get_default("verb")), name
        assert "--json" in parser.format_help(), name


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["--version"])
    assert capsys.readouterr().out == f"spile {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["status"], ["extract", "--nothing"]])
def test_a_bad_command_line_is_one_line_and_code_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith("spile: ") and told.count("\n") == 1
    assert "--help`)" in told


def test_an_interrupt_that_a_callback_swallows_prints_no_traceback() -> None:
    script = """
import signal, weakref
from spile import cli
class Value: pass
def verb(arguments):
    value = Value()
    weakref.finalize(value, lambda: 1 / 0)
    seen = weakref.ref(value, lambda _: signal.raise_signal(signal.SIGINT))
    del value
    if arguments.stop.is_set():
        raise KeyboardInterrupt
parse = cli.parser._parse
def parsed(*given):
    found = parse(["ls", "x"], *given[1:])
    found.verb = verb
    return found
cli.parser._parse = parsed
cli.main([])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 130
    assert "KeyboardInterrupt" not in done.stderr
    assert "ZeroDivisionError" in done.stderr, "other errors are shown"


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a"), 2), (StoreError("b"), 3), (Interrupted(), 130), (KeyboardInterrupt(), 130)],
)
def test_what_a_verb_raises_is_its_exit_code(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("spile.status.status.read_status", fail)
    assert cli.run(["status", "."]) == code
    said = Interrupted() if isinstance(error, KeyboardInterrupt) else error
    assert capsys.readouterr().err == f"spile: {said}\n"


def test_what_is_no_deliberate_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("spile.status.status.read_status", fail)
    with pytest.raises(ZeroDivisionError):
        cli.run(["status", "."])


def test_an_error_is_json_where_the_log_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["extract", "--log-json", "--taps", "embed"]) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert told["level"] == "error" and "--out is missing" in told["message"]


def test_a_strangers_words_do_not_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise SpileError("bad \x1b[31mname")

    monkeypatch.setattr("spile.status.status.read_status", fail)
    cli.run(["status", "."])
    assert capsys.readouterr().err == "spile: bad \\x1b[31mname\n"
