"""`spile encode`: the latents of rows that datasets of several models hold, as a new dataset.

A crosscoder reads the rows of several models at the same token together. Their datasets hold the
same rows (`extract --like`); the new one has their index and documents, and the latents of the tap.
It is made as a copy is: its unit table comes last, and the same command continues after a kill.
"""

# Strict, but for values that jax's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from spile.core.errors import ConfigError, CorruptError, DataError
from spile.core.recipe import latent_names
from spile.core.threads import OnProgress, cancellation
from spile.corpus.files import lasting
from spile.dataset.codec.documents import merge_documents, read_documents
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import Done, TapInfo
from spile.dataset.maintain.copy import (
    SHARD_BYTES,
    NewDataset,
    read_index,
    refuse_if_too_large,
    refuse_nested,
)
from spile.dataset.maintain.finished import open_finished, summarize
from spile.dataset.read.aligned import AlignedDatasets, align
from spile.dataset.read.checked_file import CheckedFile
from spile.dataset.records.features import rows_digest
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table
from spile.dataset.write.unit_writer import Attempt, UnitWriter
from spile.models.files.encoders import crosscoders, open_sae
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.files.encoders.tensors import load_arrays
from spile.models.forward.sparse_latents import TopLatents, top_latents
from spile.objects import Objects, check_creates_once, open_objects

ENCODED = "encoded"  # key of the origin in `made_by`
STORED = ("bfloat16", "float16", "float32")
_WINDOW = 32 << 20  # bytes of rows in float32 that are encoded at a time


@dataclass(frozen=True)
class MadeLatents:
    """The sizes of a dataset of latents."""

    dest: str
    tap: str
    latents: int
    kept: int  # in each row
    rows: int
    units: int
    truncated: int  # rows in which more latents are active than are kept
    bytes: int


@dataclass(frozen=True)
class EncodeRequest:
    """What to encode, and how.

    Attributes:
        encoder: directory, file or URL of a crosscoder.
        tap: which of the datasets' taps it reads.
        latents: how many to keep of each row; by default 64.
        scale: of each dataset's rows, before they are encoded.
        store_dtype: of activations.
    """

    encoder: str
    tap: str
    latents: int | None = None
    scale: Sequence[float] | None = None
    store_dtype: str = "bfloat16"


def encode(
    sources: Sequence[str],
    dest: Objects,
    request: EncodeRequest,
    *,
    progress: OnProgress | None = None,
) -> MadeLatents:
    """Encode the rows of datasets together, or continue.

    Args:
        sources: in the order in which the encoder reads their models.
        progress: called with the number of units done so far, and of all.

    Raises:
        ConfigError: if the datasets do not hold the same rows, or the encoder does not fit them.
    """
    job = _Job(sources, dest, request)
    new, records = job.new, job.records
    there = new.units_there()
    missing = [number for number in range(len(records)) if number not in there]
    refuse_if_too_large(dest, new.table, sum(records.catalog[n].rows for n in missing))
    if missing:
        check_creates_once(dest)
    new.begin(job.source, records, scales=False)
    made: list[Done] = []
    for at, number in enumerate((*sorted(there), *missing)):
        if progress:
            progress(at, len(records))
        cancellation().check()
        made.append(new.ours(number, job.origin(number)) if number in there else job.write(number))
    new.finish()
    if progress:
        progress(len(records), len(records))
    totals = new.ledger.catalog_so_far(new.ledger.table()).totals()
    return MadeLatents(
        dest=dest.url,
        tap=job.tap,
        latents=job.encoder.sae.latents,
        kept=job.encoder.kept,
        rows=totals.rows,
        units=len(made),
        truncated=job.truncated(),
        bytes=sum(file.bytes for done in made for file in done.files()),
    )


