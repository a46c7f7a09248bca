"""The plan as a user types it: its counts and measurements, compared with the run."""

from pathlib import Path

import pytest

import spile
from chaos.harness import Work, check_refused, run
from spile.plan import survey
from support import saes, tiny


def test_planned_bytes_are_exact_and_the_run_reports_the_difference(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    work = Work(model, corpus)
    flags = work.flags(tmp_path / "out")
    planned = run("plan", *flags, "--exact", "--calibrate", "0.1", "--json").json
    assert planned["exact"] and planned["tokens_error"] == 0
    assert 0.5 < planned["packing"] <= 1 and planned["flops"] > 0
    time = planned["time"]
    assert time["measured"] and time["rate"] > 0 and time["seconds"] > time["starting"] > 0
    assert list(tmp_path.iterdir()) == []
    made = run("extract", *flags)
    assert made.code == 0, made.err
    (told,) = (line for line in made.out.splitlines() if line.startswith("predicted: "))
    assert " came)" in told
    dataset = spile.open(str(tmp_path / "out"))
    stored = sum(
        p.stat().st_size for p in (tmp_path / "out" / "attempts").rglob("*") if p.is_file()
    )
    assert (planned["tokens"], planned["total_bytes"]) == (dataset.num_tokens, stored)
    status = run("status", tmp_path / "out", "--json").json
    assert status["prediction"]["tokens"] > 0 and status["seconds"] > 0
    shown = run("status", tmp_path / "out").out
    assert "  predicted  " in shown and "1 done" in shown
    assert run("plan", *flags, "--json").json["time"]["why"] == "every unit is done"


def test_a_sample_says_so(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "SECONDS", 0.0)
    flags = [*Work(model, corpus).flags(tmp_path / "out"), "--calibrate", "off"]
    shown = run("plan", *flags).out
    assert " ± " in shown and "(95%, of a sample)" in shown and "not measured: --calibrate" in shown
    assert "(all counted)" in run("plan", *flags, "--exact").out


@pytest.mark.full
def test_other_chips_are_computed(corpus: Path, tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", hidden_size=256, num_hidden_layers=2)
    work = Work(model, corpus, {"taps": "resid_post:1", "seq_len": 128})
    flags = [*work.flags(tmp_path / "out"), "--topology", "h200"]
    time = run("plan", *flags, "--json").json["time"]
    assert (time["on"], time["measured"], time["starting"]) == ("h200", False, None)
    assert time["rate"] > 0 and time["seconds"] > 0 and time["dollars"] > 0
    assert "time on h200" in run("plan", *flags).out
    sae = saes.write_sae(tmp_path / "sae", width=256, latents=1 << 16)
    encoded = run("plan", *flags, "--encode", sae, "--json").json["time"]
    assert encoded["seconds"] > 2 * time["seconds"], "most of it is the encoder's"
    check_refused(run("plan", *flags[:-1], "h2000"), 2, "--topology h2000")


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan", "1e9"])
def test_seconds_that_are_none_are_refused(
    given: str, model: Path, corpus: Path, tmp_path: Path
) -> None:
    flags = Work(model, corpus).flags(tmp_path / "out")
    check_refused(run("plan", *flags, f"--calibrate={given}"), 2, "--calibrate", given)
