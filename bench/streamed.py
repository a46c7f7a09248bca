"""A model larger than its device: blocks streamed from host memory, against the same kept there.

    python bench/streamed.py [--shape 32B] [--sweep 65536] [--seconds 10] [--resident N] [--whole]

Published shapes with random bfloat16 weights, made in place; documents of natural lengths, packed.
`--resident N` blocks stay on the device, the others come from pinned host memory, each in its turn;
`--distinct` of them are different arrays (the bytes that move are the same). `--whole` first runs
the step of the model as a whole, which must then fit. Prints useful tokens a second, the time that
the device waited for weights, and the most memory that it used.
"""

import argparse
import os
import sys
import time
from concurrent.futures import Future
from typing import Any

# width, mlp, layers, heads, kv heads: as Qwen2.5 has them
SHAPES = {
    "tiny": (64, 128, 6, 4, 2),
    "7B": (3584, 18_944, 28, 28, 4),
    "14B": (5120, 13_824, 48, 40, 8),
    "32B": (5120, 27_648, 64, 40, 8),
    "72B": (8192, 29_568, 80, 64, 8),
}


def arch_of(shape: str) -> Any:
    from spile.models.config.hf_config import read_config

    width, mlp, layers, heads, kv_heads = SHAPES[shape]
    config = {
        "architectures": ["Qwen2ForCausalLM"], "vocab_size": 4096, "hidden_size": width,
        "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    }  # fmt: skip
    return read_config(config, "bench")[1]


def sustained(step: Any, batch: Any, seconds: float) -> float:
    """Useful tokens a second."""
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
    parser.add_argument("--shape", choices=SHAPES, default="32B")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--sweep", type=int, default=65536, help="tokens")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16384, help="tokens of one program")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--resident", type=int, default=0)
    parser.add_argument("--distinct", type=int, default=8)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

    import jax
    import jax.numpy as jnp
    import numpy as np

    from families import natural_batch, random_params
    from spile.models.config.specs import block_specs
    from spile.models.forward.streamed import StreamedBlocks
    from spile.models.forward.weights import LayerSchedule, abstract_params
    from spile.models.taps import parse_taps
    from spile.plan.residency import evenly
    from spile.run.devices import prepared_device
    from spile.run.step import Step
    from spile.run.sweep import Sweep, SweptModel

    device, arch = prepared_device(), arch_of(options.shape)
    depth = options.layers or arch.num_layers
    taps = parse_taps(f"resid_post:{depth - 1}", arch)
    seq, specs = options.seq_len, block_specs(arch)
    block_bytes = 2 * sum(int(np.prod(spec.shape)) for spec in specs)
    batch = natural_batch(options.sweep // seq, seq)
    one = natural_batch(options.batch // seq, seq)
    whole = 0.0
    if options.whole:
        params, schedule = random_params(arch, depth)
        step = Step(
            params, arch, taps, schedule, compute_dtype="bfloat16", store_dtype="bfloat16",
            device=device,
        )  # fmt: skip
        whole = sustained(step, one, options.seconds)
        print(f"{options.shape}, all on the device {whole:>18,.0f} tok/s", flush=True)
        del params, step

    def block() -> Any:
        made, _ = random_params(arch, 1)
        return {name: array[0] for name, array in made.cycle[0].items()}

    here = evenly(options.resident, depth)
    resident = {layer: block() for layer, stays in enumerate(here) if stays}
    streamed = [layer for layer, stays in enumerate(here) if not stays]
    hosted = []
    for _ in range(min(options.distinct, len(streamed))):
        made = block()
        places = jax.tree.map(lambda array: array.sharding, made)
        pinned = jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), places)
        hosted.append(jax.block_until_ready(jax.device_put(made, pinned)))

    def put(layer: int, read: None) -> Any:
        return jax.device_put(hosted[layer % len(hosted)], places)

    blocks = StreamedBlocks(resident, streamed, put)
    schedule = LayerSchedule(depth, arch.period, 0)
    table = np.random.default_rng(0).standard_normal((arch.vocab_size, arch.width))
    table = table.astype(jnp.bfloat16)
    model: Future[SweptModel] = Future()
    model.set_result(SweptModel(blocks, None, {"embed": jnp.asarray(table)}))
    waited: list[float] = []
    sweep = Sweep(
        model, arch, taps, schedule, rows=options.batch // seq, looks_up=False,
        compute_dtype="bfloat16", store_dtype="bfloat16", device=device, waited=waited.append,
        shapes=abstract_params(arch, schedule, head=False, dtype=jnp.dtype(jnp.bfloat16)),
    )  # fmt: skip
    begin = time.perf_counter()
    rate = sustained(sweep, batch, options.seconds)
    spent = time.perf_counter() - begin
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    flops = 2 * sum(int(np.prod(s.shape)) for s in specs if s.name.startswith("w")) * depth
    print(
        f"{options.shape}, {len(streamed)} of {depth} blocks of {block_bytes / 1e9:.2f} GB come, "
        f"{options.sweep:,} tokens a sweep: {rate:,.0f} tok/s"
        + (f" ({rate / whole:.1%} of that)" if whole else "")
        + f", {rate * flops / 1e12:.0f} TFLOP/s in products, waited for weights "
        f"{sum(waited) / spent:.1%}, peak {peak / 1e9:.1f} GB",
        flush=True,
    )


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    main()
