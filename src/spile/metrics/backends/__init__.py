"""Where metrics go: a small protocol, and what `--metrics` names by it.

Backends of our own are modules beside this one; others come by entry point, group
`spile.metrics`. Each is a function `open_backend(argument, run)` that returns a `Backend`.
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from spile.core.errors import ConfigError

GROUP = "spile.metrics"
_OWN = {"tensorboard": "tensorboardX", "wandb": "wandb", "prometheus": "prometheus_client"}

_log = logging.getLogger("spile")


@dataclass(frozen=True, kw_only=True)
class MetricsRun:
    """The run that reports: its name, its worker and its settings."""

    name: str
    worker: str = ""  # which of several, by a name that is fit for a folder; alone: empty
    config: Mapping[str, Any]  # recipe and runtime, as flags


class Backend(Protocol):
    """Takes what a run reports. Only one thread ever calls it."""

    def log(self, tokens: int, values: Mapping[str, float]) -> None:
        """Values by name (`metrics/values.py`), after so many tokens."""
        ...

    def close(self) -> None:
        """Hand on what is held back; nothing follows."""
        ...


Opening = Callable[[str, MetricsRun], Backend]


@dataclass(frozen=True)
class ChosenBackend:
    """A backend that was asked for."""

    name: str
    argument: str  # what follows the colon
    opening: Opening


def parse_backends(text: str | None) -> list[ChosenBackend]:
    """`tensorboard:DIR,wandb:PROJECT,prometheus:PORT`.

    Raises:
        ConfigError: if there is no such backend, or its library is not installed.
    """
    return [_chosen(part.strip()) for part in text.split(",")] if text else []


def _chosen(part: str) -> ChosenBackend:
    name, _, argument = part.partition(":")
    if name in _OWN:
        try:
            importlib.import_module(_OWN[name])
        except ImportError:
            raise ConfigError(
                f"--metrics {name} needs {_OWN[name]}: pip install 'spile[{name}]'"
            ) from None
        module: Any = importlib.import_module(f"{__name__}.{name}")
        module.check(argument)
        return ChosenBackend(name, argument, module.open_backend)
    others = {found.name: found for found in entry_points(group=GROUP)}
    if name not in others:
        known = ", ".join([*_OWN, *sorted(others)])
        raise ConfigError(f"--metrics {part}: no such backend; choose from {known}")
    try:
        return ChosenBackend(name, argument, others[name].load())
    except Exception as error:
        raise ConfigError(f"--metrics {name}: {others[name].value}: {error}") from error


def open_backends(chosen: list[ChosenBackend], run: MetricsRun) -> dict[str, Backend]:
    """Those that open. One that does not is said to be missing, and the run goes on."""
    opened: dict[str, Backend] = {}
    for each in chosen:
        try:
            opened[each.name] = each.opening(each.argument, run)
        except Exception as error:
            _log.warning("--metrics %s: %s; the run goes on without it", each.name, line(error))
    return opened


def line(error: Exception) -> str:
    """An error of a stranger's library in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
