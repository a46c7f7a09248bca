"""Memory of devices, reported or counted; a chip's peak, published or measured."""

import ctypes
import os
import resource
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from spile.core.errors import ConfigError
from spile.plan.chips import CHIPS
from spile.run.world.devices import (
    keep_freed_memory,
    memory_limit,
    memory_used,
    peak_flops,
    prepared_device,
    start_error,
)


def saying(**stats: int) -> SimpleNamespace:
    return SimpleNamespace(memory_stats=lambda: stats)


def test_a_device_that_says_what_it_uses_is_believed() -> None:
    device = saying(bytes_limit=100, bytes_in_use=7)
    assert (memory_limit(device), memory_used(device)) == (100, 7)


def test_of_a_device_that_does_not_say_the_live_arrays_are_counted() -> None:
    device = jax.devices()[0]
    before = memory_used(device)
    held = jax.block_until_ready(jnp.ones((1000, 250), jnp.float32))
    assert memory_used(device) - before == held.nbytes == 1_000_000
    assert memory_limit(device) is None


def test_a_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> dict[str, int]:
        raise NotImplementedError("not through a proxy")

    monkeypatch.setenv("JAX_PLATFORMS", "proxy,cpu")
    device = SimpleNamespace(memory_stats=refuses)
    assert (memory_limit(device), memory_used(device)) == (None, 0)


@pytest.mark.parametrize(
    ("variable", "value", "calls"),
    [("JAX_PLATFORMS", "proxy,cpu", 1), ("JAX_BACKEND_TARGET", "grpc://h:1", 1), ("X", "proxy", 0)],
)
def test_pathways_is_registered_where_it_is_asked_for(
    variable: str, value: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in that records the call: there is no Pathways here."""
    called: list[int] = []
    stand_in = SimpleNamespace(initialize=lambda: called.append(1))
    monkeypatch.setitem(sys.modules, "pathwaysutils", stand_in)
    monkeypatch.setenv(variable, value)
    prepared_device()
    assert len(called) == calls


def test_pathways_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    monkeypatch.setitem(sys.modules, "pathwaysutils", None)
    with pytest.raises(ConfigError, match=r"needs Pathways: .* pip install 'spile\[pathways\]'"):
        prepared_device()


def test_a_device_that_is_not_there_is_one_line_and_exit_code_2() -> None:
    words = ("extract", "--model", "demo", "--corpus", "demo", "--taps", "embed", "--out", "none")
    ran = subprocess.run(
        [sys.executable, "-m", "spile.cli", *words], env={**os.environ, "JAX_PLATFORMS": "cuda"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 2
    assert ran.stderr.startswith("spile: JAX_PLATFORMS=cuda: needs an NVIDIA driver")
    assert ran.stderr.count("\n") == 1


_NO_LIBTPU = (
    "Unable to initialize backend 'tpu': INTERNAL: Failed to open libtpu.so: libtpu.so: cannot "
    "open shared object file: No such file or directory (set JAX_PLATFORMS='' to automatically "
    "choose an available backend)"
)
_TPU_HELD = (
    "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid "
    "4242. Not attempting to load libtpu.so in this process."
)
_NO_PROXY = "Unable to initialize backend 'proxy': Backend 'proxy' is not in the list of known"


@pytest.mark.parametrize(
    ("asked", "said", "code", "told"),
    [
        ("tpu", _NO_LIBTPU, 2, "needs a TPU and libtpu: pip install 'spile[tpu]'"),
        ("tpu", _TPU_HELD, 3, "held by another process"),
        ("tpu,cpu", _TPU_HELD, 3, "pid 4242"),
        ("proxy", _NO_PROXY, 2, "needs Pathways"),
        ("cuda", "", 2, "jax gives no reason"),
        ("nonsense", "Unknown backend nonsense", 2, "JAX_PLATFORMS='nonsense'"),
    ],
)
def test_why_no_device_starts_is_said_with_what_to_do(
    asked: str, said: str, code: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    error = start_error(said)
    assert error.exit_code == code, "a restart helps only where another process holds the device"
    assert told in str(error) and "\n" not in str(error)
    assert "set JAX_PLATFORMS=''" not in str(error)


@dataclass
class Device:
    device_kind: str
    platform: str


def test_a_known_chip_has_its_published_peak() -> None:
    h200 = Device("NVIDIA H200 NVL", "gpu")
    assert peak_flops(h200, "bfloat16") == CHIPS["h200"].peak


def test_another_is_measured() -> None:
    """Measured by a matrix product: a CPU does more than 10^6 and less than 10^15 FLOP/s."""
    found = peak_flops(jax.devices()[0], "float32")
    assert found and 1e6 < found < 1e15


def test_devices_that_share_a_processor_have_no_peak_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "local_device_count", lambda: 8)
    assert peak_flops(jax.devices()[0], "float32") is None


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc alone has it")
def test_a_step_reuses_the_memory_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    keep_freed_memory()
    libc, size = ctypes.CDLL(None), 48 << 20
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    def pages_cleared() -> int:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        buffer = libc.malloc(size)
        ctypes.memset(buffer, 1, size)
        libc.free(buffer)
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    pages_cleared()
    assert pages_cleared() < size / resource.getpagesize() / 100
