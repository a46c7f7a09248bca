"""The job of a run, and how one of its units is prepared for the model. No jax.

A run, a plan, a check and a benchmark all prepare a unit with the one function here: it reads,
tokenizes, selects and packs documents, and makes the columns of the documents file.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

from spile.core.disagreement import DISAGREEMENT_COLUMNS
from spile.core.errors import ConfigError
from spile.core.expressions import DocumentFilter, RowFilter
from spile.core.humanize import size
from spile.core.pool import Pool, beside, is_reduced
from spile.core.recipe import ResolvedRecipe
from spile.core.units import Unit
from spile.corpus.chats.rows import RowReader
from spile.corpus.documents import Documents
from spile.corpus.formats.contract import CorpusFile, ReadOptions
from spile.corpus.pack import OtherValues, PackedUnit, pack_unit
from spile.corpus.reader import CorpusReader
from spile.corpus.select import selection_of
from spile.corpus.tokenize import TextTokenizer, tokenize
from spile.dataset.codec.documents import encode_documents
from spile.dataset.records.table import Table
from spile.dataset.records.unit_table import UnitColumns
from spile.models.files.checkpoint import Checkpoint
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.files.lenses import Lens
from spile.models.objectives import Objective
from spile.models.sites import AFTER_BLOCKS, LENSES
from spile.models.splices import Splice
from spile.models.taps import Tap
from spile.plan.answers import aims_of
from spile.plan.baselines import Baseline
from spile.plan.pooling import spans_of

_MOST_LABELS = 4096  # in a unit: each is held until its last token, and stored
_MOST_BYTES = 64 << 30  # of their sums


@dataclass(frozen=True)
class ExtractionJob:
    """Everything a run needs to know before it touches a device."""

    recipe: ResolvedRecipe
    table: Table
    checkpoint: Checkpoint
    tokenizer: TextTokenizer
    files: list[CorpusFile]
    taps: tuple[Tap, ...]
    reading: RowReader | None = None  # for rows that are not plain texts
    encoders: Mapping[str, SparseEncoder] = field(
        default_factory=dict[str, SparseEncoder]
    )  # by tap
    splices: tuple[Splice, ...] = ()  # changes inside the model, in order
    compares: bool = False  # whether an engine's log-probabilities are compared with the model's
    objective: Objective | None = None  # what gradients are of, if they are tapped
    baseline: Baseline | None = None  # what attributions are differences from, if not zero
    lens: Lens | None = None  # whose predictions are tapped

    @property
    def units(self) -> UnitColumns:
        return self.table.units

    @property
    def beside(self) -> Tap | None:
        """The tap that `--reduce cov:TAP` or `jacobian:TAP` names."""
        name = beside(self.recipe.pool)
        return None if name is None else Tap.from_name(name)

    @property
    def writers(self) -> tuple[Tap, ...]:
        """The taps that edges come from."""
        named = self.recipe.writers
        return tuple(map(Tap.from_name, named.split(","))) if named else ()

    @property
    def computed(self) -> tuple[Tap, ...]:
        """The taps whose values a step needs: those of the dataset, and one beside them."""
        return self.taps if self.beside is None else (*self.taps, self.beside)

    @property
    def reached(self) -> tuple[Tap, ...]:
        """The taps that say how far the model runs: also to compare log-probabilities."""
        compared = (Tap("logprob"),) if self.compares else ()
        return (*self.computed, *compared, *(self.objective.aims if self.objective else ()))

    @property
    def crosses(self) -> bool:
        """Whether a cross-layer transcoder's errors are stored."""
        return any(encoder.sae.across for encoder in self.encoders.values())

    @property
    def layers(self) -> int:
        """Blocks that must be loaded and run."""
        return max(tap.layers_needed(self.checkpoint.arch) for tap in self.reached)

    @property
    def needs_head(self) -> bool:
        return any(tap.site in (*AFTER_BLOCKS, *LENSES) for tap in self.reached)

    def reader(self, processes: int = 1) -> CorpusReader:
        """`processes`: number that render chats, apart from this one."""
        return open_reader(self.recipe, self.files, self.reading, processes)


def open_reader(
    recipe: ResolvedRecipe,
    files: list[CorpusFile],
    reading: RowReader | None,
    processes: int = 1,
) -> CorpusReader:
    """Open a reader of a recipe's documents; `processes` render chats, apart from this one."""
    options = ReadOptions(
        text_column=recipe.text_column,
        text_documents=recipe.text_documents,
        filter=DocumentFilter(recipe.filter) if recipe.filter else None,
        selection=selection_of(recipe),
        max_doc_bytes=recipe.max_doc_bytes,
        keep=recipe.keep,
        preview=recipe.preview,
        spans=Pool.parse(recipe.pool).column if recipe.pool else None,
    )
    return CorpusReader(files, options, reading=reading, processes=processes)


Timed = Callable[[str], AbstractContextManager[object]]  # times a stage, given its name


@dataclass(frozen=True)
class PreparedUnit:
    """A unit, prepared for the model; it travels from the packer to the sink.

    Attributes:
        packed: its rows.
        tokens: the token ids of each document that was read, by its ordinal, including documents
            that are left out for their length.
        skipped: the number of documents that are left out, by reason.
        digest: a hash of exactly what was read.
        documents: the columns of its documents file; empty if they were not requested.
        unit: its id; a sample has none.
        attempt: the name of this attempt to make it, if it is to be stored.
        said: by document, 1 for each token that counts to an objective when it is predicted; empty
            if all do.
        answers: by document, the two tokens that an objective compares.
    """

    packed: PackedUnit
    tokens: Mapping[int, np.ndarray]
    skipped: Counter[str]
    digest: str
    documents: Mapping[str, np.ndarray]
    unit: int = -1
    attempt: str = ""
    said: Mapping[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])
    answers: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])


