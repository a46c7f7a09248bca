"""The parts of features: what is counted of some units, and the summary of all of them."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from spile.core.threads import cancellation
from spile.dataset import format as fmt
from spile.dataset.codec.coactivation import nearest_latents
from spile.dataset.codec.columns import ColumnFile, read_columns
from spile.dataset.codec.features import LatentCounts
from spile.dataset.records.features import FeatureFiles, FeatureSet, FeatureSpec
from spile.features.neighbours import RowSample
from spile.features.ranked import hashes
from spile.features.source import ActiveRows, AlongDirections, StoredLatents
from spile.features.tally import Tally

Source = StoredLatents | AlongDirections


def count_part(
    features: FeatureSet, spec: FeatureSpec, source: Source, units: range, made_from: str
) -> FeatureFiles:
    """Count the rows of consecutive units; store the files, and return their record."""
    sample = RowSample(spec.options.rows, source.width)
    files = list[ColumnFile]()
    counted = 0
    for low, high in zip(spec.bounds, spec.bounds[1:], strict=False):
        tally = Tally(low, high, spec.options, signed=bool(spec.names))
        for unit, window in _windows(source, units):
            cancellation().check()
            place = np.arange(window.first, window.first + window.count) + (unit << 32)
            hashed = hashes(place)
            rows, latents, values = window.rows, window.latents, window.values
            if len(spec.bounds) > 2:
                chosen = np.flatnonzero((latents >= low) & (latents < high))
                rows, latents, values = rows[chosen], latents[chosen], values[chosen]
            tally.add(latents - low, values, rows, place, hashed, window.tokens)
            if low == 0:
                sample.add(place, hashed, window.ids)
                counted += window.count
        files.append(features.store(fmt.PARTS, tally.columns()))
    sampled = features.store(fmt.PARTS, sample.columns())
    return FeatureFiles(units.start, len(units), counted, made_from, tuple(files), sampled)


def _windows(source: Source, units: Iterable[int]) -> Iterator[tuple[int, ActiveRows]]:
    for unit in units:
        rows = source.dataset.rows_of_unit(unit)
        for window in source.windows(*rows) if rows else ():
            yield unit, window


def summarize(
    features: FeatureSet,
    spec: FeatureSpec,
    width: int,
    parts: Sequence[FeatureFiles],
    made_from: str,
) -> FeatureFiles:
    """Merge an earlier summary, if there is one, and the parts that follow it, in order.

    One range of latents is held at a time.
    """
    units = parts[-1].first + parts[-1].units
    rows = sum(part.rows for part in parts)
    files = list[ColumnFile]()
    for at, (low, high) in enumerate(zip(spec.bounds, spec.bounds[1:], strict=False)):
        tally = Tally(low, high, spec.options, signed=bool(spec.names))
        for part in parts:
            cancellation().check()
            file = part.files[at]
            tally.merge(LatentCounts(file.key, read_columns(features.objects, file), high - low))
        files.append(features.store(fmt.FEATURE_COLUMNS, tally.columns()))
    sample = RowSample(spec.options.rows, width)
    for part in parts:
        sample.merge(part.sampled.key, read_columns(features.objects, part.sampled))
    drawn = sample.columns()
    count = spec.options.neighbours if width else 0
    ids, scores = nearest_latents(drawn["ids"], spec.latents, drawn["ids"], spec.latents, count)
    return FeatureFiles(
        0,
        units,
        rows,
        made_from,
        tuple(files),
        features.store(fmt.FEATURE_COLUMNS, drawn),
        features.store(fmt.FEATURE_COLUMNS, {"ids": ids, "score": scores}),
    )
