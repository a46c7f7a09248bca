"""How fast rows come shuffled out of a dataset, against bare numpy and other readers:
`python bench/reader.py`.

Everything is in the page cache and is read by one process. The bare reader has all rows in one
memory map and takes those of each batch, in Spile's order, into one buffer: no shuffling reader can
do less. Rates count the bytes of rows as stored, whatever dtype a reader gives. Readers take turns,
since the machine may have other work. Ratios are within a turn, and medians are shown: of the time,
and of the processor time of all threads, which other work hardly changes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from spile.core.index import FIRST, INDEX_DTYPE
from spile.core.tensors import DTYPES_BY_NAME
from spile.dataset.format import TapInfo
from spile.dataset.read.aligned import AlignedDatasets, align
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.opening import open_dataset
from spile.dataset.records.ledger import Ledger
from spile.dataset.write.unit_writer import UnitWriter
from spile.interop.export import export
from spile.interop.flight.client import connect
from spile.interop.jax_loader import on_devices
from spile.interop.torch_loader import TorchLoader
from spile.objects import LocalObjects
from support import stored

TAP, HOOK = "resid_post.0", "blocks.0.hook_resid_post"
WIDTH, CONTEXT, BATCH, EPOCHS = 4096, 128, 4096, 4
UNIT_ROWS = 1 << 15
STORED = "stored"


@dataclass(frozen=True)
class Taken:
    """What a reader took for so many bytes of stored rows."""

    bytes: int
    seconds: float
    processor: float | None = None  # seconds of all threads; None if another process helped


Reader = Callable[[], Taken]


@contextmanager
def clock() -> Iterator[Callable[[int], Taken]]:
    """Give a function that says what was taken since, for so many bytes."""
    began, used = time.perf_counter(), time.process_time()
    yield lambda size: Taken(size, time.perf_counter() - began, time.process_time() - used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, default=2e9, help="of the dataset")
    parser.add_argument("--window", type=int, default=1 << 14, help="rows")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--stored", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--only", default="", help="readers whose names hold this, and the first")
    parser.add_argument(
        "--remote-bytes", type=float, default=1e9, help="read from a bucket; 0: none"
    )
    arguments = parser.parse_args()
    itemsize = DTYPES_BY_NAME[arguments.stored].itemsize
    rows = max(1, int(arguments.bytes) // (itemsize * WIDTH) // UNIT_ROWS) * UNIT_ROWS
    with tempfile.TemporaryDirectory() as folder:
        dataset = made(Path(folder) / "out", rows, dtype=arguments.stored)
        size = rows * WIDTH * itemsize
        print(f"{os.cpu_count()} cores ({os.uname().machine}); {rows:,} rows of {WIDTH}", end=" ")
        print(f"{arguments.stored}, {size / 1e9:.1f} GB; batches of {BATCH}, ", end="")
        print(f"window {arguments.window:,} rows")
        readers = local(dataset, Path(folder), arguments.window, not arguments.only)
        chosen = [name for name in readers if arguments.only in name or "bare" in name]
        compare({name: readers[name] for name in chosen}, arguments.turns)
    if arguments.remote_bytes:
        compare(remote(int(arguments.remote_bytes)), arguments.turns)


def compare(readers: dict[str, Reader], turns: int) -> None:
    """Print each reader's rate, and its ratio to the first reader, turn by turn."""
    taken: dict[str, list[Taken]] = {name: [] for name in readers}
    for _ in range(turns):
        for name, read in readers.items():
            taken[name].append(read())
    bare = next(iter(taken.values()))
    print(f"\n{'':48} {'ratio to the first, in':>32} (medians of {turns} turns)")
    print(f"{'reader':48} {'GB/s':>8} {'time':>8} {'processor time':>15}")
    for name, found in taken.items():
        rate = statistics.median(each.bytes / each.seconds for each in found) / 1e9
        time_ratio = _ratio(found, bare, lambda each: each.seconds)
        processor = _ratio(found, bare, lambda each: each.processor)
        print(f"{name:48} {rate:8.3f} {time_ratio:>8} {processor:>15}")


