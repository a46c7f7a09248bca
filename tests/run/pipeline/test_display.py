"""The progress line: on narrow and wide terminals, plain, and as JSON."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import spile
from chaos.harness import Work
from spile.metrics import Counters
from spile.plan.estimate import Estimate
from spile.run.pipeline import display
from spile.run.pipeline.display import ProgressLine
from support import tiny, zygote

# The command, which says how it goes more often than every ten seconds.
OFTEN = (
    "import sys, spile.run.pipeline.display as shown; shown._SILENT_SECONDS = 0.02; "
    "import spile.cli; spile.cli.main()"
)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> ProgressLine:
    counters = Counters()
    found = ProgressLine(counters, 10_100_000)
    now = [1000.0]
    clock = type("Clock", (), {"monotonic": lambda: now[0], "time": lambda: now[0]})
    monkeypatch.setattr("spile.run.pipeline.progress.time", clock)
    counters.add(tokens=23_000)
    found.line(80)
    now[0] += 9.0
    counters.add(tokens=1_211_567, documents=1204, units=3, bytes=2_100_000_000)
    counters.add(durable=1_800_000_000, device_busy=8.0, device_idle=1.0)
    counters.set(queue_text=1, queue_device=2, queue_write=0, queue_commit=1)
    return found


def test_everything_is_said_where_there_is_room(shown: ProgressLine) -> None:
    assert shown.line(160) == (
        " 12%  1.20k docs  1.23M tok  135k/s  avg 135k/s  ETA 1:06  idle 11%  q 1·2·0·1  "
        "2.1 GB (1.8 GB safe)"
    )


@pytest.mark.parametrize("width", [1, 10, 20, 40, 60, 80, 100])
def test_a_line_is_never_wider_than_the_terminal(width: int, shown: ProgressLine) -> None:
    assert len(shown.line(width)) <= width


def test_eighty_columns_hold_what_matters(shown: ProgressLine) -> None:
    line = shown.line(77)
    for part in (" 12%", "1.23M tok", "135k/s", "ETA 1:06", "2.1 GB (1.8 GB safe)", "avg 135k/s"):
        assert part in line
    assert shown.line(24) == " 12%  1.23M tok  135k/s"


def test_numbers_are_told_to_programs(shown: ProgressLine) -> None:
    told = shown.fields()["progress"]
    assert json.loads(json.dumps(told)) == told
    assert (told["tokens"], told["documents"], told["durable"]) == (1_234_567, 1204, 1_800_000_000)
    assert told["queues"] == {"text": 1, "device": 2, "write": 0, "commit": 1}
    assert told["eta_seconds"] == pytest.approx((10_100_000 - 1_234_567) / 134_618.6, rel=1e-3)


def test_a_run_that_is_loading_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    clock = type("Clock", (), {"monotonic": lambda: now[0]})
    monkeypatch.setattr(display, "time", clock)
    line = ProgressLine(Counters(), 0)
    assert line.line(80) == "loading and compiling  0:00"
    now[0] += 83
    assert line.line(80) == "loading and compiling  1:23" and line.line(12) == "loading and "
    units = display.CountedLine("units")
    assert units.line(80) == "units  0:00"
    now[0] += 10
    units.tell(20, 1000)
    assert units.line(80) == "20 of 1,000 units  0:10  ETA 8:10"
    assert units.fields() == {"counted": {"what": "units", "done": 20, "total": 1000}}


def test_waiting_is_never_silent_for_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither before the work of a run is known, nor while something compiles or is counted."""
    assert display._SILENT_SECONDS <= 10.0
    monkeypatch.setattr(display, "_SILENT_SECONDS", 0.01)

    def lines(what: str) -> None:
        told = ""
        while told.count("\n") < 2:
            told += capsys.readouterr().err
        assert all(re.fullmatch(rf"spile: {what}  0:\d\d", line) for line in told.splitlines())

    with display.progress(Counters(), quiet=False):
        lines("reading the model and the corpus")
    with display.waiting("compiling for v5e-64"):
        lines("compiling for v5e-64")
    with display.counted("files", quiet=False):
        lines("files")
    with display.waiting("compiling", quiet=True), display.counted("files", quiet=True) as tell:
        assert tell is None
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_functions_that_usually_return_soon_say_nothing_until_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(display, "in_notebook", lambda: True)
    monkeypatch.setattr(display, "_in_cell", lambda line, over: shown.append(line.now.line(80)))
    with display.waiting("loading the model", late=True):
        time.sleep(0.05)
    assert not shown
    monkeypatch.setattr(display, "_SILENT_SECONDS", 0.01)
    with display.waiting("loading the model", late=True):
        while not shown:
            time.sleep(0.01)
    assert shown == ["loading the model  0:00"]


