"""Whether a fused attention kernel can be used, and if not, why. No jax."""

from spile.models.config.arch import Arch

_CUDNN_HEAD_DIM = 256
_SPLASH_LANES = 128  # a row's tokens must be a multiple


def why_unfused(platform: str, arch: Arch, dtype: str, seq_len: int) -> str | None:
    """The reason why every pair of a row's tokens must be scored; None if a kernel fits."""
    if platform == "cpu":
        return None
    if platform not in ("gpu", "tpu"):
        return f"there is no kernel for {platform}"
    kernel = "cuDNN" if platform == "gpu" else "splash attention"
    if dtype == "float32":
        return f"{kernel} multiplies in 16 bits, float32 was asked for"
    if arch.sinks:
        return f"{kernel} has no sinks"
    if platform == "tpu":
        if seq_len % _SPLASH_LANES:
            return f"{kernel} takes contexts of multiples of {_SPLASH_LANES}, not {seq_len}"
        return None
    if arch.attn_softcap is not None:
        return f"{kernel} has no soft cap"
    if arch.head_dim % 8 or arch.head_dim > _CUDNN_HEAD_DIM:
        return f"{kernel} takes heads of up to {_CUDNN_HEAD_DIM} in steps of 8, not {arch.head_dim}"
    return None
