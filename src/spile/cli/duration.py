"""How long what is left of a job will take: here, as measured, or on chips elsewhere. No jax."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spile.plan.estimate import Estimate

if TYPE_CHECKING:
    from spile.compile.step import Compiled
    from spile.run.rehearsal import Rehearsal


@dataclass(frozen=True)
class Duration:
    """Seconds of one slice; rates are tokens a second."""

    on: str
    measured: bool
    rate: float | None  # None: it is not known, and `why`
    seconds: float | None = None
    starting: float | None = None  # of them, until the first step
    compiling: float | None = None  # in all: later units may bring other shapes
    processor: float | None = None  # of all cores together, the steps alone
    dollars: float | None = None
    why: str | None = None


def measured(found: "Rehearsal", cost: Estimate) -> Duration:
    """What a rehearsal says of all that is left."""
    left = cost.remaining_tokens
    return Duration(
        on="here",
        measured=True,
        rate=found.rate,
        seconds=found.starting + left / found.rate if left else 0.0,
        starting=found.starting,
        compiling=found.compiling,
        processor=found.processor * left,
    )


def elsewhere(found: "Compiled", cost: Estimate) -> Duration:
    """What a compiled step says: the chips' limit, where kernels run one by one."""
    if not found.fits or found.tokens_one_by_one is None:
        why = found.notes[-1] if found.fits else f"a step does not fit on {found.topology}"
        return Duration(on=found.topology, measured=False, rate=None, why=why)
    left = cost.remaining_tokens
    rate = found.tokens_one_by_one * (cost.packing or 1.0)
    at_best = found.tokens_per_second or rate
    dollars = found.dollars and found.dollars * at_best / rate * left / 1e9
    return Duration(
        on=found.topology, measured=False, rate=rate, seconds=left / rate, dollars=dollars
    )


def unknown(on: str, why: str) -> Duration:
    return Duration(on=on, measured=False, rate=None, why=why)
