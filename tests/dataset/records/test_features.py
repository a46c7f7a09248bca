"""Records of features: what is no record is refused, and the first of two stays."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spile.core.errors import CorruptError
from spile.dataset import format as fmt
from spile.dataset.codec.columns import ColumnFile
from spile.dataset.records.features import (
    FeatureFiles,
    FeatureOptions,
    FeatureSet,
    FeatureSpec,
    live_sets,
)
from spile.objects import LocalObjects
from support import stored

SPEC = FeatureSpec(
    tap="mlp_out.1", of="", latents=40, names=(), bounds=(0, 40), stride=2, options=FeatureOptions()
)
FILE = ColumnFile("parts/ab.safetensors", 3, "ab")
PART = FeatureFiles(0, 2, 9, "cd", (FILE,), FILE)


def test_parts_are_cut_where_generations_end() -> None:
    assert SPEC.parts([3, 7]) == [range(0, 2), range(2, 3), range(3, 5), range(5, 7)]


def test_the_first_record_stays(tmp_path: Path) -> None:
    features = FeatureSet(LocalObjects(tmp_path), "mlp_out.1-1")
    assert features.create(SPEC) == SPEC
    assert features.create(replace(SPEC, stride=7)) == SPEC
    features.create_part(PART)
    features.create_part(replace(PART, rows=1))
    assert features.part(0) == PART and features.parts() == {0}
    assert features.part(2) is None and features.newest(9) is None
    for units in (2, 4):
        file = replace(FILE, key="columns/ab.safetensors")
        features.create_summary(replace(PART, units=units, files=(file,), sampled=file))
    found = features.newest(3)
    assert found is not None and found.units == 2


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("features.json", {"latents": -1}),
        ("features.json", {"bounds": [0, 3]}),
        ("features.json", {"bounds": [0, 41, 40]}),
        ("features.json", {"names": ["one"]}),
        ("features.json", {"options": {"examples": 1, "more": 2}}),
        ("features.json", {"tap": "a\nb"}),
        ("features.json", {"vectors": {"key": "../x", "bytes": 1, "digest": "ab"}}),
        ("done/00000000.json", {"rows": 1.5}),
        ("done/00000000.json", {"files": [{"key": "other/ab", "bytes": 1, "digest": "ab"}]}),
        ("done/00000000.json", {"sampled": None}),
    ],
)
def test_forged_records_are_refused(tmp_path: Path, key: str, changes: dict[str, Any]) -> None:
    features = FeatureSet(LocalObjects(tmp_path), "mlp_out.1-1")
    record, kind = (SPEC, "features") if key == "features.json" else (PART, "features-part")
    features.objects.create(key, fmt.encode_record(kind, {**record.to_json(), **changes}))
    with pytest.raises(CorruptError, match=f"features/mlp_out.1-1/{key}: is not a record of"):
        features.spec() if kind == "features" else features.part(0)


def test_only_features_of_live_taps_are_listed(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    FeatureSet(made.objects, "mlp_out.1-1").create(SPEC)
    FeatureSet(made.objects, "mlp_out.1-2").create(replace(SPEC, of="passes/gone/"))
    dropped = FeatureSet(made.objects, "mlp_out.1-3")
    dropped.create(SPEC)
    dropped.drop()
    assert [each.name for each, _ in live_sets(made.ledger)] == ["mlp_out.1-1"]
