"""Useful tokens per second on a GPU, from text to files: Spile against its peers, in one run.

    python bench/gpu.py [--shape 7B] [--seconds 20] [--taps 8] [--sinks /dev/shm,/tmp]

Everyone reads the same documents (log-normal lengths, mean about 1,000 tokens, cut at 2,048) with
the same random bfloat16 weights and stores the same residual streams. Each contestant has a
process of its own, is warmed up, and is timed for as long. The limit is the model's own matrix
products, chained, on the same card in the same run. Peers that are not installed are left out.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEQ_LEN = 2048
STEP_TOKENS = 16384
SHAPES = {  # width, mlp, layers, heads, kv heads, vocabulary: as Qwen2.5 has them
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 152_064),
    "14B": (5120, 13_824, 48, 40, 8, 152_064),
}


def config_of(shape: str) -> dict[str, Any]:
    width, mlp, layers, heads, kv_heads, vocab = SHAPES[shape]
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": vocab,
        "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768,
        "tie_word_embeddings": False, "use_sliding_window": False, "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def make_model(directory: Path, shape: str) -> None:
    """Random weights under which activations keep a realistic size, and a tokenizer."""
    import ml_dtypes
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    from spile.models.checkpoint import Checkpoint
    from spile.models.hf_config import read_config
    from spile.tensors import build_header

    directory.mkdir(parents=True)
    config = config_of(shape)
    (directory / "config.json").write_text(json.dumps(config))
    family, arch = read_config(config, "bench")
    shapes = Checkpoint(directory, family, arch, {}, (), family.prefixes[0]).shapes()
    torch.manual_seed(0)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(build_header((n, ml_dtypes.bfloat16, s) for n, s in shapes.items()))
        for name, size in shapes.items():
            scale = 1.0 if len(size) == 1 else size[-1] ** -0.5
            values = torch.randn(size, device="cuda", dtype=torch.bfloat16) * scale
            if "norm" in name:
                values = values.abs()
            file.write(values.view(torch.int16).cpu().numpy().data)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=32_000, special_tokens=["<s>"], show_progress=False)
    tokenizer.train_from_iterator(demo_texts(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<s>",
                "pad_token": "<s>"}  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def demo_texts() -> list[str]:
    from spile.data.corpus import find_files

    with find_files("demo")[0].open() as stream:
        return [json.loads(line)["text"] for line in stream.read().decode().splitlines()]


def make_corpus(path: Path, model: Path, tokens: int) -> None:
    """Pieces of the demo's text, of natural lengths."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    words = " ".join(demo_texts()).split(" ")
    per_word = len(tokenizer.encode(" ".join(words[:20_000])).ids) / 20_000
    rng = np.random.default_rng(0)
    total = 0
    with path.open("w") as file:
        while total < tokens:
            length = int(min(SEQ_LEN, rng.lognormal(np.log(600), 1.0)))
            count = max(1, int(length / per_word))
            start = int(rng.integers(0, len(words) - count))
            file.write(json.dumps({"text": " ".join(words[start : start + count])}) + "\n")
            total += length


# -- contestants: each is run in a process of its own and prints one JSON object -------------


def limit(options: argparse.Namespace) -> dict[str, float]:
    """The model's matrix products alone, chained in a scan, sustained."""
    os.environ["XLA_FLAGS"] = "--xla_gpu_enable_triton_gemm=false"
    import jax
    import jax.numpy as jnp

    width, mlp, layers, heads, kv_heads, _ = SHAPES[options.shape]
    kv = kv_heads * width // heads
    key = jax.random.key(0)

    def matrix(i: int, *shape: int) -> Any:
        values = jax.random.normal(jax.random.fold_in(key, i), (layers, *shape), jnp.bfloat16)
        return values * jnp.bfloat16(shape[-1] ** -0.5)

    sizes = ((width, width), (kv, width), (kv, width), (width, width), (mlp, width), (mlp, width))
    weights = [jax.jit(matrix, static_argnums=range(3))(i, *s) for i, s in enumerate(sizes)]
    weights.append(jax.jit(matrix, static_argnums=range(3))(9, width, mlp))

    def block(x: Any, w: Any) -> Any:
        q, k, v, o, gate, up, down = w
        used = 0 * ((x @ k.T)[:, :1] + (x @ v.T)[:, :1])  # nothing may be left out
        x = x + (x @ q.T) @ o.T + used
        hidden = (x @ gate.T + x @ up.T) * jnp.bfloat16(0.05)
        return (x + hidden @ down.T) * jnp.bfloat16(0.6), None

    run = jax.jit(lambda x, w: jax.lax.scan(block, x, w)[0])
    x = jax.random.normal(key, (STEP_TOKENS, width), jnp.bfloat16)
    run(x, weights).block_until_ready()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < options.seconds:
        run(x, weights).block_until_ready()
        count += 1
    return {"tok/s": count * STEP_TOKENS / (time.perf_counter() - begin)}


