"""Lenses beside those of their own projects: is what `spile lens fit` makes as good?

    python bench/lens_quality.py jacobian --model DIR --prompts P.jsonl --lens lens/jacobian
    python bench/lens_quality.py tuned --model DIR --train T.parquet --held H.parquet \
        --lens lens/tuned,lens/refined [--rows 2] [--threads 2]

This runs where the other project is installed (jacobian-lens, or tuned-lens 0.2.0), with torch and
transformers; it does not need Spile. The lenses come from, for example:

    spile lens fit --model DIR --corpus P.jsonl --kind jacobian --seq-len 64 --out lens/jacobian
    spile lens fit --model DIR --corpus T.parquet --kind tuned --out lens/tuned

`jacobian` fits the project's own lens to the same prompts (`text` of each line), and prints the
cosine of each matrix. `tuned` trains the project's own translators on the same rows of `input_ids`,
by its own recipe (SGD with Nesterov momentum, a learning rate that falls to zero, one pass), and
prints the KL divergence in nats of every lens on held-out rows, by translator. The first token of a
row is left out of it.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any


def cosines(options: argparse.Namespace) -> None:
    import jlens
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(options.model) / "tokenizer.json"))
    lines = Path(options.prompts).read_text().splitlines()
    prompts = [json.loads(line)["text"] for line in lines]
    begin = time.perf_counter()
    theirs = jlens.fit(
        jlens.from_hf(model, tokenizer), prompts, dim_batch=8, max_seq_len=options.seq_len
    )
    print(f"{theirs}: {time.perf_counter() - begin:.1f} s")
    ours = jlens.JacobianLens.from_pretrained(options.lens)
    for layer in theirs.source_layers:
        one = torch.as_tensor(theirs.jacobians[layer]).double().flatten()
        other = torch.as_tensor(ours.jacobians[layer]).double().flatten()
        cosine = float(one @ other / one.norm() / other.norm())
        gap, largest = float((one - other).abs().max()), float(one.abs().max())
        told = f"largest difference {gap:.2e} of {largest:.2e}"
        print(f"layer {layer}: cosine {cosine:.8f}, {told}")


def rows_of(path: str) -> Any:
    import pyarrow.parquet as pq
    import torch

    return torch.tensor(pq.read_table(path)["input_ids"].to_pylist())


def divergences(model: Any, lens: Any, held: Any) -> list[float]:
    """Return the mean KL divergence of each translator from the model."""
    import torch

    found: list[list[float]] = [[] for _ in range(len(lens))]
    with torch.no_grad():
        for rows in held.split(4):
            out = model(rows, output_hidden_states=True)
            exact = out.logits[:, 1:].log_softmax(-1)
            for number, stream in enumerate(out.hidden_states[:-1]):
                own = lens(stream[:, 1:], idx=number).log_softmax(-1)
                found[number].append(float((exact.exp() * (exact - own)).sum(-1).mean()))
    return [sum(each) / len(each) for each in found]


def trained(model: Any, train: Any, rows: int) -> Any:
    """Train translators as tuned-lens 0.2.0 does by default."""
    import torch
    from transformers import get_linear_schedule_with_warmup
    from tuned_lens import TunedLens

    lens = TunedLens.from_model(model)
    parameters = [each for each in lens.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    batches = train.split(rows)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, len(batches))
    for batch in batches:
        with torch.no_grad():
            out = model(batch, output_hidden_states=True)
        exact = out.logits.log_softmax(-1)
        for number, stream in enumerate(out.hidden_states[:-1]):
            own = lens(stream, idx=number).log_softmax(-1)
            (exact.exp() * (exact - own)).sum(-1).mean().backward()
        torch.nn.utils.clip_grad_norm_(lens.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return lens


def judged(options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM
    from tuned_lens import TunedLens

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    train, held = rows_of(options.train), rows_of(options.held)
    lenses = {"logit lens": TunedLens.from_model(model)}
    for where in filter(None, options.lens.split(",")):
        lenses[where] = TunedLens.from_model_and_pretrained(model, where)
    lenses[f"tuned-lens, {train.numel():,} tokens"] = trained(model, train, options.rows)
    for name, lens in lenses.items():
        shown = "  ".join(f"{each:8.3f}" for each in divergences(model, lens, held))
        print(f"{name:32} {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=("jacobian", "tuned"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--lens", required=True, help="tuned: several, joined by commas")
    parser.add_argument("--prompts", help="jacobian: lines of JSON with text")
    parser.add_argument("--seq-len", type=int, default=128, help="jacobian: tokens of a prompt")
    parser.add_argument("--train", help="tuned: Parquet with rows of input_ids, of equal length")
    parser.add_argument("--held", help="tuned: the same, held out")
    parser.add_argument("--rows", type=int, default=2, help="tuned: rows in a training step")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    cosines(options) if options.kind == "jacobian" else judged(options)


if __name__ == "__main__":
    main()
