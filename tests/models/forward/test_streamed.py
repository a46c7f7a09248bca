"""Blocks arrive in turn: the copy of each begins before the block before it computes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from spile.core.errors import InputError
from spile.models.files.checkpoint import open_checkpoint
from spile.models.forward.streamed import EmbeddingRows, StreamedBlocks
from spile.models.forward.weight_loader import ArrayLoader
from spile.models.forward.weights import LayerSchedule
from support import tiny

DEPTH = 5


class Said:
    """Blocks that are numbers, and a record of what was done with them, in order."""

    def __init__(self, streamed: list[int], *, reads: bool = True, copied: bool = True) -> None:
        self.log: list[str] = []
        resident = {n: {"w": jnp.int32(n)} for n in range(DEPTH) if n not in streamed}
        read: Callable[[int], Any] | None = self._read if reads else None
        self.blocks = StreamedBlocks(resident, streamed, self._put, read, copied=copied)

    def _read(self, layer: int) -> int:
        return layer

    def _put(self, layer: int, found: int | None) -> dict[str, Any]:
        assert found in (None, layer)
        self.log.append(f"put {layer}")
        return {"w": jnp.int32(layer)}

    def sweep(self, *, ends_after: int = DEPTH) -> None:
        for layer in range(ends_after):
            block = self.blocks.take(layer)
            assert int(block["w"]) == layer
            self.log.append(f"work {layer}")
            self.blocks.used(layer, jnp.int32(layer))


@pytest.mark.parametrize("reads", [True, False])
def test_the_next_block_sets_out_before_the_work_that_it_hides_behind(reads: bool) -> None:
    said = Said(list(range(DEPTH)), reads=reads)
    said.sweep()
    said.sweep()
    for layer in range(DEPTH):
        following = (layer + 1) % DEPTH
        assert said.log.index(f"put {following}") < said.log.index(f"work {layer}") or layer == 4
    assert said.log.count("put 0") == 3, "once for each sweep, and for the one that may follow"


@pytest.mark.parametrize(("slow", "copied"), [("_read", True), ("_read", False), ("_put", True)])
def test_waiting_for_files_is_counted_while_nothing_computes(
    slow: str, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = getattr(Said, slow)
    monkeypatch.setattr(Said, slow, lambda *given: time.sleep(0.05) or quick(*given))
    said = Said(list(range(DEPTH)), copied=copied)
    said.sweep()
    assert said.blocks.waited >= (DEPTH - 1) * 0.03


def test_blocks_that_stay_are_not_brought() -> None:
    said = Said([1, 3])
    said.sweep()
    said.sweep()
    assert {entry for entry in said.log if entry.startswith("put")} == {"put 1", "put 3"}
    # The next one is on its way while blocks that stay are used.
    assert said.log.index("put 3") < said.log.index("work 1")


def test_no_more_than_three_are_there() -> None:
    said = Said(list(range(DEPTH)))
    for layer in range(DEPTH):
        said.blocks.take(layer)
        said.blocks.used(layer, jnp.int32(layer))
        assert len(said.blocks._coming) <= 3


def test_on_a_cpu_there_is_one_beside_the_one_that_is_read() -> None:
    said = Said(list(range(DEPTH)), copied=False)
    for layer in range(DEPTH):
        said.blocks.take(layer)
        said.blocks.used(layer, jnp.int32(layer))
        assert len(said.blocks._coming) == 1
        assert len(said.blocks._reading) <= 1


def test_a_sweep_that_ended_early_does_not_disturb_the_next() -> None:
    said = Said(list(range(DEPTH)))
    said.sweep(ends_after=3)
    said.sweep()


def test_a_block_that_cannot_be_read_raises_where_it_is_taken() -> None:
    said = Said([0, 1, 2, 3, 4])

    def read(layer: int) -> int:
        if layer == 2:
            raise InputError("model.safetensors: cannot be read")
        return layer

    said.blocks._read = read
    with pytest.raises(InputError, match="cannot be read"):
        said.sweep()


def test_rows_of_the_embedding_are_looked_up_in_the_file(model: Path) -> None:
    checkpoint = open_checkpoint(str(model))
    loader = ArrayLoader(checkpoint, LayerSchedule(1, 1, 0), jnp.dtype("float32"), None)
    tokens = np.array([[3, 250, 3], [0, 7, 255]], np.int32)
    wanted = tiny.random_tensors(tiny.CONFIG)["model.embed_tokens.weight"]
    found = EmbeddingRows(checkpoint, loader)(tokens)
    np.testing.assert_array_equal(found, wanted[tokens])
