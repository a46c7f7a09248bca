"""The attention kernel of a model, and the reason if a better one is not used."""

from dataclasses import replace
from typing import Any

import pytest

from spile.core.config import Runtime
from spile.core.errors import ConfigError
from spile.models.config.arch import STATE_SPACE, Experts, GatedDelta, Latent, Layer, StateSpace
from spile.models.config.hf_config import read_config
from spile.models.config.kernel_choice import (
    BLOCKED,
    KERNELS,
    KernelChoice,
    attention_kernels,
    no_gradient,
    recurrence_kernel,
    told_kernels,
    told_recurrence,
    unfit_gpu,
)
from support import tiny

_, ARCH = read_config(tiny.CONFIG, "test")
NO_TOKAMAX = {"mosaic": "tokamax cannot be imported", "triton": "tokamax cannot be imported"}
NARROW = Latent(rank=512, query_rank=None, rope_dim=64, value_dim=128)
WIDER = "takes values no wider than keys, not 128 beside 96"
OLD = {"mosaic": "needs Hopper", "cudnn": "only on Hopper"}


@pytest.mark.parametrize(
    ("platform", "changes", "dtype", "seq_len", "missing", "name", "why"),
    [
        ("cpu", {"sinks": True, "attn_softcap": 5.0}, "float32", 100, {}, "blocked", ""),
        ("gpu", {}, "bfloat16", 100, {}, "mosaic", ""),
        ("gpu", {"attn_softcap": 5.0, "sinks": True}, "bfloat16", 100, {}, "mosaic", ""),
        (
            "gpu",
            {"head_dim": 256},
            "bfloat16",
            100,
            NO_TOKAMAX,
            "cudnn",
            "tokamax cannot be imported",
        ),
        ("gpu", {"sinks": True}, "bfloat16", 100, NO_TOKAMAX, "blocked", "cudnn: has no sinks"),
        ("gpu", {"attn_softcap": 5.0}, "bfloat16", 1, NO_TOKAMAX, "blocked", "has no soft cap"),
        ("gpu", {"attn_softcap": 5.0}, "bfloat16", 100, OLD, "triton", "mosaic: needs Hopper"),
        ("gpu", {}, "float32", 100, {}, "blocked", "multiplies in 16 bits, float32 was asked for"),
        ("gpu", {"head_dim": 264}, "bfloat16", 100, {}, "blocked", "heads of up to 256"),
        ("gpu", {"head_dim": 20}, "bfloat16", 100, {}, "blocked", "in steps of 8, not 20"),
        ("tpu", {"attn_softcap": 5.0, "sinks": True}, "bfloat16", 256, {}, "splash", ""),
        ("tpu", {}, "float32", 256, {}, "blocked", "splash: multiplies in 16 bits"),
        ("tpu", {}, "bfloat16", 100, {}, "blocked", "multiples of 128 tokens, not 100"),
        ("gpu", {"latent": NARROW, "head_dim": 192}, "bfloat16", 100, {}, "mosaic", ""),
        ("tpu", {"latent": NARROW, "head_dim": 192}, "bfloat16", 256, {}, "splash", ""),
        ("gpu", {"latent": NARROW, "head_dim": 96}, "bfloat16", 100, {}, "blocked", WIDER),
        ("tpu", {"latent": NARROW, "head_dim": 96}, "bfloat16", 256, {}, "blocked", WIDER),
        ("npu", {}, "bfloat16", 128, {}, "blocked", ""),
        ("gpu", {"head_dim": 512}, "bfloat16", 100, {}, "wide", "heads of up to 256"),
        ("gpu", {"head_dim": 512, "sinks": True}, "bfloat16", 9, {}, "blocked", "has no sinks"),
    ],
)
def test_the_best_usable_kernel_is_chosen_and_the_others_explained(
    platform: str,
    changes: dict[str, Any],
    dtype: str,
    seq_len: int,
    missing: dict[str, str],
    name: str,
    why: str,
) -> None:
    arch = replace(ARCH, **changes)
    found = only_kernel(platform, arch, dtype, seq_len, missing=missing)
    assert found.name == name
    assert why in found.why and bool(why) == bool(found.why)


def only_kernel(*where: Any, **given: Any) -> KernelChoice:
    [choice] = attention_kernels(*where, **given).values()
    return choice


# Gemma 4's heads: 256 in sliding layers, 512 in full ones.
TWO_WIDTHS = replace(ARCH, head_dim=256, layers=(Layer(window=64), Layer(head_dim=512)))


def test_heads_of_each_width_have_their_own_kernel() -> None:
    found = attention_kernels("gpu", TWO_WIDTHS, "bfloat16", 100)
    assert {width: choice.name for width, choice in found.items()} == {256: "mosaic", 512: "wide"}
    assert not found[256].why and "heads of up to 256 in steps of 8, not 512" in found[512].why
    on_tpu = attention_kernels("tpu", TWO_WIDTHS, "bfloat16", 128)
    assert [choice.name for choice in on_tpu.values()] == ["splash", "splash"]
    with pytest.raises(ConfigError, match="--attention mosaic: takes heads of up to 256"):
        attention_kernels("gpu", TWO_WIDTHS, "bfloat16", 100, wanted="mosaic")


def test_layers_that_do_not_attend_have_no_part_in_the_choice() -> None:
    spaces = Layer(mixer=STATE_SPACE, head_dim=512)
    assert attention_kernels("gpu", replace(ARCH, layers=(spaces,)), "bfloat16", 100) == {}
    hybrid = replace(ARCH, layers=(spaces, Layer()))
    assert only_kernel("gpu", hybrid, "bfloat16", 100).name == "mosaic"


