"""`--metrics`: the names that it accepts, and those refused before a run begins."""

import sys
from pathlib import Path

import pytest

from spile.core.errors import ConfigError
from spile.metrics import MetricsRun, open_backends, parse_backends

RUN = MetricsRun(name="spring", config={})


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ("tensorbord:runs", ["tensorbord:runs", "no such backend", "tensorboard, wandb"]),
        ("tensorboard", ["no directory", "tensorboard:DIR"]),
        ("prometheus", ["no port", "prometheus:9090"]),
        ("prometheus:http", ["prometheus:http", "no port"]),
        ("prometheus:65536", ["no port"]),
        ("prometheus:9090,", ["no such backend"]),
    ],
)
def test_what_cannot_be_is_refused(asked: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_backends(asked)
    assert all(part in str(caught.value) for part in named), caught.value


def test_nothing_asked_is_nothing_opened() -> None:
    assert parse_backends(None) == []


def test_a_library_that_is_missing_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        ConfigError, match=r"needs tensorboardX .*: pip install 'spile\[tensorboard\]'"
    ):
        parse_backends("tensorboard:runs")


def test_a_backend_comes_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "elsewhere-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[spile.metrics]\nelsewhere = elsewhere_metrics:opened\nbroken = elsewhere_metrics:no\n"
    )
    (tmp_path / "elsewhere_metrics.py").write_text(
        "def opened(argument, run):\n    return argument, run.name\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (chosen,) = parse_backends("elsewhere:a:b")
    assert open_backends([chosen], RUN) == {"elsewhere": ("a:b", "spring")}
    with pytest.raises(ConfigError, match="--metrics broken: elsewhere_metrics:no: .*'no'"):
        parse_backends("broken")