def spile(options: argparse.Namespace) -> dict[str, float]:
    """`spile.extract`; timed from the first rows written to the last durable file."""
    import spile as package
    from spile.metrics import Counters

    counters, seen, stop = Counters(), [], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            seen.append((time.perf_counter(), counters["tokens"]))

    threading.Thread(target=watch, daemon=True).start()
    recipe = package.Recipe(
        model=options.model, corpus=options.corpus, taps=options.tapped, seq_len=SEQ_LEN,
        unit_tokens=options.unit_tokens, store_dtype=options.store_dtype,
    )  # fmt: skip
    runtime = package.Runtime(batch_tokens=options.batch_tokens)
    package.extract(recipe, options.out, runtime, counters=counters)
    end = time.perf_counter()
    stop.set()
    # Loading, compiling and the first steps are warm-up, as they are for everyone.
    start, before = next((t, n) for t, n in seen if n >= 4 * STEP_TOKENS)
    return {"tok/s": (counters["tokens"] - before) / (end - start)}


def texts_of(options: argparse.Namespace) -> list[str]:
    with open(options.corpus) as file:
        return [json.loads(line)["text"] for line in file]


def timed(options: argparse.Namespace, batches: Iterator[Callable[[], int]]) -> dict[str, float]:
    """Run batches until the time is up; the first four are warm-up."""
    done, begin = 0, None
    for number, batch in enumerate(batches):
        if number == 4:
            begin = time.perf_counter()
        tokens = batch()
        if begin is not None:
            done += tokens
            if time.perf_counter() - begin > options.seconds:
                break
    assert begin is not None
    return {"tok/s": done / (time.perf_counter() - begin)}


def hf(options: argparse.Namespace) -> dict[str, float]:
    """HF with hooks and `.cpu()`: padded batches, or with --tuned sorted and copied pinned."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModel.from_pretrained(options.model, dtype=torch.bfloat16).cuda().eval()
    kept: list[Any] = []
    for layer in options.layers:
        model.layers[layer].register_forward_hook(
            lambda module, inputs, output: kept.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
    texts = texts_of(options)
    if options.tuned:
        texts = sorted(texts, key=len)  # batches of one length; their order is shuffled below
    Path(options.out).mkdir()
    pinned: dict[tuple[int, ...], Any] = {}

    def batches() -> Iterator[Callable[[], int]]:
        order = np.arange(0, len(texts) - options.size + 1, options.size)
        if options.tuned:
            np.random.default_rng(0).shuffle(order)
        for start in order:
            yield lambda start=int(start): one(start)

    def one(start: int) -> int:
        inputs = tokenizer(
            texts[start : start + options.size], return_tensors="pt", padding=True,
            truncation=True, max_length=SEQ_LEN,
        ).to("cuda")  # fmt: skip
        with torch.no_grad():
            model(**inputs, use_cache=False)
        mask = inputs["attention_mask"].bool()
        rows = [values[mask] for values in kept]
        kept.clear()
        if options.tuned:
            host = []
            for number, values in enumerate(rows):
                place = (number, *values.shape)
                if place not in pinned:
                    pinned[place] = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
                host.append(pinned[place].copy_(values, non_blocking=True))
            torch.cuda.synchronize()
        else:
            host = [values.cpu() for values in rows]
        for number, values in enumerate(host):
            np.save(f"{options.out}/{start}-{number}.npy", values.view(torch.int16).numpy())
        return int(mask.sum())

    return timed(options, batches())


def nnsight(options: argparse.Namespace) -> dict[str, float]:
    """nnsight traces, saved values moved with `.cpu()`."""
    import torch
    from nnsight import LanguageModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    weights = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).cuda()
    model = LanguageModel(weights, tokenizer=tokenizer)
    texts = texts_of(options)
    Path(options.out).mkdir()

    def one(start: int) -> int:
        inputs = tokenizer(
            texts[start : start + 8], return_tensors="pt", padding=True, truncation=True,
            max_length=SEQ_LEN,
        ).to("cuda")  # fmt: skip
        with torch.no_grad(), model.trace(dict(inputs)):
            saved = [model.model.layers[i].output.save() for i in options.layers]
        mask = inputs["attention_mask"].bool()
        for number, value in enumerate(saved):
            values = (value[0] if isinstance(value, tuple) else value)[mask].cpu()
            np.save(f"{options.out}/{start}-{number}.npy", values.view(torch.int16).numpy())
        return int(mask.sum())

    return timed(options, (lambda s=s: one(s) for s in range(0, len(texts) - 8, 8)))


def transformer_lens(options: argparse.Namespace) -> dict[str, float]:
    """TransformerLens' bridge with a cache of the same hooks."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    weights = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    model = TransformerBridge.boot_transformers(
        options.model, hf_model=weights, tokenizer=tokenizer, device="cuda", dtype=torch.bfloat16
    )
    names = [f"blocks.{i}.hook_out" for i in options.layers]
    texts = texts_of(options)
    Path(options.out).mkdir()

    def one(start: int) -> int:
        inputs = tokenizer(
            texts[start : start + 8], return_tensors="pt", padding=True, truncation=True,
            max_length=SEQ_LEN,
        ).to("cuda")  # fmt: skip
        with torch.no_grad():
            _, cache = model.run_with_cache(
                inputs["input_ids"], attention_mask=inputs["attention_mask"], names_filter=names
            )
        mask = inputs["attention_mask"].bool()
        for number, name in enumerate(names):
            values = cache[name][mask].cpu()
            np.save(f"{options.out}/{start}-{number}.npy", values.view(torch.int16).numpy())
        return int(mask.sum())

    return timed(options, (lambda s=s: one(s) for s in range(0, len(texts) - 8, 8)))


