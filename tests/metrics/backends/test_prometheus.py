"""An endpoint for each worker, on loopback."""

import contextlib
import urllib.request
from collections.abc import Iterator

import pytest

from spile.metrics import MetricsRun
from spile.metrics.backends.prometheus import Prometheus, host_and_port, open_backend


@contextlib.contextmanager
def opened(argument: str, worker: str = "") -> Iterator[Prometheus]:
    backend = open_backend(argument, MetricsRun(name="spring", worker=worker, config={}))
    with contextlib.closing(backend):
        yield backend


def scrape(backend: Prometheus) -> list[str]:
    with urllib.request.urlopen(backend.address, timeout=30) as answer:
        return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]


def test_last_values_are_scraped_with_totals_as_counters_and_tap_labels() -> None:
    with opened("0", "share-0-of-2") as backend:
        assert scrape(backend) == [], "nothing was said yet"
        backend.log(3, {"rate/tokens": 1.0})
        backend.log(5, {"rate/tokens": 2.5, "progress/units": 4, "tap/max_abs/embed": 3.0})
        assert scrape(backend) == [
            'spile_rate_tokens{run="spring",worker="share-0-of-2"} 2.5',
            'spile_progress_units_total{run="spring",worker="share-0-of-2"} 4.0',
            'spile_tap_max_abs{run="spring",tap="embed",worker="share-0-of-2"} 3.0',
        ]


def test_the_next_port_is_taken_where_one_is_and_free_again_at_the_end() -> None:
    with opened("0") as first:
        port = int(first.address.split(":")[2].partition("/")[0])
        with opened(str(port)) as second:
            assert first.address != second.address
            assert scrape(first) == scrape(second) == []
    with pytest.raises(OSError):
        scrape(first)


def test_loopback_is_where_it_listens_unless_a_host_is_named() -> None:
    assert host_and_port("9090") == ("127.0.0.1", 9090)
    assert host_and_port("0.0.0.0:9090") == ("0.0.0.0", 9090)
    assert host_and_port("[::1]:80") == ("::1", 80)
