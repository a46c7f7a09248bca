"""A chip's peak is published or measured, and never made up."""

from dataclasses import dataclass

import jax
import pytest

from spile.plan.chips import CHIPS
from spile.run.telemetry import peak_flops


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