CONTESTANTS = {f.__name__: f for f in (limit, spile, hf, nnsight, transformer_lens)}


def contest(name: str, options: argparse.Namespace, **changes: Any) -> dict[str, float] | str:
    """One contestant in a process of its own; what it printed, or why there is nothing."""
    if name in ("nnsight", "transformer_lens") and importlib.util.find_spec(name) is None:
        return "not installed"
    settings = {**vars(options), **changes}
    out = Path(settings["out"])
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, __file__, "--contestant", name, "--settings", json.dumps(settings)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    shutil.rmtree(out, ignore_errors=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return "failed: " + (lines[-1] if lines else f"exit {done.returncode}")[:300]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="7B")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--taps", type=int, default=8)
    parser.add_argument("--sinks", default="/dev/shm,/tmp")
    parser.add_argument("--work", default="/dev/shm/spile-bench")
    parser.add_argument("--peers", default="hf,hf-tuned,nnsight,transformer_lens")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        settings = argparse.Namespace(**json.loads(options.settings))
        print(json.dumps(CONTESTANTS[options.contestant](settings)))
        return

    work = Path(options.work)
    shutil.rmtree(work, ignore_errors=True)
    make_model(work / "model", options.shape)
    layers = SHAPES[options.shape][2]
    speed = 50_000 * 7.6e9 / (12 * layers * SHAPES[options.shape][0] ** 2 * 1.6)
    tokens = int(options.seconds * speed * 1.3) + 10 * STEP_TOKENS
    make_corpus(work / "corpus.jsonl", work / "model", tokens)
    options.model, options.corpus = str(work / "model"), str(work / "corpus.jsonl")
    options.unit_tokens, options.store_dtype = 16 * STEP_TOKENS, "bfloat16"
    options.batch_tokens, options.tuned, options.size = STEP_TOKENS, False, 8
    options.out = f"{options.sinks.split(',')[0]}/spile-bench-out"
    deepest = [layers - 1]
    several = list(range(layers - options.taps, layers))

    def tapped(chosen: list[int]) -> dict[str, Any]:
        return {"layers": chosen, "tapped": f"resid_post:{chosen[0]}-{chosen[-1]}"}

    def show(title: str, result: dict[str, float] | str) -> None:
        text = result if isinstance(result, str) else f"{result['tok/s']:>9,.0f} tok/s"
        print(f"{title:<44} {text}", flush=True)

    show("matrix products alone", contest("limit", options, **tapped(deepest)))
    for sink in options.sinks.split(","):
        out = f"{sink}/spile-bench-out"
        for chosen in (deepest, several):
            title = f"spile, {len(chosen)} taps, {sink}"
            show(title, contest("spile", options, out=out, **tapped(chosen)))
    half = [layers // 2 - 1]
    show("spile, 1 tap at half depth", contest("spile", options, **tapped(half)))
    for peer in filter(None, options.peers.split(",")):
        name, _, tuned = peer.partition("-")
        for size in (8, 1) if tuned else (8,):
            title = f"{name}{', tuned, batch ' + str(size) if tuned else ', as people run it'}"
            changes = {"tuned": bool(tuned), "size": size, **tapped(several)}
            show(f"{title}, {len(several)} taps", contest(name, options, **changes))
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
