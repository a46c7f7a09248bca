"""`spile.Writer`: a dataset of rows that another engine made.

Documents arrive in order, each with its token ids and its rows. They fill units; a unit is written
and committed as one of an extraction is, with an index, statistics and checksums, while the next
one arrives. Where a unit ends follows from the documents alone. So whoever was killed begins again
with the first document that is not in a committed unit, and makes the same dataset.

The unit table comes last, as that of a copy does: only then is it known which units there are.
Until then nothing opens the dataset, and `spile extract` does not continue it.
"""

import logging
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
import xxhash

from spile.core.config import PREVIEW, Recipe
from spile.core.errors import ConfigError, CorruptError, DriftError, InputError, StoreError
from spile.core.identity import summed_digest
from spile.core.index import INDEX_DTYPE
from spile.core.options import listed
from spile.core.system import system
from spile.core.threads import Consumer
from spile.core.units import Span, Unit
from spile.corpus.documents import fitted, plain
from spile.corpus.pack import pack_unit
from spile.corpus.select import EMPTY
from spile.dataset.codec.documents import encode_documents
from spile.dataset.codec.quantization import FLOAT8, decode
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import SCALE_DTYPE
from spile.dataset.maintain.copy import refuse_missing, refuse_strangers
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table, create_table
from spile.dataset.records.unit_table import UnitColumns
from spile.dataset.write.unit_writer import Attempt, UnitWriter
from spile.objects import check_creates_once, is_bucket, open_objects
from spile.plan.ingested import ingested_job
from spile.plan.job import ExtractionJob
from spile.plan.resolve import tokenizer_files

_log = logging.getLogger("spile.interop")
_SHARD_BYTES = 1 << 30
_PREVIEWED = 64  # tokens of a document that its preview is made from
_THREADS = 8  # taps of a document or a unit that are measured and written at a time

# Why a document is refused, in the documents table.
LENGTHS = "rows and tokens differ in number"
NONFINITE = "NaN or infinity"
OUTSIDE = "token id outside the vocabulary"
TOO_LONG = "longer than the context"

_Values = tuple[np.ndarray, np.ndarray | None]  # of a tap as they are stored, and their scales


@dataclass(frozen=True)
class _Document:
    """A document of a unit, or the reason it was refused."""

    ordinal: int
    kept: Mapping[str, Any]
    refused: str | None = None
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    index: np.ndarray = field(default_factory=lambda: np.empty(0, INDEX_DTYPE))
    rows: Mapping[str, _Values] = field(default_factory=dict[str, _Values])
    stats: Mapping[str, TapStats] = field(default_factory=dict[str, TapStats])
    preview: str | None = None


@dataclass(frozen=True)
class _Filled:
    """The documents of a unit that has not been written yet."""

    number: int
    first: int  # ordinal of the first document
    documents: list[_Document] = field(default_factory=list[_Document])

    @property
    def read(self) -> list[_Document]:
        return [document for document in self.documents if document.refused is None]

    @property
    def tokens(self) -> int:
        return sum(len(document.tokens) for document in self.documents)


