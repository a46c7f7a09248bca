"""The audit of a unit's documents finds faults behind correct checksums."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.dataset.codec.shard import read_shard_header
from spile.dataset.maintain.verify import verify
from support import stored

UNITS = ((5, 0, 21, 3), (0, 9))


@pytest.fixture(scope="module", params=["whole", "filtered"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    where = "pos >= 2 and doc != 5" if request.param == "filtered" else None
    path = tmp_path_factory.mktemp("audit") / "out"
    made = stored.build(path, UNITS, keep=("id",), where=where)
    assert verify(made.objects).faults == []
    return made


def edit(path: Path, key: str, name: str, row: int, value: Any, made: stored.Stored) -> None:
    info = read_shard_header(made.objects, key)[name]
    np.memmap(path, info.dtype, "r+", info.start, info.shape)[row] = value


@pytest.mark.parametrize(
    ("name", "row", "value", "reason"),
    [
        ("doc", 1, 0, "does not name each document"),
        ("doc", 3, 4, "does not name each document"),
        ("doc", 0, -1, "does not name each document"),
        ("tokens", 0, 4, "do not add up to"),
        ("tokens", 0, -5, "do not add up to"),
        ("tokens", 1, 1, "do not add up to"),
        ("rows", 2, 20, "are not those of the index"),
        ("first_row", 0, 1, "are not those of the index"),
        ("first_row", 1, 0, "are not those of the index"),
        ("skipped", 0, ord("N"), "other documents were left out"),
        ("valid/skipped", 1, False, "other documents were left out"),
        ("valid/skipped", 0, True, "other documents were left out"),
        ("ends/preview", 0, 1 << 40, "ends where none of its texts does"),
        ("preview", 0, 255, "is not UTF-8"),
        ("ends/kept/id", 2, -1, "ends where none of its texts does"),
    ],
)
def test_documents_that_cannot_be_are_found(
    dataset: stored.Stored, name: str, row: int, value: Any, reason: str
) -> None:
    key = dataset.done(0).documents_table.key
    records = [*dataset.listed("done/", "segments/"), "manifest.json"]
    with stored.changed(dataset, key, *records) as paths:
        edit(paths[key], key, name, row, value, dataset)
        assert verify(dataset.objects).faults == [
            f"{key}: checksum does not match (damaged, or another file in its place)"
        ]
        stored.reseal(dataset, 0)
        faults = verify(dataset.objects).faults
        assert faults and all(fault.startswith(key) for fault in faults), faults
        assert any(reason in fault for fault in faults), faults


def test_another_units_table_is_found(dataset: stored.Stored) -> None:
    first, second = (dataset.done(unit).documents_table.key for unit in (0, 1))
    records = [*dataset.listed("done/", "segments/"), "manifest.json"]
    with stored.changed(dataset, first, *records) as paths:
        paths[first].write_bytes((dataset.path / second).read_bytes())
        stored.reseal(dataset, 0)
        (fault,) = verify(dataset.objects).faults
        assert fault == f"{first}: does not hold doc of 4 documents"
