"""Every reported value, and how it is computed from the counters.

Sums are reported unchanged, rates between two moments. docs/metrics.md holds the same table.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """The description of a reported value."""

    meaning: str
    unit: str = ""
    total: bool = False  # a sum that only grows, since the process began


# "now" means since the last report. Unknown values are not reported.
NAMES = {
    "progress/tokens": Metric("tokens read by the model", "tokens", total=True),
    "progress/documents": Metric("documents in committed units", "documents", total=True),
    "progress/units": Metric("committed units", "units", total=True),
    "progress/bytes": Metric("bytes of rows written", "bytes", total=True),
    "rate/tokens": Metric("tokens read by the model, now", "tokens/s"),
    "rate/text": Metric("tokens read, tokenized and packed, per second of that work", "tokens/s"),
    "rate/d2h": Metric("rows that left the device, now", "GB/s"),
    "rate/write": Metric("rows written, now", "GB/s"),
    "rate/upload": Metric("uploaded to a bucket, now", "GB/s"),
    "device/busy_share": Metric("share of its time that the device computed", "0 to 1"),
    "device/idle_share": Metric("share of its time that the device was idle", "0 to 1"),
    "device/flops": Metric("the model's matrix products on each device, now", "FLOP/s"),
    "device/mfu": Metric("the same, relative to the peak", "0 to 1"),
    "device/peak_flops": Metric("peak of a device: published, or else measured here", "FLOP/s"),
    "device/memory_used": Metric("memory in use on each of this process's devices", "bytes"),
    "device/memory_limit": Metric("memory limit of that device, if it reports one", "bytes"),
    "device/memory_percent": Metric("share of that limit in use", "%"),
    "step/mean": Metric("mean of the steps that finished since the last report", "seconds"),
    "step/p50": Metric("median of those steps", "seconds"),
    "step/p95": Metric("95th percentile of those steps", "seconds"),
    "model/perplexity": Metric("perplexity of the next token, now, if `logprob` is tapped"),
    "model/disagreement": Metric(
        "mean distance of an engine's log-probabilities from the model's, now", "nats"
    ),
    "wait/text_share": Metric("share of the time that the device's loop waited for text", "0 to 1"),
    "wait/writing_share": Metric(
        "share of the time that it waited for rows to be written", "0 to 1"
    ),
    "wait/weights_share": Metric(
        "share of the time that it waited for weights to arrive", "0 to 1"
    ),
    "backlog/steps": Metric("steps computed and waiting to be written", "steps"),
    "backlog/uploads": Metric("shards being uploaded to a bucket", "shards"),
    "backlog/spooled": Metric("files in the spool", "files"),
    "packing/efficiency": Metric("share of a step's positions that hold a token", "0 to 1"),
    "store/retries": Metric(
        "requests to buckets and web servers that were retried", "requests", total=True
    ),
    "tap/mean_norm": Metric("mean norm of a tap's rows, now; not reported after a NaN"),
    "tap/max_abs": Metric("largest finite value of a tap, now"),
    "tap/nonfinite": Metric("NaN and infinity in a tap", "values", total=True),
}
# Values that exist several times, each with the name of its tap or device: `tap/mean_norm/embed`.
LABELS = {
    **{name: "tap" for name in NAMES if name.startswith("tap/")},
    **{name: "device" for name in NAMES if name.startswith("device/memory_")},
}

_GB = 1e9
_MOST_NATS = 700.0  # so that the exponential fits a float
_TOTALS = {
    "progress/tokens": "tokens", "progress/documents": "documents", "progress/units": "units",
    "progress/bytes": "bytes", "store/retries": "retries",
}  # fmt: skip
# Reported only if they have been set: a run to a disk uploads nothing.
_GAUGES = {
    "device/peak_flops": "peak_flops", "backlog/steps": "queue_write",
    "backlog/uploads": "uploading", "backlog/spooled": "spooled",
}  # fmt: skip
_PER_SECOND = {
    "rate/tokens": ("computed", 1.0), "rate/d2h": ("copied", _GB), "rate/write": ("bytes", _GB),
    "rate/upload": ("uploaded", _GB), "wait/text_share": ("waited_for_text", 1.0),
    "wait/writing_share": ("waited_for_writing", 1.0),
    "wait/weights_share": ("waited_for_weights", 1.0),
}  # fmt: skip


def described(name: str) -> tuple[str, str]:
    """Split `tap/mean_norm/resid_post.20` into the name in the table, and the tap or device."""
    if name in NAMES:
        return name, ""
    kind, _, label = name.rpartition("/")
    return kind, label


def tap_counts(tap: str, rows: int, norm_sum: float, nonfinite: int) -> dict[str, float]:
    """Return the counts for some of a tap's rows."""
    return {f"rows/{tap}": rows, f"norms/{tap}": norm_sum, f"nonfinite/{tap}": nonfinite}


