"""Batches as Arrow and back: every dtype bit for bit; other schemas are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import spile
from spile.core.errors import StoreError
from spile.dataset.read.window import Encoded
from spile.interop.flight.wire import Described, schema_of, to_arrow
from support import stored


@pytest.mark.parametrize("index", [True, False])
def test_a_batch_comes_back_to_the_bit(tmp_path: Path, index: bool) -> None:
    made = stored.build(tmp_path / "out", taps=stored.SCALED)
    ds = spile.open(str(made.path))
    batches = ds.batches(ds.taps, 50, shuffle=None, encoded=True, index=index)
    schema = schema_of(batches.view)
    described = Described.of(schema)
    assert described.index is index
    for batch in batches:
        back = described.from_arrow(to_arrow(batch, schema), None, encoded=True)
        assert back.keys() == batch.keys()
        for name, values in batch.items():
            assert _bytes(back[name]) == _bytes(values)


def _bytes(values: Any) -> tuple[bytes, ...]:
    parts = values if isinstance(values, Encoded) else (values,)
    return tuple(np.ascontiguousarray(part).tobytes() for part in parts)


@pytest.mark.parametrize(
    ("about", "complaint"),
    [
        (None, "does not serve Spile's rows"),
        ([], "does not serve Spile's rows"),
        ({"version": 1, "taps": {"q.1": {}}, "index": True}, "does not serve Spile's rows"),
        ({"version": 9}, "speaks version 9, this client 1"),
    ],
)
def test_a_schema_that_is_not_ours_is_refused(about: Any, complaint: str) -> None:
    metadata = {} if about is None else {b"spile": json.dumps(about).encode()}
    with pytest.raises(StoreError, match=complaint):
        Described.of(pa.schema([], metadata))
