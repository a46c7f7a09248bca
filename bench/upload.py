"""Compare the speed of Spile's uploads with the bare client: `python bench/upload.py`.

Servers run on this machine, so the network is no limit, and client and server share its cores. The
bare client puts objects of the same sizes, with the same concurrency, from one buffer. Both take
turns.
"""

import argparse
import os
import secrets
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import obstore

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from spile.core.index import INDEX_DTYPE
from spile.dataset.format import TapInfo
from spile.dataset.write.unit_writer import UnitWriter
from spile.objects import open_objects
from support import servers

WIDTH = 3584  # of Qwen2.5-7B


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, default=1e9, help="sent in a turn")
    parser.add_argument("--taps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    rows = int(arguments.bytes) // (arguments.taps * WIDTH * 2)
    print(f"{os.cpu_count()} cores; {arguments.taps} taps, {rows:,} rows of {WIDTH} bfloat16 each")
    print(f"{'server':8} {'bare client':>12} {'spile':>12}   ratio (median of {arguments.turns})")
    for name, new in {"s3": servers.new_s3_store, "gs": servers.new_gcs_store}.items():
        bare: list[float] = []
        ours: list[float] = []
        for _ in range(arguments.turns):
            bare.append(put_bare(new(), rows, arguments.taps))
            ours.append(put_rows(new(), rows, arguments.taps))
        ratio = statistics.median(o / b for o, b in zip(ours, bare, strict=True))
        rates = (f"{statistics.median(r) / 1e6:7.0f} MB/s" for r in (bare, ours))
        print(f"{name:8} {'  '.join(rates)}   {ratio:.2f}")


def values(rows: int) -> np.ndarray:
    return (
        np.random.default_rng(0)
        .standard_normal((rows, WIDTH), np.float32)
        .astype(ml_dtypes.bfloat16)
    )


def put_bare(url: str, rows: int, taps: int) -> float:
    """Bytes a second."""
    objects = open_objects(url)
    store, most = objects._store, objects.most_streamed  # type: ignore[attr-defined]
    whole = rows * WIDTH * 2
    sizes = [min(most, whole - at) for _ in range(taps) for at in range(0, whole, most)]
    data = values(most // (WIDTH * 2) + 1).tobytes()[:most]
    began = time.monotonic()
    with ThreadPoolExecutor(objects.parallel) as pool:
        puts = [
            pool.submit(obstore.put, store, secrets.token_hex(8), data[:size], use_multipart=False)
            for size in sizes
        ]
        for put in puts:
            put.result()
    rate = sum(sizes) / (time.monotonic() - began)
    clear(url)
    return rate


def put_rows(url: str, rows: int, taps: int) -> float:
    objects = open_objects(url)
    names = {f"resid_post.{n}": TapInfo((WIDTH,), "bfloat16") for n in range(taps)}
    step = values(2048)
    began = time.monotonic()
    writer = UnitWriter(
        objects, 0, np.zeros(rows, INDEX_DTYPE), names, objects.most_streamed or 1 << 30
    )
    with ThreadPoolExecutor(min(4, taps)) as lanes:

        def write(tap: str) -> None:
            for first in range(0, rows, len(step)):
                writer.write(tap, step[: min(len(step), rows - first)])

        list(lanes.map(write, names))
    shards = writer._finish_shards()
    rate = sum(shard.bytes for shard in shards) / (time.monotonic() - began)
    writer.discard()
    clear(url)
    return rate


def clear(url: str) -> None:
    objects = open_objects(url)
    for key in list(objects.list()):
        objects.delete(key)


if __name__ == "__main__":
    main()
