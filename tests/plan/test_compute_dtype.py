"""The compute dtype of a run, by its devices; a GPU without bfloat16 is told of."""

import logging

import pytest

from spile.core.errors import ConfigError
from spile.plan.compute_dtype import settled_compute_dtype

T4 = 7.5


@pytest.mark.parametrize(
    ("given", "platform", "capability", "settled"),
    [
        (None, "cpu", 0.0, "float32"),
        (None, "tpu", 0.0, "bfloat16"),
        (None, "gpu", 9.0, "bfloat16"),
        (None, "gpu", 8.0, "bfloat16"),
        (None, "gpu", 0.0, "bfloat16"),  # no NVIDIA GPU
        (None, "gpu", T4, "float16"),
        ("float32", "gpu", T4, "float32"),
        ("bfloat16", "gpu", T4, "bfloat16"),
        ("float16", "gpu", 9.0, "float16"),
        ("float16", "cpu", 0.0, "float16"),
    ],
)
def test_the_dtype_suits_the_device_unless_one_is_given(
    given: str | None, platform: str, capability: float, settled: str
) -> None:
    assert settled_compute_dtype(given, platform, capability) == settled


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, ["a GPU of compute capability 7.5 has no bfloat16: products are in float16"]),
        ("bfloat16", ["has no bfloat16 and emulates --compute-dtype bfloat16, which is slow"]),
        ("float16", []),
        ("float32", []),
    ],
)
def test_a_gpu_without_bfloat16_is_told_of_once(
    given: str | None, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="spile"):
        settled_compute_dtype(given, "gpu", T4)
    assert len(caplog.messages) == len(told)
    assert all(part in line for part, line in zip(told, caplog.messages, strict=True))


def test_tpus_do_not_compute_in_float16() -> None:
    with pytest.raises(ConfigError, match="float16 is for GPUs; TPUs multiply bfloat16"):
        settled_compute_dtype("float16", "tpu")
