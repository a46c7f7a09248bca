"""Edges of a model, summed over a corpus: what each writer adds at each place of the stream.

Units store the mean over their tokens for each label (`--reduce mean`), so every token counts once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.tap_order import EDGES, of_backward_pass
from spile.dataset.read.reduced import ReducedRows


@dataclass(frozen=True, eq=False)
class Edges:
    """The sums over all tokens of a label, to first order.

    Attributes:
        labels: the values of `--by`; without it, (None,).
        writers: the taps that edges come from, by name.
        readers: the places in the stream that they lead to, by name.
        counts: how many tokens each label has.
        sums: [labels, writers, readers], in float64: the objective would fall by so much if the
            stream there lost what the writer added (beyond the baseline); zero where the writer
            comes later.
    """

    labels: tuple[Any, ...]
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    counts: np.ndarray
    sums: np.ndarray


def edges_of(
    url: str,
    taps: Sequence[str],
    writers: Callable[[str], str | None],
    reduced: Callable[[str], ReducedRows],
) -> Edges:
    """Return the edges of a dataset.

    Args:
        taps: of the dataset.
        writers: returns those of a tap, as the recipe has them.
        reduced: returns a tap's sums.
    """
    edges = [tap for tap in taps if of_backward_pass(tap) == EDGES]
    if not edges:
        raise ConfigError(f"{url}: holds no edges; extract with --taps resid_post_edge:all")
    named = {writers(tap) or "" for tap in edges}
    if len(named) > 1:
        raise ConfigError(f"{url}: its edges come from several lists of --writers; read each tap")
    found = [reduced(tap) for tap in edges]
    sums = np.stack([each.means * each.counts[:, None] for each in found], axis=-1)
    readers = tuple(tap.replace(EDGES, "", 1) for tap in edges)
    return Edges(found[0].labels, (*named.pop().split(","),), readers, found[0].counts, sums)
