"""Parquet files, opened by Arrow and `datasets`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from spile.interop.export import Exported, parquet
from support import stored

Run = Callable[..., tuple[Path, Exported]]


def check_table(table: pa.Table, written: stored.Stored) -> None:
    assert table.num_rows == 111
    for name in written.index.dtype.names or ():
        assert np.array_equal(table.column(name).to_numpy(), written.index[name])
    for tap, rows in written.rows.items():
        wanted = rows.astype(np.float32) if rows.dtype.name == "bfloat16" else rows
        column = table.column(tap).combine_chunks()
        if rows.ndim > 1:
            assert column.type.list_size == rows[0].size
            column = column.flatten()
        assert np.array_equal(column.to_numpy().reshape(rows.shape), wanted)


def test_arrow_opens_parquet(
    written: stored.Stored, exported: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_FILE_BYTES", 3000)
    dest, _ = exported(written, "parquet")
    files = sorted(dest.glob("*.parquet"))
    assert len(files) > 2
    check_table(pa.concat_tables([pq.read_table(path) for path in files]), written)
    about = json.loads(pq.read_schema(files[0]).metadata[b"spile"])
    assert about["fingerprint"] == written.table.fingerprint
    assert about["taps"]["q.1"]["shape"] == [2, 3]
    assert "`blocks.0.hook_resid_post`" in (dest / "README.md").read_text()


def test_documents_lie_beside_the_rows_in_columns_of_one_type(
    exported: Run, tmp_path: Path
) -> None:
    dest, _ = exported(stored.build(tmp_path / "out", keep=("id", "mixed")), "parquet")
    table = feather.read_table(dest / "documents.arrow")
    assert table.column_names == ["doc", "tokens", "rows", "skipped", "preview", "id", "mixed"]
    assert table["doc"].to_pylist() == list(range(11))
    assert table["id"].to_pylist() == [f"id-{doc}" for doc in range(11)]
    assert table["mixed"].to_pylist()[:4] == ["0", "1", "2", "mixed-3"]


def test_datasets_opens_parquet(floats: stored.Stored, exported: Run, tmp_path: Path) -> None:
    datasets: Any = pytest.importorskip("datasets", reason="datasets is not installed")
    dest, _ = exported(floats, "parquet")
    cache = str(tmp_path / "cache")
    found = datasets.load_dataset(str(dest), split="train", cache_dir=cache)
    check_table(found.data.table, floats)
