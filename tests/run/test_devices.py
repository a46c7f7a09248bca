"""Memory of devices, where they say what they use and where they do not."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from spile.run.devices import memory_limit, memory_used


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
