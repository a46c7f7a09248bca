"""What the formats of drafting heads share: a sample for each context that the model read.

A drafting head learns from a few layers of the stream, side by side, and from the model's last
hidden state. So every token of a context must have a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spile.core.errors import ConfigError
from spile.core.index import FIRST, ROLES
from spile.dataset.records.chosen_taps import site_and_layer
from spile.interop.export.export_source import ExportSource

_ANY_ROLE = sum(ROLES.values())


@dataclass(frozen=True)
class DraftSample:
    """A context.

    Attributes:
        start: its first row; `stop` is the row after its last.
        loss_mask: 1 for each token to learn: in a chat the assistant's, else all.
    """

    start: int
    stop: int
    tokens: np.ndarray
    loss_mask: np.ndarray


def draft_samples(source: ExportSource) -> Iterator[DraftSample]:
    """Yield the contexts of a dataset, by unit, document and offset."""
    dataset = source.dataset
    for first, last in zip(dataset.unit_starts, dataset.unit_starts[1:], strict=False):
        index = dataset.index(first, last)
        starts = np.flatnonzero(index["flags"] & FIRST)
        stops = np.append(starts[1:], len(index))
        begins = np.repeat(starts, stops - starts) if len(starts) and starts[0] == 0 else -1
        if not np.array_equal(index["pos"], np.arange(len(index)) - begins):
            raise ConfigError(
                f"{dataset.url}: was shuffled, so its contexts are scattered; export the dataset "
                "that it was made from"
            )
        order = np.lexsort((index["offset"][starts], index["doc"][starts]))
        for start, stop in zip(starts[order].tolist(), stops[order].tolist(), strict=True):
            flags = index["flags"][start:stop]
            spoken = flags & ROLES["assistant"] if (flags & _ANY_ROLE).any() else np.ones(1)
            mask = np.broadcast_to(spoken != 0, flags.shape).astype(np.int64)
            tokens = index["token_id"][start:stop].astype(np.int64)
            yield DraftSample(first + start, first + stop, tokens, mask)


def layers_and_last(source: ExportSource, last: str | None) -> tuple[list[str], str]:
    """Return the taps of the layers, from the first on, and that of the last hidden state.

    Args:
        last: the tap of the last hidden state; None: the last of the layers is it.

    Raises:
        ConfigError: if they are not that, or a token has no row.
    """
    recipe, url = source.dataset.recipe, source.dataset.url
    if not recipe.keeps_all:
        raise ConfigError(
            f"{url}: a drafting head learns from every token; extract without --where, --every and "
            "--pool"
        )
    streams = [tap for tap in source.taps if site_and_layer(tap)[0] in ("resid_post", "embed")]
    rest = [tap for tap in source.taps if tap not in streams]
    wanted = [] if last is None else [last]
    widths = {source.width(tap) for tap in source.taps}
    if rest != wanted or len(streams) < 2 or len(widths) > 1:
        beside = f"and {last}" if last else "of which the last is the model's last block"
        raise ConfigError(
            f"--taps: a drafting head takes layers of the stream (resid_post) {beside}; chosen: "
            f"{', '.join(source.taps)}"
        )
    return (streams, rest[0]) if rest else (streams[:-1], streams[-1])


def side_by_side(source: ExportSource, taps: list[str], sample: DraftSample) -> np.ndarray:
    """Return the rows of several taps, [tokens, layers, width]."""
    return np.stack([source.read(tap, sample.start, sample.stop) for tap in taps], axis=1)
