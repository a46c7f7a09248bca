"""Changes of a tap's values before the model continues: replace, add, patch some positions; and
those of `--splice`.

A change is a function of the values [rows, seq, ...]. Arrays that it needs go with it in a
`jax.tree_util.Partial`, so that other arrays of the same shape need no new program.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.tree_util import Partial
from jaxtyping import Array, Bool

from spile.core.errors import ConfigError, InputError, SpileError
from spile.core.tensors import as_bytes
from spile.models.files.encoders.sae import AT_ONCE, Arrays, Sae
from spile.models.forward.sharding import P, Shards
from spile.models.forward.weights import LayerSchedule
from spile.models.layout import ROWS
from spile.models.splices import FUNCTION, Splice, changed_rows
from spile.models.taps import Tap

Change = Callable[[Array], Array]
Changes = Mapping[Tap, Change]
At = Callable[[str, Array], Array]  # a site and its values -> the values to continue with


def replaced(values: Any) -> Change:
    """Replace values by these: [rows, seq, ...], or an array that broadcasts to that.

    Arrays are of JAX or numpy, or what numpy takes as one.
    """
    return Partial(_replace, jnp.asarray(values))


def added(values: Any) -> Change:
    """Add a vector, as `spile.direction` returns it, or any array that broadcasts (steering)."""
    return Partial(_add, jnp.asarray(values))


def only(where: Bool[Array, "rows seq"], change: Change) -> Change:
    """Apply a change to some tokens only; all others keep their values."""
    return Partial(_only, where, change if isinstance(change, Partial) else Partial(change))


def at_tokens(mask: Bool[np.ndarray, "rows seq"], change: Change) -> Partial:
    """Apply a change to tokens, and leave the filler after them alone.

    So values that hold NaN there can be spliced in: a key of NaN would spoil the tokens, too.
    """
    return Partial(_at_tokens, mask, change if isinstance(change, Partial) else Partial(change))


def _at_tokens(mask: Array, change: Change, values: Array) -> Array:
    new = change(values)
    if new.shape != values.shape:
        return new  # `_changed` refuses it, by the tap's name
    return _only(mask, lambda _: new, values)


def _replace(new: Array, values: Array) -> Array:
    return jnp.broadcast_to(new, values.shape)


def _add(more: Array, values: Array) -> Array:
    return values + jnp.broadcast_to(more, values.shape).astype(values.dtype)


def _only(where: Array, change: Change, values: Array) -> Array:
    mask = where.reshape(*where.shape, *[1] * (values.ndim - where.ndim))
    return jnp.where(mask, change(values).astype(values.dtype), values)


def in_block(changes: Changes, layer: int | None = None) -> At:
    """The changes in a block that runs by itself, or outside the blocks."""

    seen, read = dict[str, Array](), _sites_read(changes)

    def at(site: str, values: Array) -> Array:
        tap = Tap(site, layer)
        if tap in changes:
            values = _changed(tap, changes[tap], values, seen)
        if site in read:
            seen[site] = values
        return values

    return at


def in_scan(changes: Changes, place: int, schedule: LayerSchedule, cycle: Array | None) -> At:
    """The changes for position `place` of the scan's period, at iteration `cycle`."""
    seen, read = dict[str, Array](), _sites_read(changes)

    def at(site: str, values: Array) -> Array:
        for tap, change in changes.items():
            if tap.site != site or tap.layer is None:
                continue
            number, own = divmod(tap.layer - schedule.lead, schedule.period)
            if own == place and schedule.lead <= tap.layer < schedule.scanned:
                assert cycle is not None
                values = jax.lax.cond(
                    cycle == number,
                    lambda own, tap=tap, change=change: _changed(tap, change, own, seen),
                    lambda own: own,
                    values,
                )
        if site in read:
            seen[site] = values
        return values

    return at


def _changed(tap: Tap, change: Change, values: Array, seen: Mapping[str, Array]) -> Array:
    """Return the new values of a tap.

    Args:
        seen: the values of the block's sites that transcoders read, with their own changes.
    """
    new = _applied(change, values, seen)
    if new.shape != values.shape:
        raise ConfigError(f"splice {tap.name}: {values.shape} became {new.shape}")
    return new.astype(values.dtype)


def _applied(change: Change, values: Array, seen: Mapping[str, Array]) -> Array:
    parts = _parts(change)
    for each in parts:
        site = _site_read(each)
        new = each(values, seen[site]) if site else each(values)  # type: ignore[call-arg]
        values = new if len(parts) == 1 else new.astype(values.dtype)
    return values


def _parts(change: Change) -> Sequence[Change]:
    """Return the changes of one tap, in their order."""
    if isinstance(change, Partial):
        function: Any = change.func
        if function is _one_after_another:
            return change.args[0]
    return (change,)


