"""A run of Weights & Biases, by the calls of its library."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from spile.metrics import MetricsRun, open_backends, parse_backends


@pytest.mark.parametrize(("asked", "project"), [("wandb", "spile"), ("wandb:mine", "mine")])
def test_a_run_is_begun_told_and_finished(
    asked: str, project: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/e2e/test_metrics.py tries it with the real library."""
    told: list[Any] = []
    began = SimpleNamespace(
        log=lambda values, step: told.append((step, values)), finish=lambda: told.append("end")
    )

    def init(**given: Any) -> Any:
        told.append(given)
        return began

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Settings=dict, init=init))
    run = MetricsRun(name="spring", worker="w1", config={"seq_len": 128})
    [backend] = open_backends(parse_backends(asked), run).values()
    backend.log(100, {"rate/tokens": 2.5})
    backend.close()
    asked_for, *rest = told
    assert (asked_for["project"], asked_for["name"]) == (project, "spring w1")
    assert (asked_for["group"], asked_for["config"]) == ("spring", {"seq_len": 128})
    assert asked_for["settings"]["disable_git"] and asked_for["settings"]["silent"]
    assert rest == [(100, {"rate/tokens": 2.5}), "end"]
