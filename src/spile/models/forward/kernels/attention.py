"""Fused attention kernels of accelerators, behind the signature of `attention.py`.

Each of them skips pairs of tokens that cannot see each other. tokamax's kernels take the first key
that each query sees, cuDNN's packed form takes each context's place and length, splash attention
takes the segments. `for_platform` finds the kernels that this machine has (neither jax's packed
cuDNN attention nor tokamax's masks are public), and logs why it does not use a better one.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import importlib
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from spile.models.config.arch import Arch
from spile.models.config.kernel_choice import (
    NO_BACKWARD,
    KernelChoice,
    attention_kernels,
    told_kernels,
    unfit_gpu,
)
from spile.models.forward.attention import (
    Attend,
    Attention,
    Keys,
    Mixed,
    Places,
    Queries,
    Scoring,
    Values,
    blocked,
)
from spile.models.forward.kernels.wide_attention import wide
from spile.models.forward.ops import gpu_capability

_log = logging.getLogger("spile.models")
_CUDNN = "jax._src.cudnn.fused_attention_stablehlo"
# tokamax's public function takes no mask of this kind; its kernels' own classes do.
_TOKAMAX = {
    "mosaic": "tokamax._src.ops.attention.pallas_mosaic_gpu",
    "triton": "tokamax._src.ops.attention.pallas_triton",
}
_FLASH = {"mosaic": "PallasMosaicGpuFlashAttention", "triton": "PallasTritonFlashAttention"}
_LANES = 128


def for_platform(
    platform: str,
    arch: Arch,
    dtype: str,
    *,
    seq_len: int,
    contexts: int,
    wanted: str = "auto",
    backward: bool = False,
) -> Attention:
    """Choose the implementation for the platform of the step.

    Args:
        contexts: the most contexts in a row, for kernels that need a fixed number.
        wanted: the kernel to use (one of `kernel_choice.KERNELS`), or auto.
        backward: whether it needs a backward pass.
    """
    choices = chosen_kernels(platform, arch, dtype, seq_len, wanted, backward=backward)
    _tell(platform, choices)
    values = {arch.of(layer).head_dim: arch.of(layer).value_dim for layer in arch.layers}
    cuts = max(seq_len // (layer.chunk or seq_len + 1) for layer in arch.layers)
    made: dict[int, Attention] = {}
    for width, choice in choices.items():
        match choice.name:
            case "splash":
                kernel = splash
            case "cudnn":
                kernel = partial(cudnn, contexts=contexts + cuts)
            case "mosaic" | "triton":
                kernel = partial(flash, kernel=choice.name)
            case "wide":
                kernel = wide
            case _:
                made[width] = blocked
                continue
        made[width] = kernel if values[width] == width else partial(widened, kernel=kernel)
    if len({choice.name for choice in choices.values()}) > 1:
        return partial(by_width, kernels=made)
    return next(iter(made.values()), blocked)


def by_width(segments: Places, positions: Places, *, kernels: Mapping[int, Attention]) -> Attend:
    """Use a different kernel for each head width, for models whose layers have several."""
    every = {width: kernel(segments, positions) for width, kernel in kernels.items()}

    def attend(q: Queries, k: Keys, v: Values, scoring: Scoring) -> Mixed:
        return every[q.shape[-1]](q, k, v, scoring)

    return attend


def widened(segments: Places, positions: Places, *, kernel: Attention) -> Attend:
    """Use a kernel that needs values as wide as keys: pad narrower values with zeros."""
    run = kernel(segments, positions)

    def attend(q: Queries, k: Keys, v: Values, scoring: Scoring) -> Mixed:
        width = v.shape[-1]
        filled = jnp.pad(v, (*[(0, 0)] * 3, (0, q.shape[-1] - width)))
        return run(q, k, filled, scoring)[..., :width]

    return attend


def chosen_kernels(
    platform: str,
    arch: Arch,
    dtype: str,
    seq_len: int,
    wanted: str = "auto",
    *,
    backward: bool = False,
) -> dict[int, KernelChoice]:
    """Return the kernels that `for_platform` takes, by head width."""
    missing = dict(missing_kernels() if platform == "gpu" else {})
    missing |= NO_BACKWARD if backward else {}
    return attention_kernels(platform, arch, dtype, seq_len, missing=missing, wanted=wanted)


@cache
def missing_kernels() -> Mapping[str, str]:
    """Return the kernels that this machine cannot run, each with the reason."""
    found = {**unfit_gpu(gpu_capability()), "cudnn": _why_not_cudnn()}
    for name, module in _TOKAMAX.items():
        if name in found:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # any failure: there are other kernels
            said = (str(error).splitlines() or [type(error).__name__])[0]
            found[name] = f"tokamax cannot be imported ({said}): pip install 'spile[kernels]'"
    return {name: reason for name, reason in found.items() if reason is not None}


@cache
def _say_once(line: str) -> None:
    _log.info("%s", line)


def _tell(platform: str, choices: Mapping[int, KernelChoice]) -> None:
    if platform != "cpu" and any(choice.passed_over for choice in choices.values()):
        _say_once(f"attention: {told_kernels(choices)}")


def _why_not_cudnn() -> str | None:
    """Return why cuDNN's packed attention cannot be used here; None if it can."""
    try:
        module = importlib.import_module(_CUDNN)
        module.check_cudnn_version()
        if not module.check_compute_capability("9.0"):
            return "cuDNN packs documents only on Hopper GPUs and later ones"
        return None if hasattr(module.MaskType, "PADDING_CAUSAL") else "this jax packs differently"
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"this jax has no packed cuDNN attention ({error})"


