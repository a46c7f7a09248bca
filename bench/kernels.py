"""Time Spile's own kernels beside plain jax and other tilings.

    python bench/kernels.py [--only recurrence,convolution,experts,mlp,routing,rows,rotary,wide]
                            [--tokens 16384] [--tilings] [--seconds 0.3]

Prints a table for each kind of work: the shape, milliseconds by plain jax, by the kernel as it runs
by default, by flash-linear-attention if it is installed, and with `--tilings` by other tilings.
Shapes are those of published models, in bfloat16, in rows of 2,048 with one document each. What
each kernel serves is in `spile.models.config.kernel_choice`.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from families import natural_batch, timed

SEQ = 2048
# heads, groups of keys, width of the state, width of a head
SPACES = {
    "Mamba-Codestral-7B": (128, 8, 128, 64),
    "Falcon-H1-0.5B": (24, 1, 128, 64),
}
# heads of keys, heads of values, width
DELTAS = {"Qwen3-Next-80B-A3B": (16, 32, 128), "Qwen3.5-27B": (16, 48, 128)}
# heads of keys and values, width; each channel has its own decay
BY_CHANNEL = {"Kimi-Linear-48B-A3B": (32, 128)}
CHANNELS = (8192, 10240)
# experts, chosen, width, width inside, activation, limit
EXPERTS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768, "silu", None),
    "OLMoE-1B-7B": (64, 8, 2048, 1024, "silu", None),
    "gpt-oss-20b": (32, 4, 2880, 2880, "quick_gelu", 7.0),
    "gemma-4-26B-A4B": (128, 8, 2816, 704, "gelu_pytorch_tanh", None),
}
# width, width inside, tokens
MLPS = {
    "Qwen2.5-0.5B": (896, 4864, 65_536),
    "Qwen3-0.6B": (1024, 3072, 16_384),
    "gemma-3-1b": (1152, 6912, 32_768),
    "Qwen2.5-1.5B": (1536, 8960, 32_768),
    "Qwen3-1.7B": (2048, 6144, 16_384),
    "Qwen3-4B": (2560, 9728, 16_384),
    "Qwen2.5-7B": (3584, 18944, 16_384),
    "Llama-3.1-8B": (4096, 14336, 16_384),
}
# The same, of MLPs with biases and the exact GELU, but no gate.
UNGATED = {
    "pythia-70m": (512, 2048, 131_072),
    "pythia-410m": (1024, 4096, 32_768),
    "pythia-1.4b": (2048, 8192, 16_384),
    "pythia-6.9b": (4096, 16384, 16_384),
}
# heads, heads of keys, width, whether heads are normalised
ROTARY = {
    "Qwen3-0.6B": (16, 8, 128, True),
    "Qwen3-30B-A3B": (32, 4, 128, True),
    "gpt-oss-20b": (64, 8, 64, False),
}
WIDE = {"gemma-4-26B-A4B, 16/2 x 512": (16, 2)}

Ways = dict[str, Callable[[], Any]]


def recurrence(options: argparse.Namespace) -> Iterator[tuple[str, Ways]]:
    import jax
    import jax.numpy as jnp

    from spile.models.forward.kernels import decay_by_channel, gated_delta, state_space
    from spile.models.forward.mixers import gated_delta as delta
    from spile.models.forward.mixers import state_space as space

    rows = options.tokens // SEQ
    batch = natural_batch(rows, SEQ)
    segments = jnp.asarray(batch.segments)
    rng = np.random.default_rng(0)

    def drawn(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jnp.asarray(rng.standard_normal((rows, SEQ, *shape)) / 2, dtype)

    for name, (heads, groups, state, dim) in SPACES.items():
        steps = jax.nn.softplus(drawn(heads, dtype=jnp.float32) - 2)
        given = (
            drawn(groups, state),
            drawn(groups, state),
            drawn(heads, dim),
            steps,
            -0.5 * steps,
            jnp.ones(heads),
            segments,
        )
        plain = jax.jit(space._in_float32)
        ways = {"plain jax": partial(plain, *given)}
        tilings = [state_space.FASTEST]
        if options.tilings:
            tilings += [
                state_space.FASTEST._replace(chunk=n, warps=w, stages=s)
                for n, w, s in ((32, 4, 2), (64, 4, 1), (64, 4, 3), (64, 8, 2), (128, 8, 2))
            ]
        for tiling in tilings:
            run = jax.jit(partial(state_space.rule, tiling=tiling))
            ways[_told(tiling, state_space.FASTEST)] = partial(run, *given)
        yield f"{name}: the state space's rule", ways | _fla_space(given, batch)
    for name, (keys, heads, dim) in DELTAS.items():
        written = jax.nn.sigmoid(drawn(heads, dtype=jnp.float32))
        kept = -jax.nn.softplus(drawn(heads, dtype=jnp.float32))
        given = (drawn(keys, dim), drawn(keys, dim), drawn(heads, dim), written, kept, segments)
        plain = jax.jit(partial(delta._in_float32, rule=delta.chunked))
        ways = {"plain jax": partial(plain, *given)}
        tilings = [gated_delta.FASTEST]
        if options.tilings:
            tilings += [
                gated_delta.FASTEST._replace(**changes)
                for changes in (
                    {"split": 1},
                    {"split": 4},
                    {"stages": 2},
                    {"warps": 8},
                    {"chunk": 32},
                )
            ]
        for tiling in tilings:
            run = jax.jit(partial(gated_delta.rule, eps=1e-6, tiling=tiling))
            ways[_told(tiling, gated_delta.FASTEST)] = partial(run, *given)
        yield f"{name}: the gated delta rule", ways | _fla_delta(given, batch)
    for name, (heads, dim) in BY_CHANNEL.items():
        written = jax.nn.sigmoid(drawn(heads, dtype=jnp.float32))
        kept = -jax.nn.softplus(drawn(heads, dim, dtype=jnp.float32))
        given = (drawn(heads, dim), drawn(heads, dim), drawn(heads, dim), written, kept, segments)
        plain = jax.jit(partial(delta._in_float32, rule=delta._by_channel))
        ways = {"plain jax": partial(plain, *given)}
        tilings = [decay_by_channel.FASTEST]
        if options.tilings:
            tilings += [
                decay_by_channel.FASTEST._replace(**changes)
                for changes in (
                    {"split": 1},
                    {"split": 4},
                    {"stages": 2},
                    {"stages": 1},
                    {"warps": 2},
                    {"solve_warps": 2},
                    {"chunk": 32},
                    {"chunk": 64, "solve_warps": 8},
                )
            ]
        for tiling in tilings:
            run = jax.jit(partial(decay_by_channel.rule, eps=1e-6, tiling=tiling))
            ways[_told(tiling, decay_by_channel.FASTEST)] = partial(run, *given)
        yield f"{name}: the delta rule with a decay by channel", ways | _fla_delta(given, batch)


def convolution(options: argparse.Namespace) -> Iterator[tuple[str, Ways]]:
    import jax
    import jax.numpy as jnp

    from spile.models.forward.kernels import convolution as kernel
    from spile.models.forward.mixers import recurrence as plain

    rows = options.tokens // SEQ
    segments = jnp.asarray(natural_batch(rows, SEQ).segments)
    for channels in CHANNELS:
        x = jax.random.normal(jax.random.key(0), (rows, SEQ, channels), jnp.bfloat16)
        weights = jax.random.normal(jax.random.key(1), (channels, 1, 4), jnp.bfloat16)
        given = (x, weights, None, segments)
        ways: Ways = {
            "plain jax": partial(jax.jit(plain._convolution, static_argnums=4), *given, "silu")
        }
        tilings = [kernel.FASTEST]
        if options.tilings:
            tilings += [
                kernel.FASTEST._replace(tokens=t, channels=c)
                for t, c in ((32, 128), (128, 64), (64, 128))
            ]
        for tiling in tilings:
            run = jax.jit(partial(kernel.convolution, tiling=tiling), static_argnums=4)
            ways[_told(tiling, kernel.FASTEST)] = partial(run, *given, "silu")
        yield f"short convolution of {channels:,} channels, with its activation", ways


def experts(options: argparse.Namespace) -> Iterator[tuple[str, Ways]]:
    import jax
    import jax.numpy as jnp

    from spile.models.forward.kernels import grouped
    from spile.models.forward.ops import activate

    for name, (count, chosen, width, inside, kind, limit) in EXPERTS.items():
        rows = options.tokens * chosen
        activation = grouped.Activation(kind, limit)
        sizes = np.random.default_rng(0).multinomial(rows, np.full(count, 1 / count))
        keys = jax.random.split(jax.random.key(0), 3)
        gate, up = (
            jax.random.normal(key, (count, inside, width), jnp.bfloat16) / width**0.5
            for key in keys[:2]
        )
        runs = grouped.Groups(jnp.asarray(sizes), rows, grouped.EIGHT)
        x = jax.random.normal(keys[2], (runs.rows, width), jnp.bfloat16)

        def two(x: Any, gate: Any, up: Any, runs: Any = runs, activation: Any = activation) -> Any:
            way = grouped.mosaic(runs)
            return activate(way(x, up), way(x, gate), *activation)

        def one(x: Any, gate: Any, up: Any, runs: Any = runs, activation: Any = activation) -> Any:
            return grouped.mosaic_activated(runs, activation)(x, up, gate)

        def single(x: Any, gate: Any, up: Any, activation: Any = activation) -> Any:
            return activate(x @ up[0].T, x @ gate[0].T, *activation)

        given = (x, gate, up)
        yield (
            f"{name}: gate, up and activation of {count} experts",
            {
                "one expert, plain jax": partial(jax.jit(single), *given),
                "kernel for each product": partial(jax.jit(two), *given),
                "**one kernel**": partial(jax.jit(one), *given),
            },
        )


def mlp(options: argparse.Namespace) -> Iterator[tuple[str, Ways]]:
    import jax
    import jax.numpy as jnp

    from spile.models.forward.kernels.grouped import Activation, inner_layer
    from spile.models.forward.ops import activate, linear

    def plain(x: Any, up: Any, gate: Any, bias: Any, activation: Any) -> Any:
        return activate(linear(x, up, bias), None if gate is None else linear(x, gate), *activation)

    for name, (width, inside, tokens) in {**MLPS, **UNGATED}.items():
        keys = jax.random.split(jax.random.key(0), 4)
        x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
        gate, up = (
            jax.random.normal(key, (inside, width), jnp.bfloat16) / width**0.5 for key in keys[1:3]
        )
        bias = jax.random.normal(keys[3], (inside,), jnp.bfloat16)
        given = (x, up, None, bias) if name in UNGATED else (x, up, gate, None)
        activation = Activation("gelu" if name in UNGATED else "silu")
        what = "up" if name in UNGATED else "gate, up"
        yield (
            f"{name}: {what} and activation of one MLP, {tokens:,} tokens",
            {
                "plain jax": partial(jax.jit(plain, static_argnums=4), *given, activation),
                "**kernel**": partial(jax.jit(inner_layer, static_argnums=4), *given, activation),
            },
        )


def routing(options: argparse.Namespace) -> Iterator[tuple[str, Ways]]:
    import jax
    import jax.numpy as jnp

    from spile.models.forward.kernels import grouped
    from spile.models.forward.kernels.routing import largest_scores, places_of

    for name, (count, chosen, *_) in EXPERTS.items():
        scores = jax.random.normal(jax.random.key(0), (options.tokens, count))
        ids = jax.lax.top_k(scores, chosen)[1]

        def by_sorting(ids: Any, count: int = count) -> Any:
            order = jnp.argsort(ids.reshape(-1))
            expert = ids.reshape(-1)[order]
            bounds = jnp.searchsorted(expert, jnp.arange(count + 1), method="scan_unrolled")
            runs = grouped.Groups(jnp.diff(bounds), len(order), grouped.EIGHT)
            places = jnp.arange(len(order)) + (runs.starts() - bounds[:-1])[expert]
            return jnp.zeros_like(order).at[order].set(places)

        yield (
            f"{name}: largest scores of {count} experts",
            {
                "plain jax": partial(jax.jit(partial(jax.lax.top_k, k=chosen)), scores),
                "**kernel**": partial(jax.jit(partial(largest_scores, count=chosen)), scores),
            },
        )
        placed = jax.jit(partial(places_of, experts=count, aligned=grouped.EIGHT))
        yield (
            f"{name}: places for {count} experts",
            {
                "plain jax": partial(jax.jit(by_sorting), ids),
                "**kernel**": partial(placed, ids),
            },
        )


def rows(options: argparse.Namespace) -> Iterator[tuple[str, Ways]]:
    import jax
    import jax.numpy as jnp

    from spile.models.forward.kernels import expert_rows, grouped
    from spile.models.forward.moe import _rows_by_words

    for name, (count, chosen, width, *_) in EXPERTS.items():
        rng = np.random.default_rng(0)
        expert = rng.random((options.tokens, count)).argsort(axis=1)[:, :chosen].reshape(-1)
        order = np.argsort(expert, kind="stable")
        sizes = np.bincount(expert, minlength=count)
        runs = grouped.Groups(jnp.asarray(sizes), len(order), grouped.EIGHT)
        places, token = np.zeros(len(order), np.int32), np.zeros(runs.rows, np.int32)
        shift = np.asarray(runs.starts()) - (np.cumsum(sizes) - sizes)
        places[order] = np.arange(len(order)) + shift[expert[order]]
        token[places] = np.arange(len(order)) // chosen
        x = jax.random.normal(jax.random.key(0), (options.tokens, width), jnp.bfloat16)
        by_token = jnp.asarray(places.reshape(-1, chosen))
        ways: Ways = {"plain jax": partial(jax.jit(_rows_by_words), x, jnp.asarray(token))}
        tilings = [(expert_rows._COLUMNS, expert_rows._WARPS)]
        if options.tilings:
            tilings += [(512, 2), (512, 4), (1024, 2), (1024, 8), (2048, 4), (2048, 8), (4096, 8)]
        for columns, warps in tilings:
            run = partial(expert_rows.spread, rows=runs.rows, columns=columns, warps=warps)
            told = "**kernel**" if (columns, warps) == tilings[0] else f"{columns}, {warps} warps"
            ways[told] = partial(jax.jit(run), x, by_token)
        yield f"{name}: rows for {count} experts", ways


def rotary(options: argparse.Namespace) -> Iterator[tuple[str, Ways]]:
    import jax
    import jax.numpy as jnp

    from spile.models.forward.kernels import rotary as kernel
    from spile.models.forward.ops import norm, rotary_angles, rotate

    tokens = 4 * options.tokens  # or starting the kernels would take longer than they
    positions = jnp.asarray(natural_batch(tokens // SEQ, SEQ).positions)
    for name, (heads, of_keys, dim, normed) in ROTARY.items():
        frequencies = 1e6 ** -(np.arange(dim // 2) / (dim // 2))
        angles = jax.jit(partial(rotary_angles, frequencies=frequencies, amplitude=1.0))(positions)
        q, k = (
            jax.random.normal(jax.random.key(n), (*positions.shape, n, dim), jnp.bfloat16)
            for n in (heads, of_keys)
        )
        weight = jnp.ones(dim, jnp.bfloat16) if normed else None

        def plain(q: Any, k: Any, angles: Any = angles, weight: Any = weight) -> Any:
            def one(x: Any) -> Any:
                if weight is not None:
                    x = norm(x, weight, None, "rms", 1e-6, rotated=True)
                return rotate(x, *angles)

            return one(q), one(k)

        ways: Ways = {"plain jax": partial(jax.jit(plain), q, k)}
        tilings = [kernel.FASTEST]
        if options.tilings:
            tilings += [
                kernel.RotaryTiling(*each) for each in ((8, 4), (16, 4), (16, 2), (64, 4), (64, 8))
            ]
        for tiling in tilings:

            def one_pass(
                q: Any, k: Any, tiling: Any = tiling, angles: Any = angles, weight: Any = weight
            ) -> Any:
                eps = None if weight is None else 1e-6
                run = partial(kernel.normed_and_rotated, eps=eps, tiling=tiling)
                return run(q, weight, *angles), run(k, weight, *angles)

            ways[_told(tiling, kernel.FASTEST)] = partial(jax.jit(one_pass), q, k)
        yield f"{name}: norm and rotation of heads, {tokens:,} tokens", ways


def wide(options: argparse.Namespace) -> Iterator[tuple[str, Ways]]:
    import jax
    import jax.numpy as jnp

    from spile.models.forward.attention import Scoring, blocked
    from spile.models.forward.kernels import wide_attention as kernel

    rows = options.tokens // SEQ
    batch = natural_batch(rows, SEQ)
    places = jnp.asarray(batch.segments), jnp.asarray(batch.positions)
    for name, (heads, of_keys) in WIDE.items():
        keys = jax.random.split(jax.random.key(0), 3)
        given = [
            jax.random.normal(key, (rows, SEQ, each, 512), jnp.bfloat16)
            for key, each in zip(keys, (heads, of_keys, of_keys), strict=True)
        ]
        ways: Ways = {
            "plain jax": partial(
                jax.jit(lambda q, k, v: blocked(*places)(q, k, v, Scoring(0.05))), *given
            )
        }
        tilings = [kernel.FASTEST]
        if options.tilings:
            tilings += [
                kernel.AttentionTiling(*each)
                for each in ((64, 32, 8, 2), (64, 64, 8, 1), (128, 32, 8, 1))
            ]
        for tiling in tilings:
            run = jax.jit(
                lambda q, k, v, tiling=tiling: kernel.wide(*places, tiling=tiling)(
                    q, k, v, Scoring(0.05)
                )
            )
            ways[_told(tiling, kernel.FASTEST)] = partial(run, *given)
        yield f"{name}: attention", ways


def _told(tiling: Any, fastest: Any) -> str:
    if tiling == fastest:
        return "**kernel**"
    pairs = zip(tiling._fields, tiling, fastest, strict=True)
    return ", ".join(f"{name} {value}" for name, value, usual in pairs if value != usual)


def _fla_space(given: tuple[Any, ...], batch: Any) -> Ways:
    if not find_spec("fla"):
        return {}
    import torch
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v, steps, kept, *_ = map(_torch, given)
    each = v.shape[2] // q.shape[2]
    q, k = (a.repeat_interleave(each, 2) for a in (q, k))
    ends = _ends(batch)

    def run() -> None:
        chunk_simple_gla(q, k, v, g=kept, scale=1.0, cu_seqlens=ends)
        torch.cuda.synchronize()

    return {"fla, simple_gla": run}


def _fla_delta(given: tuple[Any, ...], batch: Any) -> Ways:
    if not find_spec("fla"):
        return {}
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda

    q, k, v, written, kept, *_ = map(_torch, given)
    chunked = chunk_kda if kept.ndim == v.ndim else chunk_gated_delta_rule
    each = v.shape[2] // q.shape[2]
    q, k = (a.repeat_interleave(each, 2) for a in (q, k))
    written, ends = written.to(torch.bfloat16), _ends(batch)

    def run() -> None:
        chunked(q, k, v, g=kept, beta=written, cu_seqlens=ends, use_qk_l2norm_in_kernel=True)
        torch.cuda.synchronize()

    return {"fla": run}


def _torch(array: Any) -> Any:
    import torch

    if array.ndim < 3:
        return None
    tensor = torch.from_dlpack(array)
    return tensor.reshape(1, -1, *tensor.shape[2:])


def _ends(batch: Any) -> Any:
    """Return where documents end in the rows laid end to end; padding counts as a document."""
    import torch

    flat = np.asarray(batch.segments)
    first = np.concatenate([np.ones((len(flat), 1), bool), flat[:, 1:] != flat[:, :-1]], axis=1)
    ends = [*np.flatnonzero(first.reshape(-1)), flat.size]
    return torch.tensor(ends, device="cuda", dtype=torch.int32)


KINDS = {
    "recurrence": recurrence,
    "convolution": convolution,
    "experts": experts,
    "mlp": mlp,
    "routing": routing,
    "rows": rows,
    "rotary": rotary,
    "wide": wide,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--tilings", action="store_true")
    options = parser.parse_args()
    from spile.models.config.kernel_choice import KERNELS, RECURRENCES
    from spile.run.world.devices import prefer_xla_flags

    prefer_xla_flags()
    for name, what in itertools.chain(KERNELS.items(), RECURRENCES.items()):
        print(f"{name:8} {what}")
    print("\n| milliseconds | | |\n|---|---|---|")
    for kind in options.only.split(","):
        for title, ways in KINDS[kind](options):
            for name, run in ways.items():
                try:
                    told = f"{1e3 * timed(run, options.seconds):.3f}"
                except Exception as error:  # a tiling that does not fit, or another version
                    told = (str(error).splitlines() or [type(error).__name__])[0][:80]
                print(f"| {title} | {name} | {told} |", flush=True)


if __name__ == "__main__":
    main()