def _site_read(change: Change) -> str | None:
    """Return the site that a change reads, if that is another than it changes."""
    function: Any = change.func if isinstance(change, Partial) else None
    return function.reads if isinstance(function, _BuiltIn) else None


def _sites_read(changes: Changes) -> set[str]:
    return {
        site for each in changes.values() for part in _parts(each) if (site := _site_read(part))
    }


# -- those of `--splice` -----------------------------------------------------------------------


def load_changes(
    splices: Sequence[Splice], dtype: str, shards: Shards | None
) -> tuple[dict[Tap, Partial], dict[str, str]]:
    """Return the change of each tap that has one, and hashes of arrays, by name.

    Args:
        dtype: of activations, and of an autoencoder's matrices.
    """
    by_tap: dict[Tap, list[Partial]] = {}
    hashes: dict[str, str] = {}
    for number, splice in enumerate(splices):
        if splice.kind == FUNCTION:
            change = _own(splice)
            found = {str(n): _hash(leaf) for n, leaf in enumerate(jax.tree.leaves(change))}
        else:
            arrays, found = splice.load()
            reads = splice.reads.site if splice.reads else None
            built_in = _BuiltIn(splice.kind, splice.sae, reads, shards)
            change = Partial(built_in, _cast(arrays, dtype))
        by_tap.setdefault(splice.tap, []).append(change)
        hashes |= {f"splice {number} at {splice.tap.name}: {n}": h for n, h in found.items()}
    changes = {
        tap: some[0] if len(some) == 1 else Partial(_one_after_another, tuple(some))
        for tap, some in by_tap.items()
    }
    return changes, hashes


def _one_after_another(changes: Sequence[Change], values: Array) -> Array:
    for change in changes:
        values = change(values).astype(values.dtype)
    return values


def _own(splice: Splice) -> Partial:
    """A user's own change. Its exceptions become errors of one line."""
    given = splice.function
    if not callable(given):
        return Partial(_replace, jnp.asarray(given))
    given = given if isinstance(given, Partial) else Partial(given)
    return Partial(partial(_guarded, splice.tap.name), given)


def _guarded(tap: str, change: Change, values: Array) -> Array:
    try:
        new = change(values)
        shape = new.shape
    except SpileError:
        raise
    except Exception as error:
        told = str(error).strip().partition("\n")[0][:200]
        raise InputError(f"--splice: {tap}: {type(error).__name__}: {told}") from error
    if shape != values.shape:
        raise InputError(f"--splice: {tap}: {values.shape} became {shape}")
    return new


def _hash(leaf: Any) -> str:
    return xxhash.xxh3_128_hexdigest(bytes(as_bytes(np.ascontiguousarray(leaf))))


def _cast(arrays: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """An autoencoder's matrices in the model's dtype; the rest as it is, in float32."""
    matrices = ("W_enc", "W_dec", "W_skip")
    return {n: a.astype(jnp.dtype(dtype)) if n in matrices else a for n, a in arrays.items()}


@dataclass(frozen=True)
class _BuiltIn:
    """A built-in change, without its arrays: equal ones share their programs."""

    kind: str
    sae: Sae | None
    reads: str | None  # the site that a transcoder reads
    shards: Shards | None = field(compare=False)

    def __call__(self, arrays: Arrays, values: Array, read: Array | None = None) -> Array:
        made, given = self._rows, [values] if read is None else [values, read]
        if self.sae and self.shards:  # every device has the whole encoder
            made = self.shards.each(made, [P(), *[P(ROWS)] * len(given)], P(ROWS))
        return made(arrays, *given)

    def _rows(self, arrays: Arrays, values: Array, read: Array | None = None) -> Array:
        """Apply an encoder to some rows at a time: the latents of all rows are too many."""
        given = values if read is None else read
        flat = given.reshape(-1, int(np.prod(given.shape[2:])))

        def changed(row: Array) -> Array:
            wide = row.astype(jnp.float32)
            new = changed_rows(self.kind, self.sae, arrays, wide, jnp, _product, kth_largest)
            return new.astype(values.dtype)

        size = max(1, AT_ONCE // self.sae.latents) if self.sae else len(flat)
        if len(flat) <= size:
            return jax.vmap(changed)(flat).reshape(values.shape)
        return jax.lax.map(changed, flat, batch_size=size).reshape(values.shape)


def _product(a: Array, b: Array) -> Array:
    """Multiply in float32; an autoencoder's matrices in their own dtype, summed in float32."""
    exact = "highest" if b.dtype == jnp.float32 else None
    return jnp.dot(
        a.astype(b.dtype), b, precision=exact, preferred_element_type=jnp.dtype("float32")
    )


def kth_largest(found: Array, k: int) -> Array:
    return jax.lax.top_k(found, k)[0][..., -1:]
