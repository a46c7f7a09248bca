"""Event files that TensorBoard opens: a folder for each run and worker."""

from pathlib import Path

from spile.metrics import MetricsRun, open_backends, parse_backends
from support import metric_files


def test_values_are_written_by_tokens_in_the_workers_folder(tmp_path: Path) -> None:
    run = MetricsRun(name="spring", worker="w1", config={})
    [backend] = open_backends(parse_backends(f"tensorboard:{tmp_path}"), run).values()
    backend.log(100, {"rate/tokens": 2.5, "progress/units": 1})
    backend.log(200, {"rate/tokens": 3.5})
    backend.close()
    assert metric_files.tensorboard_reports(tmp_path / "spring" / "w1") == [
        (100, {"rate/tokens": 2.5, "progress/units": 1}),
        (200, {"rate/tokens": 3.5}),
    ]
