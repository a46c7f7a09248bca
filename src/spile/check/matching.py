"""What rows really are, if they are not what they are called: of which layer, or of which token.

An engine that counts layers differently, or is off by one, returns rows that are right by
themselves. So rows that are too far from their own tap are compared with every tap of their shape,
and with their own tap at the tokens before and after.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from spile.check.load import Taps
from spile.check.sampled import SampledRows
from spile.dataset.read.document import Document
from spile.dataset.read.dtypes import STORED
from spile.models.config.arch import Arch
from spile.models.taps import Tap, all_taps

_TOKENS = 32  # of each document that are compared: a model may have hundreds of taps of one shape
_SHIFTS = {-1: "the token before", 1: "the token after"}


def match(
    tap: str,
    arch: Arch,
    exact: Taps,
    samples: Sequence[tuple[Document, SampledRows]],
    allowed: float,
) -> str | None:
    """Return what a tap's rows are, in words; None if they are nothing else, or nothing known.

    Args:
        exact: the reference.
        samples: documents, and rows of the first context of each.
        allowed: the relative distance that rounding explains.
    """
    own = Tap.from_name(tap)
    if own.heads or not _is_vector(own):
        return None
    shape = own.shape(arch, 1)
    alike = [t.name for t in all_taps(arch) if _is_vector(t) and t.shape(arch, 1) == shape]
    if own.kind.of:
        layers = range(arch.num_layers if own.layer is not None else 0)
        others = (Tap(own.site, layer) for layer in layers)
        alike = [t.name for t in others if t.why_not(arch) is None and t.shape(arch, 1) == shape]
    found: dict[tuple[str, int], list[np.ndarray]] = {}
    for document, sampled in samples:
        for name, shift, distances in _distances(document, sampled, tap, alike, exact):
            found.setdefault((name, shift), []).append(distances)
    medians = {key: float(np.median(np.concatenate(parts))) for key, parts in found.items()}
    best = min(medians, key=lambda key: medians[key], default=(tap, 0))
    # (The bound is that of a mean; half of the rows are nearer than the median.)
    if best == (tap, 0) or not medians[best] <= 2 * allowed:
        return None
    name, shift = best
    return f"{name} of {_SHIFTS[shift]}" if shift else name


def _is_vector(tap: Tap) -> bool:
    """Whether a tap's values are floating numbers of one shape at every token."""
    kind = tap.kind
    return "keys" not in kind.shape and not kind.largest_of and tap.dtype("float32") == "float32"


def _distances(
    document: Document, sampled: SampledRows, tap: str, names: Sequence[str], exact: Taps
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield the relative distances of a document's first rows from each tap."""
    if not Tap.from_name(tap).kind.of:  # (gradients depend on later tokens, too)
        sampled = replace(sampled, contexts=[sampled.contexts[0][:_TOKENS]])
    context = sampled.contexts[0][:_TOKENS]
    offsets = document.index["offset"].astype(np.int64) - sampled.starts[0]
    rows = np.flatnonzero((offsets >= 0) & (offsets < len(context)))
    stored = document.read(tap, dtype=STORED)[rows].astype(np.float64).reshape(len(rows), -1)
    values = {name: each[: len(context)] for name, each in sampled.taps(exact, {*names}).items()}
    for name in names:
        if name not in values:
            continue
        truth = values[name].astype(np.float64).reshape(len(context), -1)
        for shift in (0, *(_SHIFTS if name == tap else ())):
            places = offsets[rows] + shift
            inside = (places >= 0) & (places < len(context))
            wanted = truth[places[inside]]
            if len(wanted):
                lengths = np.linalg.norm(wanted, axis=1)
                gaps = np.linalg.norm(stored[inside] - wanted, axis=1)
                yield name, shift, gaps / np.where(lengths > 0, lengths, 1.0)
