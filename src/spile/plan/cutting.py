"""Cut a corpus into units: the table of a new dataset, and the share of tokens that become rows."""

import dataclasses
import logging
from collections.abc import Sequence
from contextlib import closing

import numpy as np

from spile.core.expressions import RowFilter
from spile.core.humanize import plural
from spile.core.pool import Pool, is_reduced
from spile.core.recipe import ResolvedRecipe
from spile.core.units import Unit
from spile.corpus.chats.rows import RowReader
from spile.corpus.formats.contract import CorpusFile
from spile.corpus.named_columns import refuse_missing_columns
from spile.corpus.reader import CorpusReader
from spile.corpus.select import selection_of
from spile.corpus.tokenize import TextTokenizer
from spile.corpus.units import (
    CutOptions,
    CutSoFar,
    make_units,
    sampled_files,
    tokens_per_byte,
    without_duplicates,
)
from spile.dataset.format import TapInfo
from spile.dataset.records.table import Table
from spile.dataset.records.unit_table import UnitColumns
from spile.plan.job import open_reader, prepare_documents
from spile.plan.pooling import refuse_missing_spans

_log = logging.getLogger("spile.plan")


def make_table(
    resolved: ResolvedRecipe,
    taps: dict[str, TapInfo],
    tokenizer: TextTokenizer,
    files: list[CorpusFile],
    reading: RowReader | None,
    *,
    named: tuple[str, ...],
    like: Table | None = None,
) -> Table:
    """Args:
    named: columns to keep that the user named; they must exist.
    like: a table whose units to copy, if a single cut cannot make them.
    """
    if like:
        units, kept, more = [*like.units], like.kept, like.sources
    else:
        units, kept = cut_corpus(resolved, tokenizer, files, reading=reading, named=named)
        more = ()
    _log.info(
        "unit table: %s, about %s, in %s",
        plural(sum(unit.num_docs for unit in units), "document"),
        plural(sum(unit.tokens for unit in units), "token"),
        plural(len(units), "unit"),
    )
    return Table(
        recipe=resolved,
        fingerprint=resolved.fingerprint(),
        taps=taps,
        files=tuple(
            {"path": str(f.path), "identity": identity}
            for f, identity in zip(files, resolved.corpus, strict=True)
        ),
        units=UnitColumns.of(units),
        kept=kept,
        more_sources=more[1:],
    )


def cut_corpus(
    resolved: ResolvedRecipe,
    tokenizer: TextTokenizer,
    files: list[CorpusFile],
    *,
    reading: RowReader | None,
    named: tuple[str, ...] = (),
    so_far: CutSoFar | None = None,
    before: Sequence[Unit] = (),
) -> tuple[list[Unit], float]:
    """Cut the corpus into units; also return the estimated share of tokens that become rows.

    Args:
        named: columns to keep that must exist.
        so_far: where to continue an earlier cut.
        before: the units of that cut; their texts count as duplicates.
    """
    first = so_far.file if so_far else 0
    with closing(open_reader(resolved, files, reading)) as reader:
        refuse_missing_columns(reader, named)
        refuse_missing_spans(Pool.parse(resolved.pool) if resolved.pool else None, reader)
        density = tokens_per_byte(reader, tokenizer.count, first)
        read, kept, labels = _shares(resolved, reader, tokenizer, first)
        options = CutOptions(
            unit_tokens=resolved.unit_tokens,
            density=density * selection_of(resolved).share,
            read=read,
            keep=named,
            max_docs=resolved.max_docs,
            max_tokens=resolved.max_tokens,
            shuffle=resolved.shuffle_docs,
        )
        units = make_units(reader, options, so_far)
        if resolved.dedupe and units:
            units = without_duplicates([*before, *units], reader)[len(before) :]
    if is_reduced(resolved.pool):  # each unit has every label, however many tokens it has
        kept = labels * len(units) / max(1, sum(unit.tokens for unit in units))
    return units, kept


def _shares(
    resolved: ResolvedRecipe, reader: CorpusReader, tokenizer: TextTokenizer, first: int
) -> tuple[float, float, int]:
    """Return the share of tokens that the model reads, the share of those that become rows, and the
    most rows of a file.

    All are measured on the first documents of a few files, from file `first` on.
    """
    if resolved.reads_all and resolved.keeps_all:
        return 1.0, 1.0, 0
    whole = dataclasses.replace(resolved, where=None, every=None, pool=None)
    chosen = RowFilter(resolved.where, resolved.every)
    every = read = rows = most = 0
    indexes: list[np.ndarray] = []
    for file in sampled_files(reader, first):
        documents, taken = reader.sample(file)
        first_ones = documents.first(resolved.max_docs)
        found = prepare_documents(whole, tokenizer, first_ones, with_table=False)
        sampled = sum(len(ids) for ids in found.tokens.values())
        every += round(sampled * reader.opened(file).times_longer(taken))
        read += found.packed.num_tokens
        if resolved.pool is None:
            rows += int(chosen.mask(found.packed.index).sum())
        else:
            pooled = prepare_documents(resolved, tokenizer, first_ones, with_table=False)
            rows += pooled.packed.num_rows
            most = max(most, pooled.packed.num_rows)
        indexes.append(found.packed.index)
    if read and resolved.where:
        _warn_of_no_choice(resolved, np.concatenate(indexes))
    # A sample without kept rows, as with `doc >= 10000`, gives no estimate.
    return read / every if read else 1.0, rows / read if rows else 1.0, most


def _warn_of_no_choice(resolved: ResolvedRecipe, index: np.ndarray) -> None:
    """Warn if `--where` keeps all rows of a sample, or none, which few people want."""
    rows = RowFilter(resolved.where, None)
    kept = int(rows.mask(index).sum())
    if 0 < kept < len(index):
        return
    absent = [name for name, bits in rows.flags.items() if not (index["flags"] & bits).any()]
    reasons = [f"none of them is marked `{name}`" for name in absent if name != "bos"]
    if "bos" in absent:
        reasons.append(
            "this tokenizer adds no BOS; to drop each context's first token use `pos >= 1`"
        )
    _log.warning(
        "--where '%s' keeps %s of the first %s tokens%s",
        resolved.where,
        "all" if kept else "none",
        f"{len(index):,}",
        f": {'; '.join(reasons)}" if reasons else "",
    )
