"""The taps of a dataset by how they were made: with it, or later by a pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.dataset.codec.columns import ColumnFile
from spile.dataset.records.segments import Catalog
from spile.dataset.records.table import Table
from spile.objects import Objects
from spile.objects.rooted import RootedObjects


@dataclass(frozen=True)
class TapGroup:
    """The taps that a dataset was made with, or those of a pass.

    Attributes:
        prefix: the folder of the pass; empty for the dataset itself.
        units: those that are done.
        scales: the scale of each channel, for taps that are stored with scales.
        merged: the file that holds the statistics of all rows, if there is one.
    """

    table: Table
    units: Catalog
    scales: Mapping[str, np.ndarray]
    merged: ColumnFile | None = None
    prefix: str = ""

    def pickled(self) -> tuple[Any, ...]:
        scales = dict(self.scales)
        return self.table, self.units.parts, self.units.rows, scales, self.merged, self.prefix

    @classmethod
    def unpickled(cls, objects: Objects, *told: Any) -> "TapGroup":
        table, parts, rows, scales, merged, prefix = told
        units = Catalog(rooted(objects, prefix), table.layout, parts, rows)
        return cls(table, units, scales, merged, prefix)


def taps_of(parts: Sequence[TapGroup], only: Sequence[str] | None) -> dict[str, TapGroup]:
    """Return the part of each tap, in order. (A tap that two passes have is that of the first.)"""
    found: dict[str, TapGroup] = {}
    for part in parts:
        for tap in part.table.recipe.stored_taps:
            found.setdefault(tap, part)
    if only is None:
        return found
    for tap in only:
        if tap not in found:
            raise ConfigError(f"no tap {tap!r}; there are {', '.join(found)}")
    return {tap: found[tap] for tap in only}


def rooted(objects: Objects, prefix: str) -> Objects:
    return RootedObjects(objects, prefix) if prefix else objects
