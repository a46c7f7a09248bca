"""Refine a tuned lens: lower the KL divergence between the model's predictions and the lens's.

Muon takes one step for each batch of rows, straight from the model (`spile.stream`), whose order a
seed fixes: momentum, made orthogonal, so that a step moves all directions of a map by the same
length, whatever the size of their gradients. Maps are in units of each channel's spread: one
learning rate serves channels, and models, of very different sizes. The state is stored every few
steps, and a refinement continues from there.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spile.core.config import Recipe, Runtime
from spile.core.tensors import TensorInfo
from spile.core.torch_zip import read_torch_zip
from spile.core.torch_zip_writer import write_torch_zip
from spile.models.config.arch import Arch
from spile.models.files.checkpoint import open_checkpoint
from spile.models.forward.ends import head_values
from spile.models.forward.weight_loader import ArrayLoader
from spile.models.forward.weights import LayerSchedule, WeightArrays
from spile.objects import Objects, exists
from spile.run.stream import stream

ROWS = 1024  # of a batch
RATE = 0.02  # in units of spreads; it falls to zero
STATE = "refining.pt"
_EVERY = 25  # steps between two stored states
_WINDOW = 16  # batches whose rows are in random order
_MOMENTUM = 0.9
# Of x -> a x + (b s + c s²) x with s = x x': five times bring singular values near to 1 (Jordan,
# 2024: kellerjordan.github.io/posts/muon).
_NEWTON_SCHULZ, _ITERATIONS = (3.4445, -4.775, 2.0315), 5

Maps = Mapping[str, tuple[np.ndarray, np.ndarray]]  # by tap: the matrix and bias of the map


@dataclass(frozen=True)
class RefineOptions:
    """How long to refine, and how fast."""

    steps: int
    rate: float = RATE


class _State(NamedTuple):
    """What a step changes; the first axis is layers. Biases are the last column."""

    maps: Float[Array, "layers out in+1"]
    momentum: Float[Array, "layers out in+1"]


@dataclass(frozen=True)
class Refined:
    """Refined maps, and each tap's mean KL divergence in the first and last tenth of the steps."""

    maps: Maps
    before: Mapping[str, float]
    after: Mapping[str, float]


