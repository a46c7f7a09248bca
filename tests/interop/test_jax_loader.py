"""Batches on devices: the same rows on every mesh, with 8-bit values decoded bit for bit."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import spile
from spile.interop.jax_loader import on_devices
from support import stored, tiny


@pytest.fixture(scope="module", params=["plain", "scaled"])
def ds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    path = tmp_path_factory.mktemp("jax") / "out"
    taps = {"plain": stored.SHAPED, "scaled": stored.SCALED}[request.param]
    return spile.open(str(stored.build(path, ((300, 21),), taps=taps, shard_bytes=900).path))


def rows_on_mesh() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


@pytest.mark.parametrize("mesh", [False, True])
def test_devices_hold_the_rows_of_the_same_batches(ds: spile.Dataset, mesh: bool) -> None:
    size = 8 * len(jax.devices())
    wanted = list(ds.batches(ds.taps, size, drop_last=True, dtype="stored"))
    given = ds.batches(ds.taps, size, encoded=True, drop_last=True)
    found = list(on_devices(given, rows_on_mesh() if mesh else None))
    assert len(found) == len(wanted) == 321 // size
    for batch, values in zip(found, wanted, strict=True):
        for tap in ds.taps:
            assert isinstance(batch[tap], jax.Array)
            assert len(batch[tap].sharding.device_set) == (len(jax.devices()) if mesh else 1)
            assert np.asarray(batch[tap]).tobytes() == values[tap].tobytes()
        assert batch["index"].tobytes() == values["index"].tobytes()


def test_rows_are_normalized_and_converted_on_the_device(ds: spile.Dataset) -> None:
    taps = ["resid_post.0", "q.1"]
    for normalize in ("mean", "std", "norm"):
        (host,) = ds.batches(taps, 321, normalize=normalize)
        given = ds.batches(taps, 321, normalize=normalize, encoded=True)
        (batch,) = on_devices(given, dtype=jnp.bfloat16)
        for tap in taps:
            assert batch[tap].dtype == jnp.bfloat16
            np.testing.assert_allclose(
                np.asarray(batch[tap], np.float32), host[tap], rtol=1e-2, atol=1e-2
            )


def test_a_batch_knows_where_the_iteration_stands_after_it(ds: spile.Dataset) -> None:
    wanted = [batch["index"].tobytes() for batch in ds.batches([], 40)]
    iterator = on_devices(ds.batches([], 40), ahead=3)
    _, batch = next(iterator), next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    rest = ds.batches([], 40)
    rest.load_state_dict(batch["state"])
    assert [batch["index"].tobytes() for batch in rest] == wanted[2:]


_WORLD = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import spile
from spile.core.errors import ConfigError
from spile.interop.jax_loader import on_devices

path, coordinator, process = sys.argv[1:]
jax.distributed.initialize(coordinator, 2, int(process))
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
ds = spile.open(path)

def shared(size, **options):
    given = ds.batches(ds.taps, size, seed=2, encoded=True, drop_last=True, **options)
    return on_devices(given, sharding)

mine = {"rank": jax.process_index(), "world": jax.process_count()}
wanted = list(ds.batches(ds.taps, 40, seed=2, drop_last=True))
found = list(shared(40, **mine))
assert len(found) == len(wanted) == 8
for batch, whole in zip(found, wanted):
    for tap in ds.taps:
        assert batch[tap].shape == whole[tap].shape
        for shard in batch[tap].addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole[tap][shard.index].tobytes()
for size, options, words in ((42, mine, "split evenly"), (40, {}, "world=")):
    try:
        list(shared(size, **options))
    except ConfigError as error:
        assert words in str(error)
    else:
        raise AssertionError
print(jax.device_count(), "devices agree")
"""


def test_processes_of_a_world_make_one_array_in_the_one_order(tmp_path: Path) -> None:
    path = tmp_path / "out"
    stored.build(path, ((300, 21),), taps=stored.SCALED, shard_bytes=900)
    where = f"127.0.0.1:{tiny.free_port()}"
    environment = tiny.environment() | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    started = [
        subprocess.Popen([sys.executable, "-c", _WORLD, str(path), where, str(process)],
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for process in range(2)
    ]  # fmt: skip
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err[-3000:]
        assert out.splitlines()[-1] == "4 devices agree"
