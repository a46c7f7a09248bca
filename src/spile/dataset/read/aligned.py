"""Datasets of several models over the same tokens, read row for row.

pair = spile.align("acts/base", "acts/chat")
for batch in pair.batches("resid_post.20", 4096):
    difference = batch["chat/resid_post.20"] - batch["base/resid_post.20"]
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.core.errors import ConfigError
from spile.core.recipe import OF_EACH_ROW, ResolvedRecipe
from spile.dataset.codec.statistics import TapStats
from spile.dataset.read.batches import Batches
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.opening import open_dataset
from spile.dataset.read.order import BatchOptions
from spile.dataset.read.window import View

_SMALLEST = float(np.finfo(np.float32).tiny)


def align(*datasets: str | Path | Dataset, **named: str | Path | Dataset) -> "AlignedDatasets":
    """Open datasets that hold the same rows, of different models or of a changed one.

    Each has a name, the last part of its path unless it is given: align(base=..., chat=...).

    Raises:
        ConfigError: if they do not hold the same rows; the message says what differs.
    """
    sides: dict[str, Dataset] = {}
    for given, name in [*((d, None) for d in datasets), *((d, n) for n, d in named.items())]:
        dataset = given if isinstance(given, Dataset) else open_dataset(given)
        name = name or dataset.url.rstrip("/").rpartition("/")[2]
        if name in sides:
            raise ConfigError(
                f"align: two datasets are named {name}; name them, as in align(base=..., chat=...)"
            )
        sides[name] = dataset
    if len(sides) < 2:
        raise ConfigError("align takes two datasets or more")
    first, *others = sides.values()
    for other in others:
        _check(first, other)
    return AlignedDatasets(sides)


class AlignedDatasets:
    """Datasets over the same rows. A tap is named SIDE/TAP, as in "chat/resid_post.20"."""

    def __init__(self, sides: Mapping[str, Dataset]) -> None:
        """Take datasets that are known to hold the same rows (`align` checks it)."""
        self.sides = dict(sides)
        self._first = next(iter(self.sides.values()))

    @property
    def taps(self) -> list[str]:
        return [f"{side}/{tap}" for side, dataset in self.sides.items() for tap in dataset.taps]

    @property
    def num_tokens(self) -> int:
        """The number of rows of every tap."""
        return self._first.num_tokens

    def __repr__(self) -> str:
        told = ", ".join(f"{side}={dataset.url!r}" for side, dataset in self.sides.items())
        return f"spile.align({told}): {self.num_tokens:,} rows"

    def read(
        self,
        tap: str,
        start: int = 0,
        stop: int | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> np.ndarray:
        """Return rows of a tap of one side, as `Dataset.read` does."""
        dataset, tap = self._found(tap)
        return dataset.read(tap, start, stop, dtype=dtype)

    def index(self, start: int, stop: int) -> np.ndarray:
        """Return the index entries of rows, which are those of every side."""
        return self._first.index(start, stop)

    def statistics(self, tap: str) -> TapStats:
        """Return the statistics of a tap of one side."""
        dataset, tap = self._found(tap)
        return dataset.statistics(tap)

    def compare(self, tap: str, start: int, stop: int) -> dict[str, np.ndarray]:
        """Return how far a tap of the second side is from that of the first, row by row.

        "cosine" of both, and "relative": the length of their difference, over that of the first.
        For the tap `logits` also "kl": the divergence of the second's next-token distribution from
        the first's, in nats.
        """
        if len(self.sides) != 2:
            raise ConfigError(f"compare takes two datasets, and {len(self.sides)} are aligned")
        read = [dataset.read(tap, start, stop) for dataset in self.sides.values()]
        base, other = (
            rows.reshape(len(rows), math.prod(rows.shape[1:])).astype(np.float64) for rows in read
        )
        if base.shape != other.shape:
            raise ConfigError(
                f"{tap}: rows of {base.shape[1]} and {other.shape[1]} values cannot be compared"
            )
        lengths = np.linalg.norm(base, axis=1)
        both = np.maximum(lengths * np.linalg.norm(other, axis=1), _SMALLEST)
        found = {
            "cosine": (base * other).sum(axis=1) / both,
            "relative": np.linalg.norm(other - base, axis=1) / np.maximum(lengths, _SMALLEST),
        }
        if self._first.name(tap) == "logits":
            of_base, of_other = _log_probs(base), _log_probs(other)
            found["kl"] = (np.exp(of_base) * (of_base - of_other)).sum(axis=1)
        return {name: values.astype(np.float32) for name, values in found.items()}

    def batches(self, taps: str | Sequence[str], batch_size: int, **options: Any) -> Batches:
        """Iterate over shuffled batches `{"SIDE/TAP": rows, "index": entries}`.

        The options are those of `Dataset.batches`. A tap without a side is taken of every side. A
        window holds the rows of all sides, and `normalize` uses each side's own statistics.
        """
        chosen = BatchOptions(batch_size, **options)
        names: dict[str, dict[str, str]] = {side: {} for side in self.sides}
        for tap in [taps] if isinstance(taps, str) else taps:
            named, _, own = tap.partition("/")
            meant = {named: own} if named in self.sides else dict.fromkeys(self.sides, tap)
            for side, own in meant.items():
                names[side][f"{side}/{own}"] = self.sides[side].name(own)
        views: list[View] = []
        for side, dataset in self.sides.items():
            # (The first side shows the index, which is that of all.)
            if names[side] or not views:
                shown = chosen if not views else replace(chosen, index=False)
                views.append(dataset.view(names[side], shown))
        order = self._first.order(chosen, sum(view.row_bytes for view in views))
        return Batches(views, order, chosen)

    def _found(self, tap: str) -> tuple[Dataset, str]:
        side, _, own = tap.partition("/")
        if side not in self.sides or not own:
            known = ", ".join(self.sides)
            raise ConfigError(f"{tap}: name the side, as in {next(iter(self.sides))}/{tap}; "
                              f"there are {known}")  # fmt: skip
        return self.sides[side], own


def _check(first: Dataset, other: Dataset) -> None:
    """Raise if two datasets do not hold the same rows, with what their recipes differ in."""
    pairs = zip_longest(first.index_digests(), other.index_digests())
    if all(one == two for one, two in pairs) or _same_index(first, other):
        return
    differences = [*_differences(first.recipe, other.recipe)]
    if first.units != other.units:
        differences.append(f"{first.num_units} and {other.num_units} units")
    told = "; ".join(differences) or "their rows have another order: was one shuffled or compacted?"
    raise ConfigError(
        f"{other.url} does not hold the rows of {first.url}: {told}. To make such a dataset: "
        f"spile extract --like {first.url} --model MODEL --out OUT"
    )


def _same_index(first: Dataset, other: Dataset) -> bool:
    """Whether all entries are equal, where the files are not (another version has written them)."""
    if first.unit_starts != other.unit_starts:
        return False
    starts = first.unit_starts
    return all(
        np.array_equal(first.index(start, stop), other.index(start, stop))
        for start, stop in zip(starts, starts[1:], strict=False)
    )


def _differences(first: ResolvedRecipe, other: ResolvedRecipe) -> Iterator[str]:
    one, two = first.identity(), other.identity()
    for name in dict.fromkeys([*one, *two]):
        mine, theirs = one.get(name), two.get(name)
        if mine == theirs or name in OF_EACH_ROW:
            continue
        shown = mine is None or theirs is None or len(f"{mine}{theirs}") < 80
        yield f"{name} is {mine} and {theirs}" if shown else f"another {name}"
    if first.model.get("tokenizer") != other.model.get("tokenizer"):
        yield "another tokenizer"


def _log_probs(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
