"""`spile features` over synthetic latents: pairs a second and core, bytes beside `cat`, memory.

python bench/features.py --rows 4000000 --out DIR

makes 65,536 latents, 64 of them active in each row, and ends. The same command again counts them
in one process and prints one line of JSON. Rates are of the whole command: reading, counting,
merging, neighbours. `cat` reads the same files into /dev/null, right after, so both find them in
the page cache if they fit there.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from spile.dataset.format import TapInfo  # noqa: E402
from spile.dataset.records.features import FeatureSet  # noqa: E402
from spile.features.run import FeatureJob, FeatureRequest  # noqa: E402
from spile.objects import LocalObjects  # noqa: E402
from support import web_page  # noqa: E402

LATENTS, K = 1 << 16, 64
UNIT = 1 << 18  # rows
CONTEXT = 1024
VALUES, IDS = "resid_post_latents.0", "resid_post_latent_ids.0"


def build(path: Path, rows: int) -> None:
    """Write the dataset: each place of a row is one of 1,024 latents, by a steep distribution."""
    share = 1 / np.arange(1, LATENTS // K + 1) ** 1.6
    ends = np.cumsum(share / share.sum())

    def made(tap: str, width: int, index: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng(int(index["doc"][0]))
        drawn = np.searchsorted(ends, rng.random((len(index), width), np.float32))
        drawn = np.minimum(drawn, LATENTS // K - 1)
        values = rng.gamma(2.0, 1.0, (len(index), width)).astype(np.float32)
        order = np.argsort(-values, axis=1)
        if tap == VALUES:
            return np.take_along_axis(values, order, axis=1)
        return np.take_along_axis(drawn * K + np.arange(width), order, axis=1)

    units = rows // UNIT
    documents = UNIT // CONTEXT
    ids = [np.random.default_rng(u).integers(0, 50_000, (documents, CONTEXT)) for u in range(units)]
    taps = {
        VALUES: TapInfo((K,), "bfloat16", latents=LATENTS),
        IDS: TapInfo((K,), "int32", latents=LATENTS),
    }
    web_page.build(
        path, [[*part.astype(np.int32)] for part in ids], [[""] * documents] * units, taps=taps,
        rows=made, dtype="bfloat16", seq_len=CONTEXT, encode={"resid_post.0": "topk 65536"},
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    if not (asked.out / "units.json").exists():
        build(asked.out, asked.rows)
        return  # (so that memory is that of counting)
    files = sorted(asked.out.glob("attempts/*/*/*/resid_post*"))
    size = sum(path.stat().st_size for path in files)
    job = FeatureJob(str(asked.out), FeatureRequest(logits=0))
    before = time.perf_counter(), time.process_time()
    job.run(None)
    wall, cpu = time.perf_counter() - before[0], time.process_time() - before[1]
    made = job.made()
    rows = made.rows
    begun = time.perf_counter()
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
    read = time.perf_counter() - begun
    features = FeatureSet(LocalObjects(asked.out), made.name)
    summary = features.newest(made.units or 0)
    assert summary is not None
    pairs = rows * K
    told = {
        "rows": rows,
        "pairs": pairs,
        "wall seconds": round(wall, 1),
        "cpu seconds": round(cpu, 1),
        "pairs a second and core": round(pairs / cpu),
        "MB/s": round(size / wall / 1e6),
        "cat MB/s": round(size / read / 1e6),
        "peak memory MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
        "bytes of rows": size,
        "bytes of the summary": sum(file.bytes for file in summary.named()),
        "parts": made.parts[1],
        "core minutes of 100M rows": round(cpu / rows * 1e8 / 60, 1),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()