def _ratio(
    found: Sequence[Taken], first: Sequence[Taken], of: Callable[[Taken], float | None]
) -> str:
    """How often the first one's bytes a second another one reads."""
    ratios: list[float] = []
    for one, other in zip(found, first, strict=True):
        spent, base = of(one), of(other)
        if spent is None or base is None:
            return "-"
        ratios.append(one.bytes / spent / (other.bytes / base))
    return f"{statistics.median(ratios):.3f}"


def made(
    path: Path,
    rows: int,
    shard_bytes: int = 1 << 28,
    width: int = WIDTH,
    taps: int = 1,
    dtype: str = "bfloat16",
) -> Dataset:
    """Make a dataset of one tap, or of several of that width; all its contexts are alike."""
    infos = {
        f"resid_post.{n}": TapInfo((width,), dtype, (f"blocks.{n}.hook_resid_post",))
        for n in range(taps)
    }
    units = [[CONTEXT] * (UNIT_ROWS // CONTEXT)] * (rows // UNIT_ROWS)
    table = stored.make_table(units, infos, dtype, seq_len=CONTEXT)
    objects = LocalObjects(path)
    ledger = Ledger(objects)
    ledger.create_table(table)
    ledger.check_weights({"embed": "aa"})
    rng = np.random.default_rng(0)
    step = rng.standard_normal((4096, width), np.float32).astype(DTYPES_BY_NAME[dtype])
    for unit in range(len(units)):
        place = np.arange(UNIT_ROWS)
        index = np.zeros(UNIT_ROWS, INDEX_DTYPE)
        index["doc"] = table.units[unit].first_doc + place // CONTEXT
        index["offset"] = index["pos"] = place % CONTEXT
        index["flags"] = np.where(place % CONTEXT == 0, FIRST, 0)
        writer = UnitWriter(objects, unit, index, infos, shard_bytes)
        for first in range(0, UNIT_ROWS, len(step)):
            for tap in infos:
                writer.write(tap, np.roll(step, unit + first, axis=0))
        described = stored.describe_documents(table, unit, index)
        ledger.commit(
            writer.finish(
                table=described,
                fingerprint=table.fingerprint,
                tokens=UNIT_ROWS,
                documents=len(units[unit]),
                contexts=len(units[unit]),
                skipped={},
                text_digest="0",
                made_by={},
                made_from=ledger.made_from(table, unit) or "",
            )  # fmt: skip
        )
    ledger.complete(table)
    return open_dataset(str(path))


# -- on this machine -------------------------------------------------------------------------


def local(dataset: Dataset, folder: Path, window: int, others: bool) -> dict[str, Reader]:
    stored = dataset.dtype(TAP, STORED)
    whole = np.lib.format.open_memmap(
        folder / "rows.npy", "w+", f"u{stored.itemsize}", (dataset.num_tokens, WIDTH)
    )
    dataset.read_into(TAP, 0, whole.view(stored))
    order = np.concatenate(
        [numbers(batch["index"]) for batch in dataset.batches([], BATCH, window=window)]
    )
    buffer = np.empty((BATCH, WIDTH), whole.dtype)
    size = EPOCHS * whole.nbytes

    def bare() -> Taken:
        with clock() as taken:
            for _ in range(EPOCHS):
                for at in range(0, len(order), BATCH):
                    np.take(whole, order[at : at + BATCH], axis=0, out=buffer, mode="clip")
            return taken(size)

    def ours(**options: Any) -> Reader:
        return iterated(lambda: dataset.batches([TAP], BATCH, **shared, **options), size)

    def ranges(dtype: str | None) -> Reader:
        copy = dtype is not None

        def read() -> Taken:
            with clock() as taken:
                for _ in range(EPOCHS):
                    for at in range(0, len(whole), BATCH):
                        np.array(dataset.read(TAP, at, at + BATCH, dtype=dtype), copy=copy)
                return taken(size)

        return read

    # Narrower rows are slower to take, because each begins with a wait for memory. So aligned
    # datasets are compared with one dataset that has the same number of rows, in two taps.
    half = {"width": WIDTH // 2, "dtype": stored.name}
    both = made(folder / "both", len(whole), taps=2, **half)
    pair = align(*(made(folder / name, len(whole), **half) for name in ("one", "two")))
    shared: dict[str, Any] = {"window": window, "epochs": EPOCHS}
    wide = {"dtype": STORED}

    def halves(source: Dataset | AlignedDatasets, taps: Sequence[str]) -> Reader:
        return iterated(lambda: source.batches(taps, BATCH, **shared, **wide), size)

    readers: dict[str, Reader] = {
        "bare np.take(out=)": bare,
        "spile, window": ours(**wide),
        "spile, window, in float32": ours(),
        "spile, window, TorchLoader": iterated(
            lambda: TorchLoader(dataset, TAP, BATCH, **shared), size
        ),
        "spile, window, on_devices": iterated(
            lambda: on_devices(dataset.batches(TAP, BATCH, **shared)), size
        ),
        "spile, window, two taps of half the width": halves(both, both.taps),
        "spile, window, the same of aligned datasets": halves(pair, pair.taps),
        "spile, window, no index": ours(index=False, **wide),
        "spile, window, no index, in float32": ours(index=False),
        "spile, full": ours(shuffle="full", **wide),
        "spile, full, in float32": ours(shuffle="full"),
        "spile, in order": ours(shuffle=None, **wide),
        "spile, in order, in float32": ours(shuffle=None),
        f"spile, read of {BATCH} rows, copied": ranges(STORED),
        f"spile, read of {BATCH} rows, in float32": ranges(None),
        "spile, window, serve-rows to one trainer": lambda: served(dataset, window),
    }
    return readers | (peers(dataset, folder, order) if others else {})


def iterated(batches: Callable[[], Iterable[Any]], size: int) -> Reader:
    """Return a reader that takes all batches of an iteration."""

    def read() -> Taken:
        with clock() as taken:
            for batch in batches():
                assert len(batch)
            return taken(size)

    return read


def served(dataset: Dataset, window: int) -> Taken:
    """Read from another process over loopback, timed from the first batch on."""
    command = [sys.executable, "-m", "spile.cli", "serve-rows", dataset.url, "--json", "--port",
               "0", "--batch-size", str(BATCH), "--window", str(window)]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        batches = connect(json.loads(server.stdout.readline())["url"], dtype=STORED)
        _, read, began = next(batches), 0, time.perf_counter()
        for batch in batches:
            read += batch[TAP].nbytes
        return Taken(read, time.perf_counter() - began)


def numbers(index: np.ndarray) -> np.ndarray:
    """Return row numbers from index entries: contexts are in order."""
    return index["doc"] * CONTEXT + index["offset"]


def peers(dataset: Dataset, folder: Path, order: np.ndarray) -> dict[str, Reader]:
    """Return the other tools' readers that can run here."""
    found: dict[str, Reader] = {}
    python = os.environ.get("SPILE_SAELENS_PYTHON")
    if python:
        export(dataset, folder / "saelens", to="saelens", taps=[TAP], dtype="float16")
        found["SAELens, cached activations"] = lambda: saelens(python, folder / "saelens")
    else:
        print("SAELens: SPILE_SAELENS_PYTHON names no interpreter that has it", file=sys.stderr)
    try:
        import tensorstore

        found["tensorstore (zarr3), the same rows"] = random_rows(tensorstore, folder, order)
    except ImportError:
        print("tensorstore is not installed", file=sys.stderr)
    import zarr

    array = zarr.create_array(
        folder / "rows.zarr", shape=(dataset.num_tokens, WIDTH), chunks=(CONTEXT, WIDTH),
        dtype="float16", compressors=None, filters=None,
    )  # fmt: skip
    for first in range(0, dataset.num_tokens, UNIT_ROWS):
        array[first : first + UNIT_ROWS] = dataset.read(
            TAP, first, first + UNIT_ROWS, dtype="float16"
        )

    def zarr_rows() -> Taken:
        with clock() as taken:
            return taken(array.oindex[order[:BATCH]].nbytes)

    found["zarr-python, the same rows (one batch)"] = zarr_rows
    return found


def random_rows(tensorstore: object, folder: Path, order: np.ndarray) -> Reader:
    """Read the rows of a Zarr export through another library."""

    def read() -> Taken:
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / "rows.zarr")}}
        rows = tensorstore.open(spec).result()  # type: ignore[attr-defined]
        with clock() as taken:
            return taken(
                sum(rows[order[at : at + BATCH]].read().result().nbytes for at in (0, BATCH))
            )

    return read


