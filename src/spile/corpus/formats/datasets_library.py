"""Corpora read by the `datasets` library: converted once into one Parquet file, which is cached.

    datasets:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]    a dataset of the Hub, of any kind of files
    datasets:FOLDER[:SPLIT]                            a folder written by `save_to_disk`

The cached file lies beside a note of its source and a hash of its rows. That hash identifies the
corpus, not the path or the file's bytes: if another machine or version of Arrow makes different
rows, the difference is detected.
"""

# Strict, but for values that pyarrow, which has no types, leaves unknown.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# pyright: reportUnknownVariableType=false

import contextlib
import errno
import fcntl
import json
import shutil
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from spile.core.cache_dir import cache_directory
from spile.core.errors import DataError, InputError, StoreError
from spile.core.identity import sampled_digest, sampled_digests
from spile.core.threads import cancellation
from spile.objects.hub.datasets_library import (
    address,
    datasets_library,
    is_full,
    reading,
    refuse_script,
)
from spile.objects.hub.names import BUILT, HubName, hub_name
from spile.objects.local import sync

_ROWS, _BYTES = 8192, 64 << 20  # most rows and bytes in a row group
_WRITTEN: dict[str, Any] = {
    "compression": "zstd", "compression_level": 1, "use_dictionary": False, "version": "2.6",
    "data_page_version": "1.0", "data_page_size": 1 << 20, "write_statistics": True,
}  # fmt: skip
_BATCH = 256  # rows taken from the library at a time
_POLL = 0.5  # seconds between checks whether another process has finished
_DATA, _NOTE = "data.parquet", "source.json"


@dataclass(frozen=True)
class BuiltFile:
    """The file that holds the rows, and their identity."""

    path: Path
    identity: str


@dataclass(frozen=True)
class _Source:
    where: str  # for messages
    identity: str  # identity of the source, as far as known beforehand
    key: str  # name of its folder in the cache
    load: Callable[[Path], Any]  # with a folder for the library's own files


def is_built(corpus: str) -> bool:
    return corpus.startswith(BUILT)


def build(corpus: str, cache: str | None = None) -> BuiltFile:
    """Return the corpus as Parquet, from the cache or made now by one process at a time.

    `cache` is the folder of such corpora [SPILE_CACHE/datasets].
    """
    name = hub_name(corpus, "dataset")
    source = _of_hub(name) if name else _of_disk(corpus.removeprefix(BUILT))
    top = Path(cache) if cache else cache_directory() / "datasets"
    folder = top / source.key
    try:
        if not folder.exists():
            top.mkdir(parents=True, exist_ok=True)
            with _alone(top / f".{source.key}.lock"):
                if not folder.exists():
                    _make(source, folder)
    except OSError as error:
        if is_full(error):
            with reading(source.where):
                raise
        raise StoreError(f"--cache {top}: {error.strerror or error}") from error
    return _checked(source, folder)


def _of_hub(name: HubName) -> _Source:
    assert name.revision and name.config and name.split, name
    where = f"{name.repository.url}@{name.revision}:{name.config}:{name.split}"

    def load(scratch: Path) -> Any:
        refuse_script(name.repository, name.revision or "")
        return datasets_library(where).load_dataset(
            address(name.repository), name.config, split=name.split, revision=name.revision,
            cache_dir=str(scratch),
        )  # fmt: skip

    return _Source(where, str(name), quote(str(name).removeprefix(BUILT), safe="@:"), load)


