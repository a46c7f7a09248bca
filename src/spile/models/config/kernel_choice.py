"""Which kernels serve which model on which device, and why. No jax.

`attention_kernels` goes through the kernels of a platform, best first by what was measured (docs/
benchmarks.md), and takes the first that serves a model's heads and that the machine has. If there
is none, attention runs in blocks (`attention.blocked`): slower, but its work is in proportion to
the documents' lengths and its memory to the tokens. Where layers have heads of several widths, each
width has its own kernel. `recurrence_kernel` chooses how recurrent layers run their rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from spile.core.errors import ConfigError
from spile.models.config.arch import Arch

BLOCKED = "blocked"
# In the order in which they are tried.
_BY_PLATFORM = {"gpu": ("mosaic", "cudnn", "triton", "wide"), "tpu": ("splash",), "cpu": ()}
KERNELS = {
    "mosaic": "tokamax's Mosaic kernel, for Hopper and Blackwell GPUs",
    "cudnn": "cuDNN's packed attention, for Hopper and later GPUs",
    "triton": "tokamax's Triton kernel, for GPUs from Ampere on",
    "wide": "a Triton kernel for heads of 512, for Hopper GPUs",
    "splash": "jax's splash attention, for TPUs",
    BLOCKED: "blocks of plain products, anywhere",
}
CHUNKS, FUSED, VMEM = "chunks", "fused", "vmem"
RECURRENCES = {
    FUSED: "Triton kernels that keep states in registers, for Hopper GPUs",
    VMEM: "a kernel that keeps states in VMEM, for TPUs",
    CHUNKS: "chunks of plain products in float32, anywhere",
}
# Kernels that are never used where gradients are tapped.
NO_BACKWARD = dict.fromkeys(("mosaic", "triton", "wide", "splash"), "has no backward pass")
_MIXED = ("bfloat16", "float8_e4m3")  # compute dtypes that mix tokens in bfloat16
_MULTIPLIES = "multiplies in bfloat16, {} was asked for"
_TILES = (16, 32, 64, 128)  # sizes of a head's state
# The same on a TPU, of keys and values: both fill whole lanes, but values of a state space may lie
# side by side.
STATE_SPACES, DELTA, BY_CHANNEL = "state spaces", "delta", "delta by channel"
_ON_TPU = {
    STATE_SPACES: ((128, 256), (32, 64, 128)),
    DELTA: ((128, 256), (128, 256)),
    BY_CHANNEL: ((128,), (128,)),
}
_MOST_HEAD_DIM = 256
_WIDE_HEAD_DIM = 512
_LANES = 128  # tokens of a row must fill them, on a TPU


# The compute capability of the first GPUs that can run a kernel.
_HOPPER = 9
_LEAST = {"mosaic": 9.0, "cudnn": 9.0, "triton": 8.0}


def unfit_gpu(capability: float) -> dict[str, str]:
    """Return the kernels that a GPU is too old or too new for, each with the reason."""
    reasons = {
        name: f"needs a GPU of compute capability {least:g} or more, not {capability:g}"
        for name, least in _LEAST.items()
        if capability < least
    }
    if int(capability) != _HOPPER:
        reasons["wide"] = _needs_hopper(capability)
    return reasons


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that is used, and for each better one the reason why it is not."""

    name: str
    passed_over: Mapping[str, str]

    @property
    def why(self) -> str:
        """Why no better kernel is used, in one line; empty if there is none."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.passed_over.items())


def attention_kernels(
    platform: str,
    arch: Arch,
    dtype: str,
    seq_len: int,
    *,
    missing: Mapping[str, str] | None = None,
    wanted: str = "auto",
) -> dict[int, KernelChoice]:
    """Choose the attention kernels of a model, by the width of heads; none if no layer attends.

    Args:
        missing: kernels that this machine does not have, and why; it is assumed to have the others.
        wanted: the only kernel that may be used, or `auto`.

    Raises:
        ConfigError: if the wanted kernel cannot serve the model here.
    """
    kinds = (arch.of(layer) for layer in dict.fromkeys(arch.layers) if layer.attends)
    by_width = {own.head_dim: own for own in kinds}
    return {
        width: _chosen(platform, own, dtype, seq_len, missing or {}, wanted)
        for width, own in sorted(by_width.items())
    }


def told_kernels(choices: Mapping[int, KernelChoice]) -> str:
    """The kernels of a model, each with the reason why no better one is used."""
    if not choices:
        return "none: no layer of the model attends"
    widths: dict[tuple[str, str], list[int]] = {}
    for width, choice in choices.items():
        widths.setdefault((choice.name, choice.why), []).append(width)
    parts: list[str] = []
    for (name, why), own in widths.items():
        heads = f"heads of {' and '.join(map(str, own))}: " if len(widths) > 1 else ""
        parts.append(heads + KERNELS[name] + (f" ({why})" if why else ""))
    return "; ".join(parts)


def recurrence_kernel(
    platform: str, arch: Arch, dtype: str, capability: float, *, wanted: str = "auto"
) -> KernelChoice | None:
    """Choose how recurrent layers run their rule; None if the model has no such layer.

    Args:
        wanted: the attention kernel that the user chose: `blocked` leaves out all kernels.
    """
    space, delta = arch.state_space, arch.delta
    if space is None and delta is None:
        return None
    if wanted == BLOCKED:
        name = VMEM if platform == "tpu" else FUSED
        return KernelChoice(CHUNKS, {name: f"--attention {BLOCKED} was given"})
    if platform == "tpu":
        reason = unfit_on_tpu(STATE_SPACES, dtype, space.state, space.head_dim) if space else None
        if delta and reason is None:
            rule = BY_CHANNEL if delta.by_channel else DELTA
            reason = unfit_on_tpu(rule, dtype, delta.key_dim, delta.value_dim)
        return KernelChoice(VMEM, {}) if reason is None else KernelChoice(CHUNKS, {VMEM: reason})
    sizes = [space.state, space.head_dim] if space else []
    sizes += [delta.key_dim, delta.value_dim] if delta else []
    reason = unfit_recurrence(platform, dtype, capability, *sizes)
    return KernelChoice(FUSED, {}) if reason is None else KernelChoice(CHUNKS, {FUSED: reason})


def unfit_recurrence(platform: str, dtype: str, capability: float, *sizes: int) -> str | None:
    """Why the kernels of recurrent layers cannot run; None if they can."""
    if platform != "gpu":
        return f"there is none for {platform}"
    if int(capability) != _HOPPER:
        return _needs_hopper(capability)
    if dtype not in _MIXED:
        return _MULTIPLIES.format(dtype)
    unfit = [size for size in sizes if size not in _TILES]
    if unfit:
        return f"takes keys and values of 16, 32, 64 or 128, not {unfit[0]}"
    return None


def unfit_on_tpu(rule: str, dtype: str, keys: int, values: int) -> str | None:
    """Why a TPU's kernel for a rule of recurrent layers cannot run; None if it can.

    Args:
        rule: `STATE_SPACES`, `DELTA` or `BY_CHANNEL`.
        keys: the width of a head's keys.
        values: the width of its values.
    """
    if dtype not in _MIXED:
        return _MULTIPLIES.format(dtype)
    widths = ("keys", keys), ("values", values)
    for (name, width), fit in zip(widths, _ON_TPU[rule], strict=True):
        if width not in fit:
            *most, last = map(str, fit)
            taken = f"{', '.join(most)} or {last}" if most else last
            return f"takes {name} of {taken}, not {width}"
    return None


def told_recurrence(choice: KernelChoice) -> str:
    """How recurrent layers run their rule, with the reason why no kernel does."""
    return RECURRENCES[choice.name] + (f" ({choice.why})" if choice.why else "")


def no_gradient(platform: str, arch: Arch, dtype: str) -> str | None:
    """Why jax itself cannot differentiate a model on a platform, with attention in blocks.

    (A step with gradients leaves out the kernels that have none.)
    """
    if platform == "gpu" and arch.experts and dtype != "float32":
        return "a GPU's kernels for experts have no gradient; give compute_dtype='float32'"
    return None


def _needs_hopper(capability: float) -> str:
    return f"needs a GPU of compute capability {_HOPPER}, not {capability:g}"


def _chosen(
    platform: str, arch: Arch, dtype: str, seq_len: int, missing: Mapping[str, str], wanted: str
) -> KernelChoice:
    passed_over: dict[str, str] = {}
    for name in _BY_PLATFORM.get(platform, ()):
        if wanted not in ("auto", name):
            continue
        reason = missing.get(name) or _unfit(name, arch, dtype, seq_len)
        if reason is None:
            return KernelChoice(name, passed_over)
        passed_over[name] = reason
    if wanted not in ("auto", BLOCKED):
        reason = passed_over.get(wanted, f"there is none for {platform}")
        raise ConfigError(f"--attention {wanted}: {reason}; choose another, or auto")
    return KernelChoice(BLOCKED, passed_over)


def _unfit(kernel: str, arch: Arch, dtype: str, seq_len: int) -> str | None:
    """Why a kernel cannot serve the heads of a model."""
    if dtype == "float32":
        return "multiplies in 16 bits, float32 was asked for"
    if arch.value_dim > arch.head_dim:
        return f"takes values no wider than keys, not {arch.value_dim} beside {arch.head_dim}"
    if arch.alibi:
        return "has no scores that fall with the distance"
    if kernel == "splash":
        if seq_len % _LANES:
            return f"takes contexts of multiples of {_LANES} tokens, not {seq_len}"
        return None
    if kernel == "wide":
        if arch.head_dim != _WIDE_HEAD_DIM:
            return f"takes heads of {_WIDE_HEAD_DIM}, not {arch.head_dim}"
    elif arch.head_dim % 8 or arch.head_dim > _MOST_HEAD_DIM:
        return f"takes heads of up to {_MOST_HEAD_DIM} in steps of 8, not {arch.head_dim}"
    if kernel in ("cudnn", "wide"):
        if arch.sinks:
            return "has no sinks"
        if arch.attn_softcap is not None:
            return "has no soft cap"
    return None
