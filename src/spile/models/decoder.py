"""The one decoder: embeds, runs the blocks in a scan, and carries out what was tapped.

Tapped values live in the scan's carry, one buffer per site, already in the stored dtype. A block
that is not tapped at a site writes to the slot of the site's next tapped block, which overwrites
it later; only a site that ends above the deepest block needs a slot to throw away.
"""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spile.models.arch import Arch
from spile.models.attention import Attention
from spile.models.ops import activate, linear, rms_norm, rotary_angles, rotate
from spile.models.params import Block, Params
from spile.models.taps import Tap

Hidden = Float[Array, "rows seq width"]
Places = Int[Array, "rows seq"]


def forward(
    params: Params,
    tokens: Places,
    positions: Places,
    segments: Places,
    *,
    arch: Arch,
    taps: tuple[Tap, ...],
    attention: Attention,
    store_dtype: jnp.dtype,
) -> dict[str, Float[Array, "rows seq values"]]:
    """Run the model as deep as the deepest tap and return every tap's values, by tap name."""
    x = params.embed[tokens]
    wanted = _layers_by_site(taps)
    out: dict[str, Array] = {}
    for tap in taps:
        if _computed_as(tap) == Tap("embed"):
            out[tap.name] = x.astype(store_dtype)

    depth = max(tap.layers_needed(arch) for tap in taps)
    if depth:
        x, buffers = _run_blocks(
            params.blocks, x, positions, segments, arch, wanted, depth, attention, store_dtype
        )
        for tap in taps:
            met = _computed_as(tap)
            if met.layer is not None:
                out[tap.name] = buffers[met.site][wanted[met.site].index(met.layer)]

    if params.final_norm is not None:
        normed = rms_norm(x, params.final_norm, arch.norm_eps)
        if "final_norm" in wanted:
            out["final_norm"] = normed.astype(store_dtype)
        if "logits" in wanted:
            head = params.embed if params.head is None else params.head
            out["logits"] = linear(normed, head).astype(store_dtype)
    return out


def _computed_as(tap: Tap) -> Tap:
    """Where a tap's value is met: the stream entering a block is what the one before it left."""
    if tap.site != "resid_pre" or tap.layer is None:
        return tap
    return Tap("resid_post", tap.layer - 1) if tap.layer else Tap("embed")


def _layers_by_site(taps: tuple[Tap, ...]) -> dict[str, list[int]]:
    """The layers to keep of each site, ascending; a site without layers has none."""
    wanted: dict[str, set[int]] = {}
    for tap in map(_computed_as, taps):
        layers = wanted.setdefault(tap.site, set())
        if tap.layer is not None:
            layers.add(tap.layer)
    return {site: sorted(layers) for site, layers in wanted.items()}


def _run_blocks(
    blocks: Block,
    x: Hidden,
    positions: Places,
    segments: Places,
    arch: Arch,
    wanted: Mapping[str, list[int]],
    depth: int,
    attention: Attention,
    store_dtype: jnp.dtype,
) -> tuple[Hidden, dict[str, Float[Array, "slots rows seq width"]]]:
    sites = {site: layers for site, layers in wanted.items() if layers}
    # slots[site][layer]: where that block's value goes (see the module's first lines)
    slots = {site: np.searchsorted(layers, np.arange(depth)) for site, layers in sites.items()}
    buffers = {
        site: jnp.zeros((int(s.max()) + 1, *x.shape), store_dtype) for site, s in slots.items()
    }
    cos, sin = rotary_angles(positions, *arch.rope.frequencies(arch.head_dim, arch.max_positions))
    attend = partial(_attend, segments=segments, positions=positions, attention=attention)

    def step(
        carry: tuple[Hidden, dict[str, Array]], layer: tuple[Block, dict[str, Array]]
    ) -> tuple[tuple[Hidden, dict[str, Array]], None]:
        stream, kept = carry
        block, slot = layer
        attn_out = attend(
            rms_norm(stream, block["attn_norm"], arch.norm_eps), block, arch, cos, sin
        )
        mid = stream + attn_out
        mlp_out = _mlp(rms_norm(mid, block["mlp_norm"], arch.norm_eps), block, arch)
        post = mid + mlp_out
        values = {"attn_out": attn_out, "resid_mid": mid, "mlp_out": mlp_out, "resid_post": post}
        kept = {
            site: jax.lax.dynamic_update_index_in_dim(
                buffer, values[site].astype(buffer.dtype), slot[site], 0
            )
            for site, buffer in kept.items()
        }
        return (post, kept), None

    (x, buffers), _ = jax.lax.scan(
        step, (x, buffers), (blocks, {s: jnp.asarray(v) for s, v in slots.items()}), length=depth
    )
    return x, buffers


def _attend(
    x: Hidden,
    block: Block,
    arch: Arch,
    cos: Float[Array, "rows seq 1 half"],
    sin: Float[Array, "rows seq 1 half"],
    *,
    segments: Places,
    positions: Places,
    attention: Attention,
) -> Hidden:
    def heads(weight: str, bias: str, count: int) -> Float[Array, "rows seq heads dim"]:
        return linear(x, block[weight], block.get(bias)).reshape(*x.shape[:2], count, arch.head_dim)

    q = rotate(heads("wq", "bq", arch.num_heads), cos, sin)
    k = rotate(heads("wk", "bk", arch.num_kv_heads), cos, sin)
    v = heads("wv", "bv", arch.num_kv_heads)
    z = attention(q, k, v, segments, positions)
    return linear(z.reshape(*x.shape[:2], -1), block["wo"], block.get("bo"))


def _mlp(x: Hidden, block: Block, arch: Arch) -> Hidden:
    gate = activate(linear(x, block["w_gate"], block.get("b_gate")), arch.activation)
    hidden = gate * linear(x, block["w_up"], block.get("b_up"))
    return linear(hidden, block["w_down"], block.get("b_down"))
