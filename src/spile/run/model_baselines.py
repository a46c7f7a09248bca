"""What `Model.attr` and `Model.grad` compare values with: arrays by tap, laid beside the tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from spile.core.errors import ConfigError
from spile.core.options import listed
from spile.models.config.arch import Arch
from spile.models.taps import Tap, sites_on_paths

# By tap: values of each token [rows, seq, ...], or what broadcasts to that.
GivenBaseline = Mapping[str, Any]


@dataclass(frozen=True)
class Compared:
    """What a backward pass compares values with.

    Attributes:
        beside: values beside each token, if that is not zero: [rows, seq, all].
        columns: of them, by tap.
        steps: points of the path from there, of integrated gradients.
    """

    beside: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    steps: int | None = None

    @classmethod
    def of(
        cls,
        given: GivenBaseline | None,
        steps: int | None,
        taps: Sequence[Tap],
        arch: Arch,
        mask: np.ndarray,
    ) -> Self:
        """Lay what is given beside the tokens; the arguments are those of `_beside_tokens`."""
        if steps is not None and steps < 1:
            raise ConfigError(f"steps must be at least 1, got {steps}")
        if given is None:
            return cls(steps=steps)
        return cls(*_beside_tokens(given, taps, arch, mask), steps)


def _beside_tokens(
    given: GivenBaseline, taps: Sequence[Tap], arch: Arch, mask: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return values beside each token [rows, seq, all], and each tap's columns of them.

    Args:
        given: the baselines of the taps' sources, with all of their heads.
        taps: gradients and attributions.
        mask: [rows, seq]: whether there is a token.

    Raises:
        ConfigError: if a baseline is missing, or does not fit the tokens.
    """
    parts: list[np.ndarray] = []
    places: dict[Tap, np.ndarray] = {}
    first = 0
    for source in dict.fromkeys(replace(tap.source, heads=()) for tap in taps):
        shape = source.shape(arch, mask.shape[1])
        values = _fitted(given, source, (*mask.shape, *shape), mask)
        parts.append(values.reshape(*mask.shape, -1))
        width = parts[-1].shape[-1]
        places[source] = first + np.arange(width, dtype=np.int32).reshape(shape)
        first += width
    columns: dict[str, np.ndarray] = {}
    for tap in taps:
        whole = places[replace(tap.source, heads=())]
        columns[tap.name] = (whole[list(tap.heads)] if tap.heads else whole).reshape(-1)
    for place, some in sites_on_paths(taps).items():
        columns[place.name] = places[replace(some[0].source, heads=())].reshape(-1)
    return np.concatenate(parts, axis=-1), columns


def _fitted(given: GivenBaseline, tap: Tap, shape: tuple[int, ...], mask: np.ndarray) -> np.ndarray:
    """Return the baseline of a tap in this shape, in float32; zero where there is no token."""
    if tap.name not in given:
        raise ConfigError(f"baseline: has no {tap.name}; it has {listed([*given])}")
    own = np.asarray(given[tap.name], np.float32)
    try:
        values = np.broadcast_to(own, shape)
    except ValueError:
        raise ConfigError(
            f"baseline {tap.name}: has the shape {list(own.shape)}, and the texts' values have "
            f"{list(shape)}; give texts of as many tokens"
        ) from None
    if not np.isfinite(values[mask]).all():
        raise ConfigError(
            f"baseline {tap.name}: is not finite at some token; give texts of as many tokens"
        )
    return np.where(mask.reshape(*mask.shape, *[1] * (values.ndim - 2)), values, np.float32(0))
