"""Counters of a run, and their backends: TensorBoard, Weights & Biases, Prometheus, others."""

from spile.metrics.backends import Backend, MetricsRun, open_backends, parse_backends
from spile.metrics.counters import Counters
from spile.metrics.reporter import Reporter

__all__ = ["Backend", "Counters", "Reporter", "MetricsRun", "open_backends", "parse_backends"]
