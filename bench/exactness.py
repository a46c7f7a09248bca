"""How far float32 is from float64: HF transformers' two attentions, and Spile, tap by tap.

    python bench/exactness.py                             # the demo model, documents of the demo
    python bench/exactness.py --in-float64 product,norm   # these operations of Spile in float64
    python bench/exactness.py --families all --seeds 3    # the tests' tiny random models
    python bench/exactness.py --compute-dtypes            # what fewer bits cost, on the demo model

The exact result is HF's model with every operation in float64. A row's distance is relative to its
own length, or to the median length if that is larger, as in `spile check`. The script prints the
root mean square over the rows of all contexts, and the worst row, each for the layer where it is
largest; then the ratio of Spile's distance to that of HF's eager attention: the median over layers,
and the largest. With --compute-dtypes it prints Spile's distance from its own float32: the mean
over rows, the cosine, and the divergence of the next token's probabilities.
"""

import argparse
import gzip
import importlib.resources
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import spile
from spile.check.compare import divergence, row_scales
from spile.check.reference import Reference
from spile.corpus.tokenize import TextTokenizer
from spile.models.files.checkpoint import open_checkpoint
from spile.models.files.demo import demo_model
from spile.models.forward import attention, block, decoder, kernels, ops
from spile.models.taps import all_taps
from support import families, tiny

WAYS = ("eager", "sdpa", "spile")
Rows = dict[str, list[np.ndarray]]  # by tap, context by context


@dataclass(frozen=True)
class Distance:
    """The distance of one tap, for one way to compute it."""

    mean: float  # root mean square over rows
    worst: float


def demo_contexts(count: int, tokens: int) -> list[np.ndarray]:
    """The first tokens of some documents of the demo corpus."""
    corpus = importlib.resources.files("spile.corpus") / "demo" / "sotu.jsonl.gz"
    with corpus.open("rb") as packed, gzip.open(packed, "rt") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    tokenizer = TextTokenizer(demo_model(), "tokenizer")
    chosen = np.random.default_rng(0).permutation(len(texts))
    encoded = (tokenizer.encode([texts[i]])[0] for i in chosen)
    long = (ids[:tokens] for ids in encoded if len(ids) >= tokens)
    return [np.asarray(ids, np.int64) for ids, _ in zip(long, range(count), strict=False)]


def measure(
    directory: Path,
    contexts: Sequence[np.ndarray],
    sites: Collection[str] = (),
    ways: Sequence[str] = WAYS,
) -> dict[str, dict[str, Distance]]:
    """Return the distance of every tap (or of some sites' taps) from float64, by tap and way."""
    arch = open_checkpoint(str(directory)).arch
    taps = [tap.name for tap in all_taps(arch) if not sites or tap.site in sites]
    taps = [tap for tap in taps if not tap.startswith("expert_ids")]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    reference = Reference(model)
    exact = [reference.taps(context, taps) for context in contexts]
    reference.compute_in(torch.float32)
    found: dict[str, dict[str, Distance]] = {tap: {} for tap in taps}
    for way in ways:
        if way == "spile":
            rows = _by_spile(directory, contexts, taps)
        else:
            try:
                reference.attend_by(way)
            except ValueError:  # Gemma 2 and gpt-oss have only eager attention
                continue
            rows = [reference.taps(context, taps) for context in contexts]
        for tap in taps:
            if tap in rows[0]:
                each = [(mine[tap], truth[tap]) for mine, truth in zip(rows, exact, strict=True)]
                found[tap][way] = _distance(each)
    return found


def _by_spile(
    directory: Path, contexts: Sequence[np.ndarray], taps: Sequence[str]
) -> list[dict[str, np.ndarray]]:
    model = spile.load_model(str(directory), compute_dtype="float32")
    # A run that taps attention weights mixes values with them, so they run apart from the others.
    patterns = [tap for tap in taps if tap.startswith("attn_pattern")]
    others = [tap for tap in taps if tap not in patterns]
    found: list[dict[str, np.ndarray]] = []
    for ids in contexts:
        rows: dict[str, Any] = {}
        for names in filter(None, (others, patterns)):
            rows |= model([ids], ",".join(names))
        found.append({tap: np.asarray(values[0]) for tap, values in rows.items()})
    return found