def flash(segments: Places, positions: Places, *, kernel: str) -> Attend:
    """Attend by tokamax's flash attention, which skips blocks without a visible pair.

    A query sees the keys from the start of its context, or of its window, to itself.
    """
    base: Any = importlib.import_module("tokamax._src.ops.attention.base")
    module: Any = importlib.import_module(_TOKAMAX[kernel])
    run: Any = getattr(module, _FLASH[kernel])()
    place = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    start = jnp.where(segments > 0, place - positions, place)  # padding sees itself

    def attend(q: Queries, k: Keys, v: Values, scoring: Scoring) -> Mixed:
        assert scoring.slopes is None  # `kernel_choice` says so
        first = start
        if scoring.window is not None:
            first = jnp.maximum(start, place - scoring.window + 1)
        mask = base.Mask(k_start=first[:, None, :], is_causal=True)
        with _without_tuning_advice():
            out = run(
                q,
                k,
                v,
                logits_scale=scoring.scale,
                logits_soft_cap=scoring.cap,
                mask=mask,
                return_residuals=scoring.sinks is not None,
            )
        if scoring.sinks is None:
            return out
        # The sink is one more score without a value: it only adds to the softmax's sum.
        values, (highest, total) = out
        beside = jnp.exp(scoring.sinks.astype(jnp.float32)[None, :, None] - highest)
        share = (total / (total + beside)).swapaxes(1, 2)[..., None]
        return (values.astype(jnp.float32) * share).astype(q.dtype)

    return attend


@contextmanager
def _without_tuning_advice() -> Generator[None, None, None]:
    """Silence tokamax's warning, in every trace, that a shape was not tuned."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def cudnn(segments: Places, positions: Places, contexts: int) -> Attend:
    """Attend by cuDNN's packed attention. Padding is one more context, so all outputs are set."""
    del positions  # implied by where contexts begin
    kernel: Any = importlib.import_module(_CUDNN)
    seq = segments.shape[1]
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    begins = jax.vmap(partial(jnp.nonzero, size=contexts + 1, fill_value=-1))(segments != before)[0]
    begins = begins.astype(jnp.int32)
    ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    lengths = jnp.where(begins < 0, -1, jnp.where(ends < 0, seq, ends) - begins)
    offsets = jnp.pad(begins, ((0, 0), (0, 1)), constant_values=-1)

    def attend(q: Queries, k: Keys, v: Values, scoring: Scoring) -> Mixed:
        assert scoring.slopes is None  # `kernel_choice` says so
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
    """Attend by the TPU's splash attention, which skips blocks without a visible pair."""
    del positions
    kernel: Any = importlib.import_module(
        "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
    )
    masks: Any = importlib.import_module(
        "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask"
    )

    def attend(q: Queries, k: Keys, v: Values, scoring: Scoring) -> Mixed:
        assert scoring.slopes is None  # `kernel_choice` says so
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
            sinks = scoring.sinks
            given = {} if sinks is None else {"sinks": sinks.astype(jnp.float32)}
            by_head = (x.swapaxes(0, 1) for x in (q, k, v))
            return run(*by_head, ids, **given).swapaxes(0, 1)

        def whole_lanes(x: jax.Array) -> jax.Array:  # zeros change neither scores nor sums
            return jnp.pad(x, (*[(0, 0)] * 3, (0, -x.shape[-1] % _LANES)))

        scaled = q * jnp.asarray(scoring.scale, q.dtype)
        out = jax.vmap(row)(whole_lanes(scaled), whole_lanes(k), whole_lanes(v), segments)
        return out[..., : q.shape[-1]].astype(q.dtype)

    return attend
