"""This process's devices: what they are, how fast, and how much of their memory is used."""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import ctypes
import importlib
import os
import time
from typing import Any

import jax
import jax.numpy as jnp

from spile.core.cache_dir import cache_directory
from spile.core.config import activation_dtype
from spile.core.errors import ConfigError, SpileError
from spile.core.system import available_memory
from spile.plan.chips import chip_of

# Phrases in errors of libtpu and of the driver.
_HELD = ("already in use", "lockfile", "Device or resource busy")
_MISSING = {
    "tpu": "needs a TPU and libtpu: pip install 'spile[tpu]'",
    "cuda": "needs an NVIDIA driver and jax's CUDA plugin: pip install 'spile[gpu]'",
    "gpu": "needs an NVIDIA driver and jax's CUDA plugin: pip install 'spile[gpu]'",
    "proxy": "needs Pathways: start its proxy, and pip install 'spile[pathways]'",
}
# Measured on an H200 (docs/benchmarks.md): cuBLAS is 3% faster than XLA's own products, and
# compiles sooner; products that XLA merges must be cut apart again for kernels.
_XLA_FLAGS = ("--xla_gpu_enable_triton_gemm=false", "--xla_gpu_dot_merger_threshold_mb=0")
# Parameters of glibc's mallopt, and the variables by which users set them.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_SET_BY_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
_KEPT = 1 << 30  # bytes of the largest buffers that are kept
_MOST_OF_SOME = 32 << 20  # that some versions of glibc take as a threshold (mallopt(3))


def prepared_device() -> Any:
    """A device of this process, set up for fast steps unless the user chose otherwise."""
    prefer_xla_flags()
    # Weights may be kept in pinned memory (`--weights host`): by default 64 GB of it at most.
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(_host_gigabytes()))
    try:
        _start_pathways()
        device = jax.local_devices()[0]
    except (RuntimeError, AssertionError, ImportError) as error:
        raise start_error(str(error)) from error
    if device.platform == "cpu":
        keep_freed_memory()
    # (The CPU compiler's cache is valid only on the same machine, and it compiles fast anyway.)
    if device.platform != "cpu" and not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
    return device


def prefer_xla_flags() -> None:
    """Add the flags that make steps fast to `XLA_FLAGS`, unless it names them."""
    flags = os.environ.get("XLA_FLAGS", "")
    chosen = [flag for flag in _XLA_FLAGS if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *chosen]).strip()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step, unless the user tuned it.

    XLA allocates a program's buffers each time it runs. By default, glibc takes large ones from the
    kernel and returns them at once, so the kernel clears the same pages for every block of every
    step (docs/benchmarks.md#cpu). Other C libraries have no such function.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _SET_BY_USERS):
        return
    # Setting one threshold ends glibc's own adjusting of both: set the other only if this one is.
    if mallopt(_MMAP_THRESHOLD, _KEPT) or mallopt(_MMAP_THRESHOLD, _MOST_OF_SOME):
        mallopt(_TRIM_THRESHOLD, _KEPT)


def _host_gigabytes() -> int:
    free = available_memory()
    return max(64, int((free or 0) / 2**30))


def _start_pathways() -> None:
    """Register Pathways's proxy with jax, if the environment asks for it by name or by address."""
    if _through_proxy() or os.environ.get("JAX_BACKEND_TARGET"):
        importlib.import_module("pathwaysutils").initialize()


def _through_proxy() -> bool:
    return "proxy" in os.environ.get("JAX_PLATFORMS", "").split(",")


def start_error(said: str) -> SpileError:
    """Why jax could not start a device, and what to do.

    A device that another process holds may become free, so a restart can help; a missing package
    stays missing.
    """
    asked = os.environ.get("JAX_PLATFORMS", "")
    why = " ".join(said.split(" (set JAX_PLATFORMS")[0].split()) or "jax gives no reason"
    if any(word in said for word in _HELD):
        return SpileError(f"the device is held by another process ({why}); end it, or wait for it")
    missing = next((hint for name, hint in _MISSING.items() if name in asked.split(",")), None)
    if missing is None:
        return ConfigError(f"jax starts no device with JAX_PLATFORMS={asked!r} ({why})")
    return ConfigError(f"JAX_PLATFORMS={asked}: {missing} ({why}); JAX_PLATFORMS=cpu runs without")


def devices_here() -> tuple[str, int, str]:
    """The platform of the devices, how many there are (joined processes included), their kind."""
    return jax.default_backend(), jax.device_count(), jax.devices()[0].device_kind


def process_count() -> int:
    """The number of joined processes, as jax counts them."""
    return jax.process_count()


def local_devices() -> list[Any]:
    """This process's own devices."""
    return jax.local_devices()


def memory_limit(device: Any) -> int | None:
    """Bytes that a device may use, if it reports that."""
    return _stats(device).get("bytes_limit")


def memory_used(device: Any) -> int:
    """Bytes in use on a device; if it does not report that, the size of its live arrays."""
    used = _stats(device).get("bytes_in_use")
    if used is not None:
        return used
    return sum(
        shard.data.nbytes
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.device == device
    )


def peak_flops(device: Any, dtype: str) -> float | None:
    """FLOP/s of one device: the published figure, or else what large matrix products reach here.

    None for CPU devices that share one processor.
    """
    chip = chip_of(device.device_kind)
    if chip and dtype in (chip.half, "float16"):
        return chip.peak
    if chip and chip.platform == "gpu" and dtype == "float8_e4m3":
        return 2 * chip.peak  # of Hopper's, as published
    dtype = activation_dtype(dtype)
    if device.platform == "cpu" and jax.local_device_count() > 1:
        return None
    size = 1024 if device.platform == "cpu" else 8192
    precision = "highest" if dtype == "float32" else "default"
    ones = jax.device_put(jnp.ones((size, size), dtype), device)
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision))
    multiply(ones, ones).block_until_ready()  # compiles it
    return 2 * size**3 / min(_seconds(multiply, ones) for _ in range(3))


def _seconds(multiply: Any, ones: jax.Array) -> float:
    begin = time.perf_counter()
    multiply(ones, ones).block_until_ready()
    return time.perf_counter() - begin


def _stats(device: Any) -> dict[str, int]:
    """Memory statistics; none on CPUs, nor under Pathways (a proxy for devices elsewhere)."""
    if _through_proxy():
        return {}
    return device.memory_stats() or {}
