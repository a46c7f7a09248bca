"""Refining a tuned lens lowers the divergence, and continues after a stop to the same bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.core.config import Recipe, Runtime
from spile.lens import refine as refining
from spile.lens.refine import Maps, RefineOptions, refine
from spile.models.files.checkpoint import open_checkpoint
from spile.objects import LocalObjects

TARGET, NAMES = "resid_post.2", ("resid_pre.0", "resid_post.1")
RUNTIME = Runtime(batch_tokens=512)


@pytest.fixture
def given(model: Path, corpus: Path) -> tuple[Recipe, Maps, dict[str, np.ndarray]]:
    width = open_checkpoint(str(model)).arch.width
    recipe = Recipe(
        model=str(model), corpus=str(corpus), seq_len=32, unit_tokens=2000, where="pos >= 1",
        compute_dtype="float32",
    )  # fmt: skip
    maps = {name: (np.zeros((width, width)), np.zeros(width)) for name in NAMES}
    spreads = {name: np.linspace(0.5, 2, width) for name in (*NAMES, TARGET)}
    return recipe, maps, spreads


def test_the_divergence_falls_and_a_stopped_run_continues(
    given: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refining, "ROWS", 256)
    monkeypatch.setattr(refining, "_EVERY", 4)
    recipe, maps, spreads = given

    def run(folder: str, steps: int = 12) -> refining.Refined:
        (tmp_path / folder).mkdir(exist_ok=True)
        return refine(
            recipe, TARGET, maps, spreads, LocalObjects(tmp_path / folder),
            RefineOptions(steps), identity="x", runtime=RUNTIME,
        )  # fmt: skip

    whole = run("whole")
    for name in NAMES:
        assert whole.after[name] < 0.9 * whole.before[name]
    stored, kept = refining._store, []

    def store(objects: Any, told: str, step: int, *rest: Any) -> None:
        stored(objects, told, step, *rest)
        kept.append(step)
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(refining, "_store", store)
    with pytest.raises(KeyboardInterrupt):
        run("stopped")
    again = run("stopped")
    assert kept == [4, 8, 12], "it went on where it was"
    for name in NAMES:
        for one, other in zip(again.maps[name], whole.maps[name], strict=True):
            assert (one == other).all()
    assert again.before == whole.before and again.after == whole.after
