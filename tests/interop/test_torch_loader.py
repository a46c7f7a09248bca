"""Batches as tensors: the same ones in the same order for any number of workers."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spile
from spile.core.errors import ConfigError
from spile.interop.torch_loader import TorchLoader
from support import stored

TAPS = {"resid_post.0": 3, "mlp_out.1": 2}


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    path = tmp_path_factory.mktemp("torch") / "out"
    made = stored.build(path, ((700, 300), (257,)), taps=TAPS, dtype="bfloat16", shard_bytes=1000)
    return spile.open(str(made.path))


def plain(ds: spile.Dataset, **options: Any) -> list[dict[str, np.ndarray]]:
    return list(ds.batches(list(TAPS), 100, window=512, dtype="stored", **options))


def loader(ds: spile.Dataset, workers: int = 0, **options: Any) -> TorchLoader:
    how = {"multiprocessing_context": "spawn"} if workers else {}
    return TorchLoader(ds, list(TAPS), 100, window=512, num_workers=workers, loader=how, **options)


def same(tensors: list[dict[str, Any]], arrays: list[dict[str, np.ndarray]]) -> bool:
    assert len(tensors) == len(arrays)
    for found, wanted in zip(tensors, arrays, strict=True):
        for tap in TAPS:
            assert found[tap].dtype == torch.bfloat16
            assert found[tap].view(torch.int16).numpy().tobytes() == wanted[tap].tobytes()
        for column in wanted["index"].dtype.names or ():
            assert found[f"index/{column}"].tolist() == wanted["index"][column].tolist()
    return True


def test_tensors_hold_the_rows_of_the_same_batches(ds: spile.Dataset) -> None:
    assert same(list(loader(ds)), plain(ds))
    assert len(loader(ds, epochs=2)) == 26
    (wide,) = TorchLoader(ds, "mlp_out.1", 2000, dtype="float32", index=False)
    assert wide.keys() == {"mlp_out.1"}
    assert wide["mlp_out.1"].dtype == torch.float32
    with pytest.raises(ConfigError, match="encoded"):
        loader(ds, encoded=True)


def test_a_dataset_for_ones_own_loader_takes_what_a_loader_takes(ds: spile.Dataset) -> None:
    made = spile.torch_dataset(ds, list(TAPS), 100, window=512)
    assert same(list(pickle.loads(pickle.dumps(made))), plain(ds))
    begun = ds.batches(list(TAPS), 100, window=512)
    next(begun)
    later = spile.torch_dataset(ds, list(TAPS), 100, window=512, state=begun.state_dict())
    assert same(list(later), plain(ds)[1:])
    assert repr(later) == f"<spile.torch_dataset of {begun!r}>"
    assert repr(loader(ds)).startswith("<spile.TorchLoader, num_workers=0: <spile batches of 100 ")
    rows = spile.TorchRows(ds, "mlp_out.1", 100)
    assert repr(rows).startswith("<spile.TorchRows in torch.float32 on cpu: <spile.TorchLoader, ")
    with pytest.raises(ConfigError, match="no tap 'q.3'"):
        spile.torch_dataset(ds, "q.3", 100)


@pytest.mark.full
def test_any_number_of_workers_continues_where_another_stood(ds: spile.Dataset) -> None:
    """Epochs go on where workers' turns are; the rest is read by this process, by two workers and
    without torch."""
    wanted = plain(ds, epochs=2, seed=3)
    first = loader(ds, 2, epochs=2, seed=3)
    iterator = iter(first)
    begun = [next(iterator) for _ in range(15)]
    state = json.loads(json.dumps(first.state_dict()))
    assert same(begun, wanted[:15])
    assert same([*iterator], wanted[15:])
    alone = loader(ds, epochs=2, seed=3)
    alone.load_state_dict(state)
    assert same(list(alone), wanted[15:])
    bare = ds.batches(list(TAPS), 100, window=512, epochs=2, seed=3)
    bare.load_state_dict(state)
    assert [b["index"].tobytes() for b in bare] == [b["index"].tobytes() for b in wanted[15:]]


def test_ranks_have_workers_too(ds: spile.Dataset, tmp_path: Path) -> None:
    halves = [list(loader(ds, rank=rank, world=2)) for rank in range(2)]
    joined = [{k: torch.cat([a[k], b[k]]) for k in a} for a, b in zip(*halves, strict=True)]
    assert same(joined, plain(ds))
