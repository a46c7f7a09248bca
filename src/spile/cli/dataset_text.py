"""What is said of a dataset: whether it is sound, what was made of it."""

import shlex
from typing import TYPE_CHECKING

from spile.cli.style import size
from spile.core.errors import printable

if TYPE_CHECKING:
    from spile.dataset.maintain.compact import Compacted
    from spile.dataset.maintain.shuffle import Shuffled
    from spile.dataset.maintain.verify import Report
    from spile.interop.export import Exported
    from spile.interop.hub.push import Pushed


def verify_text(out: str, report: "Report") -> str:
    lines = [f"fault: {printable(fault)}" for fault in report.faults]
    lines += [f"orphan: {printable(key)}" for key in report.orphans]
    if report.orphans:
        lines.append(
            f"{len(report.orphans)} orphans are harmless; `spile gc {shlex.quote(out)}` removes "
            "those of finished units"
        )
    sound = "whole and sound" if report.units_done == report.units else "sound so far"
    verdict = sound if report.ok else f"{len(report.faults)} faults"
    how = "by size and etag" if report.quick else "read"
    if report.resumed:
        how += f", {report.resumed} units of them by the audit before"
    lines.append(
        f"{out}: {verdict} ({report.units_done} of {report.units} units, {report.rows:,} rows, "
        f"{size(report.bytes)} {how})"
    )
    return "\n".join(lines)


def export_text(made: "Exported") -> str:
    """What was written, and what was not."""
    lines = [
        f"{made.dest}: {made.rows:,} rows of {len(made.taps)} taps as {made.format}, "
        f"{size(made.bytes)} in {made.files} files"
    ]
    if made.context_size:
        lines.append(f"sequences of {made.context_size:,} rows, cut from the stored order")
    if made.left_over:
        rows = f"{made.left_over:,} row{'s' * (made.left_over > 1)}"
        lines.append(f"left over: the last {rows}, too few for a sequence or a file")
    return "\n".join(lines)


def compact_text(made: "Compacted") -> str:
    """What became of how many files."""
    return (
        f"{made.dest}: {made.rows:,} rows in {made.units:,} unit{'s' * (made.units != 1)} "
        f"(of {made.units_before:,}), {made.shards:,} shards (of {made.shards_before:,}), "
        f"{size(made.bytes)} (of {size(made.bytes_before)})"
    )


def shuffle_text(made: "Shuffled") -> str:
    """What was made, and found to be the same rows."""
    return (
        f"{made.dest}: {made.rows:,} rows in a drawn order, {made.units:,} "
        f"unit{'s' * (made.units != 1)}, {made.shards:,} shards, {size(made.bytes)}, in "
        f"{made.passes} passes; every row of the source once"
    )


def push_text(made: "Pushed") -> str:
    """What went where, and how to get it back."""
    lines = [f"{made.url}: {made.files:,} files sent, {made.files_there:,} were there already"]
    if not made.card_written:
        lines.append("its README.md was left as it is")
    return "\n".join([*lines, f"  load    {made.download}"])
