"""The prediction of a run: written once, only shown, and never required."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from spile.dataset import format as fmt
from spile.dataset.format import is_amount
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.verify import verify
from spile.dataset.records.prediction import Prediction, create_prediction, read_prediction
from support import stored

EXPECTED = Prediction(tokens=26, rows=26, bytes=900, seconds=1.5, device="cpu", mesh="1")


@pytest.fixture
def made(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out")


def test_the_first_prediction_stays_and_a_missing_one_is_none(
    made: stored.Stored,
) -> None:
    assert read_prediction(made.objects) is None
    create_prediction(made.objects, EXPECTED)
    create_prediction(made.objects, replace(EXPECTED, tokens=1))
    assert read_prediction(made.objects) == EXPECTED
    untimed = replace(EXPECTED, seconds=None)
    made.objects.delete(fmt.PREDICTION)
    create_prediction(made.objects, untimed)
    assert read_prediction(made.objects) == untimed


def test_it_is_part_of_a_sound_dataset(made: stored.Stored) -> None:
    create_prediction(made.objects, EXPECTED)
    report = verify(made.objects)
    assert (report.faults, report.orphans) == ([], [])
    assert collect_garbage(made.objects, abandoned=True) == []
    assert read_prediction(made.objects) == EXPECTED


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": -1},
        {"tokens": True},
        {"bytes": "many"},
        {"seconds": "1e3"},
        {"seconds": -1.0},
        {"seconds": True},
        {"device": "\x1b[2J"},
        {"mesh": None},
        {"more": 1},
    ],
)
def test_one_that_makes_no_sense_is_a_fault_and_is_not_read(
    changes: dict[str, Any], made: stored.Stored
) -> None:
    body = {**asdict(EXPECTED), **changes}
    made.objects.create(fmt.PREDICTION, fmt.encode_record("prediction", body))
    assert read_prediction(made.objects) is None
    (fault,) = verify(made.objects).faults
    assert fault.startswith("prediction.json: ")


def test_a_damaged_one_is_found(made: stored.Stored) -> None:
    create_prediction(made.objects, EXPECTED)
    path = made.path / fmt.PREDICTION
    path.write_bytes(path.read_bytes().replace(b"26", b"27"))
    assert read_prediction(made.objects) is None
    assert verify(made.objects).faults == [
        "prediction.json: checksum does not match (damaged or edited)"
    ]


def test_a_number_that_json_cannot_spell_is_no_time() -> None:
    assert is_amount(0) and is_amount(1.5)
    for value in (json.loads("NaN"), json.loads("Infinity"), -0.1, 10**400, True, "1", None):
        assert not is_amount(value)