def prepare_unit(
    job: ExtractionJob,
    reader: CorpusReader,
    unit: Unit,
    attempt: str = "",
    *,
    with_table: bool = True,
    timed: Timed = lambda stage: nullcontext(),
) -> PreparedUnit:
    """Read a unit's documents and prepare them.

    Args:
        reader: a reader of the job.
        with_table: whether to make the documents file's columns; only one process stores them.
        timed: times `reading` and `preparing`, and within that `tokenizing` and `packing`.
    """
    with timed("reading"):
        documents = reader.read(unit.spans, unit.first_doc, unit.skip)
    baseline = job.baseline if job.baseline and job.baseline.width else None
    if baseline:
        baseline.refuse_large(unit.tokens, unit.id)
    with timed("preparing"):
        prepared = prepare_documents(
            job.recipe,
            job.tokenizer,
            documents,
            packed_apart=unit.packed,
            with_table=with_table,
            compares=job.compares,
            beside=baseline.beside if baseline else None,
            timed=timed,
        )
    rows, each = prepared.packed.num_rows, job.table.row_bytes
    if is_reduced(job.recipe.pool) and (rows > _MOST_LABELS or rows * each > _MOST_BYTES):
        raise ConfigError(
            f"{Pool.parse(job.recipe.pool or '').flag}: unit {unit.id} has {rows:,} labels, which "
            f"take {size(rows * each)} in each unit; choose a column with fewer "
            "values, or --pool mean, which stores a row for each document"
        )
    return replace(prepared, unit=unit.id, attempt=attempt)


def prepare_documents(
    recipe: ResolvedRecipe,
    tokenizer: TextTokenizer,
    documents: Documents,
    *,
    packed_apart: Sequence[int] = (),
    with_table: bool = True,
    compares: bool = False,
    beside: OtherValues | None = None,
    timed: Timed = lambda stage: nullcontext(),
) -> PreparedUnit:
    """Tokenize documents, leave out those of the wrong length, and pack the others.

    Args:
        packed_apart: `Unit.packed`.
        compares: whether log-probabilities are compared (`ExtractionJob.compares`).
        beside: the values with which a step compares those of each token.
    """
    digest, ordinals = documents.digest(), documents.ordinals
    with timed("tokenizing"):
        tokens, flags = tokenize(tokenizer, documents)
    pool = Pool.parse(recipe.pool) if recipe.pool else None
    spans = spans_of(pool, tokenizer, documents, tokens, flags)
    selection = selection_of(recipe)
    reasons = [selection.refuses_length(len(ids)) for ids in tokens]
    chosen = [number for number, reason in enumerate(reasons) if not reason]
    aims = aims_of(recipe.objective, tokenizer, documents, chosen)
    with timed("packing"):
        packed = pack_unit(
            [ordinals[number] for number in chosen],
            [tokens[number] for number in chosen],
            tokenizer,
            seq_len=recipe.seq_len,
            long_docs=recipe.long_docs,
            pack=recipe.pack,
            rows=RowFilter(recipe.where, recipe.every),
            roles=[flags[number] for number in chosen] if flags else (),
            apart=_packed_of_each(documents, packed_apart, {ordinals[n] for n in chosen}),
            pool=pool,
            spans=[spans[number] for number in chosen] if spans else (),
            logprobs=[documents.usable[number].logprobs for number in chosen] if compares else None,
            aims=aims,
            beside=beside,
        )
    left_out = {
        ordinal: reason for ordinal, reason in zip(ordinals, reasons, strict=True) if reason
    }
    every = [
        replace(document, text="", roles=(), ids=None, skipped=left_out[document.ordinal])
        if document.ordinal in left_out and document.skipped is None
        else document
        for document in documents.every
    ]
    told = replace(documents, every=every)
    return PreparedUnit(
        packed,
        tokens=dict(zip(ordinals, tokens, strict=True)),
        skipped=told.skipped,
        digest=digest,
        documents=_documents_table(recipe, told, packed) if with_table else {},
        said={ordinals[n]: flags[n] & aims.role > 0 for n in chosen if flags}
        if aims and aims.role is not None
        else {},
        answers=dict(zip((ordinals[n] for n in chosen), aims.answers, strict=True))
        if aims and aims.answers
        else {},
    )


def _packed_of_each(
    documents: Documents, runs: Sequence[int], chosen: Collection[int]
) -> list[int]:
    """Return how many documents of each run are packed; `runs` count the others, too."""
    packed = [document.ordinal in chosen for document in documents.every]
    ends = itertools.accumulate(runs, initial=0)
    return [sum(packed[first:last]) for first, last in itertools.pairwise(ends)]


def _documents_table(
    recipe: ResolvedRecipe, documents: Documents, packed: PackedUnit
) -> dict[str, np.ndarray]:
    """Return the columns of a unit's documents file, including documents left out.

    Columns of disagreement are empty; a run fills them in.
    """
    every = documents.every
    empty = {name: [None] * len(every) for name in DISAGREEMENT_COLUMNS if recipe.compares}
    return encode_documents(
        docs=[document.ordinal for document in every],
        tokens=[packed.doc_tokens.get(document.ordinal, 0) for document in every],
        skipped=[document.skipped for document in every],
        previews=[document.preview for document in every],
        kept={name: documents.kept(name) for name in documents.columns} | empty,
        index=packed.index,
    )
