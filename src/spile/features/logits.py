"""The tokens whose logits a latent raises and lowers most: its decoder row times the model's head.

The final norm's weights are part of the head (its scale, which differs from row to row, is left
out; a norm that subtracts the mean does so here, too). Values are relative to the mean over all
tokens. They are the direct effect on the logits, past the layers above the tap.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from spile.models.config.specs import ParamSpec, head_specs, outer_specs
from spile.models.files.checkpoint import Checkpoint, open_checkpoint
from spile.models.files.safetensors import read_tensor

BLOCK = 2048  # latents of a record
_TOKENS = 8192  # rows of the head that are multiplied at a time


@dataclass(frozen=True)
class Head:
    """The head of a model, as rows that a decoder's rows are multiplied with."""

    rows: np.ndarray  # [tokens, width], as stored
    weight: np.ndarray  # of the final norm, float32
    centred: bool  # whether the final norm subtracts the mean

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first token and the rows, in float32, of some tokens at a time."""
        for first in range(0, len(self.rows), _TOKENS):
            yield first, self.rows[first : first + _TOKENS].astype(np.float32)


def read_head(model: str, lora: str | None) -> Head:
    """Read the head of a model."""
    checkpoint = open_checkpoint(model, lora)
    arch = checkpoint.arch
    late = {spec.name: spec for spec in head_specs(arch)}
    own = "embed" if arch.tied_head else "head"
    specs = {spec.name: spec for spec in outer_specs(arch)}
    kind = arch.last_norm or arch.norm
    weight = np.ones(arch.width, np.float32)
    if "final_norm" in late:
        weight = _array(checkpoint, late["final_norm"]).astype(np.float32)
        weight += kind == "rms_plus_one"
    return Head(_array(checkpoint, specs[own]), weight, kind.startswith("layer"))


def _array(checkpoint: Checkpoint, spec: ParamSpec) -> np.ndarray:
    source = checkpoint.source(spec.name)
    (name,) = checkpoint.names(spec)
    parts = [read_tensor(*checkpoint.tensors[each]) for each in checkpoint.stored(name)]
    packed = checkpoint.packed.get(name)
    tensor = packed.decode(np, *parts) if packed else parts[0]
    if checkpoint.adapter and name in checkpoint.adapter.targets:
        tensor = checkpoint.adapter.merge(name, tensor)
    return source.take(tensor, spec, {spec.name: spec})


def extremes(
    head: Head, decoder: np.ndarray, count: int, check: Callable[[], None]
) -> dict[str, np.ndarray]:
    """Return the columns of a block: the tokens with the largest and the smallest logits.

    Args:
        decoder: [latents, width] in float32.
        check: called now and then; raises if the work should stop.
    """
    if head.centred:
        decoder = decoder - decoder.mean(axis=1, keepdims=True)
    decoder = decoder * head.weight
    count = min(count, len(head.rows))
    total = np.zeros(len(decoder))
    best = {name: (np.zeros((len(decoder), 0), np.int32), np.zeros((len(decoder), 0), np.float32))
            for name in ("raised", "lowered")}  # fmt: skip
    for first, rows in head.blocks():
        check()
        product = decoder @ rows.T
        total += product.sum(axis=1, dtype=np.float64)
        for name, sign in (("raised", -1), ("lowered", 1)):
            most = min(count, product.shape[1])
            at = np.argpartition(sign * product, most - 1, axis=1)[:, :most]
            ids = np.concatenate([best[name][0], (first + at).astype(np.int32)], axis=1)
            found = np.concatenate([best[name][1], np.take_along_axis(product, at, axis=1)], axis=1)
            order = np.lexsort((ids, sign * found), axis=1)[:, :count]
            best[name] = (
                np.take_along_axis(ids, order, axis=1),
                np.take_along_axis(found, order, axis=1),
            )
    mean = (total / len(head.rows)).astype(np.float32)[:, None]
    columns: dict[str, np.ndarray] = {}
    for name, (ids, values) in best.items():
        columns |= {f"{name}/ids": ids, f"{name}/value": values - mean}
    return columns
