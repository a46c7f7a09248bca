"""Backends for metrics: a small protocol, and the names that `--metrics` accepts.

Our own backends are modules beside this one; others are found by entry point, group
`spile.metrics`. Each is a function `open_backend(argument, run)` that returns a `Backend`.
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from spile.core.errors import ConfigError
from spile.core.libraries import import_library

GROUP = "spile.metrics"
_OWN = {"tensorboard": "tensorboardX", "wandb": "wandb", "prometheus": "prometheus_client"}

_log = logging.getLogger("spile.metrics")


@dataclass(frozen=True, kw_only=True)
class MetricsRun:
    """The run that reports: its name, its worker and its settings."""

    name: str
    worker: str = ""  # a name fit for a folder, if there are several workers; else empty
    config: Mapping[str, Any]  # recipe and runtime, as flags


class Backend(Protocol):
    """Receives the reports of a run. Only one thread calls it."""

    def log(self, tokens: int, values: Mapping[str, float]) -> None:
        """Report values by name (`metrics/values.py`), after this many tokens."""
        ...

    def close(self) -> None:
        """Flush pending values; no call follows."""
        ...


Opening = Callable[[str, MetricsRun], Backend]


@dataclass(frozen=True)
class ChosenBackend:
    """A backend that was requested."""

    name: str
    argument: str  # the text after the colon
    opening: Opening


def parse_backends(text: str | None) -> list[ChosenBackend]:
    """Parse `tensorboard:DIR,wandb:PROJECT,prometheus:PORT`.

    Raises:
        ConfigError: if there is no such backend, or its library is not installed.
    """
    return [_chosen(part.strip()) for part in text.split(",")] if text else []


def _chosen(part: str) -> ChosenBackend:
    name, _, argument = part.partition(":")
    if name in _OWN:
        import_library(_OWN[name], f"--metrics {name}", f"'spile[{name}]'")
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
    """Open backends. One that fails is reported and left out, and the run continues."""
    opened: dict[str, Backend] = {}
    for each in chosen:
        try:
            opened[each.name] = each.opening(each.argument, run)
        except Exception as error:
            _log.warning("--metrics %s: %s; the run continues without it", each.name, line(error))
    return opened


def line(error: Exception) -> str:
    """Format an error of a foreign library as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
