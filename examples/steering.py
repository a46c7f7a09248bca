"""A steering vector: found in one half of the documents, and its effect measured in the other.

    spile extract --model demo --corpus demo --keep year --taps resid_post:9+20,logprob \
        --max-docs 32 --seq-len 256 --out acts/clean
    python examples/steering.py acts/clean --tap resid_post.9 --later resid_post.20 \
        --label 'year >= 1900' --out acts/steering

The vector is `spile.direction`: the mean of documents with the label, minus that of the others. Two
runs with --splice read the same tokens: one adds `--factor` times the vector to every row of
`--tap`, and one adds a random vector of the same length. For each run and both kinds of documents,
the script prints how far the rows of `--later` moved along the difference of means of that tap (1
is the whole way from one mean to the other), and by how much the loss rose.
"""

import argparse
from pathlib import Path

import numpy as np

import spile
from probe import labels
from spile.core.errors import SpileError

ROWS = 1 << 20  # most rows to read
# Odd or even documents, without the first row of a context, which is huge, and without the last,
# which predicts nothing.
_WHERE = "pos >= 1 and not last and doc % 2 == {half}"


def rows(ds: spile.Dataset, tap: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of even documents in stored order, and the document of each."""
    where = _WHERE.format(half=0)
    batch = next(ds.batches([tap], ROWS, where=where, shuffle=None))
    return batch[tap], batch["index"]["doc"]


def difference(ds: spile.Dataset, tap: str, of: np.ndarray) -> np.ndarray:
    """Return the difference of means of odd documents: those with the label minus the others."""
    labels, where = of[ds.columns("doc")], _WHERE.format(half=1)
    return spile.direction(ds, 1, 0, tap, by=labels, where=where).values


def write_vectors(ds: spile.Dataset, tap: str, of: np.ndarray, folder: Path) -> dict[str, Path]:
    """Write the difference of means, and a random vector of the same length."""
    vector = difference(ds, tap, of)
    drawn = np.random.default_rng(0).standard_normal(len(vector)).astype(np.float32)
    vectors = {"steered": vector, "random": drawn * np.linalg.norm(vector) / np.linalg.norm(drawn)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in vectors.items():
        np.save(folder / f"{name}.npy", values)
    return {name: folder / f"{name}.npy" for name in vectors}


def effects(
    clean: spile.Dataset, changed: spile.Dataset, later: str, of: np.ndarray
) -> dict[str, tuple[float, float]]:
    """Return the shift of `later` and the loss's rise in nats, for both kinds of even documents."""
    spile.align(clean=clean, changed=changed)  # refuses datasets of other rows
    apart = difference(clean, later, of)
    along = apart / np.square(apart).sum()
    (before, docs), (after, _) = (rows(ds, later) for ds in (clean, changed))
    (likely, _), (now, _) = (rows(ds, "logprob") for ds in (clean, changed))
    shift, rise = (after - before) @ along, (likely - now).reshape(-1)
    kinds = {"with the label": of[docs] == 1, "without": of[docs] == 0}
    return {kind: (float(shift[on].mean()), float(rise[on].mean())) for kind, on in kinds.items()}


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dataset")
    parser.add_argument("--tap", required=True, help="where the vector is added")
    parser.add_argument("--later", required=True, help="where its effect is measured")
    parser.add_argument("--label", required=True, help="a condition, e.g. 'year >= 1900'")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(given)
    try:
        clean = spile.open(args.dataset)
        of = labels(clean, args.label)
        vectors = write_vectors(clean, args.tap, of, args.out)
        for name, path in vectors.items():
            splice = f"steer:{args.tap}={path}*{args.factor}"
            recipe = spile.Recipe(like=args.dataset, splice=splice)
            spile.extract(recipe, str(args.out / name))
            changed = spile.open(args.out / name)
            for kind, (shift, rise) in effects(clean, changed, args.later, of).items():
                print(f"{name}, documents {kind}: {args.later} moved by {shift:+.2f}, "
                      f"loss {rise:+.3f} nats a token", flush=True)  # fmt: skip
    except SpileError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
