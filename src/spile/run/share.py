"""A static share of the units: which machine of how many this is. No jax, no coordinator.

A share is a run of neighbouring units, so that a machine reads few files and each of them in
order. Whoever has done its own helps where most is left, from the far end: there the owner, who
comes from the other one, arrives last.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spile.core.config import Runtime
from spile.core.errors import ConfigError
from spile.corpus.units import Unit

_MACHINE, _MACHINES = "MACHINE_ID", "TOTAL_MACHINES"


@dataclass(frozen=True)
class Share:
    """The units of one machine among several, counted from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def next_of(self, free: Sequence[Unit], units: int) -> Unit | None:
        """Which of the free units, in order, comes next; `units`: how many there are in all."""
        owned: dict[int, list[Unit]] = {}
        for unit in free:
            owned.setdefault(self._owner(unit.id, units), []).append(unit)
        if self.index in owned:
            return owned[self.index][0]
        if not owned:
            return None
        # Helpers of equally busy shares begin at different ones.
        _, _, busiest = min((-len(u), (o - self.index) % self.count, o) for o, u in owned.items())
        return owned[busiest][-1]

    def _owner(self, unit: int, units: int) -> int:
        # The share i holds units from i * units // count up to those of the next.
        return ((unit + 1) * self.count - 1) // units


def find_share(runtime: Runtime, environ: Mapping[str, str]) -> Share | None:
    """`--share i/n`, or `MACHINE_ID` of `TOTAL_MACHINES`; None if all units are everybody's.

    Raises:
        ConfigError: if what is given is no share.
    """
    text, name = runtime.share, "--share"
    if text is None:
        machine, machines = environ.get(_MACHINE), environ.get(_MACHINES)
        if not machines:
            return None
        if not machine and machines != "1":
            raise ConfigError(
                f"{_MACHINES} is {machines!r}, but which of them is this? set {_MACHINE}, from 0, "
                "or give --share"
            )
        text, name = f"{machine or 0}/{machines}", f"{_MACHINE}/{_MACHINES}"
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match is None:
        raise ConfigError(f"{name} must be I/N such as 3/32, counted from 0, got {text!r}")
    index, count = int(match[1]), int(match[2])
    if not index < count:
        raise ConfigError(
            f"{name} {text} is out of range: shares are counted from 0, of {count} the last is "
            f"{max(0, count - 1)}/{count}"
        )
    return Share(index, count)
