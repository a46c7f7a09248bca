"""One process of a world that loads its share of a checkpoint, and reports the cost.

python loading.py MODEL COORDINATOR PROCESSES PROCESS
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from spile.models.config.specs import array_axes, axis_sizes
from spile.models.files.checkpoint import open_checkpoint
from spile.models.forward.sharding import Shards, make_mesh
from spile.models.forward.weight_loader import load_params
from spile.models.forward.weights import LayerSchedule
from spile.models.layout import Cuts, Layout


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def main(model: str, coordinator: str, processes: str, process: str) -> None:
    jax.distributed.initialize(coordinator, int(processes), int(process))
    layout = Layout(model=jax.device_count())
    checkpoint = open_checkpoint(model)
    arch = checkpoint.arch
    cuts = Cuts.of(layout, axis_sizes(arch))
    shards = Shards(make_mesh(layout, jax.devices()), cuts, array_axes(arch))
    jax.block_until_ready(jax.device_put(jnp.zeros(8), jax.local_devices()[0]))
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is of what follows
    before = status("VmRSS")
    params, digests = load_params(
        checkpoint, LayerSchedule.of(arch, arch.num_layers, whole=True), head=True,
        dtype=jnp.dtype("float32"), shards=shards, hashed=(int(process), int(processes)),
    )  # fmt: skip
    jax.block_until_ready(params)
    held = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(params))
    sys.stdout.write(
        json.dumps({"held": held, "took": status("VmHWM") - before, "hashed": sorted(digests)})
        + "\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
