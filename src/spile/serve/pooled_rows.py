"""Pooled rows: a table of spans beside the kept columns of their documents, and nearest rows."""

from collections.abc import Callable
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.dataset.read.dataset import Dataset
from spile.serve.digest import Sample, read_rows

_NEAREST = 20
_CHANNELS = 12

Kept = Callable[[str, np.ndarray, np.ndarray], list[Any]]  # column, units, documents -> values


def listed(dataset: Dataset, kept: Kept, start: int, count: int) -> dict[str, Any]:
    """Return rows in stored order from `start` on, with what is known of them."""
    stop = min(start + count, dataset.num_tokens)
    rows = np.arange(min(start, stop), stop)
    units = np.searchsorted(dataset.unit_starts, rows, side="right") - 1
    firsts = np.array(dataset.unit_starts)[units]
    numbers = np.array(dataset.units, np.int64)[units]
    told = _told(dataset, kept, dataset.index(min(start, stop), stop), numbers, rows - firsts)
    return {"rows": told, "start": start, "total": dataset.num_tokens}


def nearest(
    dataset: Dataset,
    kept: Kept,
    sample: Sample,
    moments: tuple[np.ndarray, np.ndarray],
    tap: str,
    unit: int,
    row: int,
) -> dict[str, Any]:
    """Return the sampled rows nearest to a row, and the channels that stand out in it.

    Near is what has a large cosine once the mean of all rows is subtracted.

    Args:
        moments: the mean and the deviation of each channel.
        row: its number in the unit.
    """
    mean, deviation = moments
    rows = dataset.rows_of_unit(unit)
    if rows is None or rows[0] + row >= rows[1]:
        raise ConfigError(f"unit {unit} has no row {row}")
    start = rows[0] + row
    (values,) = read_rows(dataset, tap, start, start + 1)
    values = values.astype(np.float64)
    own = values - mean
    others = sample.values[tap].astype(np.float64) - mean
    lengths = np.linalg.norm(others, axis=1) * np.linalg.norm(own)
    cosine = others @ own / np.maximum(lengths, 1e-30)
    cosine[(sample.units == unit) & (sample.rows == row)] = -np.inf
    order = np.argsort(-cosine, kind="stable")
    order = order[np.isfinite(cosine[order])][:_NEAREST]
    near = _told(dataset, kept, sample.index[order], sample.units[order], sample.rows[order])
    beyond = own / np.maximum(deviation, 1e-30)
    out = np.argsort(-np.abs(beyond), kind="stable")[:_CHANNELS]
    told = _told(dataset, kept, dataset.index(start, start + 1), np.array([unit]), np.array([row]))
    return {
        "tap": tap,
        "row": told[0],
        "length": float(np.linalg.norm(values)),
        "near": [
            {**each, "cosine": value} for each, value in zip(near, cosine[order], strict=True)
        ],
        "of": len(sample),
        "channels": [
            {"channel": int(c), "value": values[c], "mean": mean[c], "beyond": beyond[c]}
            for c in out
        ],
    }


def _told(
    dataset: Dataset, kept: Kept, entries: np.ndarray, units: np.ndarray, rows: np.ndarray
) -> list[dict[str, Any]]:
    """Return which tokens each row stands for, and the columns of its document."""
    names = ("preview", *dataset.recipe.keep)
    columns = {name: kept(name, units, entries["doc"]) for name in names}
    return [
        {
            "unit": int(unit),
            "row": int(row),
            **{name: int(entry[name]) for name in ("doc", "span", "start", "count", "offset")},
            "preview": columns["preview"][at],
            "labels": {name: columns[name][at] for name in dataset.recipe.keep},
        }
        for at, (entry, unit, row) in enumerate(zip(entries, units, rows, strict=True))
    ]