class Writer:
    """Writes rows that another engine made as a dataset, or continues one.

    with spile.Writer("acts/vllm", model="demo", taps="resid_post:9", rows_by="vLLM 0.21") as made:
        for tokens, rows in answers[made.documents :]:
            made.add(tokens, {"resid_post.9": rows})

    Attributes:
        documents: the number of documents that it has: those of committed units, and those that
            were added since. A program that was killed continues with the document of this number.
        refused: the number of documents that were refused, by reason.
    """

    def __init__(
        self,
        out: str | Path,
        *,
        model: str,
        taps: str | Sequence[str],
        rows_by: str,
        corpus: str = "",
        identity: str | None = None,
        lora: str | None = None,
        store_dtype: str = "bfloat16",
        compute_dtype: str = "bfloat16",
        seq_len: int | None = None,
        keep: Sequence[str] = (),
        unit_tokens: int | None = None,
    ) -> None:
        """Args:
        out: a directory or a URL; empty, or begun by the same arguments.
        model: the model that the engine ran, as for `extract`; `spile check` recomputes with it.
        taps: what the rows are, as for `extract`.
        rows_by: the engine, as people name it.
        corpus: where the documents come from, for people.
        identity: what names the documents for good; by default `corpus`. A dataset is continued
            only under the same identity.
        store_dtype: "bfloat16", "float16" or "float32"; or "float8_e4m3", of rows that come with a
            scale each.
        compute_dtype: the dtype in which the engine computes, for `spile check`.
        seq_len: the most tokens that a document may have; by default the model's maximum.
        keep: the columns of the documents table that `add` gets values of.
        unit_tokens: how many tokens end a unit, which is held in memory until it is written; by
            default those of 256 MiB.

        Raises:
            DriftError: if other rows were begun there.
        """
        recipe = Recipe(
            model=model,
            lora=lora,
            taps=taps if isinstance(taps, str) else list(taps),  # type: ignore[arg-type]
            store_dtype=store_dtype,
            compute_dtype=compute_dtype,
            seq_len=seq_len,
            keep=",".join(keep) or None,
            unit_tokens=unit_tokens,
        )
        source = corpus or rows_by
        self._job = ingested_job(
            recipe, rows_by=rows_by, corpus=source, identity=identity or source
        )
        self._ledger = Ledger(open_objects(str(out)))
        self._units = list[Unit]()
        self.refused = Counter[str]()
        self.finished = _begin(self._ledger, self._job, self._units, self.refused)
        self.documents = self._units[-1].first_doc + self._units[-1].num_docs if self._units else 0
        self._filled = _Filled(len(self._units), self.documents)
        self._pool = system().pool(_THREADS, "ingest")
        self._sink = Consumer[_Filled](self._write, 1, "ingest-write")

    @property
    def job(self) -> ExtractionJob:
        """What is written: the recipe, the model and the taps."""
        return self._job

    def add(
        self,
        tokens: Any,
        rows: Mapping[str, Any],
        *,
        flags: np.ndarray | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Add a document: its token ids, and for each tap one row for each token, in order.

        Args:
            tokens: all tokens that the model read: a list, or an array of numpy or torch.
            rows: arrays of numpy, jax or torch, by the tap's name; for float8_e4m3 a pair of the
                values and the scale of each row.
            flags: of each token, to add to its flags in the index: `spile.FLAGS["assistant"]`.
            columns: values of the columns in `keep`.

        Returns:
            None, or the reason it was refused: the numbers of its rows and tokens differ, a value
            is not finite, or it has no token or one that the model does not know. It then has an
            entry in the documents table, and no rows.

        Raises:
            ConfigError: if a tap is missing or unknown, or its rows have another shape or dtype
                than the model's.
        """
        ids = _array(tokens).reshape(-1)
        found = {tap: self._rows(tap, rows) for tap in self._job.table.taps}
        if unknown := sorted(rows.keys() - found.keys()):
            raise ConfigError(
                f"rows of {listed(unknown)}: the dataset has {', '.join(self._job.table.taps)}"
            )
        reason = self._refuses(ids, [len(each[0]) for each in found.values()])
        if reason is None and flags is not None and len(flags) != len(ids):
            raise ConfigError(f"flags of {len(flags)} tokens, and there are {len(ids)}")
        stats = {} if reason else dict(self._pool.map(self._measured, found.items()))
        if any(each.nonfinite for each in stats.values()):
            reason = NONFINITE
        if reason is not None:
            self.refuse(reason, columns=columns)
            return reason
        ids, tokenizer = ids.astype(np.int32), self._job.tokenizer
        packed = pack_unit(
            [self.documents],
            [ids],
            tokenizer,
            seq_len=len(ids),
            long_docs="split",
            pack="none",
            roles=[] if flags is None else [flags.astype(np.uint16)],
        )
        text = tokenizer.decode(ids[:_PREVIEWED].tolist())
        self._put(
            _Document(
                self.documents,
                self._kept(columns),
                tokens=ids,
                index=packed.index,
                rows=found,
                stats=stats,
                preview=fitted(text[:PREVIEW]),
            )
        )
        return None

    def refuse(self, reason: str, *, columns: Mapping[str, Any] | None = None) -> None:
        """Add a document without rows, and the reason why it has none."""
        self.refused[reason] += 1
        self._put(_Document(self.documents, self._kept(columns), refused=reason))

    def _refuses(self, ids: np.ndarray, rows: Sequence[int]) -> str | None:
        """Return why a document cannot be stored, from its tokens and the numbers of its rows."""
        if not len(ids):
            return EMPTY
        if ids.dtype.kind not in "iu":
            raise ConfigError(f"tokens must be integers, got {ids.dtype}")
        if ids.min() < 0 or ids.max() >= self._job.checkpoint.arch.vocab_size:
            return OUTSIDE
        if any(count != len(ids) for count in rows):
            return LENGTHS
        return TOO_LONG if len(ids) > self._job.recipe.seq_len else None

    def _rows(self, tap: str, given: Mapping[str, Any]) -> _Values:
        """Return a tap's rows as they are stored, and the scale of each if they have one."""
        info = self._job.table.taps[tap]
        if tap not in given:
            raise ConfigError(f"no rows of {tap}; add them for every document")
        values, scales = given[tap], None
        if info.scaled_by:
            if not isinstance(values, tuple) or len(values) != 2:  # pyright: ignore
                raise ConfigError(f"{tap}: give (values, scales) to store float8_e4m3")
            values, scales = (_array(each) for each in values)  # pyright: ignore
            scales = scales.reshape(-1).astype(SCALE_DTYPE)
            if values.dtype != FLOAT8 or len(scales) != len(values):
                raise ConfigError(
                    f"{tap}: float8_e4m3 rows need values of that dtype and one scale for each; "
                    f"got {values.dtype} and {len(scales)} scales for {len(values)}"
                )
        values = _array(values)
        if values.shape[1:] != info.shape:
            raise ConfigError(
                f"{tap}: rows of {list(values.shape[1:])} values, and the model's have "
                f"{list(info.shape)}"
            )
        integers = info.storage.kind in "iu"
        if (values.dtype.kind in "iu") is not integers or values.dtype.kind not in "iufV":
            wanted = "integers" if integers else "floating numbers"
            raise ConfigError(f"{tap}: rows must be {wanted}, got {values.dtype}")
        with np.errstate(over="ignore"):  # what does not fit is infinite, and refused
            return np.array(values, info.storage, order="C"), scales  # (its owner may change it)

    def _measured(self, item: tuple[str, _Values]) -> tuple[str, TapStats]:
        tap, (values, scales) = item
        seen = values if scales is None else decode(values, scales)
        return tap, TapStats.of_blocks(seen)

    def _kept(self, columns: Mapping[str, Any] | None) -> dict[str, Any]:
        given, keep = columns or {}, self._job.recipe.keep
        if unknown := sorted(given.keys() - {*keep}):
            raise ConfigError(f"columns {listed(unknown)}: name them in --keep")
        return {name: plain(given.get(name)) for name in keep}

    def _put(self, document: _Document) -> None:
        if self.finished:
            raise ConfigError(f"{self._ledger.url} is finished: no document can be added to it")
        self._sink.check()
        self._filled.documents.append(document)
        self.documents += 1
        limit = self._job.recipe.unit_tokens
        # (Refused documents have no tokens, and a unit of nothing else must end, too.)
        if self._filled.tokens >= limit or len(self._filled.documents) >= limit:
            self._flush()

    def _flush(self) -> None:
        self._sink.put(self._filled)
        self._filled = _Filled(self._filled.number + 1, self.documents)

    # -- the writing thread --------------------------------------------------------------------

    def _write(self, filled: _Filled) -> None:
        """Write a unit and commit it. If another process was first, its unit counts."""
        job, objects, documents = self._job, self._ledger.objects, filled.documents
        index = np.concatenate([document.index for document in documents])
        table = encode_documents(
            docs=[document.ordinal for document in documents],
            tokens=[len(document.tokens) for document in documents],
            skipped=[document.refused for document in documents],
            previews=[document.preview for document in documents],
            kept={name: [each.kept[name] for each in documents] for name in job.recipe.keep},
            index=index,
        )
        hashes = (xxhash.xxh3_128_intdigest(document.tokens.tobytes()) for document in filled.read)
        digest = summed_digest(hashes)
        unit = _unit(filled.number, filled.first, len(documents), filled.tokens, digest)
        shard_bytes = _alone(job, unit).shard_limit(objects, _SHARD_BYTES)
        writer = UnitWriter(objects, unit.id, index, job.table.taps, shard_bytes)
        with Attempt(self._ledger, writer) as attempt:
            list(self._pool.map(partial(_write_tap, writer, filled.read), job.table.taps))
            done = writer.finish(
                table=table,
                fingerprint=job.table.fingerprint,
                made_from=self._ledger.must_be_made_from(_alone(job, unit), 0),
                tokens=filled.tokens,
                documents=len(filled.read),
                contexts=len(filled.read),
                skipped=dict(sorted(Counter(d.refused for d in documents if d.refused).items())),
                text_digest=digest,
                made_by={
                    "spile": version("spile"),
                    "ingested": job.recipe.rows_by,
                    "host": socket.gethostname(),
                    "finished_at": round(system().time(), 3),
                },
            )
            attempt.commit(done)
        self._units.append(unit)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is left, and make it a dataset; `with` does so.

        Raises:
            InputError: if no document was accepted.
        """
        if self.finished:
            self._stop()
            return
        try:
            if self._filled.documents:
                self._flush()
            self._sink.close()
            self._finish()
        finally:
            self._stop()

    def _finish(self) -> None:
        job = self._job
        if self.documents == sum(self.refused.values()):
            reasons = ", ".join(f"{n} {reason}" for reason, n in self.refused.items())
            raise InputError(
                f"{self._ledger.url}: no document has rows that can be stored"
                f" ({reasons or 'none was given'})"
            )
        table = replace(job.table, units=UnitColumns.of(self._units).stored())
        self._ledger.complete(table)
        create_table(self._ledger.objects, table, tokenizer_files(job))
        if self._ledger.table().order != table.order:
            raise StoreError(f"{self._ledger.url}: another process made another dataset there")
        self.finished = True

    def _stop(self) -> None:
        self._sink.abandon()
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()


def _write_tap(writer: UnitWriter, documents: Sequence[_Document], tap: str) -> None:
    for document in documents:
        writer.stats[tap].merge(document.stats[tap])
        writer.write(tap, *document.rows[tap])


def _unit(number: int, first: int, documents: int, tokens: int, digest: str) -> Unit:
    """Return a unit's row of the table; `digest` is that of its documents' token ids."""
    span = Span(file=0, first=first, count=documents, digest=digest)
    return Unit(number, first, documents, tokens, (span,))


def _alone(job: ExtractionJob, unit: Unit) -> Table:
    """Return the table as if it had one unit: what that is made from depends on no other."""
    return replace(job.table, units=UnitColumns.of([unit], unit.id))


def _begin(ledger: Ledger, job: ExtractionJob, units: list[Unit], refused: Counter[str]) -> bool:
    """Find what was committed before; return whether the dataset is finished.

    Args:
        units: gets the units that are done.
        refused: gets the numbers of documents that were refused in them.

    Raises:
        DriftError: if the place holds a dataset of another recipe.
        ConfigError: if it holds anything else, or units that another recipe began.
    """
    stored = ledger.read_table()
    if stored is not None:
        _refuse_other(ledger.url, stored, job)
        units += list(stored.units)
        refused.update(ledger.catalog_so_far(stored).totals().skipped)
        return True
    objects = ledger.objects
    refuse_strangers(objects)
    if is_bucket(objects.url):
        check_creates_once(objects)
    ledger.check_weights({})  # they are recorded with every unit, and none were read here
    there = sorted(ledger.done_units())
    for number in there:
        done = ledger.read_done(number)
        if done is None:
            raise CorruptError(ledger.layout.done_key(number), "is missing")
        first = units[-1].first_doc + units[-1].num_docs if units else 0
        documents = done.documents_table.count
        unit = _unit(number, first, documents, done.tokens, done.text_digest)
        made_from = ledger.made_from(_alone(job, unit), 0)
        recipe = done.fingerprint == job.table.fingerprint
        if number != len(units) or not recipe or done.made_from != made_from:
            raise ConfigError(
                f"{ledger.url} holds units of other rows, of a copy or of an extraction; choose an "
                "empty place, or give the arguments that began it"
            )
        refuse_missing(ledger, done)
        units.append(unit)
        refused.update(done.skipped)
    return False


def _refuse_other(url: str, stored: Table, job: ExtractionJob) -> None:
    if stored.fingerprint == job.table.fingerprint:
        return
    old, new = stored.recipe.identity(), job.recipe.identity()
    raise DriftError(
        url,
        {
            name: (old.get(name), new.get(name))
            for name in sorted({**old, **new})
            if old.get(name) != new.get(name)
        },
    )


def _array(values: Any) -> np.ndarray:
    """Return values of numpy, jax or torch as an array of numpy; torch has dtypes that it lacks."""
    if type(values).__module__.partition(".")[0] != "torch":
        return np.asarray(values)
    held = values.detach().cpu().contiguous()
    name = str(held.dtype).removeprefix("torch.")
    if name not in _OF_TORCH:
        return held.numpy()
    torch: Any = import_module("torch")
    flat = held.reshape(-1).view(torch.uint8).numpy()
    return flat.view(_OF_TORCH[name]).reshape(tuple(held.shape))


_OF_TORCH = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float8_e4m3fn": FLOAT8}
