"""Where blocks are kept: on the device as far as they fit, then in host memory, then on disk."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from spile.core.config import Runtime
from spile.models.config.hf_config import read_config
from spile.models.config.specs import block_specs
from spile.models.layout import ONE_DEVICE
from spile.models.taps import parse_taps
from spile.objects.opened import OpenedFile, opened
from spile.plan import residency
from spile.plan.chips import CHIPS, Chip
from spile.plan.residency import (
    Machine,
    Residency,
    choose_residency,
    disk_rate,
    evenly,
    streamed_bytes,
)
from spile.plan.roofline import MEMORY_SHARE, Workload
from support.remote import counted

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
GB = 10**9


def work(rows: int, name: str = "Llama-3.3-70B-Instruct") -> Workload:
    _, arch = read_config(json.loads((CONFIGS / f"{name}.json").read_text()), name)
    taps = parse_taps(f"resid_post:{arch.num_layers - 1}", arch)
    return Workload(
        arch=arch, taps=taps, cuts=ONE_DEVICE, seq_len=2048, rows=rows, compute_dtype="bfloat16",
        store_dtype="bfloat16", whole=True,
    )  # fmt: skip


def chosen(
    memory: int,
    host: int,
    kept: str = "auto",
    most_rows: int = 2000,
    chip: Chip = CHIPS["h200"],
    step: Callable[[int], Workload] = work,
) -> Residency:
    return choose_residency(
        step,
        (8, 1),
        Runtime(weights=kept),
        Machine("gpu", memory, chip),
        most_rows=most_rows,
        host_memory=host,
    )


def test_a_model_that_fits_stays_on_the_device() -> None:
    found = chosen(200 * GB, 500 * GB)
    assert not found.streams and str(found) == "all on the device"


def test_what_does_not_fit_is_in_host_memory_and_the_rest_of_that_on_disk() -> None:
    found = chosen(80 * GB, 64 * GB)
    counts = [found.count(where) for where in ("resident", "host", "disk")]
    assert sum(counts) == 80 and min(counts) > 5
    assert found.host_bytes <= 0.8 * 64 * GB
    needed = streamed_bytes(work(found.batch_rows), counts[0], 2048 * found.sweep_rows)
    assert needed <= MEMORY_SHARE * 80 * GB
    assert "on disk" in str(found)


def test_streamed_blocks_lie_evenly_between_those_that_stay() -> None:
    kept = chosen(80 * GB, 500 * GB).kept
    streamed = [n for n, where in enumerate(kept) if where != "resident"]
    gaps = {after - before for before, after in zip(streamed, streamed[1:], strict=False)}
    assert max(gaps) - min(gaps) <= 1
    assert evenly(3, 8) == [False, False, True, False, False, True, False, True]


@pytest.mark.parametrize("kept", ["host", "disk"])
def test_a_place_can_be_chosen(kept: str, tmp_path: Path) -> None:
    found = chosen(200 * GB, 500 * GB, kept)
    assert set(found.kept) == {kept}


def test_a_sweep_is_long_enough_that_copies_hide() -> None:
    found = chosen(24 * GB, 500 * GB, "host")
    copying = 80 * found.block_bytes / CHIPS["h200"].host_link
    one = work(1)
    computing = found.sweep_rows * one.flops / CHIPS["h200"].sustained
    assert computing > copying and found.hidden == 1.0
    slower = dataclasses.replace(CHIPS["h200"], host_link=CHIPS["h200"].host_link / 4)
    assert chosen(24 * GB, 500 * GB, "host", chip=slower).sweep_rows > 2 * found.sweep_rows


def test_a_sweep_is_no_longer_than_memory_and_units_allow() -> None:
    assert chosen(80 * GB, 500 * GB, "host", most_rows=16).sweep_rows == 16
    slow = dataclasses.replace(CHIPS["h200"], host_link=1e6)
    found = chosen(80 * GB, 150 * GB, "host", chip=slow)
    assert streamed_bytes(work(found.batch_rows), 0, 2048 * found.sweep_rows) <= 72 * GB
    assert found.hidden < 1 and not found.spills


def test_streams_of_a_long_sweep_wait_on_the_host_if_the_device_is_full() -> None:
    slow = dataclasses.replace(CHIPS["h200"], host_link=CHIPS["h200"].host_link / 20)
    found = chosen(16 * GB, 500 * GB, "host", chip=slow)
    assert found.spills and found.hidden == 1.0
    assert found.stream_bytes == found.sweep_rows * 2048 * 8192 * 2
    assert found.host_bytes == 80 * found.block_bytes + found.stream_bytes <= 0.8 * 500 * GB
    there = streamed_bytes(work(found.batch_rows), 0, 2048 * found.streams_on_device)
    everything = streamed_bytes(work(found.batch_rows), 0, 2048 * found.sweep_rows)
    assert there <= MEMORY_SHARE * 16 * GB < everything
    assert "streams in host memory" in found.told(2048)
    assert not chosen(16 * GB, 145 * GB, "host", chip=slow).spills, "the host is full of blocks"


def test_a_small_device_gets_smaller_batches() -> None:
    found = chosen(12 * GB, 500 * GB)
    assert found.batch_rows < 8
    needed = streamed_bytes(work(found.batch_rows), found.count("resident"), 0)
    assert needed <= MEMORY_SHARE * 12 * GB


def test_on_a_cpu_a_model_larger_than_memory_comes_from_disk() -> None:
    found = choose_residency(
        work, (1, 1), Runtime(), Machine("cpu"), most_rows=10, host_memory=20 * GB
    )
    assert set(found.kept) == {"resident", "disk"} and found.looks_up
    assert found.sweep_rows == found.batch_rows == 1


def test_the_rate_of_files_is_measured(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(64 << 20))
    assert disk_rate([OpenedFile(tmp_path / "weights")]) > 1e7
    assert disk_rate([]) == disk_rate([opened(counted(b"elsewhere", "weights")[1])])


def test_sweeps_from_files_are_as_long_as_reading_and_copying_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residency, "disk_rate", lambda files: 60e9)  # from the page cache
    assert chosen(80 * GB, 500 * GB, "disk").link_rate == 7e9


def packed_work(rows: int) -> Workload:
    """gpt-oss-120b, whose experts are published in MXFP4: 17 bytes for 32 values."""
    plain = work(rows, "gpt-oss-120b")
    experts = [
        spec for spec in block_specs(plain.arch) if spec.name in ("w_gate", "w_up", "w_down")
    ]
    assert experts
    small = {spec.name: math.prod(spec.shape) * 17 // 32 for spec in experts}
    return dataclasses.replace(plain, packed=small)


def test_blocks_stay_packed_on_the_device_if_decoded_ones_do_not_fit() -> None:
    found = chosen(141 * GB, 500 * GB, step=packed_work)
    assert set(found.kept) == {"resident"} and found.streams
    assert found.block_bytes < packed_work(1).block_weights / 3
    assert str(found) == "of 36 blocks of 1.7 GB (packed), 36 on the device"
    decoding = 2 * packed_work(1).block_weights * 36 / CHIPS["h200"].bandwidth
    sweep = found.sweep_rows * packed_work(1).flops / CHIPS["h200"].sustained
    assert decoding < 0.06 * sweep


def test_packed_blocks_are_counted_as_they_are_stored() -> None:
    found = chosen(40 * GB, 500 * GB, step=packed_work)
    counts = [found.count(where) for where in ("resident", "host", "disk")]
    assert counts[0] > 3 and counts[1] > 3 and not counts[2]
    assert found.host_bytes == counts[1] * found.block_bytes
    needed = streamed_bytes(packed_work(found.batch_rows), counts[0], 2048 * found.sweep_rows)
    assert needed <= MEMORY_SHARE * 40 * GB
    slots = (counts[0] + 3) * found.block_bytes + 2 * packed_work(1).block_weights
    assert needed > slots, "besides packed blocks, two that are decoded"
