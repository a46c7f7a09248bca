"""A sparse autoencoder on a dataset of Spile's: TopK or JumpReLU, data-parallel over all devices.

    spile extract --model demo --corpus demo --taps resid_post:9 --seq-len 512 --out acts/demo
    python examples/train_sae.py acts/demo --tap resid_post.9 --out sae --steps 1000

The same command resumes from its last checkpoint, and ends with the same weights as an
uninterrupted run. SAELens loads `sae/`, which also holds the training log. Every `--holdout`-th
document is kept for the evaluation: the explained variance, and the model's own loss when the
reconstruction replaces the tap's rows.
"""

import argparse
import json
import os
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import Partial

import spile
from spile import SPLICE_SITES, on_devices, only, replaced
from spile.core.tensors import map_tensor, read_header, write_tensors

Arrays = dict[str, jax.Array]
BANDWIDTH = 0.5  # of JumpReLU's gradient, for rows with a mean square of 1
KEPT = "pos >= 1"  # a context's first row is huge and always the same
SETTINGS = {
    "latents": 4096, "k": 32, "steps": 1000, "batch": 1024, "rate": 1e-3, "seed": 0, "warmup": 50,
    "sparsity": 1.0, "aux": 1 / 32, "aux_k": 256, "dead_after": 100_000, "holdout": 20,
}  # fmt: skip
HABITS = {
    "log_every": 10, "save_every": 100, "eval_rows": 4096, "eval_tokens": 2048, "eval_length": 256
}  # fmt: skip