def _of_disk(given: str) -> _Source:
    folder, split = Path(given), ""
    if not folder.is_dir():
        folder, split = Path(given.rpartition(":")[0]), given.rpartition(":")[2]
    splits = [p.name for p in folder.iterdir() if p.is_dir()] if folder.is_dir() else []
    saved = folder / split if split else folder
    if not (saved / "state.json").is_file():
        there = (
            f"; there are: {', '.join(sorted(splits))} (datasets:FOLDER:SPLIT)" if splits else ""
        )
        raise InputError(
            f"--corpus {BUILT}{given}: neither OWNER/NAME on the Hub nor a folder that the "
            f"`datasets` library saved{there}"
        )
    names = json.loads((saved / "state.json").read_bytes()).get("_data_files", [])
    parts = [saved / "state.json", *(saved / str(file["filename"]) for file in names)]
    digest = xxhash.xxh3_128_hexdigest(" ".join(sampled_digests(parts)).encode())
    where = f"{BUILT}{saved}"
    # (A folder on disk is identified by its rows alone.)
    return _Source(
        where, f"{BUILT}saved", digest,
        lambda scratch: datasets_library(where).load_from_disk(str(saved)),
    )  # fmt: skip


@contextlib.contextmanager
def _alone(lock: Path) -> Generator[None, None, None]:
    """Wait while another process makes the same corpus; a killed process releases its lock."""
    with lock.open("ab") as file:
        while True:
            cancellation().check()
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                    break  # no locks available: both make it, and the first to finish wins
            time.sleep(_POLL)
        yield


def _make(source: _Source, folder: Path) -> None:
    begun = f".{folder.name}.tmp-"
    for leftover in folder.parent.glob(f"{begun.replace('[', '[[]')}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    making = folder.with_name(begun + uuid.uuid4().hex[:12])
    making.mkdir()
    try:
        with reading(source.where):
            note = _write(source, making)
        shutil.rmtree(making / "scratch")
        (making / _NOTE).write_text(json.dumps(note))
        for path in (making / _DATA, making / _NOTE, making):
            sync(path)
        try:
            making.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process was first
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _write(source: _Source, making: Path) -> dict[str, Any]:
    """Write all rows in order; groups are cut by rows and bytes, so equal rows make equal files."""
    (making / "scratch").mkdir()
    dataset = source.load(making / "scratch")
    if not hasattr(dataset, "features"):
        splits = ", ".join(dataset)
        raise InputError(f"{source.where}: has several splits; there are: {splits}")
    schema = dataset.features.arrow_schema.remove_metadata()
    digest, rows = xxhash.xxh3_128(), 0
    digest.update(str(schema).encode())
    waiting: list[pa.Table] = []
    with pq.ParquetWriter(making / _DATA, schema, **_WRITTEN) as writer:

        def flush() -> None:
            if waiting:
                group = pa.concat_tables(waiting)
                writer.write_table(group, row_group_size=group.num_rows)
                waiting.clear()

        for batch in dataset.with_format("arrow").iter(_BATCH):
            cancellation().check()
            table = batch.cast(schema)
            rows += table.num_rows
            digest.update(repr(table.to_pylist()).encode("utf-8", "surrogatepass"))
            for start in range(0, table.num_rows, _step(table)):
                waiting.append(table.slice(start, _step(table)))
                if (
                    sum(t.num_rows for t in waiting) >= _ROWS
                    or sum(t.nbytes for t in waiting) >= _BYTES
                ):
                    flush()
        flush()
    file = sampled_digest(making / _DATA)
    return {
        "identity": source.identity, "rows": rows, "content": digest.hexdigest(), "file": file
    }  # fmt: skip


def _step(table: pa.Table) -> int:
    """Return how many rows to add between checks of a group's size."""
    return max(1, table.num_rows * _BYTES // max(_BYTES, 4 * table.nbytes))


def _checked(source: _Source, folder: Path) -> BuiltFile:
    again = f"remove {folder} and run the same command again"
    try:
        note = json.loads((folder / _NOTE).read_bytes())
        same = note["file"] == sampled_digest(folder / _DATA)
        identity = f"{source.identity} {note['rows']} rows {note['content']}"
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{folder}: is not a complete corpus; {again}") from None
    if not same:
        raise DataError(f"{folder / _DATA}: was changed since it was made; {again}")
    return BuiltFile(folder / _DATA, identity)
