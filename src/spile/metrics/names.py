"""Every value that is reported: its name, unit and meaning. docs/metrics.md is made of the same."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    meaning: str
    unit: str = ""
    total: bool = False  # a sum that only grows, since the process began


# What is "now" is of the time since the last report. A value that is not known is not reported.
NAMES = {
    "progress/tokens": Name("read by the model", "tokens", total=True),
    "progress/documents": Name("in units that were committed", "documents", total=True),
    "progress/units": Name("that were committed", "units", total=True),
    "progress/bytes": Name("rows written", "bytes", total=True),
    "rate/tokens": Name("read by the model, now", "tokens/s"),
    "rate/text": Name("read, tokenized and packed, a second of that work", "tokens/s"),
    "rate/d2h": Name("rows that left the device, now", "GB/s"),
    "rate/write": Name("rows written, now", "GB/s"),
    "rate/upload": Name("uploaded to a bucket, now", "GB/s"),
    "device/busy_share": Name("of the time in which steps ran, that they computed", "0 to 1"),
    "device/idle_share": Name("of that time, that the device had nothing to do", "0 to 1"),
    "device/mfu": Name("the model's matrix products against the peak, now", "0 to 1"),
    "device/peak_flops": Name("of a device: published, else measured here", "FLOP/s"),
    "device/memory_used": Name("of this process's first device", "bytes"),
    "device/memory_limit": Name("of that device, where it says so", "bytes"),
    "wait/text_share": Name("of the time, that the device's loop waited for text", "0 to 1"),
    "wait/writing_share": Name("of the time, that it waited for rows to be written", "0 to 1"),
    "backlog/steps": Name("computed and waiting to be written", "steps"),
    "backlog/uploads": Name("shards being uploaded to a bucket", "shards"),
    "backlog/spooled": Name("files in the spool", "files"),
    "packing/efficiency": Name("of a step's positions, that hold a token", "0 to 1"),
    "store/retries": Name("requests to buckets and sites, made again", "requests", total=True),
    "tap/mean_norm": Name("of a tap's rows, now; none after a NaN"),
    "tap/max_abs": Name("largest finite value of a tap, now"),
    "tap/nonfinite": Name("NaN and infinity in a tap", "values", total=True),
}
OF_TAPS = {name for name in NAMES if name.startswith("tap/")}


def described(name: str) -> tuple[str, str]:
    """`tap/mean_norm/resid_post.20` -> the name in the table, and the tap."""
    if name in NAMES:
        return name, ""
    kind, _, tap = name.rpartition("/")
    return kind, tap
