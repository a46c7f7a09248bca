"""How fast `spile copy` is, against the bare client: `python bench/copies.py`.

Buckets are those of a server on this machine, so the network is no limit, and client and server
share its cores. The bare client gets each object whole and puts it, as many at once; on disks it is
shutil, as many at once, with a sync of each file. Neither compares any checksum. Both take turns.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import servers
import stored
from spile.dataset.maintain.replica import replicate
from spile.objects import LocalObjects, open_objects

WIDTH = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=float, default=5e8, help="copied in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=("s3", "disk"), help="one kind of store")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spile-copy-") as name:
        folder = Path(name)
        rows = int(arguments.bytes) // (4 * WIDTH)
        units = [[rows // 8]] * 8
        taps = {"resid_post.0": WIDTH}
        made = stored.build(folder / "out", units, taps=taps, shard_bytes=64 << 20)
        size = sum(path.stat().st_size for path in made.path.rglob("*") if path.is_file())
        print(f"{os.cpu_count()} cores; {size / 1e6:.0f} MB in 8 units; median of turns")
        bucket = servers.new_s3_store()
        if arguments.only != "disk":
            replicate(made.objects, open_objects(bucket))
        kinds: dict[str, tuple[Callable[[int], None], Callable[[int], None]]] = {
            "s3 to s3": (
                lambda turn: copy_bare(bucket, f"{bucket}-bare-{turn}"),
                lambda turn: copy_ours(bucket, f"{bucket}-ours-{turn}"),
            ),
            "disk to disk": (
                lambda turn: copy_files(made.path, folder / f"bare-{turn}"),
                lambda turn: copy_ours(str(made.path), str(folder / f"ours-{turn}")),
            ),
        }
        chosen = {k: v for k, v in kinds.items() if k.startswith(arguments.only or "")}
        for name, both in chosen.items():
            rates: list[list[float]] = [[], []]
            for turn in range(arguments.turns):
                for copy, found in zip(both, rates, strict=True):
                    began = time.monotonic()
                    copy(turn)
                    found.append(size / (time.monotonic() - began) / 1e6)
            bare, ours = map(statistics.median, rates)
            ratio = statistics.median(o / b for b, o in zip(*rates, strict=True))
            print(f"{name:14} bare {bare:6.0f} MB/s   spile {ours:6.0f} MB/s   ratio {ratio:.2f}")


def copy_ours(source: str, dest: str) -> None:
    replicate(open_objects(source), open_objects(dest))


def copy_bare(source: str, dest: str) -> None:
    here, there = open_objects(source), open_objects(dest)
    store, other = here._store, there._store  # type: ignore[attr-defined]

    def copy(key: str) -> None:
        data = obstore.get(store, key).bytes()
        obstore.put(other, key, data, use_multipart=False)

    with ThreadPoolExecutor(here.parallel) as pool:
        list(pool.map(copy, here.list()))


def copy_files(source: Path, dest: Path) -> None:
    def copy(path: Path) -> None:
        target = dest / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())

    with ThreadPoolExecutor(LocalObjects.parallel) as pool:
        list(pool.map(copy, [path for path in source.rglob("*") if path.is_file()]))


if __name__ == "__main__":
    main()
