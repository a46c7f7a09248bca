"""A dataset in a bucket is the dataset of a disk."""

from pathlib import Path

import numpy as np
import pytest

import servers
import spile
from spile.objects import open_objects
from spile.store.verify import verify

TAPS = "embed,resid_post:1"


STORES = {"s3": servers.new_s3_store, "gs": servers.new_gcs_store}


@pytest.mark.parametrize("kind", [*STORES, "memory"])
def test_what_is_extracted_into_a_bucket_is_what_a_disk_would_hold(
    kind: str, model: Path, corpus: Path, tmp_path: Path
) -> None:
    out = STORES[kind]() if kind in STORES else f"memory://{tmp_path.name}"
    recipe = spile.Recipe(
        model=str(model), corpus=str(corpus), taps=TAPS, seq_len=32, unit_tokens=200
    )
    outcome = spile.extract(recipe, out, spile.Runtime(shard_bytes=4096))
    spile.extract(recipe, str(tmp_path / "disk"))
    assert verify(open_objects(out)).ok
    there, here = spile.open(out), spile.open(str(tmp_path / "disk"))
    assert there.num_tokens == here.num_tokens == outcome.rows > 100
    assert there.index(0, outcome.rows).tobytes() == here.index(0, outcome.rows).tobytes()
    for tap in here.taps:
        one, other = (ds.read(tap, 0, outcome.rows) for ds in (there, here))
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    again = spile.extract(spile.Recipe(), out)
    assert again.units == outcome.units, "it is complete"
