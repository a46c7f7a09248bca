"""`spile plan`: how long it calibrates, and the certainty that it states."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.harness import run
from spile.cli.plan import (
    Duration,
    _seconds,
    _timed,
    _tokens,
    attention_row,
    recurrence_rows,
    unknown,
)
from spile.core.errors import ConfigError
from spile.models.config.kernel_choice import KernelChoice


def test_calibration_is_seconds_or_off() -> None:
    assert (_seconds(None), _seconds("off"), _seconds("2.5")) == (5.0, 0.0, 2.5)
    for bad in ("0", "-1", "3600", "long", "nan", ""):
        with pytest.raises(ConfigError, match="--calibrate must be seconds such as 5, or off"):
            _seconds(bad)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (0, "2,000 (all counted)"),
        (None, "2,000 (estimated)"),
        (50, "2,000 ± 2.5% (95%, of a sample)"),
    ],
)
def test_tokens_say_how_they_are_known(error: int | None, told: str) -> None:
    cost: Any = SimpleNamespace(tokens=2000, tokens_error=error)
    assert _tokens(cost) == told


def test_a_time_says_where_and_how_it_is_known() -> None:
    assert _timed(unknown("here", "every unit is done")) == [("time here", "every unit is done")]
    measured = Duration("here", True, 500.0, seconds=120.0, starting=4.0, compiling=9.0)
    assert _timed(measured) == [
        ("time here", "2.0 min at 500 tok/s (measured)"),
        ("  until the first step", "4.0 s (compiling, in all: 9.0 s)"),
    ]
    elsewhere = Duration("v5e-64", False, 1e6, seconds=7200.0, dollars=12.5)
    assert _timed(elsewhere) == [
        ("time on v5e-64", "2.0 h at 1,000,000 tok/s (computed: at the chips' limit)"),
        ("  on demand", "$12.50"),
    ]


def test_the_attention_kernel_is_named_with_why_not_a_better_one() -> None:
    best = KernelChoice("splash", {})
    said = ("attention", "jax's splash attention, for TPUs")
    assert attention_row({64: best}) == attention_row({64: best, 128: best}) == said
    _, told = attention_row({64: KernelChoice("triton", {"mosaic": "old", "cudnn": "no caps"})})
    assert told.startswith("tokamax's Triton") and told.endswith("(mosaic: old; cudnn: no caps)")
    _, told = attention_row({256: best, 512: KernelChoice("blocked", {"splash": "too wide"})})
    assert told == (
        "heads of 256: jax's splash attention, for TPUs; "
        "heads of 512: blocks of plain products, anywhere (splash: too wide)"
    )
    assert attention_row({}) == ("attention", "none: no layer of the model attends")


def test_the_kernel_of_recurrent_layers_is_named_if_there_are_such_layers() -> None:
    assert recurrence_rows(None) == []
    choice = KernelChoice("chunks", {"fused": "there is none for cpu"})
    ((name, told),) = recurrence_rows(choice)
    assert (name, told[-30:]) == ("recurrent layers", "(fused: there is none for cpu)")


def test_what_is_counted_is_printed_before_any_step_is_measured(
    model: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def rehearse(*_: object) -> None:
        said.append(sys.stdout.getvalue())  # type: ignore[attr-defined]

    monkeypatch.setattr("spile.run.rehearsal.rehearse", rehearse)
    told = run(
        "plan", "--model", model, "--corpus", corpus, "--taps", "embed", "--out", tmp_path / "out"
    )
    assert "documents  " in said[0] and "tok/s a core" in said[0]
    assert "attention   " in said[0] and "time here" not in said[0]
    assert told.out.startswith(said[0]) and "time here" in told.out
