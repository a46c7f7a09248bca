"""Spile's step on every family, against the model's own matrix products and HF, in one run.

    python bench/families.py [--models gemma-2-9b,Mixtral-8x7B-v0.1] [--attention auto,triton]
                             [--taps mlp_out:all] [--seq-len 2048] [--mixed] [--seconds 2] [--hf]
                             [--profile N] [--parity]

Models are published configurations (tests/fixtures/configs), cut to a few layers and a small
vocabulary, with random bfloat16 weights. Documents have natural lengths (log-normal, median 600,
cut at the row). The longest of many fill the rows, so a row of 2,048 holds one document, as HF's
rows do. With `--mixed`, and for `--parity`, rows are packed with documents of all lengths.
`products` are the model's matrix products, chained, on as many tokens; those of the chosen experts
are one plain product each. HF runs in the fastest way it has. `--profile` prints the shares of a
step's time by kind of kernel, and the N longest kernels. `--parity` instead compares rows in the
first of `--compute-dtypes` with HF in float32, next to HF's own in that dtype (in bfloat16 beside
float8). HF's experts then run one by one, and rows of HF that are not finite are an error.
"""

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

CONFIGS = Path(__file__).parents[1] / "tests" / "fixtures" / "configs"
MODELS = (
    "Qwen2.5-7B", "Llama-3.1-8B", "Qwen3-8B", "phi-4", "OLMo-2-1124-7B", "pythia-6.9b",
    "starcoder2-7b", "gemma-7b", "gemma-2-2b", "gemma-2-9b", "gemma-3-4b-it", "Mistral-7B-v0.1",
    "Mixtral-8x7B-v0.1", "Qwen3-30B-A3B", "gpt-oss-20b", "Qwen3-0.6B", "gpt2", "pythia-70m",
)  # fmt: skip
# Models with mixers other than softmax attention, or with features that those above lack.
MIXERS = (
    "DeepSeek-V2-Lite", "GLM-4.7-Flash", "Qwen3-Next-80B-A3B-Instruct", "Qwen3.5-27B-text",
    "Olmo-Hybrid-7B", "Mamba-Codestral-7B-v0.1", "Bamba-9B", "Nemotron-H-8B-Base-8K",
    "granite-4.0-h-tiny", "Falcon-H1-0.5B-Base", "LFM2-1.2B", "gemma-4-E2B-it-text",
    "gemma-4-26B-A4B-it-text", "OLMoE-1B-7B-0924", "Llama-4-Scout-17B-16E-Instruct",
)  # fmt: skip
# Not cut to --layers: these are small, or their first layers differ from the others.
WHOLE = (
    "gemma-2-2b", "gemma-3-4b-it", "Qwen3-0.6B", "gpt2", "pythia-70m", "Falcon-H1-0.5B-Base",
    "LFM2-1.2B", "gemma-4-E2B-it-text",
)  # fmt: skip
LAYERS = {"Bamba-9B": 10, "Nemotron-H-8B-Base-8K": 10}  # the first attention is the 10th and 8th
VOCAB = 4096
PEAK = 653e12  # FLOP/s that large products reach on an H200


