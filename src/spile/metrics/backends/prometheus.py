"""`--metrics prometheus:[HOST:]PORT`: serve the last values of this process at /metrics.

The server listens on loopback unless a host is given. If the port is in use, for instance by
another worker on this machine, the server takes the next free one; port 0 means any.
"""

import errno
import importlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from spile.core.errors import ConfigError
from spile.metrics.backends import MetricsRun
from spile.metrics.values import LABELS, NAMES, described

_LOOPBACK = "127.0.0.1"
_PORTS_TRIED = 64
_MOST = 65535

_log = logging.getLogger("spile.metrics")


def check(argument: str) -> None:
    host_and_port(argument)


def host_and_port(argument: str) -> tuple[str, int]:
    """Parse `9090`, `0.0.0.0:9090` or `[::]:9090`."""
    host, _, port = argument.rpartition(":")
    if not (port.isdecimal() and port.isascii()) or int(port) > _MOST:
        raise ConfigError(
            f"--metrics prometheus:{argument}: no port; write e.g. prometheus:9090 (loopback only) "
            "or prometheus:0.0.0.0:9090"
        )
    return host.strip("[]") or _LOOPBACK, int(port)


class Prometheus:
    """A server in a thread of the library's own; a scrape computes nothing."""

    def __init__(self, host: str, port: int, run: MetricsRun) -> None:
        library: Any = importlib.import_module("prometheus_client")
        self._families: Any = importlib.import_module("prometheus_client.core")
        self._labels = {"run": run.name, "worker": run.worker}
        self._last: tuple[int, Mapping[str, float]] = 0, {}
        registry = library.CollectorRegistry()
        registry.register(self)
        for tried in range(_PORTS_TRIED):
            try:
                self._server, self._thread = library.start_http_server(port + tried, host, registry)
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or tried == _PORTS_TRIED - 1:
                    raise
        self.address = "http://{}:{}/metrics".format(*self._server.server_address[:2])
        _log.info("metrics at %s", self.address)

    def log(self, tokens: int, values: Mapping[str, float]) -> None:
        self._last = tokens, values

    def collect(self) -> Iterator[Any]:
        """Yield the metric families of a scrape."""
        families: dict[str, Any] = {}
        names, base = list(self._labels), list(self._labels.values())
        for name, value in self._last[1].items():
            kind, label = described(name)
            own = LABELS.get(kind)
            labels, of = ([*names, own], [*base, label]) if own else (names, base)
            about = NAMES[kind]
            if kind not in families:
                make = "CounterMetricFamily" if about.total else "GaugeMetricFamily"
                families[kind] = getattr(self._families, make)(
                    "spile_" + kind.replace("/", "_"), about.meaning, labels=labels
                )
            families[kind].add_metric(of, value)
        yield from families.values()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def open_backend(argument: str, run: MetricsRun) -> Prometheus:
    return Prometheus(*host_and_port(argument), run)
