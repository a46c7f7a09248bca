"""`spile status --follow` and `spile ls`, as a user types them."""

import contextlib
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.harness import check_refused, run
from support import stored, tiny


@pytest.fixture
def unfinished(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out", commit=(0, 1, 2, 3))


def finish(made: stored.Stored) -> None:
    assert made.ledger.commit(made.attempt(4)) and made.ledger.complete(made.table)


def command(made: stored.Stored, *flags: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "spile.cli",
        "status",
        str(made.path),
        "--follow",
        "--interval",
        "0.05",
        *flags,
    ]


def test_following_ends_when_the_dataset_is_complete(unfinished: stored.Stored) -> None:
    with subprocess.Popen(
        command(unfinished), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=tiny.environment(),
    ) as process:  # fmt: skip
        assert process.stdout
        first = process.stdout.readline()
        assert first == f"{unfinished.path}: unfinished\n"
        finish(unfinished)
        rest, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    last = rest.strip().split("\n\n")[-1]
    assert last.startswith(f"{unfinished.path}: complete\n") and "5 of 5" in last


@contextlib.contextmanager
def on_a_terminal(made: stored.Stored) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    ours, theirs = pty.openpty()
    environment = {**tiny.environment(), "TERM": "xterm"}
    process = subprocess.Popen(
        command(made), stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
        start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, wanted: bytes) -> bytes:
    said, limit = b"", time.monotonic() + 120
    while wanted not in said:
        assert time.monotonic() < limit, said
        said += os.read(terminal, 65536)
    return said


def drained(terminal: int) -> None:
    """A process that writes there must not wait for a reader."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass


def test_q_quits(unfinished: stored.Stored) -> None:
    with on_a_terminal(unfinished) as (terminal, process):
        read_until(terminal, b"(q quits)")
        os.write(terminal, b"q")
        drained(terminal)
        assert process.wait(120) == 0


def test_an_interrupt_quits_without_a_message(unfinished: stored.Stored) -> None:
    with on_a_terminal(unfinished) as (terminal, process):
        read_until(terminal, b"(q quits)")
        process.send_signal(2)
        drained(terminal)
        assert process.wait(120) == 0


def test_impossible_intervals_are_refused(unfinished: stored.Stored) -> None:
    followed = ("status", unfinished.path, "--follow")
    check_refused(run(*followed, "--interval", "0"), 2, "--interval")
    check_refused(run(*followed, "--stale-after", "-1"), 2, "--stale-after")
    check_refused(run("status", unfinished.path, "--interval", "1"), 2, "--interval needs --follow")


def test_watch_names_its_new_spelling_and_follows(unfinished: stored.Stored) -> None:
    finish(unfinished)
    watched = run("watch", unfinished.path)
    assert (watched.code, watched.err.count("\n")) == (0, 1)
    assert "`spile status OUT --follow`" in watched.err
    assert watched.out == run("status", unfinished.path).out + "\n"


def test_files_are_listed_with_what_they_add_up_to(unfinished: stored.Stored) -> None:
    listed = run("ls", unfinished.path, "--json").json
    done = [unfinished.done(unit) for unit in range(4)]
    wanted = [(file.key, file.tap, file.count, file.first, file.bytes, file.digest)
              for record in done for file in record.files()]  # fmt: skip
    names = ("key", "tap", "rows", "first", "bytes", "digest")
    assert [tuple(each[name] for name in names) for each in listed["shards"]] == wanted
    assert listed["bytes"] == sum((unfinished.path / each[0]).stat().st_size for each in wanted)
    assert (listed["units"], listed["files"]) == (4, len(wanted))
    of_tap = listed["taps"]["mlp_out.1"]
    assert of_tap["dtype"] == "float32" and listed["taps"]["index"]["dtype"] is None
    assert of_tap["rows"] == listed["taps"]["index"]["rows"] == sum(r.rows for r in done)

    text = run("ls", unfinished.path).out.splitlines()
    assert text[0].startswith(f"{unfinished.path}: 4 units, {len(wanted)} files, ")
    for key, tap, _, _, _, digest in wanted:
        (line,) = (line for line in text if line.startswith(f"{key} "))
        assert line.split()[1] == tap and line.endswith(digest)


def test_one_unit_or_one_tap_is_listed_alone(unfinished: stored.Stored) -> None:
    some = run("ls", unfinished.path, "--unit", 1, "--tap", "resid_post.0", "--json").json
    assert {(file["unit"], file["tap"]) for file in some["shards"]} == {(1, "resid_post.0")}
    assert sum(file["rows"] for file in some["shards"]) == unfinished.done(1).rows
    text = run("ls", unfinished.path, "--unit", 1, "--tap", "resid_post.0").out
    assert f"{unfinished.path}: 1 unit, {len(some['shards'])} file" in text
    check_refused(run("ls", unfinished.path, "--tap", "q.7"), 2, "--tap q.7", "mlp_out.1")
    check_refused(run("ls", unfinished.path, "--unit", 4), 2, "--unit 4", "not done")
    check_refused(run("ls", unfinished.path, "--unit", 5), 2, "0 to 4")
