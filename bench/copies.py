"""Compare the speed of `spile copy` with the bare client: `python bench/copies.py`.

The buckets are on two servers on this machine, each with its own account. So the network is no
limit, and client and servers share the cores. The bare client gets each whole object and puts it,
with the same concurrency. On disks it is shutil, with the same concurrency, a sync of each file
and, at the end, of each folder. Neither bare way compares checksums. Both sides take turns, and the
order alternates.
"""

import argparse
import os
import resource
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

from spile.dataset.maintain.replica import replicate
from spile.objects import LocalObjects, Objects, open_objects
from spile.objects.local import sync
from support import servers, stored

WIDTH = 4096
Copy = Callable[[Objects, Objects], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=float, default=5e8, help="copied in a turn")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--only", choices=("s3", "disk"), help="one kind of store")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spile-copy-") as name:
        folder = Path(name)
        rows = int(arguments.bytes) // (4 * WIDTH)
        units = [[rows // 8]] * 8
        taps = {"resid_post.0": WIDTH}
        made = stored.build(folder / "out", units, taps=taps, shard_bytes=64 << 20)
        size = sum(path.stat().st_size for path in made.path.rglob("*") if path.is_file())
        print(f"{os.cpu_count()} cores; {size / 1e6:.0f} MB in 8 units; medians of turns")
        if arguments.only != "disk":
            source = in_bucket("source")
            replicate(made.objects, source)
            compare("s3", size, arguments.turns, copy_bare, source, lambda: in_bucket("dest"))
        if arguments.only != "s3":
            # (A new one each time: it remembers which folders it has synced.)
            place = folder / "copy"
            compare(
                "disk", size, arguments.turns, copy_files, made.objects, lambda: LocalObjects(place)
            )


def in_bucket(account: str) -> Objects:
    """An empty store of an account."""
    prefix = f"SPILE_{account.upper()}_"
    for name, value in servers.s3_account(account).items():
        os.environ[prefix + name] = value
    return open_objects(servers.s3_url(), prefix=prefix)


def compare(
    name: str, size: int, turns: int, bare: Copy, source: Objects, empty: Callable[[], Objects]
) -> None:
    """Copy by both ways to an empty store of the same kind, and print how long it took."""
    seconds: dict[Copy, list[float]] = {bare: [], replicate: []}
    used: dict[Copy, list[float]] = {bare: [], replicate: []}
    for turn in range(turns):
        for copy in (bare, replicate) if turn % 2 else (replicate, bare):
            dest = empty()
            began, before = time.monotonic(), cpu_seconds()
            copy(source, dest)
            seconds[copy].append(time.monotonic() - began)
            used[copy].append(cpu_seconds() - before)
            for key in list(dest.list()):
                dest.delete(key)
            os.sync()
    ratio = statistics.median(b / o for b, o in zip(*seconds.values(), strict=True))
    for copy, title in ((bare, "bare"), (replicate, "spile")):
        rate = size / statistics.median(seconds[copy]) / 1e6
        cpu = statistics.median(used[copy]) / size * 1e9
        print(f"{name} to {name:6} {title:6} {rate:6.0f} MB/s   {cpu:5.2f} CPU s/GB, the client's")
    print(f"{name} to {name:6} ratio  {ratio:6.2f}")


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def copy_bare(source: Objects, dest: Objects) -> None:
    store, other = source._store, dest._store  # type: ignore[attr-defined]

    def copy(key: str) -> None:
        data = obstore.get(store, key).bytes()
        obstore.put(other, key, data, use_multipart=False)

    with ThreadPoolExecutor(source.parallel) as pool:
        list(pool.map(copy, source.list()))


def copy_files(source: LocalObjects, dest: LocalObjects) -> None:
    def copy(path: Path) -> None:
        target = dest.root / path.relative_to(source.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        sync(target)

    with ThreadPoolExecutor(LocalObjects.parallel) as pool:
        list(pool.map(copy, [path for path in source.root.rglob("*") if path.is_file()]))
        list(pool.map(sync, [dest.root, *(path for path in dest.root.rglob("*") if path.is_dir())]))


if __name__ == "__main__":
    main()
