"""Other tools and scripts that people use; bench/gpu.py starts each in its own process.

Each reads the same texts, keeps the residual stream after the same layers without padding, and
writes one file per layer and batch. `tuned` is an expert's torch script for this one family:
documents packed into steps of one shape, torch's packed flash attention, fused projections and
`torch.compile`, copies into pinned memory that overlap with the next forward pass, four threads
that write, one that tokenizes ahead.
"""

import argparse
import inspect
import json
import queue
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
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
    batches: Iterator[Any],
    one: Callable[[int, Any, Seconds], int],
    finish: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run batches until the time is up; the first few are warm-up."""
    done, begin, seconds = 0, 0.0, Seconds(float)
    for number, batch in enumerate(batches):
        if number == WARM_UP:
            wait()  # otherwise the warm-up's work would count
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
    """Run padded batches in the corpus's order, with `.cpu()` and a file for each layer."""
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
    """Return a list that fills with the outputs of these layers at every forward pass."""
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
    """Run an expert's torch script (see the module's docstring)."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = PackedQwen2(Path(options.model), options.layers)
    Path(options.out).mkdir(parents=True)
    on_gpu = torch.cuda.is_available()
    side = torch.cuda.Stream() if on_gpu else None
    steps: queue.Queue[Any] = queue.Queue(4)
    files: queue.Queue[Any] = queue.Queue()
    # Pinned once: a new buffer for each step would cost more than the forward pass.
    spare: queue.Queue[torch.Tensor] = queue.Queue()
    for _ in range(3 * len(options.layers)):
        shape = (options.step_tokens, model.width)
        spare.put(torch.empty(shape, dtype=torch.bfloat16, pin_memory=on_gpu))

    def reader() -> None:
        """Tokenize ahead, and fill steps with whole documents."""
        texts, step = texts_of(options), list[list[int]]()
        for start in range(0, len(texts), 512):
            some = texts[start : start + 512]
            for ids in tokenizer(some, truncation=True, max_length=options.seq_len)["input_ids"]:
                if sum(map(len, step)) + len(ids) > options.step_tokens:
                    steps.put(packed_step(step, options.step_tokens, options.seq_len))
                    step = []
                step.append(ids)
        steps.put(None)

    def writer() -> None:
        while (item := files.get()) is not None:
            path, ready, buffer, count = item
            if ready is not None:
                ready.synchronize()
            save(path, buffer[:count])
            spare.put(buffer)

    def one(number: int, step: Any, seconds: Seconds) -> int:
        begin = time.perf_counter()
        *arrays, count = step
        moved = (array.to(device(), non_blocking=True) for array in arrays)
        with torch.inference_mode():
            rows = model.forward(*moved, options.seq_len)
        begin = stage(seconds, "forward", begin)
        buffers = [spare.get() for _ in rows]
        begin = stage(seconds, "wait for files", begin)
        ready = None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for buffer, values in zip(buffers, rows, strict=True):
                    buffer[:count].copy_(values[:count], non_blocking=True)
                    values.record_stream(side)
                ready = side.record_event()
        else:
            for buffer, values in zip(buffers, rows, strict=True):
                buffer[:count].copy_(values[:count])
        for layer, buffer in enumerate(buffers):
            files.put((f"{options.out}/{number}-{layer}.npy", ready, buffer, count))
        return count

    def finish() -> None:
        for _ in writers:
            files.put(None)
        for thread in writers:
            thread.join()

    writers = [threading.Thread(target=writer, daemon=True) for _ in range(4)]
    for thread in (threading.Thread(target=reader, daemon=True), *writers):
        thread.start()
    return measured(options, iter(steps.get, None), one, finish)


def packed_step(documents: list[list[int]], size: int, longest: int) -> tuple[Any, ...]:
    """Return ids, positions and boundaries of concatenated documents, padded to a fixed shape."""
    count = sum(map(len, documents))
    rest = size - count
    padding = [[0] * min(longest, rest - start) for start in range(0, rest, longest)]
    ids = np.concatenate([np.array(each, np.int64) for each in (*documents, *padding)])
    lengths = [len(each) for each in (*documents, *padding)]
    positions = np.concatenate([np.arange(length) for length in lengths])
    ends = np.cumsum(lengths)
    # A fixed number of boundaries: the rest belong to empty documents.
    most = 64 * -(-(len(lengths) + 1) // 64)
    bounds = np.concatenate([[0], ends, np.full(most - len(ends), size)]).astype(np.int32)
    arrays = [torch.from_numpy(array) for array in (ids, positions, bounds)]
    if torch.cuda.is_available():
        # A copy from unpinned memory would wait for every forward pass that has started.
        arrays = [array.pin_memory() for array in arrays]
    return (*arrays, count)


class PackedQwen2:
    """Qwen2 as an expert would write it for this purpose: only what the taps need."""

    def __init__(self, directory: Path, layers: list[int]) -> None:
        from safetensors.torch import load_file

        config = json.loads((directory / "config.json").read_text())
        self.width, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads, self.eps = config["num_key_value_heads"], config["rms_norm_eps"]
        self.dim, self.layers = self.width // self.heads, layers
        stored = load_file(directory / "model.safetensors", device=device())
        self.embed = stored["model.embed_tokens.weight"]
        half = torch.arange(0, self.dim, 2, device=device()) / self.dim
        self.frequencies = 1.0 / config["rope_theta"] ** half.float()
        self.blocks = [self._fused(stored, f"model.layers.{i}.") for i in range(max(layers) + 1)]
        self._run = torch.compile(self._block) if torch.cuda.is_available() else self._block

    def _fused(self, stored: dict[str, torch.Tensor], prefix: str) -> tuple[torch.Tensor, ...]:
        def side_by_side(*names: str) -> torch.Tensor:
            return torch.cat([stored.pop(prefix + name) for name in names])

        qkv = [f"self_attn.{n}_proj" for n in "qkv"]
        return (
            stored[prefix + "input_layernorm.weight"],
            side_by_side(*(f"{name}.weight" for name in qkv)),
            side_by_side(*(f"{name}.bias" for name in qkv)),
            stored[prefix + "self_attn.o_proj.weight"],
            stored[prefix + "post_attention_layernorm.weight"],
            side_by_side("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            stored[prefix + "mlp.down_proj.weight"],
        )

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, bounds: torch.Tensor, longest: int
    ) -> list[torch.Tensor]:
        angles = positions[:, None].float() * self.frequencies
        cos, sin = (f(angles).to(torch.bfloat16)[:, None] for f in (torch.cos, torch.sin))
        x, kept = self.embed[ids], list[torch.Tensor]()
        for layer, block in enumerate(self.blocks):
            x = self._run(x, cos, sin, bounds, longest, *block)
            if layer in self.layers:
                kept.append(x)
        return kept

    def _block(
        self, x: Any, cos: Any, sin: Any, bounds: Any, longest: int, norm: Any, w_qkv: Any,
        b_qkv: Any, w_o: Any, mlp_norm: Any, w_gate_up: Any, w_down: Any,
    ) -> Any:  # fmt: skip
        def normed(x: Any, weight: Any) -> Any:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
            return weight * wide.to(x.dtype)

        def rotated(x: Any) -> Any:
            first, second = x.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        qkv = torch.nn.functional.linear(normed(x, norm), w_qkv, b_qkv)
        parts = qkv.unflatten(-1, (-1, self.dim)).split([self.heads, *[self.kv_heads] * 2], 1)
        z = packed_attention(rotated(parts[0]), rotated(parts[1]), parts[2], bounds, longest)
        x = x + z.flatten(1) @ w_o.T
        gate, up = (normed(x, mlp_norm) @ w_gate_up.T).chunk(2, -1)
        return x + (torch.nn.functional.silu(gate) * up) @ w_down.T


def packed_attention(q: Any, k: Any, v: Any, bounds: Any, longest: int) -> Any:
    """Causal attention within each document: torch's packed flash attention on a GPU."""
    if not q.is_cuda:
        out = torch.empty_like(q)
        attend = torch.nn.functional.scaled_dot_product_attention
        for start, end in pairwise(sorted(set(bounds.tolist()))):
            own = (x[start:end].transpose(0, 1)[None].float() for x in (q, k, v))
            found = attend(*own, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
            out[start:end] = found.to(q.dtype)
        return out
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters  # they have changed from version to version
    causal: dict[str, Any] = (
        {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    )
    if "enable_gqa" in known:
        causal["enable_gqa"] = True
    return varlen_attn(q, k, v, bounds, bounds, longest, longest, **causal)


CONTESTANTS = {f.__name__: f for f in (hf, nnsight, transformer_lens, tuned)}

if __name__ == "__main__":
    settings = argparse.Namespace(**json.loads(sys.argv[2]))
    if sys.argv[1] == "transformer_lens" and settings.stubs:
        sys.path.append(settings.stubs)
    print(json.dumps(CONTESTANTS[sys.argv[1]](settings)))
