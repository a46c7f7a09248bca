"""`--profile`: a trace of the chosen steps, and the summary of it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import spile
from spile.cli.extract import profile_summary
from spile.core.config import Recipe, Runtime
from spile.core.errors import ConfigError, DataError
from spile.metrics import Counters
from spile.run.pipeline.profile import SPANS, Profile, Traced, read_trace


def extract(model: Path, corpus: Path, out: Path, profile: str) -> Counters:
    counters = Counters()
    recipe = Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:0", seq_len=64, unit_tokens=700
    )
    spile.extract(recipe, str(out), Runtime(batch_tokens=128, profile=profile), counters=counters)
    return counters


@pytest.mark.parametrize(
    "text",
    [
        "steps=5",
        "steps=5:5",
        "steps=6:5",
        "step=1:2",
        "",
        "steps=1:2,dir=",
        "steps=-1:2",
        "steps=1:2,host=4",
        "steps=1:2,python=",
        "steps=1:2,tpu=1",
    ],
)
def test_what_is_no_range_of_steps_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--profile .*: choose e\.g\. steps=10:15"):
        Profile.parse(text)


def test_steps_and_a_folder_are_understood() -> None:
    assert Profile.parse("steps=10:15") == Profile(10, 15, Path("spile-profile"))
    assert Profile.parse("dir=a/b,steps=0:1") == Profile(0, 1, Path("a/b"))
    levels = {"host": 3, "device": 0, "python": 1}
    found = Profile.parse("steps=0:1,host=3,device=0,python=1")
    assert found == Profile(0, 1, Path("spile-profile"), levels)


def test_the_trace_holds_the_steps_that_were_asked_for_and_no_others(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    asked = f"steps=3:6,dir={tmp_path / 'trace'}"
    counters = extract(model, corpus, tmp_path / "out", asked)
    path = Profile.parse(asked).newest()
    assert path
    (raw,) = (file for file in path.parent.glob("*.trace.json.gz"))
    with gzip.open(raw) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    assert any(event.get("args", {}).get("hlo_module") == "jit_block" for event in events)
    assert list(path.parent.glob("*.xplane.pb")), "what XProf opens"
    traced = read_trace(path)
    assert traced.steps == (3, 4, 5)
    assert traced.seconds and all(seconds >= 0 for seconds in traced.seconds.values())
    assert sum(traced.seconds.values()) < 60
    shown = profile_summary(counters, path, traced)
    assert "in steps 3 to 5" in shown and traced.top(1)[0][0] in shown
    assert len(shown.splitlines()) <= 30, "one screen"
    for stage in ("device busy", "waited for text", "writing rows", "making units durable"):
        assert stage in shown


def test_the_trace_shows_the_stages_of_the_host(model: Path, corpus: Path, tmp_path: Path) -> None:
    asked = f"steps=0:100000,dir={tmp_path / 'trace'},host=1"
    extract(model, corpus, tmp_path / "out", asked)
    path = Profile.parse(asked).newest()
    assert path
    with gzip.open(path) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {f"spile_{name}" for name in SPANS.values()} <= names


def test_a_run_that_ends_before_says_so(
    model: Path, corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "trace"
    extract(model, corpus, tmp_path / "out", f"steps=1000:1001,dir={folder}")
    assert "nothing was traced" in caplog.text and not folder.exists()


def write_trace(path: Path, *events: dict[str, Any]) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def event(name: str, begin: float, lasts: float, tid: int = 1, **args: str) -> dict[str, Any]:
    return {"ph": "X", "pid": 7, "tid": tid, "ts": begin, "dur": lasts, "name": name, "args": args}


def test_an_operation_is_told_without_those_it_holds(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "t.json.gz",
        event("spile_step", 0, 5, tid=9, step_num="10"),
        event("call", 0, 1000, hlo_op="fused_call.2"),
        event("dot", 100, 300, hlo_op="dot.17"),
        event("dot", 500, 200, hlo_op="dot.18"),
        event("while", 2000, 900, hlo_op="while.3"),
        event("add", 2000, 100, tid=2, hlo_op="add"),
        event("a host's", 0, 10**6),
    )
    traced = read_trace(trace)
    assert traced.steps == (10,)
    want = {"fused_call": 500e-6, "dot": 500e-6, "add": 100e-6}
    assert traced.seconds == pytest.approx(want)


def test_operations_of_a_tpu_have_a_line_of_their_own(tmp_path: Path) -> None:
    def line(tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "pid": 7, "tid": tid, "name": "thread_name", "args": {"name": name}}

    trace = write_trace(
        tmp_path / "t.json.gz", line(1, "XLA Ops"), line(2, "Steps"),
        event("fusion.1", 0, 2e6), event("fusion.2", 3e6, 1e6), event("10", 0, 9e6, tid=2),
    )  # fmt: skip
    assert read_trace(trace) == Traced((), {"fusion": 3.0})


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"{}")
    with pytest.raises(DataError, match="no trace"):
        read_trace(tmp_path / "t")
