"""Rows of tokens for the experts that they chose, copied in one pass over the tokens.

XLA gathers a row for each place of the experts' layout, so it reads each token as often as it chose
an expert, from memory more often than not. A program here reads a token once, and writes it to all
its places.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

_COLUMNS, _WARPS = 1024, 4  # of a program; the fastest of those tried (docs/benchmarks.md)


def spread(
    x: Float[Array, "tokens width"],
    places: Int[Array, "tokens chosen"],
    rows: int,
    weights: Float[Array, "tokens chosen"] | None = None,
    *,
    columns: int = _COLUMNS,
    warps: int = _WARPS,
    interpret: bool = False,
) -> Float[Array, "rows width"]:
    """Copy each token to its places among `rows`, multiplied by their weights if there are any.

    A negative place is none. Rows without a token are left unset.
    """
    if x.dtype.itemsize == 1:  # copied in pairs, which Triton has a type for on every GPU
        pairs = x.reshape(len(x), -1, 2)
        words = jax.lax.bitcast_convert_type(pairs, jnp.uint16)
        found = spread(words, places, rows, columns=columns, warps=warps, interpret=interpret)
        return jax.lax.bitcast_convert_type(found, x.dtype).reshape(rows, -1)
    tokens, width = x.shape
    columns = min(columns, pl.next_power_of_2(width))
    run: Any = pl.pallas_call(
        partial(_kernel, columns=columns),
        out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
        grid=(tokens, pl.cdiv(width, columns)),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        name="rows_for_experts",
        interpret=interpret,
    )
    return run(x, places, *(() if weights is None else (weights,)))


def _kernel(x: Any, places: Any, *rest: Any, columns: int) -> None:
    *weights, out = rest
    token = pl.program_id(0)
    here = pl.program_id(1) * columns + jnp.arange(columns)
    inside = here < x.shape[1]
    values = triton.load(x.at[token, here], mask=inside, other=0)
    for number in range(places.shape[1]):
        place = places[token, number]
        own = values
        for weight in weights:
            scale = weight[token, number].astype(jnp.float32)
            own = (values.astype(jnp.float32) * scale).astype(values.dtype)
        row = jnp.maximum(place, 0)
        triton.store(out.at[row, here], own, mask=inside & (place >= 0))
