"""Fused attention kernels of accelerators, behind the signature of `attention.py`.

cuDNN's packed form takes each context's offset and length, and does no work for pairs that cannot
see each other. jax has it, but not in its public interface: `for_platform` checks that it exists,
and logs the reason if it falls back to another implementation.
"""

# jax's arrays, shardings and devices are only partly typed: strict would want casts everywhere.
# pyright: standard

import importlib
import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from spile.models.config.arch import Arch
from spile.models.config.kernel_choice import why_unfused
from spile.models.forward.attention import (
    Attend,
    Attention,
    Keys,
    Places,
    Queries,
    Scoring,
    Sinks,
    blocked,
    masked,
)

_log = logging.getLogger("spile")
_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
_LANES = 128


def for_platform(
    platform: str, arch: Arch, dtype: str, *, seq_len: int, contexts: int
) -> Attention:
    """Choose the implementation for the platform of the step.

    Args:
        contexts: the most contexts in a row, for kernels that need a fixed number.
    """
    if platform == "cpu":
        return blocked
    reason = why_unfused(platform, arch, dtype, seq_len)
    if reason is None and platform == "gpu":
        reason = why_not_cudnn()
    if reason is None:
        return splash if platform == "tpu" else partial(cudnn, contexts=contexts)
    _log.info("attention scores every pair of a row: %s", reason)
    return masked


def why_not_cudnn() -> str | None:
    """Why cuDNN's packed attention cannot be used with this jax on this GPU; None if it can."""
    try:
        module = importlib.import_module(_CUDNN)
        module.check_cudnn_version()
        if not module.check_compute_capability("9.0"):
            return "cuDNN packs documents only on Hopper GPUs and later ones"
        return None if hasattr(module.MaskType, "PADDING_CAUSAL") else "this jax packs differently"
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"this jax has no packed cuDNN attention ({error})"


def cudnn(segments: Places, positions: Places, contexts: int) -> Attend:
    """cuDNN's packed attention. Padding is one more context, so that all outputs are written."""
    del positions  # implied by where contexts begin
    kernel: Any = importlib.import_module(_CUDNN)
    rows, seq = segments.shape
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    begins = jax.vmap(partial(jnp.nonzero, size=contexts + 1, fill_value=-1))(segments != before)[0]
    begins = begins.astype(jnp.int32)
    ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    lengths = jnp.where(begins < 0, -1, jnp.where(ends < 0, seq, ends) - begins)
    offsets = jnp.pad(begins, ((0, 0), (0, 1)), constant_values=-1)

    def attend(q: Queries, k: Keys, v: Keys, scoring: Scoring, sinks: Sinks = None) -> Queries:
        del sinks
        return kernel.dot_product_attention(
            q,
            k,
            v,
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=offsets,
            kv_offsets=offsets,
            scale=scoring.scale,
            mask_type=kernel.MaskType.PADDING_CAUSAL,
            sliding_window_length=scoring.window,
        )

    return attend


def splash(segments: Places, positions: Places, *, interpret: bool = False) -> Attend:
    """TPU's splash attention, which skips blocks without a visible pair."""
    del positions
    kernel: Any = importlib.import_module(
        "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
    )
    masks: Any = importlib.import_module(
        "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask"
    )

    def attend(q: Queries, k: Keys, v: Keys, scoring: Scoring, sinks: Sinks = None) -> Queries:
        del sinks
        seq, heads = q.shape[1], q.shape[2]
        if scoring.window is None:
            mask = masks.CausalMask((seq, seq))
        else:
            mask = masks.LocalMask((seq, seq), (scoring.window - 1, 0), 0)
        run = kernel.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=scoring.cap,
            interpret=interpret,
        )

        def row(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
            ids = kernel.SegmentIds(segments, segments)
            return run(q.swapaxes(0, 1), k.swapaxes(0, 1), v.swapaxes(0, 1), ids).swapaxes(0, 1)

        def whole_lanes(x: jax.Array) -> jax.Array:  # zeros change neither scores nor sums
            return jnp.pad(x, (*[(0, 0)] * 3, (0, -x.shape[-1] % _LANES)))

        scaled = q * jnp.asarray(scoring.scale, q.dtype)
        out = jax.vmap(row)(whole_lanes(scaled), whole_lanes(k), whole_lanes(v), segments)
        return out[..., : q.shape[-1]].astype(q.dtype)

    return attend