def refine(
    recipe: Recipe,
    target: str,
    maps: Maps,
    spreads: Mapping[str, np.ndarray],
    objects: Objects,
    options: RefineOptions,
    *,
    identity: str,
    runtime: Runtime | None = None,
) -> Refined:
    """Refine the maps of several taps; continue if a state of the same refinement is stored.

    Args:
        recipe: of the rows, without taps.
        target: the tap of the last stream.
        spreads: standard deviations of each tap's channels, and of the target's.
        objects: where the state is stored.
        identity: what the maps were made from.
    """
    names = [*maps]
    taps = ",".join([*names, target])
    rows = replace(recipe, taps=taps, reduce=None, store_dtype="float32")
    told = json.dumps([identity, names, options.steps, options.rate, ROWS, "muon"])
    ours, theirs = (_scales([spreads[n] for n in names]), _scales([spreads[target]]))
    state = _begin(maps, ours, theirs)
    kls = np.zeros((options.steps, len(names)))
    batches = stream(
        rows, runtime, batch_size=ROWS, index=False, window=_WINDOW * ROWS, epochs=None,
        dtype=np.float32, drop_last=True,
    )  # fmt: skip
    first, found = 0, _stored(objects, told)
    if found:
        first, place, kls, state = found
        batches.load_state_dict(place)
    change = _stepping(recipe, ours, theirs)
    with batches:
        for step in range(first, options.steps):
            batch = next(batches)
            x = np.stack([np.asarray(batch[name]) for name in names])
            rate = options.rate * (1 - step / options.steps)
            state, losses = change(state, x, np.asarray(batch[target]), rate)
            kls[step] = np.asarray(losses)
            if (step + 1) % _EVERY == 0 or step + 1 == options.steps:
                _store(objects, told, step + 1, batches.state_dict(), kls, state)
    some = max(1, options.steps // 10)
    matrices, biases = _unscaled(state, ours, theirs)
    return Refined(
        {name: (matrices[n], biases[n]) for n, name in enumerate(names)},
        dict(zip(names, kls[:some].mean(axis=0).tolist(), strict=True)),
        dict(zip(names, kls[-some:].mean(axis=0).tolist(), strict=True)),
    )


# -- the maps in units of spreads ------------------------------------------------------------------


def _scales(spreads: list[np.ndarray]) -> np.ndarray:
    found = np.stack(spreads).astype(np.float32)
    return np.where(found > 0, found, 1.0).astype(np.float32)


def _begin(maps: Maps, ours: np.ndarray, theirs: np.ndarray) -> _State:
    matrices = np.stack([matrix for matrix, _ in maps.values()])
    scaled = matrices * ours[:, None, :] / theirs[:, :, None]
    biases = np.stack([bias for _, bias in maps.values()]) / theirs
    both = jnp.asarray(np.concatenate([scaled, biases[:, :, None]], axis=2), jnp.float32)
    return _State(both, jnp.zeros_like(both))


def _unscaled(state: _State, ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    both = np.asarray(state.maps) * theirs[:, :, None]
    return both[:, :, :-1] / ours[:, None, :], both[:, :, -1]


def _stepping(recipe: Recipe, ours: np.ndarray, theirs: np.ndarray) -> Any:
    """Return the compiled function of a step."""
    assert recipe.model
    checkpoint = open_checkpoint(recipe.model, recipe.lora)
    arch = checkpoint.arch
    schedule = LayerSchedule.of(arch, 0, whole=True)
    outer = ArrayLoader(checkpoint, schedule, jnp.dtype("float32"), None).outer(head=True)

    def step(
        outer: WeightArrays, state: _State, x: Array, y: Array, rate: Array
    ) -> tuple[_State, Array]:
        wanted = jax.nn.log_softmax(_logits(outer, y, arch), axis=-1)

        def one(layer: tuple[Any, ...]) -> tuple[Any, ...]:
            (both, momentum), own, scale = layer

            def loss(both: Array) -> Array:
                moved = (own / scale[None, :]) @ both[:, :-1].T + both[None, :, -1]
                found = _logits(outer, own + moved * theirs, arch)
                logs = jax.nn.log_softmax(found, axis=-1)
                return (jnp.exp(wanted) * (wanted - logs)).sum(axis=-1).mean()

            kl, gradient = jax.value_and_grad(loss)(both)
            momentum = _MOMENTUM * momentum + (1 - _MOMENTUM) * gradient
            ahead = _MOMENTUM * momentum + (1 - _MOMENTUM) * gradient  # as Nesterov does
            return _State(both - rate * _orthogonal(ahead), momentum), kl

        return jax.lax.map(one, (state, x, jnp.asarray(ours)))

    compiled = jax.jit(step)

    def run(state: _State, x: np.ndarray, y: np.ndarray, rate: float) -> Any:
        with jax.default_matmul_precision("highest"):
            return compiled(outer, state, x, y, np.float32(rate))

    return run


def _logits(
    outer: WeightArrays, stream: Float[Array, "rows width"], arch: Arch
) -> Float[Array, "rows vocab"]:
    return head_values(outer, stream[None], arch, ("logits",), {})["logits"][0]


def _orthogonal(matrix: Float[Array, "out in"]) -> Float[Array, "out in"]:
    """Return about the nearest matrix whose singular values are all 1."""
    first, second, third = _NEWTON_SCHULZ
    found = matrix / jnp.maximum(jnp.linalg.norm(matrix), jnp.finfo(matrix.dtype).tiny)
    for _ in range(_ITERATIONS):
        square = found @ found.T
        found = first * found + (second * square + third * square @ square) @ found
    return found


# -- the stored state ------------------------------------------------------------------------------


def _store(
    objects: Objects, told: str, step: int, place: Mapping[str, Any], kls: np.ndarray, state: _State
) -> None:
    sink = io.BytesIO()
    arrays = {str(n): np.asarray(each) for n, each in enumerate(jax.tree.leaves(state))}
    value = {"of": told, "step": step, "place": json.dumps(place), "kls": kls, "arrays": arrays}
    write_torch_zip(sink, value)
    objects.replace(STATE, sink.getvalue())


def _stored(objects: Objects, told: str) -> tuple[int, dict[str, Any], np.ndarray, _State] | None:
    """Return the stored state, if it is one of this refinement."""
    if not exists(objects, STATE):
        return None
    data = objects.get(STATE)
    found = read_torch_zip(
        lambda start, length: data[start : start + length], len(data), f"{objects.url}/{STATE}"
    )
    if not isinstance(found, dict) or cast(dict[str, Any], found).get("of") != told:
        return None
    stored = cast(dict[str, Any], found)

    def array(info: TensorInfo) -> np.ndarray:
        return np.frombuffer(data[info.start : info.stop], info.dtype).reshape(info.shape).copy()

    state = _State(*(jnp.asarray(array(stored["arrays"][str(n)])) for n in range(2)))
    return stored["step"], json.loads(stored["place"]), array(stored["kls"]), state