def cut_config(
    name: str, layers: int | None, experts: int | None = None
) -> tuple[dict[str, Any], int]:
    """Return a published configuration with vocabulary, layers and experts cut, and its depth."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    text = config.get("text_config", config)
    depth = "n_layer" if "n_layer" in text else "num_hidden_layers"
    kept: int = text[depth] if layers is None else layers
    text[depth] = kept
    for key in ("layer_types", "hybrid_override_pattern", "no_rope_layers"):
        if text.get(key) is not None:
            text[key] = text[key][:kept]
    for key in ("attn_layer_indices", "full_attn_idxs", "moe_layers"):
        if text.get(key) is not None:
            text[key] = [n for n in text[key] if n < kept]
    for key in ("vocab_size", "vocab_size_per_layer_input"):
        if key in text:
            text[key] = VOCAB
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if experts and text.get(key) is not None:
            text[key] = min(max(experts, text.get("num_experts_per_tok") or 1), text[key])
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(text.get(key), int):
            text[key] = 0
    config.pop("quantization_config", None)
    text.pop("quantization_config", None)
    return config, kept


def depth_of(name: str, layers: int) -> int | None:
    """Return the depth to which a model is cut; None: it is not."""
    return None if name in WHOLE else LAYERS.get(name, layers)


def random_params(arch: Any, depth: int) -> Any:
    """Weights under which activations keep a realistic size, made on the device."""
    import jax
    import jax.numpy as jnp

    from spile.models.config.specs import block_specs, outer_specs
    from spile.models.forward.weights import LayerSchedule, Params

    schedule = LayerSchedule.of(arch, depth, whole=True)
    keys = iter(jax.random.split(jax.random.key(0), 4096))

    def array(spec: Any, lead: tuple[int, ...] = ()) -> Any:
        shape = (*lead, *spec.shape)
        if "norm" in spec.name and not spec.name.endswith("_bias"):
            return jnp.ones(shape, jnp.bfloat16)
        if len(spec.shape) == 1 or spec.name.startswith("b_"):
            return jnp.zeros(shape, jnp.bfloat16)
        return normal(shape)(next(keys))

    def block(layer: int, *lead: int) -> dict[str, Any]:
        return {spec.name: array(spec, lead) for spec in block_specs(arch, arch.layers[layer])}

    places = range(schedule.period if schedule.cycles else 0)
    cycle = tuple(block(schedule.lead + place, schedule.cycles) for place in places)
    tail = tuple(map(block, range(schedule.scanned, depth)))
    outer = {spec.name: array(spec) for spec in outer_specs(arch)}
    lead = tuple(map(block, range(schedule.lead)))
    return Params(outer=outer, cycle=cycle, tail=tail, lead=lead), schedule


@cache
def normal(shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Makes random values, compiled once for each shape."""
    import jax
    import jax.numpy as jnp

    scale = jnp.bfloat16(shape[-1] ** -0.5)
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * scale)


def held_as(params: Any, dtype: str) -> Any:
    """Convert every array to the dtype that a step of this compute dtype holds it in."""
    import jax
    import jax.numpy as jnp

    from spile.models.forward.weights import held_dtype

    def block(arrays: dict[str, Any]) -> dict[str, Any]:
        return {n: a.astype(held_dtype(n, jnp.dtype(dtype))) for n, a in arrays.items()}

    return jax.tree.map(block, params, is_leaf=lambda each: isinstance(each, dict))


def in_float8(params: Any) -> Any:
    """Convert the blocks' matrices to float8."""
    import jax

    from spile.models.config import specs
    from spile.models.forward.ops import Float8Weight

    def block(arrays: dict[str, Any], lead: int) -> dict[str, Any]:
        def narrow(name: str, array: Any) -> bool:
            return specs.in_float8(specs.ParamSpec(name, array.shape[lead:], ()))

        make = jax.jit(Float8Weight.of)
        return {n: make(a) if narrow(n, a) else a for n, a in arrays.items()}

    cycle = tuple(block(arrays, 1) for arrays in params.cycle)
    tail, lead = (tuple(block(a, 0) for a in some) for some in (params.tail, params.lead))
    return dataclasses.replace(params, cycle=cycle, tail=tail, lead=lead)