def _distance(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Distance:
    squares, lengths = [], []
    for found, exact in pairs:
        wide = found.reshape(len(found), -1).astype(np.float64)
        truth = exact.reshape(len(exact), -1)
        squares.append(np.square(wide - truth).sum(axis=1))
        lengths.append(np.square(truth).sum(axis=1))
    relative = np.concatenate(squares) / row_scales(np.concatenate(lengths))
    return Distance(float(np.sqrt(relative.mean())), float(np.sqrt(relative.max())))


def ratios(found: dict[str, dict[str, Distance]]) -> dict[str, float]:
    """Return the ratio of Spile's mean distance to HF eager's, by tap; 1 if both are exact."""
    least = float(np.finfo(np.float32).eps) / 4  # embeddings are copied, not rounded
    return {
        tap: max(by["spile"].mean, least) / max(by["eager"].mean, least)
        for tap, by in found.items()
    }


def table(found: dict[str, dict[str, Distance]]) -> Iterator[str]:
    by_tap = ratios(found)
    yield (
        f"{'site':14}" + "".join(f"  {way + ' mean, worst':>18}" for way in WAYS) + "   ratio, most"
    )
    for site in dict.fromkeys(tap.partition(".")[0] for tap in found):
        taps = [tap for tap in found if tap.partition(".")[0] == site]
        line = f"{site:14}"
        for way in WAYS:
            each = [found[tap][way] for tap in taps if way in found[tap]]
            mean, worst = (
                max((getattr(one, kind) for one in each), default=np.nan)
                for kind in ("mean", "worst")
            )
            line += f"  {mean:8.1e}, {worst:8.1e}"
        own = [by_tap[tap] for tap in taps]
        yield f"{line}   {np.median(own):5.2f}, {max(own):.2f}"
    worst = [by["spile"].worst / max(by["eager"].worst, 1e-9) for by in found.values()]
    yield f"worst row, Spile's over eager's: median {np.median(worst):.2f}, most {max(worst):.2f}"


# -- one operation at a time, in float64 (as the demo model has them) ----------------------------


def _product(equation: str, x: Any, weight: Any) -> Any:
    return jnp.einsum(equation, *(a.astype(jnp.float64) for a in (x, weight))).astype(x.dtype)


def _norm(x: Any, weight: Any, bias: Any, kind: str, eps: float) -> Any:
    assert (bias, kind) == (None, "rms")
    wide = x.astype(jnp.float64)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float64)[None, None]).astype(x.dtype)


def _angles(positions: Any, frequencies: np.ndarray, amplitude: float) -> Any:
    angles = positions[:, :, None, None].astype(jnp.float64) * frequencies[None, None, None]
    return tuple((f(angles) * amplitude).astype(jnp.float32) for f in (jnp.cos, jnp.sin))


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    return ops.rotate(*(a.astype(jnp.float64) for a in (x, cos, sin))).astype(x.dtype)


def _activate(up: Any, gate: Any, name: str, limit: float | None) -> Any:
    return ops.activate(up.astype(jnp.float64), gate.astype(jnp.float64), name, limit).astype(
        up.dtype
    )


def _attention(segments: Any, positions: Any) -> Any:
    def attend(q: Any, k: Any, v: Any, scoring: Any) -> Any:
        wide = [a.astype(jnp.float64) for a in (q, k, v)]
        score = attention.masked(segments, positions)
        return score(wide[0], wide[1], wide[2], scoring).astype(q.dtype)

    return attend


OPERATIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "product": (ops, "product", _product),
    "norm": (block, "norm", _norm),
    "angles": (decoder, "rotary_angles", _angles),
    "rotate": (block, "rotate", _rotate),
    "activate": (block, "activate", _activate),
    "attend": (kernels, "blocked", _attention),
}


@contextmanager
def in_float64(names: Collection[str]) -> Iterator[None]:
    """Compute some of Spile's operations in float64, and round their results."""
    kept = {name: getattr(*OPERATIONS[name][:2]) for name in names}
    jax.config.update("jax_enable_x64", bool(names))
    for name in names:
        setattr(*OPERATIONS[name])
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(*OPERATIONS[name][:2], original)
        jax.config.update("jax_enable_x64", False)


