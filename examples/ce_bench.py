"""CE-Bench's figures of a sparse autoencoder, from the mean latents of contrastive stories.

    spile extract --model demo --corpus 'examples/ce_bench.py:stories(path="pairs.jsonl")' \
        --taps resid_post:9 --encode sae --latents 1024 --pool mean --out acts/pairs
    python examples/ce_bench.py acts/pairs --tap resid_post.9

CE-Bench (Gulko, Peng and Kumar 2025, https://arxiv.org/abs/2509.00691) asks whether latents tell
two stories about one subject apart. Each line of `pairs.jsonl` has the keys `story1`, `story2` and
`subject`. The figures are those of `ce_bench/CE_Bench.py` in github.com/Yusen-Peng/CE-Bench, each
the mean over all pairs of the largest standardized value over all latents:

* contrastive: how far the mean latents of both stories lie apart;
* independent: how far their common mean lies from the mean of all stories. The paper says so, and
  the published code subtracts zeros instead; `--average` does what the paper says;
* interpretability: both distances added.

The mean of a latent is over all tokens, and every latent counts: give `--latents` the number of all
latents of the encoder, so that the whole mean of each story is stored.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import spile
from spile.core.errors import SpileError


def stories(path: str) -> Iterator[dict[str, object]]:
    """Yield the stories of all pairs, as a program for `--corpus`."""
    with Path(path).open(encoding="utf-8") as lines:
        for pair, line in enumerate(lines):
            record = json.loads(line)
            for story in (1, 2):
                about = {"pair": pair, "story": story, "subject": record["subject"]}
                yield {"text": record[f"story{story}"], **about}


def mean_latents(ds: spile.Dataset, tap: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the documents, the mean of all latents over each of them, and its tokens."""
    if ds.recipe.pool != "mean":
        raise SpileError(f"{ds.url}: does not hold means of documents; extract with --pool mean")
    found, index = ds.latents(tap, 0, ds.num_tokens), ds.index(0, ds.num_tokens)
    cut = ds.statistics(tap.replace(".", "_latents.")).truncated
    if cut:
        raise SpileError(
            f"{ds.url}: in {cut:,} documents more latents were active than were stored; extract "
            f"with --latents {found.width}"
        )
    return index["doc"], found.dense().astype(np.float64), index["count"]


def figures(
    first: np.ndarray, second: np.ndarray, common: np.ndarray, average: np.ndarray | float
) -> dict[str, float]:
    """Return CE-Bench's figures.

    Args:
        first, second: the mean latents of the two stories of each pair, [pairs, latents].
        common: the mean over the tokens of both.
        average: what the independent score subtracts.
    """
    apart, beyond = np.abs(first - second), np.abs(common - average)
    distances = {"contrastive": apart, "independent": beyond, "interpretability": apart + beyond}
    return {name: float(largest(each).mean()) for name, each in distances.items()}


def largest(distances: np.ndarray) -> np.ndarray:
    """Return the largest standardized distance of each pair."""
    spread = distances.std(axis=1, ddof=1)
    above = distances.max(axis=1) - distances.mean(axis=1)
    return above / np.where(spread == 0, 1, spread)


def measured(ds: spile.Dataset, tap: str, average: bool) -> tuple[dict[str, float], int]:
    """Return the figures of a dataset of pairs, and the number of pairs."""
    docs, means, tokens = mean_latents(ds, tap)
    own = np.searchsorted(ds.columns("doc"), docs)
    pair, story = ds.columns("pair")[own], ds.columns("story")[own]
    sides = [np.flatnonzero(story == side) for side in (1, 2)]
    sides = [side[np.argsort(pair[side])] for side in sides]
    if not np.array_equal(pair[sides[0]], pair[sides[1]]):
        raise SpileError(f"{ds.url}: some pair lacks a story; extract all documents")
    first, second = (means[side] for side in sides)
    weights = np.stack([tokens[side] for side in sides])[:, :, None]
    common = (weights * [first, second]).sum(axis=0) / weights.sum(axis=0)
    return figures(first, second, common, common.mean(axis=0) if average else 0.0), len(first)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dataset")
    parser.add_argument("--tap", required=True, help="the encoded tap, e.g. resid_post.9")
    parser.add_argument("--average", action="store_true", help="subtract the mean of all stories")
    args = parser.parse_args(given)
    try:
        found, pairs = measured(spile.open(args.dataset), args.tap, args.average)
    except SpileError as error:
        raise SystemExit(str(error)) from None
    print(", ".join(f"{name} {value:.4f}" for name, value in found.items()), f"({pairs} pairs)")


if __name__ == "__main__":
    main()