def natural_batch(rows: int, seq: int, *, mixed: bool = False) -> Any:
    """Return a batch of documents of natural lengths, each in the first row with room for it.

    Args:
        mixed: whether to take as many documents as fill the rows. Otherwise the longest of several
            times as many fill them: rows of 2,048 then hold one each, attention's greatest work.
    """
    from spile.corpus.pack import Batch

    rng = np.random.default_rng(0)
    room, placed = [seq] * rows, [[] for _ in range(rows)]
    lengths = np.minimum(seq, rng.lognormal(np.log(600), 1.0, rows * seq // 200))
    if mixed:
        lengths = lengths[: np.searchsorted(lengths.cumsum(), rows * seq) + 1]
    for length in sorted(lengths, reverse=True):
        length = max(1, int(length))
        row = next((r for r in range(rows) if room[r] >= length), None)
        if row is not None:
            placed[row].append(length)
            room[row] -= length
    tokens = rng.integers(0, VOCAB, (rows, seq)).astype(np.int32)
    positions, segments = np.zeros((2, rows, seq), np.int32)
    for row, lengths in enumerate(placed):
        at = 0
        for number, length in enumerate(lengths, 1):
            positions[row, at : at + length] = np.arange(length)
            segments[row, at : at + length] = number
            at += length
    lengths = np.array([seq - left for left in room], np.int32)
    contexts = max(map(len, placed))
    most = next(n for n in (16, 64, 256, 1024) if n >= contexts)
    return Batch(tokens, positions, segments, lengths, None, lengths, contexts=most)


def timed(call: Callable[[], Any], seconds: float) -> float:
    """Return the sustained seconds of one call."""
    import jax

    jax.block_until_ready(call())
    jax.block_until_ready(call())
    count, begin, last = 0, time.perf_counter(), None
    while time.perf_counter() - begin < seconds:
        ahead = call()
        if last is not None:
            jax.block_until_ready(last)
        last, count = ahead, count + 1
    jax.block_until_ready(last)
    return (time.perf_counter() - begin) / count


def products(arch: Any, depth: int, tokens: int) -> tuple[Callable[[], Any], float]:
    """Return a call that runs the blocks' matrix products in sequence, and their FLOPs.

    Each adds to the input of the next product of that width, so XLA cannot drop any.
    """
    import jax

    from spile.models.config.specs import block_specs

    shapes: list[tuple[int, int, int]] = []  # columns, terms, times that a token is multiplied
    for layer in arch.layers[:depth]:
        for spec in block_specs(arch, layer):
            if spec.name.startswith("w"):
                times = arch.experts.chosen if arch.experts and "experts" in spec.axes else 1
                columns, terms = spec.shape[-2:]
                shapes.append((columns, terms, times))
    keys = iter(jax.random.split(jax.random.key(1), 4096))
    weights = [normal(shape[:2])(next(keys)) for shape in shapes]
    widths = {(n, width) for columns, terms, n in shapes for width in (columns, terms)}
    values = {(n, width): normal((tokens * n, width))(next(keys)) for n, width in sorted(widths)}

    @jax.jit
    def run(values: Any, weights: Any) -> Any:
        for (columns, terms, times), w in zip(shapes, weights, strict=True):
            out = values[times, terms] @ w.T
            values = {**values, (times, columns): values[times, columns] + out}
        return values

    flops = 2 * tokens * sum(columns * terms * times for columns, terms, times in shapes)
    return (lambda: run(values, weights)), flops


def hf_seconds(config: dict[str, Any], rows: int, seq: int, seconds: float) -> tuple[float, str]:
    """Return the seconds of HF's step on full rows, in the fastest way it has, and that way."""
    import torch
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    best, way = float("inf"), "nothing runs"
    routed = any(key in str(config) for key in ("num_experts", "num_local_experts"))
    capped = "attn_logit_softcapping" in config and config["attn_logit_softcapping"]
    for attention in ("eager",) if capped else ("sdpa", "eager"):  # sdpa ignores a soft cap
        for experts in ("grouped_mm", "eager") if routed else ("",):
            try:
                settings = transformers.AutoConfig.for_model(**config)
                settings._attn_implementation = attention
                if experts:
                    settings._experts_implementation = experts
                with torch.device("cuda"):
                    model = kind._from_config(settings, dtype=torch.bfloat16).eval()
                inner = getattr(model, "model", None) or model.base_model
                ids = torch.randint(0, VOCAB, (rows, seq), device="cuda")
                with torch.inference_mode():
                    for _ in range(2):
                        inner(ids, use_cache=False)
                    torch.cuda.synchronize()
                    count, begin = 0, time.perf_counter()
                    while time.perf_counter() - begin < seconds:
                        inner(ids, use_cache=False)
                        torch.cuda.synchronize()
                        count += 1
                spent = (time.perf_counter() - begin) / count
                if spent < best:
                    best, way = spent, " ".join(filter(None, (attention, experts)))
            except Exception as error:
                print(f"    HF {attention}, {experts}: {str(error).splitlines()[0][:90]}")
            finally:
                model = inner = None
                torch.cuda.empty_cache()
    return best, way


def parity(name: str, options: argparse.Namespace) -> None:
    """Print the mean distances of Spile's and HF's 16-bit rows from HF in float32."""
    import jax
    import jax.numpy as jnp
    import torch
    import transformers

    from spile.models.files.checkpoint import open_checkpoint
    from spile.models.forward.ops import FLOAT8
    from spile.models.forward.weight_loader import load_params
    from spile.models.forward.weights import LayerSchedule
    from spile.models.taps import parse_taps
    from spile.run.step.devices import StepDevices
    from spile.run.step.resident import ResidentStep
    from spile.run.step.settings import StepSettings

    dtype = options.compute_dtypes.split(",")[0]
    # HF has no float8.
    halves = "bfloat16" if dtype == "float8_e4m3" else dtype
    # Rows in float16 are computed in float32, besides the products: bfloat16 would hide that.
    stored = "float32" if dtype == "float16" else halves
    config, layers = cut_config(name, depth_of(name, options.layers), options.experts)
    kind = getattr(transformers, config["architectures"][0])
    settings = transformers.AutoConfig.for_model(**config)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = natural_batch(2, options.seq_len, mixed=True)
    documents = [
        (row, np.flatnonzero(batch.segments[row] == number))
        for row in range(2)
        for number in range(1, batch.segments[row].max() + 1)
    ]

    def rows_of_hf(folder: str, dtype: str) -> list[np.ndarray]:
        # (Experts one by one: other ways have kernels of their own.)
        model = kind.from_pretrained(
            folder, dtype=getattr(torch, dtype), experts_implementation="eager"
        )
        model = model.to(device).eval()
        found = [by_hf(model, batch.tokens[row, places]) for row, places in documents]
        known = np.isfinite(np.concatenate(found)).all(axis=1)
        if not known.all():
            raise ValueError(f"HF in {dtype}: {(~known).sum()} of {len(known)} rows are not finite")
        return found

    def by_hf(model: Any, ids: np.ndarray) -> np.ndarray:
        # Take the stream before the last norm; hidden_states[-1] is after it.
        inner = getattr(model, "model", None) or model.base_model
        inner = getattr(inner, "language_model", inner)
        blocks = next(m for n, m in inner.named_children() if n in ("layers", "h"))
        kept: list[Any] = []
        hook = blocks[-1].register_forward_hook(
            lambda module, given, out: kept.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.inference_mode():
            inner(torch.as_tensor(ids, device=device)[None].long(), use_cache=False)
        hook.remove()
        return kept[0].reshape(-1, kept[0].shape[-1]).float().cpu().numpy()

    with torch.device(device):
        made = kind._from_config(settings, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        made.save_pretrained(folder)
        del made
        # One model at a time is in memory.
        exact, floor = rows_of_hf(folder, "float32"), rows_of_hf(folder, halves)
        Path(folder, "tokenizer.json").write_text("{}")  # nothing here is tokenized
        checkpoint = open_checkpoint(folder)
        schedule = LayerSchedule.of(checkpoint.arch, layers, whole=True)
        held = jnp.dtype(FLOAT8 if dtype == "float8_e4m3" else dtype)
        params, _ = load_params(checkpoint, schedule, head=False, dtype=held)
    taps = parse_taps(f"resid_post:{layers - 1}", checkpoint.arch)
    if device == "cuda":
        torch.cuda.empty_cache()

    def distance(found: list[np.ndarray]) -> float:
        pairs = zip(found, exact, strict=True)
        each = [np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1) for a, b in pairs]
        return float(np.concatenate(each).mean())

    told = [f"HF {distance(floor):.4f}"]
    for wanted in options.attention.split(","):
        settings = StepSettings(
            arch=checkpoint.arch, taps=taps, schedule=schedule, compute_dtype=dtype,
            store_dtype=stored, place=StepDevices(jax.devices()[0]), attention=wanted,
        )  # fmt: skip
        try:
            rows = ResidentStep(params, settings).compute(batch)[0].rows
            values = np.asarray(rows[taps[0].name], np.float32)
        except Exception as error:
            told.append(f"{wanted}: {str(error).splitlines()[0][:80]}")
            continue
        starts = np.cumsum([0, *batch.lengths[:-1]])
        rows = [values[starts[row] + places] for row, places in documents]
        told.append(f"{wanted} {distance(rows):.4f}")
    print(f"{name:<30} {', '.join(told)}", flush=True)


def profile(call: Callable[[], Any], names: int, steps: int = 5) -> None:
    """Print the shares of a step's time by kind of kernel, and its longest kernels."""
    import jax
    from contestants import kernels_of, read_profile

    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call() for _ in range(steps)])
        kernels = kernels_of(Path(folder))
        shares = read_profile(Path(folder), 60.0)
    told = ", ".join(f"{kind} {part:.1%}" for kind, part in shares.items() if kind != "seconds")
    print(f"      {shares['seconds'] / steps * 1e3:.2f} ms a step: {told}")
    spent: dict[tuple[str, str], list[float]] = {}
    for begin, end, kind, kernel in kernels:
        spent.setdefault((kind, kernel), []).append((end - begin) / 1e6)
    longest = sorted(spent.items(), key=lambda entry: -sum(entry[1]))[:names]
    for (kind, kernel), times in longest:
        each, count = sum(times) / steps, len(times) / steps
        print(f"      {each:>8.3f} ms, {count:>4.0f} x, {kind}: {kernel[:90]}", flush=True)


def measure(name: str, options: argparse.Namespace) -> None:
    import jax

    from spile.models.config.hf_config import read_config
    from spile.models.taps import parse_taps
    from spile.run.step.devices import StepDevices
    from spile.run.step.resident import ResidentStep
    from spile.run.step.settings import StepSettings

    config, layers = cut_config(name, depth_of(name, options.layers), options.experts)
    _, arch = read_config(config, "bench")
    seq = min(options.seq_len, arch.max_positions)
    rows = max(1, options.tokens // seq)
    batch = natural_batch(rows, seq, mixed=options.mixed)
    useful = int(batch.lengths.sum())
    run, flops = products(arch, layers, rows * seq)
    bare = timed(run, options.seconds) * useful / (rows * seq)
    del run
    share = flops * useful / (rows * seq) / bare / PEAK
    rate = useful / bare
    print(f"{name:<30} products {rate:>9,.0f} tok/s ({share:.0%} of 653 TFLOP/s)", flush=True)
    taps = parse_taps(options.taps or f"resid_post:{layers - 1}", arch)
    params, schedule = random_params(arch, layers)
    ours = 0.0
    for wanted, dtype in product(options.attention.split(","), options.compute_dtypes.split(",")):
        try:
            held = in_float8(params) if dtype == "float8_e4m3" else held_as(params, dtype)
            settings = StepSettings(
                arch=arch, taps=taps, schedule=schedule, compute_dtype=dtype,
                store_dtype="bfloat16", place=StepDevices(jax.devices()[0]), attention=wanted,
            )  # fmt: skip
            step = ResidentStep(held, settings)
            spent = timed(partial(step.compute, batch), options.seconds)
            rate, part = useful / spent, bare / spent
            ours = max(ours, rate)
            beside = "" if dtype == "bfloat16" else f", {dtype}"
            print(f"    Spile, {wanted + beside:<12} {rate:>9,.0f} tok/s {part:>7.1%}", flush=True)
            if options.profile:
                profile(partial(step.compute, batch), options.profile)
        except Exception as error:
            print(f"    Spile, {wanted}: {str(error).splitlines()[0][:160]}", flush=True)
    del params
    if options.hf:
        spent, way = hf_seconds(config, rows, seq, options.seconds)
        rate = rows * seq / spent
        print(f"    HF, {way:<15} {rate:>9,.0f} tok/s {ours / rate:>7.2f} x is Spile", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS + MIXERS))
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compute-dtypes", default="bfloat16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, help="cut to so many experts")
    parser.add_argument("--taps", help="default: the last layer's stream")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--mixed", action="store_true", help="rows of several documents")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--hf", action="store_true")
    parser.add_argument("--profile", type=int, default=0, metavar="N")
    parser.add_argument("--parity", action="store_true")
    options = parser.parse_args()
    from spile.run.world.devices import prefer_xla_flags

    prefer_xla_flags()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if options.hf:
        import transformers

        there = {name: bool(find_spec(name)) for name in ("fla", "causal_conv1d", "mamba_ssm")}
        told = (f"{'with' if found else 'without'} {name}" for name, found in there.items())
        print(f"HF: transformers {transformers.__version__}, {', '.join(told)}", flush=True)
    for name in options.models.split(","):
        try:
            (parity if options.parity else measure)(name, options)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", flush=True)


if __name__ == "__main__":
    main()