def test_a_kernel_that_is_asked_for_is_used_or_refused() -> None:
    for wanted in ("cudnn", "triton", BLOCKED):
        assert only_kernel("gpu", ARCH, "bfloat16", 100, wanted=wanted).name == wanted
    with pytest.raises(ConfigError, match="--attention splash: there is none for gpu"):
        only_kernel("gpu", ARCH, "bfloat16", 100, wanted="splash")
    capped = replace(ARCH, attn_softcap=5.0)
    with pytest.raises(ConfigError, match="--attention cudnn: has no soft cap; choose another"):
        only_kernel("gpu", capped, "bfloat16", 100, wanted="cudnn")


def test_the_flag_knows_every_kernel() -> None:
    for name in ("auto", *KERNELS):
        assert Runtime(attention=name).attention == name


def test_experts_in_16_bits_have_no_gradient_on_a_gpu() -> None:
    routed = replace(ARCH, experts=Experts(count=4, chosen=2, normalised=True))
    assert "compute_dtype='float32'" in str(no_gradient("gpu", routed, "bfloat16"))
    for platform, arch, dtype in (
        ("gpu", ARCH, "bfloat16"), ("gpu", routed, "float32"), ("cpu", routed, "bfloat16"),
    ):  # fmt: skip
        assert no_gradient(platform, arch, dtype) is None


@pytest.mark.parametrize("changes", [{}, {"attn_softcap": 5.0, "sinks": True}, {"head_dim": 256}])
def test_a_gpu_too_old_for_every_kernel_attends_in_blocks(changes: dict[str, Any]) -> None:
    choices = attention_kernels(
        "gpu", replace(ARCH, **changes), "float16", 2048, missing=unfit_gpu(7.5)
    )
    assert [choice.name for choice in choices.values()] == [BLOCKED]
    told = told_kernels(choices)
    assert told.startswith("blocks of plain products, anywhere (mosaic: needs a GPU of compute ")
    assert "triton: needs a GPU of compute capability 8 or more, not 7.5" in told
    assert not unfit_gpu(9.0) and set(unfit_gpu(8.6)) == {"mosaic", "cudnn", "wide"}
    assert unfit_gpu(10.0) == {"wide": "needs a GPU of compute capability 9, not 10"}


def test_recurrent_layers_run_kernels_on_hopper_gpus() -> None:
    space = StateSpace(heads=8, head_dim=64, groups=1, state=128, kernel=4, norm_eps=1e-5)
    delta = GatedDelta(
        key_heads=2, value_heads=4, key_dim=128, value_dim=128, kernel=4, norm_eps=1e-5
    )

    def told(platform: str = "gpu", dtype: str = "bfloat16", at: float = 9.0, **own: Any) -> str:
        arch = replace(ARCH, **(own or {"state_space": space, "delta": delta}))
        choice = recurrence_kernel(platform, arch, dtype, at)
        assert choice
        return told_recurrence(choice)

    assert recurrence_kernel("gpu", ARCH, "bfloat16", 9.0) is None
    assert told() == "Triton kernels that keep states in registers, for Hopper GPUs"
    assert told(dtype="float8_e4m3") == told()
    plain = "chunks of plain products in float32, anywhere (fused: "
    assert told("cpu") == plain + "there is none for cpu)"
    assert told(at=8.0) == plain + "needs a GPU of compute capability 9, not 8)"
    assert told(dtype="float32") == plain + "multiplies in bfloat16, float32 was asked for)"
    wide = replace(space, head_dim=96)
    sizes = "takes keys and values of 16, 32, 64 or 128, not 96)"
    assert told(state_space=wide) == plain + sizes
    by_channel = replace(delta, by_channel=True)
    assert told(delta=by_channel) == told()


def test_recurrent_layers_run_kernels_on_tpus() -> None:
    space = StateSpace(heads=8, head_dim=64, groups=1, state=128, kernel=4, norm_eps=1e-5)

    def told(dtype: str = "bfloat16", wanted: str = "auto", **changes: Any) -> str:
        arch = replace(ARCH, state_space=replace(space, **changes))
        choice = recurrence_kernel("tpu", arch, dtype, 0.0, wanted=wanted)
        assert choice
        return told_recurrence(choice)

    assert told() == "a kernel that keeps states in VMEM, for TPUs"
    assert told("float8_e4m3", state=256, head_dim=128) == told()
    plain = "chunks of plain products in float32, anywhere (vmem: "
    assert told("float32") == plain + "multiplies in bfloat16, float32 was asked for)"
    assert told(wanted=BLOCKED) == plain + "--attention blocked was given)"
    assert told(state=64) == plain + "takes keys of 128 or 256, not 64)"
    assert told(head_dim=96) == plain + "takes values of 32, 64 or 128, not 96)"
    delta = GatedDelta(
        key_heads=2, value_heads=4, key_dim=128, value_dim=128, kernel=4, norm_eps=1e-5
    )

    def told_of_delta(**changes: Any) -> str:
        choice = recurrence_kernel(
            "tpu", replace(ARCH, delta=replace(delta, **changes)), "bfloat16", 0.0
        )
        assert choice
        return told_recurrence(choice)

    assert told_of_delta() == told_of_delta(value_dim=256) == told()
    assert told_of_delta(value_dim=64) == plain + "takes values of 128 or 256, not 64)"
    assert told_of_delta(by_channel=True) == told()
    assert told_of_delta(by_channel=True, key_dim=256) == plain + "takes keys of 128, not 256)"
