"""A directory of rollouts is begun once, and each of its units is made once."""

import io
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from spile.core.errors import ConfigError, CorruptError, DataError
from spile.core.units import Span, Unit
from spile.corpus.rollout_columns import COLUMNS, RECORD
from spile.dataset.records.unit_table import UnitColumns
from spile.objects import open_objects
from spile.rollouts.exchange import Sampling
from spile.rollouts.prompts import EnginePrompt
from spile.rollouts.store import AnswerRow, RolloutStore, RolloutTable, encode_unit

SAMPLING = Sampling(api="chat")
TABLE = RolloutTable(
    prompts={"corpus": "a"}, sampling=SAMPLING.identity(), files=[{"path": "a", "identity": "1"}],
    made_with={}, kept={"id": "int64"},
    units=UnitColumns.of([Unit(0, 0, 2, 2, (Span(0, 0, 2),))]),
)  # fmt: skip


def test_what_is_stored_first_stays(tmp_path: Path) -> None:
    store = RolloutStore(open_objects(str(tmp_path)))
    assert store.read() is None
    assert store.create(TABLE) == TABLE
    other = RolloutTable(**{**vars(TABLE), "prompts": {"corpus": "b", "filter": "x"}})
    assert store.create(other) == TABLE
    assert TABLE.differences(other) == {"filter": (None, "x")}
    record = tmp_path / RECORD
    record.write_bytes(record.read_bytes().replace(b'"a"', b'"c"', 1))
    with pytest.raises(CorruptError):
        store.read()


def test_a_unit_is_made_once(tmp_path: Path) -> None:
    store = RolloutStore(open_objects(str(tmp_path)))
    assert store.done() == set()
    assert store.commit(300, b"first") and not store.commit(300, b"second")
    (tmp_path / "data" / "000001" / "a.txt").write_text("")
    assert store.done() == {300}
    assert (tmp_path / "data" / "000001" / "00000300.parquet").read_bytes() == b"first"


def test_rollouts_do_not_begin_in_a_dataset(tmp_path: Path) -> None:
    store = RolloutStore(open_objects(str(tmp_path)))
    store.create(TABLE)
    (tmp_path / RECORD).rename(tmp_path / "units.json")
    with pytest.raises((ConfigError, CorruptError)):
        store.create(TABLE)


def test_kept_columns_have_the_type_of_the_first_rows() -> None:
    names = [field.name for field in encode_schema()]
    assert names == [*COLUMNS, "id"]
    for value in (1.5, "x", True):
        row = AnswerRow(EnginePrompt(0, "empty", columns={"id": value}), 0, error="empty")
        with pytest.raises(DataError, match="leave it out with --keep"):
            encode_unit([row], SAMPLING, "vllm", {"id": "int64"})


def encode_schema() -> Any:
    row = AnswerRow(EnginePrompt(0, "empty", columns={"id": 1}), 0, error="empty")
    return pq.read_schema(io.BytesIO(encode_unit([row], SAMPLING, "vllm", {"id": "int64"})))
