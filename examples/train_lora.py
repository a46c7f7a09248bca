"""A LoRA adapter that moves a model towards some of a dataset's documents.

    spile extract --model demo --corpus demo --keep year --taps resid_post:9 --max-docs 120 \
        --seq-len 256 --out acts/lora/base
    python examples/train_lora.py acts/lora/base --label 'year < 1900' --out lora
    spile extract --like acts/lora/base --lora lora --out acts/lora/tuned

It trains with PEFT, on the tokens that the dataset holds. The label is a condition on the columns
that --keep stored. Every fifth document is held out: the script prints the loss there, before and
after, of documents with the label and of the others.
"""

import argparse

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import spile
from probe import HELD_OUT, labels
from spile.core.errors import SpileError

SETTINGS = {
    "steps": 40, "batch": 2, "length": 96, "rate": 1e-3, "rank": 8, "seed": 0, "evaluated": 8
}  # fmt: skip


def contexts(ds: spile.Dataset, docs: np.ndarray, length: int) -> list[torch.Tensor]:
    """Return the documents' tokens in pieces of one length; the rest of each is not used."""
    ids = [ds.document(int(doc)).index["token_id"].astype(np.int64) for doc in docs]
    starts = [(d, at) for d in ids for at in range(0, len(d) - length + 1, length)]
    return [torch.from_numpy(d[at : at + length].copy()) for d, at in starts]


@torch.no_grad()
def loss(model: torch.nn.Module, texts: list[torch.Tensor]) -> float:
    """Nats a token."""
    model.eval()
    return float(np.mean([model(input_ids=t[None], labels=t[None]).loss.item() for t in texts]))


def train(model: torch.nn.Module, texts: list[torch.Tensor], args: argparse.Namespace) -> None:
    """Train the adapter with AdamW on random contexts; the learning rate falls to zero."""
    rng = np.random.default_rng(args.seed)
    weights = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(weights, lr=args.rate, weight_decay=0.0)
    falling = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, args.steps)
    model.train()
    for step in range(1, args.steps + 1):
        drawn = torch.stack([texts[i] for i in rng.integers(len(texts), size=args.batch)])
        wrong = model(input_ids=drawn, labels=drawn).loss
        wrong.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()
        adam.zero_grad()
        falling.step()
        if step % 10 == 0:
            print(f"step {step}: loss {wrong.item():.3f}", flush=True)


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dataset")
    parser.add_argument("--label", required=True, help="a condition, e.g. 'year < 1900'")
    parser.add_argument("--out", required=True)
    for name, value in SETTINGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    try:
        ds = spile.open(args.dataset)
        chosen = labels(ds, args.label)
    except SpileError as error:
        raise SystemExit(str(error)) from None
    docs = np.array([doc for doc in range(len(chosen)) if ds.has_document(doc)])
    held, of = docs % HELD_OUT == 0, chosen[docs] > 0
    learnt = contexts(ds, docs[of & ~held], args.length)
    tests = {
        "with the label": contexts(ds, docs[of & held], args.length)[: args.evaluated],
        "the others": contexts(ds, docs[~of & held], args.length)[: args.evaluated],
    }
    for name, texts in {"to train on": learnt, **tests}.items():
        if not texts:
            raise SystemExit(f"{name}: no document has {args.length} tokens; see --label, --length")
    torch.manual_seed(args.seed)
    source = ds.recipe.model_source
    base = AutoModelForCausalLM.from_pretrained(
        spile.demo_model() if source == "demo" else source, dtype=torch.float32
    )
    adapter = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, adapter)
    before = {name: loss(model, texts) for name, texts in tests.items()}
    train(model, learnt, args)
    model.save_pretrained(args.out)
    for name, texts in tests.items():
        print(
            f"{len(texts)} held-out contexts, {name}: "
            f"{before[name]:.3f} nats a token before, {loss(model, texts):.3f} after"
        )


if __name__ == "__main__":
    main()
