"""Useful tokens per second on the CPU: `spile extract` against HF transformers, in one run.

    python bench/cpu.py [--layers 6] [--tokens 30000] [--rounds 2]

Both read the same text with the same weights (the demo model cut to its first layers), compute in
float32 on the same cores, and store one float32 tap at the deepest layer. The HF side is a typical
script: a forward hook, `.numpy()`, `np.save` per batch. Its model is loaded and warmed up before
the clock starts. Spile's clock includes everything from reading the recipe to the last durable
file, also loading weights and (cached) compilation. Rounds alternate, and the best of each counts.
On a machine that others use, compare tokens per processor second, on one core (`taskset -c 0`):
HF's threads spin while they wait for each other.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

import spile
from spile.core.tensors import write_tensors
from spile.corpus.files import find_files
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.demo import demo_model
from spile.models.files.safetensors import read_tensor

SEQ_LEN = 1024
EQUAL = 256


class Rates(NamedTuple):
    """Useful tokens per second, by the clock and by the processor."""

    clock: float
    processor: float


def cut_model(directory: Path, layers: int) -> Path:
    """Write the demo model's first layers as a checkpoint that both sides load."""
    source = open_checkpoint("demo")
    shutil.copytree(demo_model(), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] = layers
    (directory / "config.json").write_text(json.dumps(config))
    dropped = [f"model.layers.{i}." for i in range(layers, source.arch.num_layers)]
    kept = {
        name: read_tensor(file, info)
        for name, (file, info) in source.tensors.items()
        if not name.startswith(tuple(dropped))
    }
    write_tensors(directory / "model.safetensors", kept)
    return directory


def choose_texts(tokenizer: Any, tokens: int, *, equal: bool) -> tuple[list[str], int]:
    """Documents of the demo corpus, whole (natural lengths) or cut to one length."""
    records = map(json.loads, open_demo().splitlines())
    chosen: list[str] = []
    total = 0
    for record in records:
        ids = tokenizer(record["text"])["input_ids"]
        if equal:
            text = tokenizer.decode(ids[:EQUAL])
            ids = tokenizer(text)["input_ids"]
            if len(ids) != EQUAL:
                continue
        elif len(ids) > SEQ_LEN:
            continue
        else:
            text = record["text"]
        chosen.append(text)
        total += len(ids)
        if total >= tokens:
            break
    return chosen, total


def open_demo() -> str:
    with find_files("demo")[0].open() as stream:
        return stream.read().decode()


def run_hf(model: Any, tokenizer: Any, texts: list[str], batch: int, out: Path) -> None:
    """Run a typical HF script."""
    out.mkdir()
    kept: list[torch.Tensor] = []
    hook = model.layers[-1].register_forward_hook(
        lambda module, inputs, output: kept.append(
            output[0] if isinstance(output, tuple) else output
        )
    )
    with torch.no_grad():
        for start in range(0, len(texts), batch):
            inputs = tokenizer(texts[start : start + batch], return_tensors="pt", padding=True)
            model(**inputs)
            rows = kept.pop()[inputs["attention_mask"].bool()].numpy()
            np.save(out / f"{start:06d}.npy", rows)
    hook.remove()


def run_spile(model: Path, corpus: Path, layers: int, out: Path) -> None:
    recipe = spile.Recipe(
        model=str(model),
        corpus=str(corpus),
        taps=f"resid_post:{layers - 1}",
        seq_len=SEQ_LEN,
        compute_dtype="float32",
    )
    spile.extract(recipe, str(out))


def measured(run: Callable[[Path], None], tokens: int, out: Path) -> Rates:
    begin, used = time.perf_counter(), time.process_time()
    run(out)
    rates = Rates(tokens / (time.perf_counter() - begin), tokens / (time.process_time() - used))
    shutil.rmtree(out)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="spile-bench-"))
    jax.config.update("jax_compilation_cache_dir", str(work / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    directory = cut_model(work / "model", options.layers)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()

    print(f"{options.layers} layers, float32, {torch.get_num_threads()} threads; useful tok/s")
    for name in ("natural", "equal"):
        texts, total = choose_texts(tokenizer, options.tokens, equal=name == "equal")
        corpus = work / f"{name}.jsonl"
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        ordered = sorted(texts, key=lambda text: len(tokenizer(text)["input_ids"]))
        settings: dict[str, Callable[[Path], None]] = {
            "spile": lambda out, c=corpus: run_spile(directory, c, options.layers, out),
            "HF batch 8": lambda out, t=texts: run_hf(model, tokenizer, t, 8, out),
            "HF batch 1": lambda out, t=texts: run_hf(model, tokenizer, t, 1, out),
            "HF sorted 8": lambda out, t=ordered: run_hf(model, tokenizer, t, 8, out),
        }
        measured(settings["spile"], total, work / "out")  # compiles
        measured(lambda out, t=texts: run_hf(model, tokenizer, t[:4], 1, out), 1, work / "out")
        rounds: dict[str, list[Rates]] = {setting: [] for setting in settings}
        for _ in range(options.rounds):
            for setting, run in settings.items():
                rounds[setting].append(measured(run, total, work / "out"))
        best = {
            setting: Rates(*map(max, zip(*each, strict=True))) for setting, each in rounds.items()
        }
        print(f"{name} lengths: {len(texts)} documents, {total} tokens", flush=True)
        for setting, (clock, processor) in best.items():
            shares = best["spile"].clock / clock, best["spile"].processor / processor
            print(
                f"  {setting:12} {clock:8.0f}   spile is {shares[0]:.2f}x; "
                f"{processor:8.0f} per processor second, {shares[1]:.2f}x",
                flush=True,
            )
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
