"""Attention and experts on a mesh: every device computes what it holds.

All the rest of the decoder is cut up by the compiler, which follows the arrays' shardings. Here it
would not know how: a kernel is opaque to it, and experts are chosen token by token.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spile.models.config.arch import Arch
from spile.models.forward import moe
from spile.models.forward.attention import Attend, Attention, Keys, Places, Queries, Scoring, Sinks
from spile.models.forward.params import Block
from spile.models.forward.sharding import P, Shards
from spile.models.layout import ROWS


def attention_by_heads(
    attention: Attention, segments: Places, positions: Places, shards: Shards
) -> Attend:
    """Each device attends for its rows and its heads."""
    along = shards.model_axis("heads")
    heads, places = P(ROWS, None, along), P(ROWS)
    repeat = along is not None and shards.model_axis("kv_heads") is None

    def attend(q: Queries, k: Keys, v: Keys, scoring: Scoring, sinks: Sinks = None) -> Queries:
        if repeat:  # fewer keys than devices: each takes copies of those its queries need
            group = q.shape[2] // k.shape[2]
            k, v = (jnp.repeat(array, group, axis=2) for array in (k, v))

        def local(q: Any, k: Any, v: Any, segments: Any, positions: Any, *sinks: Any) -> Any:
            return attention(segments, positions)(q, k, v, scoring, *(sinks or (None,)))

        given = () if sinks is None else (sinks,)
        specs = (heads, heads, heads, places, places, *(P(along) for _ in given))
        return shards.each(local, specs, heads)(q, k, v, segments, positions, *given)

    return attend


def mixed_experts(
    x: Any, weights: Any, ids: Any, block: Block, arch: Arch, shards: Shards
) -> jax.Array:
    """Each device runs its experts, or its part of every expert; the results are added."""
    names = [name for name in block if name[:2] in ("w_", "b_") and not name.endswith("router")]
    specs = [P(*shards.cuts.along(shards.axes[name], gathered=True)) for name in names]
    cut = shards.model_axis("experts") or shards.model_axis("mlp")

    def local(x: Any, weights: Any, ids: Any, *arrays: Any) -> Any:
        held: Mapping[str, Any] = dict(zip(names, arrays, strict=True))
        part = jax.lax.axis_index("model")
        first = part * len(held["w_up"]) if shards.model_axis("experts") else 0
        # A bias that all devices hold whole is added by one of them.
        adds = part == 0 if cut and not shards.model_axis("experts") else True
        out = moe.mix(x, weights, ids, dict(held), arch, first=first, adds=adds)
        return jax.lax.psum(out, "model") if cut else out

    rows = P(ROWS)
    arrays = [block[name] for name in names]
    return shards.each(local, (rows, rows, rows, *specs), rows)(x, weights, ids, *arrays)
