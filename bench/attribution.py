"""Attribution patching beside real patching, on an induction circuit that this script trains.

    python bench/attribution.py [--steps 150] [--pairs 16]

A llama of two blocks learns to continue sequences whose second half repeats the first. Each pair
has a clean sequence and a corrupted one, in which the token to be predicted is another where it
first occurred. For every head and token (`z`), and for the stream after each block, it replaces the
clean values by the corrupted ones (splices), and compares the change of the logit difference of
both answers with the gradient times the difference. It prints their rank correlations.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HALF, VOCAB, LAYERS, HEADS = 12, 48, 2, 4


def sequences(rng: np.random.Generator, count: int) -> np.ndarray:
    first = np.stack([rng.permutation(VOCAB)[:HALF] for _ in range(count)])
    return np.concatenate([first, first], axis=1)


def trained(folder: Path, steps: int) -> float:
    """Train the model, and save it; return its loss on the second half."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from support import tiny

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the model is tiny
    config = LlamaConfig(
        vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=128,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.0)
    rng, loss = np.random.default_rng(0), torch.zeros(())
    for step in range(steps):
        ids = torch.tensor(sequences(rng, 32))
        found = model(ids).logits[:, HALF - 1 : -1]
        loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), ids[:, HALF:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: {loss.item():.3f} nats a repeated token", flush=True)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)
    return loss.item()


def ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each; equal ones share theirs, and below a thousandth of the largest is zero."""
    large = np.where(np.abs(values) > 1e-3 * np.abs(values).max(), values, 0.0)
    _, place, counts = np.unique(large, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[place]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--pairs", type=int, default=16)
    options = parser.parse_args()
    import jax
    import jax.numpy as jnp

    import spile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"trained to {trained(folder, options.steps):.3f} nats", flush=True)
        model = spile.load_model(name, compute_dtype="float32", special_tokens="none")
    rng = np.random.default_rng(1)
    clean = sequences(rng, options.pairs)
    place = rng.integers(1, HALF, options.pairs)
    answer = clean[np.arange(len(clean)), place]
    clean = np.stack([np.roll(row, HALF - 1 - at) for row, at in zip(clean[:, :HALF], place,
                                                                      strict=True)])  # fmt: skip
    clean = np.concatenate([clean, clean[:, :-1]], axis=1)  # the answer follows
    corrupted = clean.copy()
    other = np.array([next(t for t in range(VOCAB) if t not in row) for row in clean])
    corrupted[:, HALF - 1] = other
    last = clean.shape[1] - 1
    assert (clean[:, HALF - 1] == answer).all()

    def predicted(logits: jax.Array) -> jax.Array:
        both = jnp.asarray(np.stack([answer, other], axis=1))[:, None]
        own = jnp.take_along_axis(logits, jnp.broadcast_to(both, (*logits.shape[:2], 2)), axis=2)
        return jnp.where(jnp.arange(last + 1)[None] == last, own[..., 0] - own[..., 1], 0.0)

    taps = "z:0-1,resid_post:0-1"
    before, after = (model([*ids], taps) for ids in (clean, corrupted))
    gradients = model.grad([*clean], taps, objective={"logits": predicted})
    base = np.asarray(predicted(model([*clean])["logits"]))[:, last]
    print(f"the answer's logit is {base.mean():.2f} above the other's", flush=True)
    for tap in before:
        difference = np.asarray(after[tap]) - np.asarray(before[tap])
        estimated = (difference * np.asarray(gradients[tap])).sum(axis=-1)
        real = np.zeros_like(estimated)
        for where in np.ndindex(*estimated.shape[1:]):
            values = np.array(before[tap])
            values[(slice(None), *where)] = np.asarray(after[tap])[(slice(None), *where)]
            logits = model([*clean], splice={tap: spile.replaced(values)})["logits"]
            real[(slice(None), *where)] = np.asarray(predicted(logits))[:, last] - base
        ours, theirs = estimated.mean(axis=0).reshape(-1), real.mean(axis=0).reshape(-1)
        rank = np.corrcoef(ranks(ours), ranks(theirs))[0, 1]
        top = int(np.argmin(theirs))
        print(f"{tap:14} {ours.size:>3} places: rank correlation {rank:.3f}, correlation "
              f"{np.corrcoef(ours, theirs)[0, 1]:.3f}; the largest fall is "
              f"{theirs[top]:.2f}, estimated {ours[top]:.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