# -- tiny models ---------------------------------------------------------------------------------


def family_ratios(make: Callable[..., Any], seeds: int, tokens: int = 60) -> dict[str, float]:
    """Return the root mean square of the ratios over random models of a family, by tap."""
    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            tiny_model(make, seed, Path(folder))
            rng = np.random.default_rng(seed)
            contexts = [rng.integers(0, 256, tokens) for _ in range(4)]
            for tap, ratio in ratios(
                measure(Path(folder), contexts, ways=("eager", "spile"))
            ).items():
                found.setdefault(tap, []).append(ratio)
    return {tap: float(np.sqrt(np.mean(np.square(each)))) for tap, each in found.items()}


def tiny_model(make: Callable[..., Any], seed: int, folder: Path) -> None:
    families.randomised(make, seed).save_pretrained(folder)
    tiny.write_tokenizer(folder)


def _print_families(wanted: str, seeds: int) -> None:
    names = [*families.FAMILIES] if wanted == "all" else wanted.split(",")
    width = max(map(len, names))
    by_site: dict[str, dict[str, float]] = {}
    for name in names:
        try:
            found = family_ratios(families.FAMILIES[name], seeds)
        except spile.SpileError as error:
            print(f"{name:{width}}  refused: {error}")
            continue
        by_site[name] = {}
        for tap, ratio in found.items():
            site = tap.partition(".")[0]
            by_site[name][site] = max(by_site[name].get(site, 0.0), ratio)
        each = " ".join(f"{site} {ratio:.2f}" for site, ratio in by_site[name].items())
        print(f"{name:{width}}  most {max(found.values()):.2f}: {each}", flush=True)


def print_compute_dtypes(contexts: list[np.ndarray]) -> None:
    """Print each tap's relative distance and cosine, and the next token's divergence, by dtype."""
    taps = "embed,resid_post:0,resid_post:4,resid_post:14,resid_post:29,logits"

    def rows(dtype: str) -> dict[str, np.ndarray]:
        model = spile.load_model("demo", compute_dtype=dtype)
        found = [model(context[None], taps) for context in contexts]
        return {
            tap: np.concatenate([np.asarray(each[tap][0], np.float64) for each in found])
            for tap in found[0]
        }

    exact, dtypes = rows("float32"), ("bfloat16", "float16", "float8_e4m3")
    others = {dtype: rows(dtype) for dtype in dtypes}
    print(f"| tap | {' | '.join(f'{dtype}: distance | cosine' for dtype in dtypes)} |")
    print("|---" * (1 + 2 * len(dtypes)) + "|")
    length = partial(np.linalg.norm, axis=1)
    for tap, truth in exact.items():
        cells: list[str] = []
        for dtype in dtypes:
            found = others[dtype][tap]
            distance = length(found - truth) / length(truth)
            cosine = (found * truth).sum(axis=1) / (length(found) * length(truth))
            cells.append(f"{distance.mean():.4f} | {cosine.mean():.5f}")
        print(f"| {tap} | {' | '.join(cells)} |")
    cells = [f"{divergence(exact['logits'], others[d]['logits']).mean():.2g}" for d in dtypes]
    print(f"| next token, nats | {' | | '.join(cells)} | |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=192, help="in each context")
    parser.add_argument("--sites", default="", help="only these sites")
    parser.add_argument("--in-float64", default="", help=f"some of {','.join(OPERATIONS)}")
    parser.add_argument("--families", default="", help="all, or some by name")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--compute-dtypes", action="store_true")
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    if given.families:
        _print_families(given.families, given.seeds)
        return
    contexts = demo_contexts(given.contexts, given.tokens)
    if given.compute_dtypes:
        print_compute_dtypes(contexts)
        return
    sites = [*filter(None, given.sites.split(","))]
    with in_float64([*filter(None, given.in_float64.split(","))]):
        print("\n".join(table(measure(demo_model(), contexts, sites))))


if __name__ == "__main__":
    main()
