"""`--metrics tensorboard:DIR`: event files that TensorBoard opens; a folder for each run."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spile.core.errors import ConfigError
from spile.metrics.backends import MetricsRun


def check(argument: str) -> None:
    if not argument:
        raise ConfigError("--metrics tensorboard: no directory; write tensorboard:DIR")


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        library: Any = importlib.import_module("tensorboardX")
        self._writer = library.SummaryWriter(str(folder))

    def log(self, tokens: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, tokens)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def open_backend(argument: str, run: MetricsRun) -> TensorBoard:
    return TensorBoard(Path(argument) / run.name / run.worker)
