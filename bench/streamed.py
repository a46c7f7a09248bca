"""Compare a model whose blocks are streamed from host memory with the same model on the device.

    python bench/streamed.py [--shape 32B] [--sweep 65536] [--seconds 10] [--resident N] [--whole]
                             [--profile N]

Models have published shapes and random weights: Qwen2.5 in bfloat16, gpt-oss in MXFP4, which the
device decodes when a block runs. Documents fill rows as in families.py. `--resident N`
blocks stay on the device, the others are streamed from pinned host memory; `--distinct` of them are
different arrays (the bytes that move are the same). `--whole` first runs the step of the whole
model, which must then fit. The script prints useful tokens a second, the time that the device
waited for weights, and the peak memory; with `--profile`, also where the time goes.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

# width, mlp, layers, heads, kv heads: as Qwen2.5 has them
SHAPES = {
    "tiny": (64, 128, 6, 4, 2),
    "7B": (3584, 18_944, 28, 28, 4),
    "14B": (5120, 13_824, 48, 40, 8),
    "32B": (5120, 27_648, 64, 40, 8),
    "72B": (8192, 29_568, 80, 64, 8),
}
PACKED = ("gpt-oss-20b", "gpt-oss-120b")


def arch_of(shape: str) -> Any:
    from families import cut_config

    from spile.models.config.hf_config import read_config

    if shape in PACKED:
        return read_config(cut_config(shape, None)[0], "bench")[1]
    width, mlp, layers, heads, kv_heads = SHAPES[shape]
    config = {
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": 4096, "hidden_size": width,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    }  # fmt: skip
    return read_config(config, "bench")[1]


def packed_loader(shape: str, layers: int, folder: Path) -> Any:
    """Make an MXFP4 checkpoint of random codes in a folder; return a loader of its blocks."""
    import jax.numpy as jnp
    import numpy as np
    from families import cut_config

    from spile.core.tensors import write_tensors
    from spile.models.config.hf_config import read_config
    from spile.models.files.checkpoint import Checkpoint, open_checkpoint
    from spile.models.files.quantized import BLOCKS, SCALES, packed_shapes
    from spile.models.forward.weight_loader import ArrayLoader
    from spile.models.forward.weights import LayerSchedule

    config = cut_config(shape, layers)[0] | {"quantization_config": {"quant_method": "mxfp4"}}
    family, arch = read_config(config, "bench")
    rng, tensors = np.random.default_rng(0), dict[str, Any]()
    for name, size in Checkpoint(folder, family, arch, {}, (), family.prefixes[0]).shapes().items():
        if len(size) == 3:
            blocks, scales = packed_shapes(size)
            tensors[name + BLOCKS] = rng.integers(0, 256, blocks, np.uint8)
            tensors[name + SCALES] = np.full(scales, 120, np.uint8)  # values of about 0.02
        else:
            values = rng.standard_normal(size, np.float32) * size[-1] ** -0.5
            tensors[name] = (abs(values) if "norm" in name else values).astype(jnp.bfloat16)
    write_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")  # nothing here is tokenized
    schedule = LayerSchedule(layers, arch.period, 0)
    return ArrayLoader(open_checkpoint(str(folder)), schedule, jnp.dtype(jnp.bfloat16), None)


def sustained(step: Any, batch: Any, seconds: float) -> float:
    """Return the sustained useful tokens a second."""
    import jax

    step.compile(batch)
    jax.block_until_ready(step.compute(batch))
    count, begin, last = 0, time.perf_counter(), None
    while time.perf_counter() - begin < seconds:
        ahead = step.compute(batch)
        if last is not None:
            jax.block_until_ready(last)
        last, count = ahead, count + 1
    jax.block_until_ready(last)
    return count * int(batch.lengths.sum()) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=(*SHAPES, *PACKED), default="32B")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--sweep", type=int, default=65536, help="tokens")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16384, help="tokens of one program")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--resident", type=int, default=0)
    parser.add_argument("--distinct", type=int, default=8)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--work", default="/dev/shm", help="holds packed blocks while they load")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="longest kernels")
    options = parser.parse_args()
    from spile.run.world.devices import prefer_xla_flags

    prefer_xla_flags()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    import jax
    import jax.numpy as jnp
    import numpy as np
    from families import natural_batch, profile, random_params

    from spile.models.config.specs import block_specs
    from spile.models.forward.streamed import StreamedBlocks, SweptModel
    from spile.models.forward.weights import LayerSchedule, abstract_params
    from spile.models.taps import parse_taps
    from spile.plan.residency import evenly
    from spile.run.step.devices import StepDevices
    from spile.run.step.resident import ResidentStep
    from spile.run.step.settings import StepSettings
    from spile.run.step.sweep import Sweep, SweepOptions
    from spile.run.world.devices import prepared_device

    device, arch = prepared_device(), arch_of(options.shape)
    depth = options.layers or arch.num_layers
    taps = parse_taps(f"resid_post:{depth - 1}", arch)
    seq, specs = options.seq_len, block_specs(arch)
    batch = natural_batch(options.sweep // seq, seq)
    one = natural_batch(options.batch // seq, seq)

    def settings(schedule: LayerSchedule) -> StepSettings:
        return StepSettings(
            arch=arch, taps=taps, schedule=schedule, place=StepDevices(device),
            compute_dtype="bfloat16", store_dtype="bfloat16",
        )  # fmt: skip

    whole = 0.0
    if options.whole:
        params, schedule = random_params(arch, depth)
        step = ResidentStep(params, settings(schedule))
        whole = sustained(step, one, options.seconds)
        print(f"{options.shape}, all on the device {whole:>18,.0f} tok/s", flush=True)
        del params, step

    here = evenly(options.resident, depth)
    distinct = min(options.distinct, depth)
    loader = None
    if options.shape in PACKED:
        with tempfile.TemporaryDirectory(dir=options.work) as folder:
            loader = packed_loader(options.shape, distinct, Path(folder))
            found = [loader.host_block(layer) for layer in range(distinct)]

    def block(number: int) -> Any:
        if loader is not None:
            return loader.put_block(found[number % distinct])
        made, _ = random_params(arch, 1)
        return {name: array[0] for name, array in made.cycle[0].items()}

    resident = {layer: block(layer) for layer, stays in enumerate(here) if stays}
    streamed = [layer for layer, stays in enumerate(here) if not stays]
    block_bytes = sum(array.nbytes for array in jax.tree.leaves(block(0)))
    hosted, places = [], None
    for number in range(min(distinct, len(streamed))):
        made = block(number)
        places = jax.tree.map(lambda array: array.sharding, made)
        pinned = jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), places)
        hosted.append(jax.block_until_ready(jax.device_put(made, pinned)))

    def put(layer: int, read: None) -> Any:
        return jax.device_put(hosted[layer % len(hosted)], places)

    unpack = loader.unpacked if loader is not None else lambda block: block
    blocks = StreamedBlocks(resident, streamed, put, unpack=unpack)
    schedule = LayerSchedule(depth, arch.period, 0)
    table = np.random.default_rng(0).standard_normal((arch.vocab_size, arch.width))
    table = table.astype(jnp.bfloat16)
    model: Future[SweptModel] = Future()
    model.set_result(SweptModel(blocks, {"embed": jnp.asarray(table)}))
    waited: list[float] = []
    shapes = abstract_params(arch, schedule, head=False, dtype=jnp.dtype(jnp.bfloat16))
    told = SweepOptions(rows=options.batch // seq, waited=waited.append)
    sweep = Sweep(model, settings(schedule), shapes, told)
    begin = time.perf_counter()
    rate = sustained(sweep, batch, options.seconds)
    spent = time.perf_counter() - begin
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    share = arch.experts.chosen / arch.experts.count if arch.experts else 1
    flops = (
        2
        * depth
        * sum(
            int(np.prod(s.shape)) * (share if "experts" in s.axes else 1)
            for s in specs
            if s.name.startswith("w")
        )
    )
    print(
        f"{options.shape}, {len(streamed)} of {depth} blocks of {block_bytes / 1e9:.2f} GB come, "
        f"{options.sweep:,} tokens a sweep: {rate:,.0f} tok/s"
        + (f" ({rate / whole:.1%} of that)" if whole else "")
        + f", {rate * flops / 1e12:.0f} TFLOP/s in products, waited for weights "
        f"{sum(waited) / spent:.1%}, peak {peak / 1e9:.1f} GB",
        flush=True,
    )
    if options.profile:
        profile(partial(sweep.compute, batch), options.profile, steps=1)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main()
