"""What a run reported is read back from its backends, and equals what the run made."""

import importlib
import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import spile
from chaos.harness import Work
from spile.metrics.values import NAMES, described
from support import metric_files, spoilt, tiny
from support.worlds import Group

RECIPE = ("--taps", "embed,resid_post:1", "--seq-len", "64", "--unit-tokens", "700")
# A backend that somebody else installed. It lets the run end when it is told to.
HOLDING = """
import json, os, time
from pathlib import Path

class Holding:
    def __init__(self, folder):
        self.folder = Path(folder)

    def log(self, tokens, values):
        with (self.folder / "told").open("a") as file:
            file.write(json.dumps([tokens, dict(values)]) + "\\n")

    def close(self):
        (self.folder / "closing").touch()
        deadline = time.monotonic() + 50
        while not (self.folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)

def open_backend(argument, run):
    return Holding(argument)
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a backend as pip would, for the processes that this test starts."""
    about = folder / "holding-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "holding.py").write_text(HOLDING)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: holding\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[spile.metrics]\nholding = holding:open_backend\n")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def scrape(address: str) -> dict[tuple[str, str], float]:
    """Samples by name and tap or device, as Prometheus reads them."""
    parser: Any = importlib.import_module("prometheus_client.parser")
    with urllib.request.urlopen(address, timeout=30) as answer:
        families = parser.text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, sample.labels.get("tap") or sample.labels.get("device", "")): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.full  # tests/metrics reads back what each backend was told
def test_three_backends_and_a_stranger_are_told_the_same_of_a_real_run(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    out, board, held = tmp_path / "acts", tmp_path / "board", tmp_path / "held"
    held.mkdir()
    backends = f"holding:{held},tensorboard:{board},wandb:maple,prometheus:0"
    flags = ("--model", str(model), "--corpus", str(corpus), "--out", str(out), *RECIPE)
    with tiny.start(
        "extract", *flags, "--metrics", backends, "--metrics-every", "1", "--run-name", "spring",
        "--profile", f"steps=2:5,dir={tmp_path / 'trace'}",
    ) as process:  # fmt: skip
        assert process.stderr
        lines = iter(process.stderr.readline, "")
        address = next(line.split()[-1] for line in lines if "metrics at http://" in line)
        assert address.startswith("http://127.0.0.1:"), "on loopback unless asked otherwise"
        deadline = time.monotonic() + 300
        while not (held / "closing").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        scraped = scrape(address)
        (held / "go").touch()
        printed, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints
    assert "metrics" not in complaints, "none of them failed"

    told = [json.loads(line) for line in (held / "told").read_text().splitlines()]
    board_reports = metric_files.tensorboard_reports(board / "spring")
    run, history = metric_files.wandb_run(tmp_path)
    assert (run.project, run.display_name, run.run_group) == ("maple", "spring", "spring")
    tokens, last = told[-1]
    dataset = spile.open(str(out))
    assert tokens == dataset.num_tokens
    assert last["progress/tokens"] == dataset.num_tokens
    assert last["progress/documents"] == 40
    assert last["progress/units"] == len(list((out / "done").glob("*/*")))
    assert last["progress/bytes"] == dataset.num_tokens * 2 * 32 * 2
    assert last["backlog/steps"] == 0
    for values in (board_reports[-1], history[-1]):
        assert values[0] == tokens
        for name, value in last.items():
            assert values[1][name] == pytest.approx(value, rel=1e-6), name
    for name, value in last.items():
        kind, tap = described(name)
        suffix = "_total" if NAMES[kind].total else ""
        assert scraped[f"spile_{kind.replace('/', '_')}{suffix}", tap] == pytest.approx(value), name
    assert any(values["device/mfu"] > 0 for _, values in told), "the peak was measured here"
    assert all(0 < v["packing/efficiency"] <= 1 for _, v in told if "packing/efficiency" in v)
    statistics = dataset.statistics("resid_post.1")
    largest = max(values.get("tap/max_abs/resid_post.1", 0) for _, values in told)
    assert largest == pytest.approx(statistics.max_abs)
    assert last["tap/nonfinite/resid_post.1"] == 0

    assert "where the time went" in printed and "in steps 2 to 4" in printed
    (trace,) = (tmp_path / "trace").rglob("perfetto_trace.json.gz")
    assert str(trace) in printed


@pytest.mark.full
def test_a_backend_that_fails_is_heard_once_and_the_run_goes_on(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file where a folder should be")
    flags = ("--model", str(model), "--corpus", str(corpus), "--out", str(tmp_path / "out"))
    done = tiny.spile(
        "extract", *flags, *RECIPE, "--taps", "embed", "--metrics", f"tensorboard:{tmp_path}/taken"
    )
    assert done.stderr.count("--metrics tensorboard: ") == 1
    assert "the run continues without it" in done.stderr
    assert spile.open(str(tmp_path / "out")).num_tokens


@pytest.mark.full
def test_every_process_of_a_world_reports_and_names_the_row_of_a_nan(
    tmp_path: Path,
) -> None:
    model = spoilt.write_model(tmp_path / "model")
    corpus = spoilt.write_corpus(tmp_path / "docs.jsonl")
    board, options = tmp_path / "board", {"taps": "embed", "seq_len": 64, "unit_tokens": 500}
    told = {"metrics": f"tensorboard:{board}", "metrics_from": "all"}
    flags = Work(model, corpus, {**options, **told}).flags(tmp_path / "acts")
    with Group(flags, 2, 1) as world:
        assert set(world.wait(180)) == {3}, world.said()
        for member in world.members:
            assert "embed: NaN or infinity in unit " in member.last_line, member.err
            named = member.last_line.partition("a packed row of documents ")[2].partition(";")[0]
            assert str(spoilt.AT) in named.split(", "), member.last_line
    # (The other may be ended before it reports anything.)
    folders = [board / "acts" / f"process-{number}" for number in (0, 1)]
    reports = [report for folder in folders for report in metric_files.tensorboard_reports(folder)]
    assert max(values.get("tap/nonfinite/embed", 0) for _, values in reports) == 1
