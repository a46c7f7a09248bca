"""Opening a dataset: which generation, which passes and which units a reader gets."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import cast

import numpy as np

from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.core.options import parse_count
from spile.dataset import format as fmt
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.tap_groups import TapGroup
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.manifest import Manifest
from spile.dataset.records.passes import Pass, named, readable_passes, whole_generation
from spile.dataset.records.table import Table
from spile.objects import Objects, open_objects


def open_dataset(
    url: str | Path,
    *,
    partial: bool = False,
    taps: Sequence[str] | None = None,
    cache: str | Path | None = None,
    cache_bytes: int | str = "10GiB",
    verify: bool = False,
    tokenizer: str | None = None,
) -> Dataset:
    """Open a finished dataset; with `partial`, the units that are done so far.

    Taps that are being added (`--add-taps`) are there once they are complete. With `partial` they
    are there before that, and units are those in which all taps are done.

    Args:
        taps: the taps to open, by their names in the dataset; by default all.
        verify: compare each file with its checksum when it is first read; this reads all of it.
        cache: a local folder that keeps what was read from a bucket.
        cache_bytes: the largest size of that folder.
        tokenizer: the directory or URL of a tokenizer for `tokenizer`, `tokens` and `text`; by
            default the dataset's own, or else the model's.

    Raises:
        StoreError: if there is no dataset, or it is unfinished and `partial` is not given.
        ConfigError: if a tap of `taps` is not there.
    """
    given = cast(object, url)
    if not isinstance(given, str | Path):
        raise ConfigError(
            f"spile.open takes one dataset, got a {type(given).__name__}: open each, as in "
            "[spile.open(url) for url in urls]"
        )
    kept = None
    if cache is not None:
        try:
            most = parse_count(cache_bytes) if isinstance(cache_bytes, str) else cache_bytes
        except ValueError:
            raise ConfigError(f"cache_bytes is a size such as 10GiB, not {cache_bytes!r}") from None
        kept = Path(cache), most
    objects = open_objects(str(url))
    ledger = Ledger(objects)
    newest = ledger.table()
    parts = _parts(ledger, newest, partial, taps)
    return Dataset(objects, _common(parts), verify, tokenizer, taps, kept)


def finished_taps(objects: Objects) -> list[str]:
    """Return the taps of a dataset without those that are still being added."""
    ledger = Ledger(objects)
    table, _, passes = _finished(ledger, ledger.table(), None)
    own = [found for each in passes if (found := each.finished(table))]
    return [tap for found in (table, *own) for tap in found.recipe.stored_taps]


def _parts(
    ledger: Ledger, newest: Table, partial: bool, taps: Sequence[str] | None
) -> list[TapGroup]:
    """Return what the dataset has of its taps, and what its passes have."""
    table, manifest, passes = _finished(ledger, newest, taps)
    if manifest is None or (partial and table is not newest):
        own = _own_part(ledger, newest, partial)
    else:
        scales = _needed(ledger.read_scales(table))
        own = TapGroup(table, ledger.derived.catalog(table, manifest), scales, manifest.columns)
    return [own, *_passes_of(passes, own.table, partial)]


def _finished(
    ledger: Ledger, newest: Table, taps: Sequence[str] | None
) -> tuple[Table, Manifest | None, list[Pass]]:
    """Return the newest generation that is complete, its manifest, and passes with wanted taps."""
    passes = [
        each
        for each, table in readable_passes(ledger, newest)
        if taps is None or not table.taps.keys().isdisjoint(taps)
    ]
    table, manifest = whole_generation(ledger, newest, passes)
    return table, manifest, passes


def _own_part(ledger: Ledger, newest: Table, partial: bool) -> TapGroup:
    """Return the units that are done so far, or those of the table if they are all done."""
    table = newest
    if not partial:
        # Later generations are read by their manifests. Those are created in order, so if readers
        # got a generation before, they would lose it once an earlier one has its manifest.
        table, there = newest.at(0), ledger.done_units()
        base = range(len(table.units))
        if not there.issuperset(base):
            raise StoreError(
                f"{ledger.url}: {len(there.intersection(base))} of {len(base)} units are done; "
                "finish with the same `spile extract`, or open with partial=True"
            )
    scales = ledger.read_scales(table)
    units = ledger.catalog_so_far(table)
    return TapGroup(table, units, _needed(scales) if len(units) else {})


def _passes_of(passes: Sequence[Pass], base: Table, partial: bool) -> Iterator[TapGroup]:
    """Yield the passes that can be read."""
    for each in passes:
        with named(each.name):
            table = each.table_over(base)
            if table is None:
                continue
            manifest = each.manifest_over(table)
            scales = each.ledger.read_scales(table)
            if manifest is not None:
                units = each.ledger.derived.catalog(table, manifest)
                yield TapGroup(table, units, _needed(scales), manifest.columns, each.prefix)
            elif partial:
                units = each.ledger.catalog_so_far(table)
                yield TapGroup(
                    table, units, _needed(scales) if len(units) else {}, None, each.prefix
                )


def _common(parts: Sequence[TapGroup]) -> list[TapGroup]:
    """Return the parts with the units that all of them have."""
    units = reduce(np.intersect1d, (part.units.units for part in parts))
    return [
        part
        if np.array_equal(units, part.units.units)
        else replace(part, units=part.units.only(units), merged=None)
        for part in parts
    ]


def _needed(scales: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    if scales is None:
        raise CorruptError(fmt.SCALES, "is missing, and without it int8 rows cannot be read")
    return scales