# -- from a bucket ---------------------------------------------------------------------------


def remote(size: int) -> dict[str, Reader]:
    """Return readers of a bucket whose server runs on this machine and shares its cores."""
    import obstore

    from spile.objects import open_objects
    from support import remote as files
    from support import servers

    url = servers.new_s3_store()
    objects = open_objects(url)
    rows = max(1, size // (2 * WIDTH) // UNIT_ROWS) * UNIT_ROWS
    with tempfile.TemporaryDirectory() as folder:
        made(Path(folder), rows, objects.most_streamed or 1 << 26)
        files.upload(Path(folder), url)
    dataset = open_dataset(url)
    shards = [entry for entry in objects.entries() if entry.size > 1 << 24]
    pieces = [
        (entry.key, at, min(at + _PIECE, entry.size))
        for entry in sorted(shards, key=lambda entry: entry.key)
        for at in range(0, entry.size, _PIECE)
    ]
    print(f"\n{rows:,} rows from moto's S3 in {len(shards)} objects")
    store = objects._store  # type: ignore[attr-defined]

    def bare() -> Taken:
        with clock() as taken, ThreadPoolExecutor(objects.parallel) as pool:
            read = pool.map(
                lambda p: len(obstore.get_range(store, p[0], start=p[1], end=p[2])), pieces
            )
            return taken(sum(read))

    def ours(**options: Any) -> Reader:
        return iterated(
            lambda: dataset.batches([TAP], BATCH, window=1 << 14, **options), dataset.nbytes
        )

    return {
        f"bare client, in order, {_PIECE >> 20} MiB x {objects.parallel} at once": bare,
        "spile, window": ours(),
        "spile, window, no index": ours(index=False),
        "spile, in order": ours(shuffle=None),
    }


_PIECE = 8 << 20
_SAELENS = """
import sys, time, torch
from sae_lens.training.activations_store import ActivationsStore
path, hook, context, width, batch = *sys.argv[1:3], *map(int, sys.argv[3:])
store = ActivationsStore(
    model=None, dataset=None, streaming=False, hook_name=hook, hook_head_index=None,
    context_size=context, d_in=width, n_batches_in_buffer=128, total_training_tokens=1 << 20,
    store_batch_size_prompts=8, train_batch_size_tokens=batch, prepend_bos=True,
    normalize_activations="none", device=torch.device("cpu"), dtype="float16",
    cached_activations_path=path,
)
next(store)
began = time.perf_counter()
size = sum((rows := next(store)).numel() * rows.element_size() for _ in range(12))
print(size, time.perf_counter() - began)
"""


def saelens(python: str, path: Path) -> Taken:
    """Read with SAELens's own reader and mixing buffer, in its own environment."""
    command = [python, "-c", _SAELENS, str(path), HOOK, *map(str, (CONTEXT, WIDTH, BATCH))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    size, seconds = done.stdout.splitlines()[-1].split()
    return Taken(int(size), float(seconds))


if __name__ == "__main__":
    main()
