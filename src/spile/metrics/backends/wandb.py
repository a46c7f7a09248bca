"""`--metrics wandb[:PROJECT]`: a run of Weights & Biases, configured by its own variables.

(`WANDB_MODE=offline`, `WANDB_ENTITY`, `WANDB_DIR`, `WANDB_API_KEY`, …)
"""

import importlib
from collections.abc import Mapping
from typing import Any

from spile.metrics.backends import MetricsRun

_PROJECT = "spile"


def check(argument: str) -> None:
    """Accept any name."""


class WeightsAndBiases:
    def __init__(self, project: str, run: MetricsRun) -> None:
        library: Any = importlib.import_module("wandb")
        # Do not capture our output, and do not upload anything about the working directory.
        settings = library.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
        )
        self._run = library.init(
            project=project,
            name=" ".join([run.name, run.worker]).strip(),
            group=run.name,
            config=dict(run.config),
            settings=settings,
        )

    def log(self, tokens: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=tokens)

    def close(self) -> None:
        self._run.finish()


def open_backend(argument: str, run: MetricsRun) -> WeightsAndBiases:
    return WeightsAndBiases(argument or _PROJECT, run)
