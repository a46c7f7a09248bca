"""Datasets of several models over the same tokens: read row for row, or refused."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.dataset.format import TapInfo
from spile.dataset.read.window import BatchBuilder
from support import stored
from support.marks import some

LENGTHS = ((70, 30), (90,), (0,), (57, 60), (41,))
WIDE, NARROW = {"resid_post.0": 6, "mlp_out.1": 3}, {"resid_post.0": 4}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    return stored.build(tmp_path_factory.mktemp("a") / "base", LENGTHS, taps=WIDE)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    """The rows of another model for the same tokens, in another dtype and other files."""
    path, model = tmp_path_factory.mktemp("b") / "chat", {"config": "beef", "weights": "cafe"}
    return stored.build(
        path, LENGTHS, taps=NARROW, dtype="bfloat16", model=model, shard_bytes=300
    )  # fmt: skip


@pytest.fixture
def pair(base: stored.Stored, chat: stored.Stored) -> spile.AlignedDatasets:
    return spile.align(base.path, spile.open(chat.path))


def numbers(source: stored.Stored, index: np.ndarray) -> np.ndarray:
    where = {(e["doc"], e["offset"]): i for i, e in enumerate(source.index)}
    return np.array([where[e["doc"], e["offset"]] for e in index])


@pytest.mark.parametrize("options", [
    {"shuffle": None}, {"window": 64, "block": 8}, {"shuffle": "full"}, {"window": "2KiB"},
    {"where": "pos >= 2", "drop_last": True}, {"rank": 1, "world": 2},
])  # fmt: skip
def test_batches_hold_the_same_rows_of_every_side(
    options: dict[str, Any], pair: Any, base: stored.Stored, chat: stored.Stored
) -> None:
    seen = 0
    for batch in pair.batches(["resid_post.0", "base/mlp_out.1"], 50, seed=3, **options):
        assert list(batch) == ["base/resid_post.0", "base/mlp_out.1", "index", "chat/resid_post.0"]
        rows = numbers(base, batch["index"])
        np.testing.assert_array_equal(batch["base/resid_post.0"], base.rows["resid_post.0"][rows])
        np.testing.assert_array_equal(batch["base/mlp_out.1"], base.rows["mlp_out.1"][rows])
        np.testing.assert_array_equal(batch["chat/resid_post.0"], chat.rows["resid_post.0"][rows])
        seen += len(rows)
    assert seen >= 150


def test_one_side_can_be_read_in_the_order_of_both(pair: Any, chat: stored.Stored) -> None:
    (batch,) = pair.batches("chat/resid_post.0", 1000)
    assert set(batch) == {"index", "chat/resid_post.0"}
    rows = numbers(chat, batch["index"])
    np.testing.assert_array_equal(batch["chat/resid_post.0"], chat.rows["resid_post.0"][rows])


def test_the_iteration_continues_from_its_state(pair: Any) -> None:
    whole = [*pair.batches("resid_post.0", 50, window=64)]
    begun = pair.batches("resid_post.0", 50, window=64)
    for _ in range(3):
        next(begun)
    again = pickle.loads(pickle.dumps(pair)).batches("resid_post.0", 50, window=64)
    again.load_state_dict(begun.state_dict())
    rest = [*again]
    assert len(rest) == len(whole) - 3 == len(again) - 3
    for one, two in zip(rest, whole[3:], strict=True):
        assert all(one[name].tobytes() == two[name].tobytes() for name in two)


@pytest.mark.parametrize("workers", some([0, 2], 0))
def test_torch_reads_both_sides(workers: int, pair: Any) -> None:
    torch = pytest.importorskip("torch")
    want = [*pair.batches("resid_post.0", 50, window=64)]
    how = {"multiprocessing_context": "spawn"} if workers else {}
    loader = spile.TorchLoader(pair, "resid_post.0", 50, window=64, num_workers=workers, loader=how)
    for batch, tensors in zip(want, loader, strict=True):
        assert tensors["chat/resid_post.0"].dtype == torch.bfloat16
        np.testing.assert_array_equal(batch["base/resid_post.0"], tensors["base/resid_post.0"])
        np.testing.assert_array_equal(batch["index"]["doc"], tensors["index/doc"])


def test_devices_decode_each_side_by_its_own_scales(tmp_path: Path) -> None:
    kinds = {"base": "int8", "chat": "float8_e4m3"}
    for seed, (name, dtype) in enumerate(kinds.items()):
        taps = {"q.1": TapInfo((2, 3), dtype)}
        stored.build(tmp_path / name, LENGTHS, taps=taps, dtype=dtype, latents=seed + 1)
    pair = spile.align(*(tmp_path / name for name in kinds))
    plain = pair.batches("q.1", 50)
    coded = spile.on_devices(pair.batches("q.1", 50, encoded=True))
    for want, found in zip(plain, coded, strict=True):
        for side in kinds:
            np.testing.assert_allclose(found[f"{side}/q.1"], want[f"{side}/q.1"], rtol=1e-6)


def test_a_batch_that_a_side_cannot_give_is_not_counted(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [*pair.batches("resid_post.0", 50, window=64)]
    found = pair.batches("resid_post.0", 50, window=64)
    next(found)
    with monkeypatch.context() as broken:

        def finish(builder: Any) -> Any:
            made = finished(builder)
            if "chat/resid_post.0" in made:
                raise OSError("the disk failed")
            return made

        finished = BatchBuilder.finish
        broken.setattr(BatchBuilder, "finish", finish)
        with pytest.raises(OSError, match="the disk failed"):
            next(found)
    for one, two in zip(found, whole[1:], strict=True):
        assert all(one[name].tobytes() == two[name].tobytes() for name in two)


def test_a_pair_reads_like_a_dataset(pair: Any, base: stored.Stored, chat: stored.Stored) -> None:
    assert pair.taps == ["base/resid_post.0", "base/mlp_out.1", "chat/resid_post.0"]
    assert pair.num_tokens == len(base.index)
    np.testing.assert_array_equal(pair.read("chat/resid_post.0", 3, 9),
                                  chat.rows["resid_post.0"][3:9])  # fmt: skip
    np.testing.assert_array_equal(pair.index(3, 9), base.index[3:9])
    assert pair.statistics("base/mlp_out.1").count == len(base.index)
    with pytest.raises(ConfigError, match="name the side, as in base/mlp_out.1"):
        pair.read("mlp_out.1", 0, 1)


def test_rows_are_compared_one_by_one(tmp_path: Path) -> None:
    taps = {"resid_post.0": 4, "logits": 5}
    for seed, name in enumerate(("one", "two")):
        stored.build(tmp_path / name, LENGTHS, taps=taps, latents=seed + 1)
    pair = spile.align(tmp_path / "one", tmp_path / "two")
    one, two = (pair.read(f"{side}/logits", 0, 40).astype(np.float64) for side in pair.sides)
    found = pair.compare("logits", 0, 40)
    lengths = np.linalg.norm(one, axis=1), np.linalg.norm(two, axis=1)
    np.testing.assert_allclose(found["cosine"], (one * two).sum(1) / lengths[0] / lengths[1], 1e-5)
    np.testing.assert_allclose(found["relative"], np.linalg.norm(two - one, axis=1) / lengths[0],
                               1e-5)  # fmt: skip
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (one, two))
    np.testing.assert_allclose(found["kl"], (p * np.log(p / q)).sum(1), rtol=1e-4, atol=1e-6)
    assert set(pair.compare("resid_post.0", 0, 3)) == {"cosine", "relative"}
    past = pair.compare("resid_post.0", pair.num_tokens - 2, pair.num_tokens + 9)
    assert past["cosine"].shape == (2,), "as of a slice, what is past the end is not there"


@pytest.mark.parametrize(("changes", "reason"), [
    ({"seq_len": 16}, "seq_len is 8 and 16"),
    ({"pack": "none", "seed": 1}, "pack is ffd and none"),
    ({"model": {"tokenizer": "aa"}, "seed": 1}, "another tokenizer"),
    ({"units": LENGTHS[:3]}, "5 and 3 units"),
    ({"seed": 1}, "another order"),
])  # fmt: skip
def test_other_rows_are_refused_with_what_differs(
    changes: dict[str, Any], reason: str, base: stored.Stored, tmp_path: Path
) -> None:
    lengths = changes.pop("units", LENGTHS)
    stored.build(tmp_path / "other", lengths, taps=NARROW, **changes)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        spile.align(base.path, tmp_path / "other")


def test_sides_need_names_of_their_own(base: stored.Stored, chat: stored.Stored) -> None:
    with pytest.raises(ConfigError, match="two datasets are named base"):
        spile.align(base.path, base.path)
    assert list(spile.align(a=base.path, b=base.path).sides) == ["a", "b"]
    with pytest.raises(ConfigError, match="two datasets or more"):
        spile.align(base.path)
