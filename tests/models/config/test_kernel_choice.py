"""Where a fused attention kernel serves, and the reason where none does."""

from dataclasses import replace
from typing import Any

import pytest

import tiny
from spile.models.config.hf_config import read_config
from spile.models.config.kernel_choice import why_unfused

_, ARCH = read_config(tiny.CONFIG, "test")


@pytest.mark.parametrize(
    ("platform", "changes", "dtype", "seq_len", "why"),
    [
        ("cpu", {"sinks": True, "attn_softcap": 5.0}, "float32", 100, None),
        ("gpu", {}, "bfloat16", 100, None),
        ("gpu", {"head_dim": 256}, "bfloat16", 100, None),
        ("tpu", {}, "bfloat16", 256, None),
        ("tpu", {"attn_softcap": 5.0}, "bfloat16", 256, None),
        ("gpu", {}, "float32", 100, "cuDNN multiplies in 16 bits, float32 was asked for"),
        ("tpu", {}, "float32", 256, "splash attention multiplies in 16 bits"),
        ("gpu", {"sinks": True}, "bfloat16", 100, "cuDNN has no sinks"),
        ("tpu", {"sinks": True}, "bfloat16", 256, "splash attention has no sinks"),
        ("gpu", {"attn_softcap": 5.0}, "bfloat16", 100, "cuDNN has no soft cap"),
        ("gpu", {"head_dim": 264}, "bfloat16", 100, "cuDNN takes heads of up to 256"),
        ("gpu", {"head_dim": 20}, "bfloat16", 100, "in steps of 8, not 20"),
        ("tpu", {}, "bfloat16", 100, "contexts of multiples of 128, not 100"),
        ("npu", {}, "bfloat16", 128, "there is no kernel for npu"),
    ],
)
def test_a_kernel_serves_or_the_reason_is_said(
    platform: str, changes: dict[str, Any], dtype: str, seq_len: int, why: str | None
) -> None:
    found = why_unfused(platform, replace(ARCH, **changes), dtype, seq_len)
    assert (found is None) == (why is None)
    assert why is None or why in (found or "")
