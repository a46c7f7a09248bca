"""What people run today, as bench/gpu.py starts it: each in a process of its own.

Each reads the same texts, keeps the residual stream after the same layers without padding, and
writes one file per layer and batch. `tuned` is HF as well as we could make it without packing:
batches of one length and a full step's tokens, no head, copies into pinned memory that overlap
with the next forward, files written by a thread beside it.
"""

import argparse
import json
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

Batch = list[str]
Seconds = defaultdict[str, float]
WARM_UP = 4  # batches


def texts_of(options: argparse.Namespace) -> list[str]:
    with open(options.corpus) as file:
        return [json.loads(line)["text"] for line in file]


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def save(path: str, values: torch.Tensor) -> None:
    np.save(path, values.view(torch.int16).numpy())


def measured(
    options: argparse.Namespace,
    batches: Iterator[Batch],
    one: Callable[[int, Batch, Seconds], int],
    finish: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run batches until the time is up; the first few are warm-up."""
    done, begin, seconds = 0, 0.0, Seconds(float)
    for number, batch in enumerate(batches):
        if number == WARM_UP:
            seconds.clear()
            begin = time.perf_counter()
        tokens = one(number, batch, seconds)
        done += tokens if number >= WARM_UP else 0
        if number >= WARM_UP and time.perf_counter() - begin > options.seconds:
            break
    finish()
    total = time.perf_counter() - begin
    shares = {name: round(value / total, 3) for name, value in seconds.items()}
    return {"tok/s": done / total, "shares": shares}


def stage(seconds: Seconds, name: str, begin: float) -> float:
    now = time.perf_counter()
    seconds[name] += now - begin
    return now


def plain(options: argparse.Namespace, forward: Callable[[Any], list[torch.Tensor]],
          tokenizer: Any) -> dict[str, Any]:  # fmt: skip
    """Padded batches in the corpus's order, `.cpu()`, a file for each layer."""
    texts = texts_of(options)
    Path(options.out).mkdir(parents=True)

    def one(number: int, batch: Batch, seconds: Seconds) -> int:
        begin = time.perf_counter()
        inputs = tokenizer(
            batch, return_tensors="pt", padding=True, truncation=True, max_length=options.seq_len
        ).to(device())
        begin = stage(seconds, "tokenize", begin)
        with torch.no_grad():
            kept = forward(inputs)
        wait()
        begin = stage(seconds, "forward", begin)
        mask = inputs["attention_mask"].bool()
        host = [values[mask].cpu() for values in kept]
        begin = stage(seconds, "copy", begin)
        for layer, values in enumerate(host):
            save(f"{options.out}/{number}-{layer}.npy", values)
        stage(seconds, "write", begin)
        return int(mask.sum())

    starts = range(0, len(texts) - options.size, options.size)
    return measured(options, (texts[i : i + options.size] for i in starts), one)


def hooked(model: Any, layers: list[int]) -> list[torch.Tensor]:
    """A list that fills with the outputs of these layers at every forward."""
    kept: list[torch.Tensor] = []
    for layer in layers:
        model.layers[layer].register_forward_hook(
            lambda module, inputs, output: kept.append(
                output[0] if isinstance(output, tuple) else output
            )
        )
    return kept


def hf(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModel.from_pretrained(options.model, dtype=torch.bfloat16).to(device()).eval()
    kept = hooked(model, options.layers)

    def forward(inputs: Any) -> list[torch.Tensor]:
        kept.clear()
        model(**inputs, use_cache=False)
        return list(kept)

    return plain(options, forward, tokenizer)


def nnsight(options: argparse.Namespace) -> dict[str, Any]:
    import nnsight as library

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    weights = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    model = library.LanguageModel(weights.to(device()).eval(), tokenizer=tokenizer)

    def forward(inputs: Any) -> list[torch.Tensor]:
        with model.trace(dict(inputs)) as tracer:
            saved = library.save([model.model.layers[i].output for i in options.layers])
            tracer.stop()  # neither later layers nor the head
        return [s[0] if isinstance(s, tuple) else s for s in saved]

    return plain(options, forward, tokenizer)


def transformer_lens(options: argparse.Namespace) -> dict[str, Any]:
    from transformer_lens.model_bridge import TransformerBridge

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    weights = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    model = TransformerBridge.boot_transformers(
        options.model, hf_model=weights.to(device()).eval(), tokenizer=tokenizer,
        device=device(), dtype=torch.bfloat16,
    )  # fmt: skip
    names = [f"blocks.{i}.hook_out" for i in options.layers]

    def forward(inputs: Any) -> list[torch.Tensor]:
        _, cache = model.run_with_cache(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], names_filter=names,
            logits_to_keep=1,
        )  # fmt: skip
        return [cache[name] for name in names]

    return plain(options, forward, tokenizer)


def tuned(options: argparse.Namespace) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModel.from_pretrained(options.model, dtype=torch.bfloat16).to(device()).eval()
    kept = hooked(model, options.layers)
    texts = texts_of(options)
    Path(options.out).mkdir(parents=True)
    files: queue.Queue[Any] = queue.Queue(2)
    side = torch.cuda.Stream() if torch.cuda.is_available() else None
    # Pinned once: a fresh buffer for each shape would cost more than the forward.
    most, width = max(options.step_tokens, options.seq_len), model.config.hidden_size
    spare = [
        torch.empty((most, width), dtype=torch.bfloat16, pin_memory=side is not None)
        for _ in range(5 * len(options.layers))
    ]

    def by_length() -> Iterator[Batch]:
        """Neighbours in length, as many as fill a step; then in any order."""
        encoded = tokenizer(texts, truncation=True, max_length=options.seq_len)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        groups: list[Batch] = [[]]
        for length, text in sorted(zip(lengths, texts, strict=True)):
            if options.size == 1 or (len(groups[-1]) + 1) * length > options.step_tokens:
                groups.append([])
            groups[-1].append(text)
        np.random.default_rng(0).shuffle(groups)  # type: ignore[arg-type]
        yield from filter(None, groups)

    def keep(values: torch.Tensor) -> tuple[torch.Tensor, int]:
        buffer = spare.pop()
        buffer[: len(values)].copy_(values, non_blocking=True)
        return buffer, len(values)

    def writer() -> None:
        while (item := files.get()) is not None:
            number, ready, host = item
            if ready is not None:
                ready.synchronize()
            for layer, (buffer, count) in enumerate(host):
                save(f"{options.out}/{number}-{layer}.npy", buffer[:count])
                spare.append(buffer)

    thread = threading.Thread(target=writer, daemon=True)  # or a failure would wait for it
    thread.start()

    def one(number: int, batch: Batch, seconds: Seconds) -> int:
        begin = time.perf_counter()
        inputs = tokenizer(
            batch, return_tensors="pt", padding=True, truncation=True, max_length=options.seq_len
        )
        mask = inputs["attention_mask"].bool()
        whole = bool(mask.all())
        begin = stage(seconds, "tokenize", begin)
        kept.clear()
        with torch.no_grad():
            # Without padding no mask is given: that is the faster kernel.
            given = {"input_ids": inputs["input_ids"]} if whole else dict(inputs)
            model(**{k: v.to(device()) for k, v in given.items()}, use_cache=False)
        places = mask.flatten().nonzero().squeeze(1).to(device())
        rows = [values.flatten(0, 1) if whole else values.flatten(0, 1)[places] for values in kept]
        host, ready = [], None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host = [keep(values) for values in rows]
                ready = side.record_event()
            for values in rows:
                values.record_stream(side)
        else:
            host = [keep(values) for values in rows]
        begin = stage(seconds, "forward and copy", begin)
        files.put((number, ready, host))
        stage(seconds, "wait for files", begin)
        return int(mask.sum())

    def finish() -> None:
        files.put(None)
        thread.join()

    return measured(options, by_length(), one, finish)


CONTESTANTS = {f.__name__: f for f in (hf, nnsight, transformer_lens, tuned)}

if __name__ == "__main__":
    settings = argparse.Namespace(**json.loads(sys.argv[2]))
    if sys.argv[1] == "transformer_lens" and settings.stubs:
        sys.path.append(settings.stubs)
    print(json.dumps(CONTESTANTS[sys.argv[1]](settings)))
