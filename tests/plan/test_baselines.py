"""`--baseline`: how it is spelled, and what belongs to each tap (e2e/test_baselines.py runs it)."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from spile.core.errors import ConfigError
from spile.models.taps import Tap
from spile.plan.baselines import Baseline, baseline_source


@pytest.mark.parametrize(
    ("given", "source"),
    [
        (None, None),
        ("zero", None),
        ("acts/means", "/now/acts/means"),
        ("acts/means:en", "/now/acts/means:en"),
        ("acts/means:en,de", "/now/acts/means:en,de"),
        ("s3://bucket/means", "/now/s3://bucket/means"),
    ],
)
def test_a_path_changes_and_a_label_does_not(given: str | None, source: str | None) -> None:
    assert baseline_source(given, lambda path: f"/now/{path}") == source


def test_a_directory_with_a_colon_in_its_name_has_no_label(tmp_path: Path) -> None:
    folder = tmp_path / "one:two"
    folder.mkdir()
    assert baseline_source(str(folder), str.upper) == str(folder).upper()


def rows() -> Baseline:
    columns = {"embed": (3,), "z.0": (2, 4)}
    return Baseline(
        given="acts", identity="rows 1", dataset=cast(Any, object()), columns=columns
    )  # fmt: skip


def test_the_heads_of_a_tap_have_their_own_columns_or_means() -> None:
    assert rows().width == 11
    assert rows().of_tap(Tap("embed")).tolist() == [0, 1, 2]
    assert rows().of_tap(Tap("z", 0)).tolist() == [*range(3, 11)]
    assert rows().of_tap(Tap("z", 0, (1,))).tolist() == [7, 8, 9, 10]
    mean = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    means = Baseline(given="acts", identity="mean 1", means={"z.0": mean})
    assert means.width == 0
    assert means.of_tap(Tap("z", 0, (1,))).tolist() == [[4.0, 5.0, 6.0, 7.0]]


def test_a_unit_that_would_fill_the_memory_is_refused_with_a_remedy() -> None:
    rows().refuse_large(1 << 20, 3)
    with pytest.raises(ConfigError, match="unit 3 would hold .* give --unit-tokens "):
        rows().refuse_large(1 << 30, 3)
