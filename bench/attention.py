"""Time each attention kernel on one layer, and measure its distance from the definition.

    python bench/attention.py [--tokens 16384] [--seconds 0.3]

Rows hold the longest of many documents (families.py), which is the most work; shapes are those of
published models, in bfloat16. The distance is between one row and `attention.masked` in float32. A
kernel that this machine does not have is named once, with the reason.
"""

import argparse
from functools import partial
from typing import Any

import numpy as np
from families import natural_batch, timed

# title, heads, heads of keys, width of a head, tokens of a row, window, soft cap, sinks
SHAPES = (
    ("Qwen2.5-7B", 28, 4, 128, 2048, None, None, False),
    ("Llama-3.1-8B", 32, 8, 128, 2048, None, None, False),
    ("Llama-3.1-8B, a row of 32,768", 32, 8, 128, 32_768, None, None, False),
    ("pythia-6.9b", 32, 32, 128, 2048, None, None, False),
    ("phi-3", 32, 32, 96, 2048, None, None, False),
    ("pythia-2.8b", 32, 32, 80, 2048, None, None, False),
    ("gpt2", 12, 12, 64, 1024, None, None, False),
    ("gemma-2-9b", 16, 8, 256, 2048, None, 50.0, False),
    ("gemma-2-9b, rows of 8,192", 16, 8, 256, 8192, 4096, 50.0, False),
    ("gemma-3-4b, window", 8, 4, 256, 2048, 1024, None, False),
    ("gpt-oss, window", 64, 8, 64, 2048, 128, None, True),
    ("gpt-oss", 64, 8, 64, 2048, None, None, True),
)
_MOST_SCORED = 8192  # most tokens of a row for which the definition, which scores all pairs, runs


def measure(shape: tuple[Any, ...], options: argparse.Namespace) -> str:
    import jax
    import jax.numpy as jnp

    from spile.models.forward.attention import Scoring, blocked, masked
    from spile.models.forward.kernels import attention as kernels

    _, heads, kv_heads, dim, seq, window, cap, sunk = shape
    rows = max(1, options.tokens // seq)
    batch = natural_batch(rows, seq)
    segments, positions = jnp.asarray(batch.segments), jnp.asarray(batch.positions)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (rows, seq, count, dim), jnp.bfloat16)
        for key, count in zip(keys, (heads, kv_heads, kv_heads), strict=False)
    )
    sinks = jax.random.normal(keys[3], (heads,), jnp.bfloat16) if sunk else None
    scoring = Scoring(dim**-0.5, window, cap, sinks)
    real = batch.segments[0] > 0
    exact = None
    if seq <= _MOST_SCORED:
        wide = [x[:1].astype(jnp.float32) for x in (q, k, v)]
        with jax.default_matmul_precision("highest"):
            found = jax.jit(lambda *wide: masked(segments[:1], positions[:1])(*wide, scoring))(
                *wide
            )
        exact = np.asarray(found[0])[real]
    ways: dict[str, Any] = {
        "mosaic": partial(kernels.flash, kernel="mosaic"),
        "triton": partial(kernels.flash, kernel="triton"),
        "cudnn": partial(kernels.cudnn, contexts=batch.contexts),
        "blocked": blocked,
    }
    told: list[str] = []
    for name, way in ways.items():
        if name in options.missing or (name == "cudnn" and (cap or sunk)):
            continue
        run = jax.jit(lambda q, k, v, way=way: way(segments, positions)(q, k, v, scoring))
        distance = ""
        if exact is not None:
            own = np.asarray(run(q, k, v)[0], np.float32)[real]
            distance = f" ({np.linalg.norm(own - exact) / np.linalg.norm(exact):.4f})"
        spent = timed(partial(run, q, k, v), options.seconds)
        told.append(f"{name} {1e3 * spent:.3f} ms{distance}")
    return ", ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    from spile.run.world.devices import prefer_xla_flags

    prefer_xla_flags()

    import jax

    from spile.models.forward.kernels.attention import missing_kernels

    on_gpu = jax.default_backend() == "gpu"
    options.missing = (
        missing_kernels() if on_gpu else dict.fromkeys(("mosaic", "triton", "cudnn"), "no GPU here")
    )
    for name, reason in options.missing.items():
        print(f"{name}: {reason}", flush=True)
    for shape in SHAPES:
        if shape[4] <= options.tokens * 2:
            print(f"{shape[0]:<30} {measure(shape, options)}", flush=True)


main()
