"""The decoder's weights on the device. Each array is declared in `specs.py`."""

from dataclasses import dataclass
from typing import Any

import jax

from spile.models.config.arch import Arch

# Arrays by name; jax puts placeholders in their stead while it looks at the tree.
Arrays = dict[str, Any]
Block = Arrays  # of one block; inside `Params.cycle` each has a leading axis of cycles


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    """The weights on the device; those after the blocks only where a tap asks for them.

    Blocks whose kinds repeat are scanned: `cycle` has one entry for each block of a period, its
    arrays stacked over the repetitions. What does not fill a period is in `tail`, block by block.
    """

    outer: Arrays
    cycle: tuple[Block, ...]
    tail: tuple[Block, ...]


@dataclass(frozen=True)
class Schedule:
    """How the first `depth` blocks are run: `cycles` times a period, then the rest."""

    depth: int
    period: int
    cycles: int

    @classmethod
    def of(cls, arch: Arch, depth: int, *, whole: bool) -> "Schedule":
        """Without `whole` the last block stands apart: what no tap needs of it is left out."""
        return cls(depth, arch.period, max(0, depth - (not whole)) // arch.period)

    @property
    def scanned(self) -> int:
        return self.period * self.cycles
