"""From what is counted to what is reported: sums, and rates between two moments."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping

_GB = 1e9
_TOTALS = {
    "progress/tokens": "tokens", "progress/documents": "documents", "progress/units": "units",
    "progress/bytes": "bytes", "store/retries": "retries",
}  # fmt: skip
# Reported only where they have been said: a run to a disk uploads nothing.
_GAUGES = {
    "device/memory_used": "memory_used", "device/memory_limit": "memory_limit",
    "device/peak_flops": "peak_flops", "backlog/steps": "queue_write",
    "backlog/uploads": "uploading", "backlog/spooled": "spooled",
}  # fmt: skip
_PER_SECOND = {
    "rate/tokens": ("computed", 1.0), "rate/d2h": ("copied", _GB), "rate/write": ("bytes", _GB),
    "rate/upload": ("uploaded", _GB), "wait/text_share": ("waited_for_text", 1.0),
    "wait/writing_share": ("waited_for_writing", 1.0),
}  # fmt: skip


def tap_counts(tap: str, rows: int, norm_sum: float, nonfinite: int) -> dict[str, float]:
    """What is counted of some of a tap's rows."""
    return {f"rows/{tap}": rows, f"norms/{tap}": norm_sum, f"nonfinite/{tap}": nonfinite}


def values_between(
    before: Mapping[str, float], now: Mapping[str, float], seconds: float
) -> dict[str, float]:
    """What is reported of the time between two snapshots; what is not known is left out."""
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
    if now["peak_flops"]:
        flops = grown["computed"] * now["flops_per_token"] / seconds
        yield "device/mfu", flops / now["peak_flops"]
    if grown["positions"]:
        yield "packing/efficiency", grown["stepped"] / grown["positions"]
    for counted in now:
        kind, _, tap = counted.partition("/")
        if kind == "nonfinite":
            yield f"tap/nonfinite/{tap}", now[counted]
        elif kind == "norms" and grown[f"rows/{tap}"] and math.isfinite(grown[counted]):
            yield f"tap/mean_norm/{tap}", grown[counted] / grown[f"rows/{tap}"]