@pytest.mark.full
def test_every_line_of_a_run_is_json_where_that_is_asked_for(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    work = Work(model, corpus)
    command = [sys.executable, "-c", OFTEN, "extract", *work.flags(tmp_path / "out")]
    made = zygote.run([*command, "--log-json", "--share", "0/1"], env=tiny.environment())
    assert made.returncode == 0, made.stderr
    lines = [json.loads(line) for line in made.stderr.splitlines()]
    for line in lines:
        assert {"time", "level", "worker", "message"} <= {*line}
        assert abs(line["time"] - time.time()) < 3600 and line["level"] == "info"
    assert {line["place"] for line in lines} == {"share 0/1"}
    assert any(line["message"].startswith("unit table: ") for line in lines)
    last = [line["progress"] for line in lines if "progress" in line][-1]
    assert last["tokens_total"] > 0 and {"rate", "average", "idle", "queues"} <= {*last}
    assert "predicted: " in made.stdout and "tokens (" in made.stdout

    failed = zygote.run([*command, "--log-json", "--seq-len", "7000"], env=tiny.environment())
    assert failed.returncode == 2
    error = json.loads(failed.stderr.splitlines()[-1])
    assert error["level"] == "error" and "--seq-len" in error["message"]


def test_a_terminal_of_eighty_columns_sees_one_line(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "spile.cli", "extract", *Work(model, corpus).flags(tmp_path)]
    environment = {**tiny.environment(), "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    with zygote.Popen(
        command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            said += piece
        assert process.wait(120) == 0
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    moving = [line for line in lines if line[0] in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"]
    assert moving and all(len(line.rstrip()) <= 80 for line in moving), lines
    assert "spile: unit table: " in [line[:19] for line in lines], "a message has its own line"


def test_a_notebook_shows_one_line_that_changes_below_the_cell(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(`tests/documented/test_notebook.py` runs a real kernel.)"""
    lines: list[str] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            lines.append(data["text/plain"])

    def show(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        lines.append(data["text/plain"])
        return Handle()

    shell = type("Shell", (type("ZMQInteractiveShell", (), {}),), {})()  # as Colab's
    monkeypatch.setattr("builtins.get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr("IPython.display.display", show)
    corpus = tiny.write_corpus(tmp_path / "docs.jsonl", 5)
    recipe = spile.Recipe(model=str(model), corpus=str(corpus), taps="embed")
    outcome = spile.extract(recipe, str(tmp_path / "out"))
    assert (
        lines[0] == "reading the model and the corpus  0:00"
        and "100%" in lines[-1]
        and "5 docs" in lines[-1]
    )
    assert repr(outcome).endswith(f"spile.open({str(tmp_path / 'out')!r}) reads it>")
    lines.clear()
    spile.extract(recipe, str(tmp_path / "out"), counters=Counters())
    spile.extract(recipe, str(tmp_path / "out"), progress=False)
    assert not lines


def test_a_script_is_told_on_standard_error_unless_it_declines(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "_SILENT_SECONDS", 0.01)
    corpus = tiny.write_corpus(tmp_path / "docs.jsonl", 5)
    recipe = spile.Recipe(model=str(model), corpus=str(corpus), taps=["embed"])
    spile.extract(recipe, str(tmp_path / "out"))
    told = capsys.readouterr().err.splitlines()
    assert told and all(line.startswith("spile: ") for line in told)
    spile.extract(recipe, str(tmp_path / "again"), progress=False)
    assert "spile: " not in capsys.readouterr().err


def test_a_line_says_what_a_run_does_before_its_first_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "_SILENT_SECONDS", 0.01)
    told = ""

    def wait_for(line: str) -> None:
        nonlocal told
        limit = time.monotonic() + 60
        while f"spile: {line}" not in told:
            assert time.monotonic() < limit, told
            time.sleep(0.001)
            told += capsys.readouterr().err

    counters = Counters()
    cost = SimpleNamespace(remaining_tokens=1000)
    with display.progress(counters, quiet=False) as on_start:
        wait_for("reading the model and the corpus  0:0")
        on_start(None, cast(Estimate, cost))
        wait_for("loading and compiling  0:0")
        counters.add(tokens=500)
        wait_for(" 50%  ")