class _Job:
    """The datasets, the encoder, and the dataset that is made of them."""

    def __init__(self, sources: Sequence[str], dest: Objects, request: EncodeRequest) -> None:
        if request.store_dtype not in STORED:
            raise ConfigError(f"--store-dtype {request.store_dtype}: choose {', '.join(STORED)}")
        for url in sources:
            refuse_nested(open_objects(url), dest)
        self.pair: AlignedDatasets = align(**{str(at): url for at, url in enumerate(sources)})
        self.sides = [*self.pair.sides.values()]
        self.stores = [open_objects(url) for url in sources]
        self.source = self.stores[-1]
        taps = {side.name(request.tap.replace(":", ".", 1)) for side in self.sides}
        if len(taps) > 1:
            raise ConfigError(
                f"--tap {request.tap}: is {' and '.join(sorted(taps))}; give its name"
            )
        (self.tap,) = taps
        self.scale = _scale(request, len(sources))
        sae = open_sae(request.encoder, sides=len(sources))
        if sae.file.name == crosscoders.WEIGHTS and request.scale is None:
            raise ConfigError(
                f"--encode {request.encoder}: does not hold the factors by which its training "
                "multiplied the rows of each model; give them as --scale, or --scale 1,1 if the "
                "weights have them folded in"
            )
        width = sum(_width(side, self.tap) for side in self.sides)
        if width != sae.width:
            raise ConfigError(
                f"--encode {request.encoder}: reads rows of {sae.width // sae.sides} values, and "
                f"{self.tap} has {width // len(sources)}"
            )
        self.encoder = SparseEncoder.of(sae, request.latents)
        table, self.records = open_finished(self.source, [self.tap])
        if table.recipe.pool or table.shuffled:
            raise ConfigError(f"{self.source.url}: pooled or shuffled rows are not encoded")
        other = "one of other rows, or of another encoder"
        new = self._table(table, request)
        self.new = NewDataset(Ledger(dest), new, ENCODED, other)
        self.of_source = table

    def _table(self, table: Table, request: EncodeRequest) -> Table:
        sides = "+".join(side.fingerprint[:16] for side in self.sides)
        scaled = "" if set(self.scale) == {1.0} else f" scaled {','.join(map(repr, self.scale))}"
        recipe = replace(
            table.recipe,
            taps=(self.tap,),
            encode={self.tap: f"{self.encoder.sae.identity()} of {sides}{scaled}"},
            encode_source=f"{self.tap}={lasting(request.encoder)}",
            latents=self.encoder.kept,
            store_dtype=request.store_dtype,
        )
        shape, latents = (self.encoder.kept,), self.encoder.sae.latents
        values, ids = latent_names(self.tap)
        infos = {
            values: TapInfo(shape, request.store_dtype, latents=latents),
            ids: TapInfo(shape, self.encoder.id_dtype, latents=latents),
        }
        return replace(table, recipe=recipe, fingerprint=recipe.fingerprint(), taps=infos)

    # -- units -------------------------------------------------------------------------------------

    def origin(self, number: int) -> dict[str, Any]:
        """Return what a unit is made from: the rows of the tap in every dataset."""
        unit = self.sides[0].units[number]
        return {"rows": [rows_digest(side.record(unit), [self.tap]) for side in self.sides]}

    def write(self, number: int) -> Done:
        """Encode the rows of a unit, and commit it."""
        done = self.records[number]
        self._check_files(number)
        objects, table = self.new.objects, self.new.table
        index = read_index(self.source, self.of_source, done)
        CheckedFile(self.source, done.documents_table).check()
        keep = self.of_source.recipe.table_columns
        read = read_documents(self.source, done.documents_table, keep)
        limit = table.shard_limit(objects, SHARD_BYTES)
        layout = self.new.ledger.layout
        writer = UnitWriter(objects, number, index, table.taps, limit, layout=layout)
        with Attempt(self.new.ledger, writer) as attempt:
            for start, top in self._encoded(number):
                self._put(writer, start, top)
            summary = summarize([done])
            return self.new.commit(
                attempt,
                summary,
                documents=merge_documents([read], index),
                made_from=self.origin(number),
                makers=summary.makers,
            )

    def _put(self, writer: UnitWriter, start: int, top: TopLatents) -> None:
        for tap, found in zip(self.new.table.taps, (top.values, top.ids), strict=True):
            with np.errstate(over="ignore"):  # what does not fit is infinite, and refused
                rows = np.asarray(found).astype(self.new.table.taps[tap].storage)
            stats = TapStats.of_blocks(rows)
            if stats.nonfinite:
                raise DataError(f"{tap}: rows from {start} on hold values that are not finite")
            if found is top.values:
                stats.truncated = int(np.count_nonzero(top.beyond))
            writer.stats[tap].merge(stats)
            writer.write(tap, rows)

    def _check_files(self, number: int) -> None:
        """Compare the files of the rows with their records."""
        for store, side in zip(self.stores, self.sides, strict=True):
            for shard in side.record(side.units[number]).shards:
                if shard.tap == self.tap:
                    CheckedFile(store, shard).check()

    def _encoded(self, number: int) -> Iterator[tuple[int, TopLatents]]:
        """Yield the latents of a unit's rows, a window at a time, and its first row."""
        place = self.sides[0].rows_of_unit(self.sides[0].units[number])
        if place is None:
            raise CorruptError(f"unit {number}", "is missing")
        width = self.encoder.sae.width
        step = max(1, _WINDOW // (4 * width))
        for start in range(*place, step):
            stop = min(start + step, place[1])
            rows = np.zeros((min(step, place[1] - place[0]), width), np.float32)
            parts = np.split(rows, len(self.sides), axis=1)
            for part, side, scale in zip(parts, self.sides, self.scale, strict=True):
                read = side.read(self.tap, start, stop).reshape(stop - start, -1)
                part[: stop - start] = read if scale == 1.0 else read * np.float32(scale)
            found = jax.device_get(self._program(rows))
            values, ids, beyond = (np.asarray(each)[: stop - start] for each in found[:3])
            yield start, TopLatents(values, ids, beyond, None)  # pyright: ignore[reportArgumentType]

    @cached_property
    def _program(self) -> Callable[[np.ndarray], TopLatents]:
        arrays = jax.device_put(load_arrays(self.encoder.sae)[0])
        run = jax.jit(partial(top_latents, encoder=self.encoder))

        def encoded(rows: np.ndarray) -> TopLatents:
            with jax.default_matmul_precision("highest"):
                return run(arrays, rows)

        return encoded

    def truncated(self) -> int:
        """Return in how many rows more latents are active than are kept."""
        _, records = open_finished(self.new.objects)
        values, _ = latent_names(self.tap)
        return sum(records.statistics(unit)[values].truncated for unit in range(len(records)))


def _width(side: Any, tap: str) -> int:
    if side.dtype(tap).kind == "i" or side.num_latents(tap):
        raise ConfigError(f"--tap {tap}: holds ranks or latents; an encoder reads dense rows")
    return math.prod(side.shape(tap))


def _scale(request: EncodeRequest, sides: int) -> tuple[float, ...]:
    given = request.scale or (1.0,) * sides
    if len(given) != sides or not all(0 < each < math.inf for each in given):
        told = ",".join(map(str, given))
        raise ConfigError(f"--scale {told}: give one positive number for each of {sides} datasets")
    return tuple(map(float, given))