def next_token_counts(tokens: int, logprob_sum: float) -> dict[str, float]:
    """Return the counts for tokens whose next token is known."""
    return {"predicted": tokens, "surprise": -logprob_sum}


def disagreement_counts(tokens: int, total: float) -> dict[str, float]:
    """Return the counts for compared tokens. `total`: the sum of their distances."""
    return {"compared": tokens, "gaps": total}


def memory_counts(device: int, used: int | None, limit: int | None) -> dict[str, float]:
    """Return the gauges of a device's memory."""
    found = {"memory_used": used, "memory_limit": limit}
    return {f"{name}/{device}": size for name, size in found.items() if size is not None}


def step_times(seconds: Sequence[float]) -> dict[str, float]:
    """Return the reported durations of the steps that finished since the last report."""
    if not seconds:
        return {}
    ordered = sorted(seconds)

    def at_most(share: float) -> float:
        return ordered[math.ceil(share * len(ordered)) - 1]

    mean = sum(ordered) / len(ordered)
    return {"step/mean": mean, "step/p50": at_most(0.5), "step/p95": at_most(0.95)}


def values_between(
    before: Mapping[str, float], now: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """Return the values to report for the time between two snapshots, without unknown ones."""
    now, grown = Counter(now), Counter(now)
    grown.subtract(before)
    return dict(_values(now, grown, max(seconds, 1e-9)))


def _values(
    now: Mapping[str, float], grown: Mapping[str, float], seconds: float
) -> Iterator[tuple[str, float]]:
    for name, counted in _TOTALS.items():
        yield name, now[counted]
    for name, gauge in _GAUGES.items():
        if gauge in now:
            yield name, now[gauge]
    for name, (counted, unit) in _PER_SECOND.items():
        if counted in now:
            yield name, grown[counted] / seconds / unit
    if spent := grown["reading"] + grown["preparing"]:
        yield "rate/text", grown["prepared"] / spent
    if span := grown["device_busy"] + grown["device_idle"]:
        yield "device/busy_share", grown["device_busy"] / span
        yield "device/idle_share", grown["device_idle"] / span
    if now["flops_per_token"]:
        flops = grown["computed"] * now["flops_per_token"] / seconds
        yield "device/flops", flops
        if now["peak_flops"]:
            yield "device/mfu", flops / now["peak_flops"]
    if grown["predicted"] and math.isfinite(grown["surprise"]):
        yield "model/perplexity", math.exp(min(grown["surprise"] / grown["predicted"], _MOST_NATS))
    if grown["compared"] and math.isfinite(grown["gaps"]):
        yield "model/disagreement", grown["gaps"] / grown["compared"]
    if grown["positions"]:
        yield "packing/efficiency", grown["stepped"] / grown["positions"]
    for counted in now:
        kind, _, tap = counted.partition("/")
        if kind in ("memory_used", "memory_limit"):
            yield f"device/{counted}", now[counted]
            if kind == "memory_limit" and now[counted]:
                yield (
                    f"device/memory_percent/{tap}",
                    (100 * now[f"memory_used/{tap}"] / now[counted]),
                )
        elif kind == "nonfinite":
            yield f"tap/nonfinite/{tap}", now[counted]
        elif kind == "norms" and grown[f"rows/{tap}"] and math.isfinite(grown[counted]):
            yield f"tap/mean_norm/{tap}", grown[counted] / grown[f"rows/{tap}"]
