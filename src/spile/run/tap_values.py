"""The values of taps for contexts of several lengths, such that filler cannot pass for tokens."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spile.core.errors import ConfigError

_NO_ID = -1  # beyond the end of a context, in taps of integers


@jax.tree_util.register_pytree_node_class
class TapValues(Mapping[str, jax.Array]):
    """Each tap's values [texts, tokens, ...], by name; NaN beyond the end of a text (ids: -1).

    found = model(["a", "longer text"], "resid_post:9,logits")
    found["logits"]  # [2, tokens of the longest, vocabulary]
    found.last("resid_post.9")  # [2, width]; for a single tap its name may be left out
    """

    def __init__(self, values: Mapping[str, jax.Array], lengths: tuple[int, ...]) -> None:
        self._values, self._lengths = dict(values), lengths

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each text."""
        return np.array(self._lengths)

    @property
    def mask(self) -> np.ndarray:
        """[texts, tokens]: True where there is a token, False beyond the end of a text."""
        return np.arange(max(self._lengths))[None, :] < self.lengths[:, None]

    def last(self, tap: str | None = None) -> jax.Array:
        """Return the values of each text's last token: [texts, ...]."""
        values = self._of(tap)
        return values[np.arange(len(values)), self.lengths - 1]

    def mean(self, tap: str | None = None) -> jax.Array:
        """Return the mean over the tokens of each text, in float32: [texts, ...]."""
        values = self._of(tap)
        if not jnp.issubdtype(values.dtype, jnp.floating):
            raise ConfigError(f"mean: {self._name(tap)} holds ids, which have no mean")
        mask = _beside(self.mask, values)
        total = jnp.where(mask, values, 0).sum(axis=1, dtype=jnp.float32)
        return total / _beside(self.lengths.astype(np.float32), total)

    def _name(self, tap: str | None) -> str:
        if tap is None and len(self) != 1:
            raise ConfigError(f"name one of the taps: {', '.join(self)}")
        return next(iter(self)) if tap is None else tap

    def _of(self, tap: str | None) -> jax.Array:
        values = self[self._name(tap)]
        if values.shape[:2] != self.mask.shape:  # e.g. of many calls at once, from `jax.vmap`
            raise ConfigError(
                f"values of shape {list(values.shape)} are not of {len(self._lengths)} texts of up "
                f"to {max(self._lengths)} tokens; pool them inside the function that jax transforms"
            )
        return values

    def __getitem__(self, tap: str) -> jax.Array:
        if tap not in self._values:
            raise KeyError(f"no tap {tap!r}; there are {', '.join(self._values)}")
        return self._values[tap]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        taps = ", ".join(f"{n} {list(v.shape)} {v.dtype}" for n, v in self._values.items())
        return f"<{len(self._lengths)} texts of {_range(self._lengths)} tokens: {taps}>"

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(self._values.values()), (tuple(self._values), self._lengths)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Any, ...], values: tuple[Any, ...]) -> "TapValues":
        names, lengths = aux
        return cls(dict(zip(names, values, strict=True)), lengths)


def blanked(values: Mapping[str, jax.Array], segments: jax.Array) -> dict[str, jax.Array]:
    """Return the values of flattened rows, with NaN (in integers, -1) where there is no token."""
    there = segments.reshape(-1) > 0

    def blank(each: jax.Array) -> jax.Array:
        filler = jnp.nan if jnp.issubdtype(each.dtype, jnp.floating) else _NO_ID
        return jnp.where(_beside(there, each), each, jnp.asarray(filler, each.dtype))

    return {name: blank(each) for name, each in values.items()}


def _beside(given: Any, values: jax.Array) -> Any:
    """Add axes to an array, so that it broadcasts to values."""
    return given.reshape(*given.shape, *[1] * (values.ndim - given.ndim))


def _range(lengths: tuple[int, ...]) -> str:
    least, most = min(lengths), max(lengths)
    return str(least) if least == most else f"{least} to {most}"
