"""Values from two snapshots of the counters: sums, rates, and nothing unknown."""

import math
import re
from pathlib import Path

import pytest

from spile.metrics.values import (
    LABELS,
    NAMES,
    described,
    disagreement_counts,
    memory_counts,
    next_token_counts,
    step_times,
    tap_counts,
    values_between,
)

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_a_run_of_which_nothing_is_known_reports_its_sums_alone() -> None:
    assert values_between({}, {}, 1.0) == {
        "progress/tokens": 0, "progress/documents": 0, "progress/units": 0, "progress/bytes": 0,
        "store/retries": 0,
    }  # fmt: skip


def test_rates_are_of_the_time_between() -> None:
    before = {"computed": 1000, "bytes": 10**9, "waited_for_text": 1.0, "uploaded": 0}
    now = {"computed": 3000, "bytes": 4 * 10**9, "waited_for_text": 2.0, "uploaded": 10**9}
    found = values_between(before, now, 2.0)
    assert (found["rate/tokens"], found["rate/write"]) == (1000, 1.5)
    assert (found["rate/upload"], found["wait/text_share"]) == (0.5, 0.5)
    assert found["progress/bytes"] == 4 * 10**9
    assert "rate/d2h" not in found, "where the host is the device nothing is copied"


def test_utilization_is_arithmetic_against_the_peak() -> None:
    now = {"computed": 2000, "flops_per_token": 3e9, "peak_flops": 6e12}
    found = values_between({}, now, 2.0)
    assert (found["device/flops"], found["device/mfu"]) == (pytest.approx(3e12), pytest.approx(0.5))
    del now["peak_flops"]
    assert values_between({}, now, 2.0)["device/flops"] == pytest.approx(3e12)
    assert "device/mfu" not in values_between({}, now, 2.0)
    assert "device/flops" not in values_between({}, {"computed": 2000}, 2.0)


def test_memory_is_of_each_device_and_a_share_of_its_limit() -> None:
    now = {**memory_counts(0, 25, 100), **memory_counts(3, 7, None)}
    found = values_between({}, now, 1.0)
    assert found["device/memory_used/0"] == 25 and found["device/memory_limit/0"] == 100
    assert found["device/memory_percent/0"] == 25.0
    assert found["device/memory_used/3"] == 7 and "device/memory_percent/3" not in found


def test_step_times_are_a_mean_and_two_percentiles() -> None:
    found = step_times([0.1] * 18 + [1.0, 2.0])
    assert found == {"step/mean": pytest.approx(0.24), "step/p50": 0.1, "step/p95": 1.0}
    assert step_times([]) == {} and step_times([3.0])["step/p95"] == 3.0


def test_disagreement_is_the_mean_over_compared_tokens_if_it_is_finite() -> None:
    found = values_between({}, disagreement_counts(4, 1.0), 1.0)
    assert found["model/disagreement"] == 0.25
    assert "model/disagreement" not in values_between({}, disagreement_counts(4, math.nan), 1.0)


def test_perplexity_is_of_the_tokens_between() -> None:
    before = next_token_counts(10, -math.log(1000) * 10)
    now = {name: value + more for (name, value), more in zip(
        before.items(), next_token_counts(5, -math.log(8) * 5).values(), strict=True
    )}  # fmt: skip
    assert values_between(before, now, 1.0)["model/perplexity"] == pytest.approx(8)
    assert "model/perplexity" not in values_between(now, now, 1.0)
    assert "model/perplexity" not in values_between({}, next_token_counts(5, math.nan), 1.0)
    assert math.isfinite(values_between({}, next_token_counts(1, -1e9), 1.0)["model/perplexity"])


def test_shares_and_efficiency_are_of_what_grew() -> None:
    before = {"device_busy": 5.0, "device_idle": 5.0, "stepped": 50, "positions": 100}
    now = {"device_busy": 8.0, "device_idle": 6.0, "stepped": 140, "positions": 200}
    found = values_between(before, now, 4.0)
    assert (found["device/busy_share"], found["device/idle_share"]) == (0.75, 0.25)
    assert found["packing/efficiency"] == 0.9
    assert "packing/efficiency" not in values_between(now, now, 4.0)


def test_norms_are_of_the_time_between_and_nonfinite_values_of_all_time() -> None:
    before = tap_counts("embed", 10, 100.0, 2)
    now = tap_counts("embed", 30, 200.0, 3)
    found = values_between(before, now, 1.0)
    assert (found["tap/mean_norm/embed"], found["tap/nonfinite/embed"]) == (5.0, 3)
    assert "tap/mean_norm/embed" not in values_between(now, now, 1.0)


def test_a_norm_that_is_no_number_is_not_reported() -> None:
    found = values_between({}, tap_counts("embed", 10, math.nan, 3), 1.0)
    assert "tap/mean_norm/embed" not in found and found["tap/nonfinite/embed"] == 3


def test_every_value_has_a_name_in_the_table() -> None:
    counted = (
        "computed copied bytes uploaded waited_for_text waited_for_writing waited_for_weights "
        "queue_write peak_flops flops_per_token uploading spooled reading "
        "preparing prepared device_busy device_idle positions stepped predicted surprise "
        "compared gaps"
    )
    now = {**dict.fromkeys(counted.split(), 1.0), **tap_counts("embed", 1, 1.0, 1)}
    values = {**values_between({}, {**now, **memory_counts(0, 1, 2)}, 1.0), **step_times([1.0])}
    found = {described(name)[0] for name in values}
    assert found == set(NAMES) - {"tap/max_abs"}, "which the counters themselves name"


def test_the_page_has_every_name_with_its_unit_and_meaning() -> None:
    _, _, values = PAGE.read_text("utf-8").partition("## Values")
    rows = re.findall(r"^\| `(\S+)` \| (.*?) \| (.*?) \|$", values, re.M)
    shown = {
        name.removesuffix("/TAP").removesuffix("/DEVICE"): (unit, meaning)
        for name, unit, meaning in rows
    }
    assert shown == {
        name: (about.unit + " (total)" * about.total, about.meaning)
        for name, about in NAMES.items()
    }


def test_a_tap_is_told_from_what_is_said_of_it() -> None:
    assert described("tap/mean_norm/resid_post.20") == ("tap/mean_norm", "resid_post.20")
    assert described("rate/tokens") == ("rate/tokens", "")
    assert {"tap/mean_norm", "tap/max_abs", "tap/nonfinite"} == {
        name for name, label in LABELS.items() if label == "tap"
    }
