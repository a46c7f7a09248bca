"""Arrays on a mesh: moved between meshes, and read back by run."""

from pathlib import Path

import jax
import numpy as np
import pytest

from spile.models.files.checkpoint import open_checkpoint
from spile.models.forward import sharding
from spile.models.forward.sharding import P, local_runs, make_mesh, moved, put
from spile.models.forward.weights import moved_params
from spile.models.layout import Layout
from support.meshes import make_step, shards_of

VALUES = np.arange(48 * 6, dtype=np.float32).reshape(48, 6)


def on(layout: Layout, spec: jax.sharding.PartitionSpec) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(make_mesh(layout, jax.devices()[: layout.size]), spec)


@pytest.mark.parametrize("size", [1 << 20, 100, 1], ids=["whole", "in pieces", "row by row"])
def test_an_array_moved_to_another_mesh_is_the_same(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "_MOVED", size)
    before = put(VALUES, on(Layout(8), P("data")))
    after = on(Layout(1, 2, 2), P("model", "fsdp"))
    found = moved(before, after)
    assert found.sharding == after
    assert np.asarray(found).tobytes() == VALUES.tobytes()
    assert found.addressable_shards[0].data.shape == (24, 3)


def test_a_model_moved_to_another_mesh_is_the_one_loaded_there(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "_MOVED", 2000)
    layout = Layout(1, 2, 2)
    loaded = make_step(model, "resid_post:all", layout).params
    shards = shards_of(open_checkpoint(str(model)), layout)
    found = moved_params(make_step(model, "resid_post:all", Layout(8)).params, shards)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(loaded), strict=True):
        assert one.sharding == other.sharding
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_runs_are_in_the_order_of_what_they_hold() -> None:
    array = put(VALUES, on(Layout(2, 2, 2), P(("data", "fsdp", "model"))))
    runs = local_runs(array)
    assert [len(run) for run in runs] == [6] * 8
    assert np.concatenate(runs).tobytes() == VALUES.tobytes()
