"""From checkpoint files to device arrays: only the blocks that will run, checked and hashed.

Every tensor's full hash is taken as it is read. The first worker of a dataset records them in the
store, and every later one compares before its first commit, so that weights which changed under
the same path cannot slip into half of a dataset.
"""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from spile.models import mxfp4
from spile.models.checkpoint import Checkpoint
from spile.models.params import Block, Params, Schedule
from spile.models.specs import ParamSpec, block_specs, head_specs, outer_specs
from spile.tensors import as_bytes, map_tensor

_THREADS = 8


def load_params(
    checkpoint: Checkpoint, schedule: Schedule, *, head: bool, dtype: jnp.dtype
) -> tuple[Params, dict[str, str]]:
    """Read the blocks that are scheduled (and the head if asked for).

    Returns:
        The parameters, and a hash for each tensor that was read.
    """
    arch = checkpoint.arch
    digests: dict[str, str] = {}
    blocks = {spec.name: spec for spec in block_specs(arch)}
    late = {spec.name for spec in head_specs(arch)}

    def read(name: str) -> np.ndarray:
        parts: list[np.ndarray] = []
        for stored in checkpoint.stored(name):
            parts.append(map_tensor(*checkpoint.tensors[stored]))
            if stored not in digests:  # a fused tensor is read once for each array it holds
                digests[stored] = xxhash.xxh3_128_hexdigest(as_bytes(parts[-1]))
        tensor = mxfp4.decode(*parts) if len(parts) > 1 else parts[0]
        return checkpoint.adapter.merge(name, tensor) if checkpoint.adapter else tensor

    def fill(out: np.ndarray, spec: ParamSpec, layer: int | None) -> None:
        source = checkpoint.source(spec.name)
        names = checkpoint.names(spec, layer)
        for target, name in zip(out if source.per_expert else [out], names, strict=True):
            target[...] = source.take(read(name), spec, blocks, arch.head_dim)

    def whole(spec: ParamSpec, layer: int | None = None) -> jax.Array:
        host = np.empty(spec.shape, dtype)
        fill(host, spec, layer)
        return jnp.asarray(host)

    def stacked(spec: ParamSpec, place: int) -> jax.Array:
        host = np.empty((schedule.cycles, *spec.shape), dtype)

        def fill_one(cycle: int) -> None:
            fill(host[cycle], spec, cycle * schedule.period + place)

        # Copying and hashing leave the interpreter alone; one core cannot keep up with a disk.
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(fill_one, range(schedule.cycles)))
        return jnp.asarray(host)

    cycle: tuple[Block, ...] = ()
    if schedule.cycles:
        places = range(schedule.period)
        cycle = tuple({n: stacked(spec, place) for n, spec in blocks.items()} for place in places)
    params = Params(
        outer={s.name: whole(s) for s in outer_specs(arch) if head or s.name not in late},
        cycle=cycle,
        tail=tuple(
            {name: whole(spec, layer) for name, spec in blocks.items()}
            for layer in range(schedule.scanned, schedule.depth)
        ),
    )
    return params, digests
