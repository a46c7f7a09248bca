"""Memory of devices, said or counted; a chip's peak, published or measured."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from spile.plan.chips import CHIPS
from spile.run.devices import memory_limit, memory_used, peak_flops


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


@dataclass
class Device:
    device_kind: str
    platform: str


def test_a_known_chip_has_its_published_peak() -> None:
    h200 = Device("NVIDIA H200 NVL", "gpu")
    assert peak_flops(h200, "bfloat16") == CHIPS["h200"].peak


def test_another_is_measured() -> None:
    """By a product of two matrices: a CPU does more than a million and less than 10^15 a second."""
    found = peak_flops(jax.devices()[0], "float32")
    assert found and 1e6 < found < 1e15


def test_devices_that_share_a_processor_have_no_peak_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "local_device_count", lambda: 8)
    assert peak_flops(jax.devices()[0], "float32") is None