@jax.custom_vjp
def jump(x: jax.Array, threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the values above the threshold (0 elsewhere), and whether each is above: 1 or 0."""
    above = (x > threshold).astype(x.dtype)
    return x * above, above


def _jump_forward(x: jax.Array, threshold: jax.Array) -> Any:
    return jump(x, threshold), (x, threshold)


def _jump_backward(kept: Any, gradients: Any) -> tuple[jax.Array, jax.Array]:
    x, threshold = kept
    of_value, of_step = gradients
    near = (jnp.abs(x - threshold) < BANDWIDTH / 2).astype(x.dtype) / BANDWIDTH
    across = near * (threshold * of_value + of_step)
    return of_value * (x > threshold) + across, -across.sum(axis=0)


jump.defvjp(_jump_forward, _jump_backward)


def top(x: jax.Array, k: int) -> jax.Array:
    """Keep each row's k largest values, if they are positive."""
    least = jax.lax.top_k(x, k)[0][:, -1:]
    return jnp.where(x >= least, jax.nn.relu(x), 0.0)


def encode(sae: Arrays, x: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return latents, which are active (with JumpReLU's gradient), and the pre-activations."""
    before = (x - sae["b_dec"]) @ sae["W_enc"] + sae["b_enc"]
    if "threshold" not in sae:
        latents = top(before, k)
        return latents, (latents > 0).astype(x.dtype), before
    return *jump(before, jnp.abs(sae["threshold"])), before


def decode(sae: Arrays, latents: jax.Array) -> jax.Array:
    return latents @ sae["W_dec"] + sae["b_dec"]


def folded(state: Arrays) -> Arrays:
    """Return the autoencoder for rows in stored scale; its latents scale with them."""
    shrunk = {name: state[f"sae/{name}"] / state["scale"] for name in ("b_enc", "b_dec")}
    if "sae/threshold" in state:
        shrunk["threshold"] = jnp.abs(state["sae/threshold"]) / state["scale"]
    return {"W_enc": state["sae/W_enc"], "W_dec": state["sae/W_dec"], **shrunk}


def losses(sae: Arrays, x: jax.Array, silent: jax.Array, args: argparse.Namespace) -> Any:
    latents, active, before = encode(sae, x, args.k)
    wrong = x - decode(sae, latents)
    total = jnp.square(x - x.mean(axis=0)).sum()
    unexplained = jnp.square(wrong).sum() / total
    l0 = active.sum(axis=1).mean()
    loss = unexplained
    if args.kind == "jumprelu":
        loss += args.sparsity * jnp.square(l0 / args.k - 1)
    # Latents that have long been silent learn from what the others leave, which revives them.
    dead = silent > args.dead_after

    def missed() -> jax.Array:
        revived = top(jnp.where(dead, before, -jnp.inf), args.aux_k) @ sae["W_dec"]
        return jnp.square(jax.lax.stop_gradient(wrong) - revived).sum() / total

    loss += args.aux * jax.lax.cond(dead.any(), missed, lambda: 0.0)
    told = {"explained variance": 1 - unexplained, "L0": l0, "dead": dead.sum()}
    return loss, (told, active.any(axis=0))


def step(state: Arrays, x: jax.Array, args: argparse.Namespace) -> tuple[Arrays, Arrays]:
    """Make one step of Adam; rows of the decoder keep the length one."""
    sae = {name.removeprefix("sae/"): a for name, a in state.items() if name.startswith("sae/")}
    x = x * state["scale"]
    slopes, (told, fired) = jax.grad(losses, has_aux=True)(sae, x, state["silent"], args)
    slopes["W_dec"] -= (slopes["W_dec"] * sae["W_dec"]).sum(1, keepdims=True) * sae["W_dec"]
    length = jnp.sqrt(sum(jnp.square(slope).sum() for slope in slopes.values()))
    number = state["step"] + 1
    left = (args.steps - number) / (0.2 * args.steps)  # the rate falls to zero at the end
    rate = args.rate * jnp.clip(jnp.minimum(number / args.warmup, left), 0, 1)
    new = {**state, "step": number}
    new["silent"] = jnp.where(fired, 0, state["silent"] + len(x))
    for name, slope in slopes.items():
        slope = slope / jnp.maximum(length, 1)
        mean = 0.9 * state[f"mean/{name}"] + 0.1 * slope
        square = 0.999 * state[f"square/{name}"] + 0.001 * slope * slope
        moved = (mean / (1 - 0.9**number)) / (jnp.sqrt(square / (1 - 0.999**number)) + 1e-8)
        new |= {f"mean/{name}": mean, f"square/{name}": square}
        new[f"sae/{name}"] = sae[name] - rate * moved
    new["sae/W_dec"] /= jnp.linalg.norm(new["sae/W_dec"], axis=1, keepdims=True)
    return new, told


def begin(rows: jax.Array, args: argparse.Namespace) -> Arrays:
    """Return the state before the first step; its scale gives rows a mean square of one."""
    scale = jnp.sqrt(rows.shape[1]) / jnp.linalg.norm(rows, axis=1).mean()
    mean = (rows * scale).mean(axis=0)
    directions = jax.random.normal(jax.random.key(args.seed), (args.latents, rows.shape[1]))
    directions /= jnp.linalg.norm(directions, axis=1, keepdims=True)
    sae = {"W_enc": directions.T, "W_dec": directions}
    sae |= {"b_enc": jnp.zeros(args.latents), "b_dec": mean}
    if args.kind == "jumprelu":  # begins with about k latents active
        least = jax.lax.top_k((rows * scale - mean) @ directions.T, args.k)[0][:, -1]
        sae["threshold"] = jnp.full(args.latents, least.mean())
    state = {f"sae/{name}": array for name, array in sae.items()}
    for name, array in sae.items():
        state |= {f"mean/{name}": jnp.zeros_like(array), f"square/{name}": jnp.zeros_like(array)}
    return {**state, "scale": scale, "step": jnp.int32(0), "silent": jnp.zeros(args.latents, int)}


def train(ds: spile.Dataset, out: Path, args: argparse.Namespace) -> Arrays:
    """Train from the checkpoint, or from the start; return the state after the last step."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    by_rows, whole = (NamedSharding(mesh, PartitionSpec(*p)) for p in (["data"], []))
    batches = ds.batches(
        [args.tap], args.batch, seed=args.seed, epochs=None, drop_last=True, encoded=True,
        index=False, where=f"{KEPT} and doc % {args.holdout} != 0",
        rank=jax.process_index(), world=jax.process_count(),
    )  # fmt: skip
    state, settings = None, {name: getattr(args, name) for name in ("kind", "tap", *SETTINGS)}
    checkpoint, log = out / "checkpoint.safetensors", out / "log.jsonl"
    if checkpoint.exists():
        found = load(checkpoint)
        stood = json.loads(bytes(found.pop("stood")))
        if stood["settings"] != settings:
            raise SystemExit(f"{out} was begun with {stood['settings']}, this is {settings}")
        batches.load_state_dict(stood["batches"])
        state = jax.device_put(found, whole)
        print(f"resumes after step {int(state['step'])}", flush=True)
    lines = log.read_text().splitlines() if state and log.exists() else []
    lines = [line for line in lines if state and json.loads(line)["step"] <= state["step"]]
    advance = jax.jit(partial(step, args=args), donate_argnums=0, out_shardings=whole)
    start, first = time.perf_counter(), int(state["step"]) if state else 0
    more = islice(on_devices(batches, by_rows, dtype=jnp.float32), args.steps - first)
    for number, batch in enumerate(more, first + 1):
        x, last = batch[args.tap], number == args.steps
        if state is None:
            state = jax.jit(partial(begin, args=args), out_shardings=whole)(x)
        state, told = advance(state, x)
        if number % args.log_every == 0 or last:
            rate = round(args.batch * (number - first) / (time.perf_counter() - start))
            line = {"step": number, **{n: round(float(v), 4) for n, v in told.items()}}
            lines.append(json.dumps(line))
            print(lines[-1], f"{rate:,} rows/s", flush=True)
        if (number % args.save_every == 0 or last) and jax.process_index() == 0:
            stood = json.dumps({"settings": settings, "batches": batch["state"]}).encode()
            beside = log.with_suffix(".part")  # a kill can only damage this copy
            beside.write_text("\n".join(lines) + "\n")
            beside.replace(log)
            save(checkpoint, {"stood": np.frombuffer(stood, np.uint8), **jax.device_get(state)})
    assert state is not None
    return state


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write the file atomically: a kill leaves the previous one."""
    beside = path.with_suffix(".part")
    beside.unlink(missing_ok=True)
    write_tensors(beside, {name: np.asarray(array) for name, array in tensors.items()})
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(path)


def load(path: Path) -> dict[str, Any]:
    return {name: np.array(map_tensor(path, info)) for name, info in read_header(path).items()}


def save_for_saelens(out: Path, sae: Arrays, ds: spile.Dataset, args: argparse.Namespace) -> None:
    hook = next((n for n in ds.aliases(args.tap) if n.startswith("blocks.")), args.tap)
    about = {"model_name": ds.recipe.model_source, "hook_name": hook, "sae_lens_version": "6.0.0"}
    config = {
        "architecture": args.kind, "d_in": ds.width(args.tap), "d_sae": args.latents,
        "dtype": "float32", "device": "cpu", "apply_b_dec_to_input": True,
        "normalize_activations": "none", "reshape_activations": "none", "metadata": about,
    }  # fmt: skip
    (out / "cfg.json").write_text(
        json.dumps(config | ({"k": args.k} if args.kind == "topk" else {}), indent=1)
    )
    save(out / "sae_weights.safetensors", jax.device_get(sae))


def reconstructed(sae: Arrays, values: jax.Array, *, k: int) -> jax.Array:
    rows = values.reshape(-1, values.shape[-1]).astype(jnp.float32)
    return decode(sae, encode(sae, rows, k)[0]).reshape(values.shape)


def evaluate(
    ds: spile.Dataset,
    sae: Arrays,
    model: spile.Model | None,
    args: argparse.Namespace,
    known: dict[str, float] | None = None,
) -> dict[str, float]:
    """Evaluate on held-out documents: by stored rows, and by the model's loss unless `known`."""
    held = f"{KEPT} and doc % {args.holdout} == 0"
    rows = next(ds.batches([args.tap], args.eval_rows, where=held, shuffle=None))
    x = jnp.asarray(rows[args.tap])
    latents, _, _ = jax.jit(encode, static_argnums=2)(sae, x, args.k)
    unexplained = jnp.square(x - decode(sae, latents)).sum() / jnp.square(x - x.mean(0)).sum()
    active = (latents > 0).sum(axis=1).mean()
    found = {"explained variance": float(1 - unexplained), "L0": float(active)}
    contexts = held_out_contexts(ds, args)
    if not contexts or model is None:
        return found
    later = jnp.asarray(np.tile(np.arange(max(map(len, contexts))) > 0, (len(contexts), 1)))
    changes = {
        "clean": {},
        "spliced": {args.tap: only(later, Partial(partial(reconstructed, k=args.k), sae))},
        "ablated": {args.tap: only(later, replaced(jnp.float32(0)))},
    }
    loss = {name: (known or {}).get(name) for name in changes}
    loss = {n: model.loss(contexts, splice=changes[n]) if v is None else v for n, v in loss.items()}
    recovered = (loss["ablated"] - loss["spliced"]) / (loss["ablated"] - loss["clean"])
    return {**found, **loss, "loss recovered": recovered}


def held_out_contexts(ds: spile.Dataset, args: argparse.Namespace) -> list[np.ndarray]:
    """Return contexts of about `--eval-tokens` tokens; none if some tokens were not stored."""
    contexts: list[np.ndarray] = []
    whole = not (ds.recipe.where or ds.recipe.every)
    for doc in range(0, ds.num_documents if whole else 0, args.holdout):
        if sum(map(len, contexts)) < args.eval_tokens and ds.has_document(doc):
            tokens = ds.document(doc).index["token_id"]
            contexts += [tokens[: min(args.eval_length, ds.recipe.seq_len)]]
    return contexts


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dataset")
    parser.add_argument("--tap", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=("topk", "jumprelu"), default="topk")
    for name, value in {**SETTINGS, **HABITS}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args(given)
    args.aux_k = min(args.aux_k, args.latents)
    return args


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    ds = spile.open(args.dataset)
    sae = folded(train(ds, args.out, args))
    if jax.process_index() == 0:
        save_for_saelens(args.out, sae, ds, args)
        splices = args.tap.partition(".")[0] in SPLICE_SITES and args.eval_tokens
        source = ds.recipe.model_source, ds.recipe.lora_source
        found = evaluate(ds, sae, spile.load_model(*source) if splices else None, args)
        (args.out / "evaluation.json").write_text(json.dumps(found, indent=1))
        print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
