"""Queries, keys and values of latent attention (arXiv:2405.04434), head by head.

Keys and values of all heads are projected from one small normalised vector, the latent; queries may
have their own latent. The last dimensions of each key are the same in all heads and come from the
stream itself; only these are rotated. The rest is the usual softmax attention, except that a head's
values may be narrower than its keys.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from spile.models.config.arch import Arch
from spile.models.forward.ops import Heads, Hidden, linear, norm, rotate
from spile.models.forward.splice import At
from spile.models.forward.weights import Block

Angles = Float[Array, "rows seq 1 half"]


def latent_heads(x: Hidden, block: Block, arch: Arch, at: At) -> dict[str, Array]:
    """Return queries, keys and values before rotation, and the latent, by site."""
    latent = arch.latent
    assert latent

    def down(name: str, given: Hidden) -> Array:
        return linear(given, block[f"w{name}"], block.get(f"b{name}"))

    def normed(given: Array, name: str) -> Array:
        return norm(given, block[name], None, arch.norm, latent.norm_eps)

    def heads(name: str, given: Array) -> Heads:
        return linear(given, block[f"w{name}"]).reshape(*x.shape[:2], arch.num_heads, -1)

    if latent.query_rank:
        queries = heads("qb", normed(down("qa", x), "q_latent_norm"))
    else:
        queries = heads("q", x)
    kept = at("kv_latent", normed(down("ka", x), "kv_latent_norm"))
    own, turned = heads("k", kept), down("kr", x)[:, :, None]
    shared = jnp.broadcast_to(turned, (*own.shape[:3], latent.rope_dim))
    return {
        "kv_latent": kept,
        "q": at("q", queries),
        "k": at("k", jnp.concatenate([own, shared], axis=-1)),
        "v": at("v", heads("v", kept)),
    }


def rotate_last(x: Heads, cos: Angles, sin: Angles, *, interleaved: bool, regrouped: bool) -> Heads:
    """Rotate the last dimensions of each head; if `regrouped`, neighbours become halves first."""
    size = 2 * cos.shape[-1]
    rest, last = x[..., :-size], x[..., -size:]
    if regrouped:
        last = last.reshape(*x.shape[:3], -1, 2).swapaxes(-1, -2).reshape(last.shape)
    return jnp.concatenate([rest, rotate(last, cos, sin, interleaved=interleaved)], axis=-1)
