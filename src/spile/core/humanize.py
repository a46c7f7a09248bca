"""Format sizes, counts and times for people."""

FIELDS = "fields"  # the attribute of a log record that holds the extra fields of its JSON line


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def short(count: float) -> str:
    """Format a number in a few characters: 987, 12.3k, 4.56M."""
    for unit in ("", "k", "M", "G"):
        if count < 999.5:
            digits = 0 if not unit or count >= 99.95 else 1 if count >= 9.995 else 2
            return f"{count:.{digits}f}{unit}"
        count /= 1000
    return f"{count:.2f}T"


def lasting(seconds: float) -> str:
    """Format a duration in one unit: 3.2 s, 45 s, 1.5 min, 2.0 h, 3.0 days."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.1f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def clock(seconds: float) -> str:
    """Format a duration as a countdown: 3:07, 2:03:07, 4d 2h."""
    whole = round(seconds)
    minutes, hours = whole // 60, whole // 3600
    if hours >= 100:
        return f"{hours // 24}d {hours % 24}h"
    if hours:
        return f"{hours}:{minutes % 60:02}:{whole % 60:02}"
    return f"{minutes}:{whole % 60:02}"


def compared(predicted: float, came: float) -> str:
    """Format the relative difference between an actual value (`came`) and its prediction."""
    if not predicted:
        return "0%" if not came else "expected 0"
    return f"{(came - predicted) / predicted:+.1%}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: `1 unit`, `2 units`, `1,024 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
