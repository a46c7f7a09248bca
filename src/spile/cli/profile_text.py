"""Where a run's time went: its stages, and what the device did in the steps that were traced."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spile.metrics import Counters

if TYPE_CHECKING:
    from spile.run.trace import Traced

_SHOWN = 12  # operations
_STAGES = (
    ("device busy", "device_busy"),
    ("device idle", "device_idle"),
    ("waited for the first text", "waited_at_first"),
    ("waited for text", "waited_for_text"),
    ("waited for writing", "waited_for_writing"),
    ("reading documents", "reading"),
    ("tokenizing and packing", "preparing"),
    ("writing rows, all lanes", "writing"),
    ("making units durable", "committing"),
)


def profile_summary(counters: Counters, path: Path | None, traced: "Traced | None") -> str:
    """One screen. Stages overlap: their seconds do not add up to the run's."""
    lines = ["where the time went (stages overlap):"]
    lines += [f"  {name:<28}{counters[key]:>9.2f} s" for name, key in _STAGES]
    if path and traced:
        lines += _of_the_device(path, traced)
    return "\n".join(lines)


def _of_the_device(path: Path, traced: "Traced") -> Iterator[str]:
    total, steps = sum(traced.seconds.values()), traced.steps
    if steps:
        yield f"operations of the device in steps {steps[0]} to {steps[-1]}, {total:.3f} s in all:"
    for kind, seconds in traced.top(_SHOWN):
        yield f"  {kind[:40]:<40}{seconds * 1e3:>9.1f} ms {seconds / total:>6.1%}"
    rest = len(traced.seconds) - _SHOWN
    if rest > 0:
        less = total - sum(seconds for _, seconds in traced.top(_SHOWN))
        yield f"  {f'{rest} other kinds':<40}{less * 1e3:>9.1f} ms {less / total:>6.1%}"
    # …/plugins/profile/WHEN/TRACE
    yield f"  open    tensorboard --logdir {path.parents[3]}  (with xprof installed)"
    yield f"  or      {path}  at https://ui.perfetto.dev"
