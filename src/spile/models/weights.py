"""From checkpoint files to device arrays: only the blocks that will run, checked and hashed.

Every tensor's full hash is taken as it is read. The first worker of a dataset records them in the
store, and every later one compares before its first commit, so that weights which changed under
the same path cannot slip into half of a dataset.
"""

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from spile.models.checkpoint import Checkpoint
from spile.models.params import Params
from spile.models.specs import ParamSpec, block_specs
from spile.tensors import as_bytes, map_tensor


def load_params(
    checkpoint: Checkpoint, layers: int, *, head: bool, dtype: jnp.dtype
) -> tuple[Params, dict[str, str]]:
    """Read the first `layers` blocks (and the head if asked for).

    Returns:
        The parameters, and a hash for each tensor that was read.
    """
    arch = checkpoint.arch
    digests: dict[str, str] = {}

    def read(source: str) -> np.ndarray:
        path, info = checkpoint.tensors[source]
        array = map_tensor(path, info)
        digests[source] = xxhash.xxh3_128_hexdigest(as_bytes(array))
        return array

    def outer(name: str) -> jax.Array:
        return jnp.asarray(read(checkpoint.source(name)).astype(dtype))

    def stacked(spec: ParamSpec) -> jax.Array:
        host = np.empty((layers, *spec.shape), dtype)
        for layer in range(layers):
            host[layer] = read(checkpoint.source(spec.name, layer))
        return jnp.asarray(host)

    params = Params(
        embed=outer("embed"),
        blocks={spec.name: stacked(spec) for spec in block_specs(arch)} if layers else {},
        final_norm=outer("final_norm") if head else None,
        head=outer("head") if head and not arch.tied_head else None,
    )
    return params, digests
