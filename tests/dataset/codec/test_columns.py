"""Files of columns: equal columns give equal bytes, and every changed byte is noticed."""

from pathlib import Path

import numpy as np
import pytest

from spile.core.errors import CorruptError
from spile.dataset.codec.columns import (
    ColumnFile,
    column_file,
    columns_in,
    encode_columns,
    named_by_content,
    read_columns,
    text_at,
    text_columns,
    texts_at,
)
from spile.objects import LocalObjects, MemoryObjects, Objects

TEXTS = ["", "a", "größer", "", "ends"]
COLUMNS = {"n": np.arange(5), **text_columns("t", TEXTS), "x": np.linspace(0, 1, 3)}


@pytest.fixture(params=["disk", "memory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    return LocalObjects(tmp_path) if request.param == "disk" else MemoryObjects()


def test_columns_read_back(objects: Objects) -> None:
    file, data = named_by_content("units/", COLUMNS)
    objects.create(file.key, data)
    found = read_columns(objects, file)
    assert found.keys() == COLUMNS.keys()
    assert all(np.array_equal(found[name], COLUMNS[name]) for name in COLUMNS)
    assert texts_at(found, "t", slice(0, 5)) == TEXTS
    assert texts_at(found, "t", slice(2, 4)) == TEXTS[2:4]
    assert [text_at(found, "t", at) for at in range(5)] == TEXTS


def test_the_bytes_do_not_depend_on_the_order_in_which_columns_are_given() -> None:
    assert encode_columns(dict(reversed(COLUMNS.items()))) == encode_columns(COLUMNS)


def test_a_changed_missing_or_shorter_file_is_refused(objects: Objects) -> None:
    file, data = named_by_content("units/", COLUMNS)
    with pytest.raises(CorruptError, match="is missing"):
        read_columns(objects, file)
    for position in range(0, len(data), 97):
        spoilt = bytearray(data)
        spoilt[position] ^= 1
        objects.replace(file.key, bytes(spoilt))
        with pytest.raises(CorruptError, match=file.key):
            read_columns(objects, file)
    objects.replace(file.key, data[:-1])
    with pytest.raises(CorruptError, match="does not have the"):
        read_columns(objects, file)


def test_a_file_without_values_reads_back(objects: Objects) -> None:
    empty = {"n": np.empty(0, np.int64)}
    file = column_file("units/x", encode_columns(empty))
    objects.create(file.key, encode_columns(empty))
    assert len(read_columns(objects, file)["n"]) == 0
    assert len(columns_in("k", encode_columns(empty))["n"]) == 0


@pytest.mark.parametrize(
    "change", [{"key": "../x"}, {"key": 3}, {"bytes": -1}, {"digest": None}, {"bytes": "9"}]
)
def test_a_reference_that_is_none_is_refused(change: dict[str, object]) -> None:
    good = {"key": "units/a", "bytes": 9, "digest": "00"}
    assert ColumnFile.from_json(good, "units/") == ColumnFile("units/a", 9, "00")
    with pytest.raises(ValueError, match="not a file of columns"):
        ColumnFile.from_json({**good, **change}, "units/")
