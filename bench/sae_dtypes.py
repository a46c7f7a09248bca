"""Measure the cost of fewer bits: the example's SAE on rows stored, or computed, in fewer bits.

    python bench/sae_dtypes.py --out /tmp/sae_dtypes

The same corpus is extracted once for each dtype, and an SAE trained on each, from three seeds.
All are evaluated on the same held-out bfloat16 rows, and by the model's own loss. Results are kept
in --out: you may stop the command and run it again, or run several at once for different dtypes or
seeds.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import spile
import train_sae

# How rows are stored and computed, by name; None: as this machine computes by default.
DTYPES: dict[str, tuple[str, str | None]] = {
    "bfloat16": ("bfloat16", None),
    "float8_e4m3": ("float8_e4m3", None),
    "int8": ("int8", None),
    "products-in-float8": ("bfloat16", "float8_e4m3"),
}
TAP = "resid_post.4"
RECIPE: dict[str, Any] = {
    "model": "demo", "corpus": "demo", "taps": TAP, "seq_len": 512, "max_tokens": 96_000,
    "unit_tokens": 32_000,
}  # fmt: skip
SHOWN = ("explained variance", "loss recovered", "L0")


def extracted(out: Path, dtype: str) -> spile.Dataset:
    where = str(out / dtype)
    stored, computed = DTYPES[dtype]
    spile.extract(spile.Recipe(**RECIPE, store_dtype=stored, compute_dtype=computed), where)
    return spile.open(where)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    exact = extracted(given.out, "bfloat16")
    model, baseline = None, given.out / "baseline.json"  # the model's own losses: the same for all
    for dtype in given.dtypes.split(","):
        rows = extracted(given.out, dtype)
        for seed in given.seeds.split(","):
            folder = given.out / f"sae-{dtype}-{seed}"
            result = folder / "evaluation.json"
            if result.exists():
                continue
            folder.mkdir(exist_ok=True)
            options = [rows.url, "--tap", TAP, "--out", str(folder), "--seed", seed]
            options += ["--steps", str(given.steps), "--latents", "1024", "--batch", "256"]
            options += ["--eval-tokens", "512", "--eval-rows", "2048"]
            args = train_sae.arguments(options)
            sae = train_sae.folded(train_sae.train(rows, folder, args))
            model = model or spile.load_model("demo")
            known = json.loads(baseline.read_text()) if baseline.exists() else {}
            found = train_sae.evaluate(exact, sae, model, args, known)
            baseline.write_text(json.dumps({name: found[name] for name in ("clean", "ablated")}))
            result.write_text(json.dumps(found, indent=1))
    print(table(given.out))


def table(out: Path) -> str:
    """Return a table of means over the seeds, with the largest deviation."""
    lines = [f"| rows | bytes a row | {' | '.join(SHOWN)} |", "|---" * (2 + len(SHOWN)) + "|"]
    for dtype in DTYPES:
        found = [
            json.loads(p.read_text()) for p in sorted(out.glob(f"sae-{dtype}-*/evaluation.json"))
        ]
        if not found:
            continue
        width = spile.open(str(out / dtype)).width(TAP)
        sizes = {"bfloat16": 2 * width, "float8_e4m3": width + 4, "int8": width}
        size = sizes[DTYPES[dtype][0]]
        cells = [_cell([each[name] for each in found]) for name in SHOWN]
        lines.append(f"| {dtype} | {size:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: list[float]) -> str:
    middle = mean(values)
    return f"{middle:.4f} ± {max(abs(value - middle) for value in values):.4f}"


if __name__ == "__main__":
    main()
