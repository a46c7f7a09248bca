"""`spile check`: recompute sampled documents with HF transformers, and compare the stored rows.

For each tap it measures three distances from the exact result: that of the stored rows (`error`),
that of the reference itself when it computes and rounds as the recipe does (`floor`), and that of
the reference's neighbouring layer or token (`control`). A check that could not tell `error` from
`control` would prove nothing. A row's distance is relative to its own length, or to the median
length if that is larger. Rows computed in float32 are compared with float64, row by row; rows
computed in fewer bits are compared with float32, by the mean over rows. For an encoded tap the
distances are between latents, and the encoder runs on the reference's activations. For products in
float8 it also measures what bfloat16 would cost, and how far the next token's probabilities move.
The result is kept in the store beside the manifest.
"""

import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from spile.check.backward import UnitBackward, checkable
from spile.check.comparable import comparable, named_in
from spile.check.disagreement import Disagreement, disagreement_of
from spile.check.latent_rows import RowLatents, SparseTap
from spile.check.load import References, Taps, load_references, versions
from spile.check.matching import match
from spile.check.reconstructions import (
    Reconstruction,
    Reconstructions,
    error_taps,
    with_errors,
)
from spile.check.sampled import (
    SampledRows,
    ingested_documents,
    sampled_rows,
    sampled_units,
)
from spile.core.config import Recipe
from spile.core.disagreement import BOUND
from spile.core.errors import ConfigError, StoreError
from spile.core.libraries import import_library
from spile.core.pool import is_reduced
from spile.core.recipe import TOPS
from spile.core.tap_order import of_backward_pass
from spile.dataset import format as fmt
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.document import Document
from spile.dataset.read.dtypes import STORED
from spile.dataset.read.opening import open_dataset
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import live_passes
from spile.models.config.arch import Arch
from spile.models.sites import LENSES
from spile.models.splices import FUNCTION
from spile.models.taps import Tap
from spile.objects import open_objects
from spile.plan.ingested import stored_job
from spile.plan.job import ExtractionJob, PreparedUnit, prepare_unit
from spile.plan.resolve import resolve

_log = logging.getLogger("spile.check")
_FLOAT32 = 2e-5  # always allowed: the rounding of float32 through the layers of a model
_MARGIN = 2.0  # over the reference's own floor
# Over the reference's worst row in float32, which varies by chance: two correct results differ in
# their worst rows, and among 2,300 taps and documents one was 3.4 times the other
# (docs/exactness.md).
_MARGIN_OF_WORST = 4.0
_DRAWS = 4  # more results of the reference, if a row exceeds that
# Below float32 a token may legitimately choose another expert: these shares of the stored rows, and
# of the reference's own, may be far off. They differ, so that equal numbers on both sides pass.
_SPARED, _SPARED_FLOOR = 0.2, 0.1
_FEWEST_ROWS = 16  # needed below float32; with fewer, the result would depend on chance
_MATCHED = 3  # documents by which rows that are too far off are recognised
_ROWS = 64  # rows of logits that are held at once in float64
_NOWHERE = 1e200  # stands for an infinite squared distance (of NaN), which JSON cannot hold


@dataclass(frozen=True)
class Loss:
    """Distances caused by storing alone, and the cosine between stored and exact rows.

    A few channels are much larger than all others and dominate any total. `typical_channel`, the
    median over channels of each one's own relative distance, shows the effect on the others.
    """

    relative_l2: float
    typical_channel: float
    cosine: float  # between stored and exact rows, averaged over rows


class LossCounter:
    """Accumulates the rows of one tap."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._gap, self._size = np.zeros(shape), np.zeros(shape)  # sums of squares, by channel
        self._cosines: list[np.ndarray] = []

    def add(self, exact: np.ndarray, rounded: np.ndarray, stored: np.ndarray) -> None:
        """Add rows: exact ones in float32, those rounded by storing alone, and the stored ones."""
        wide, alone, found = (array.astype(np.float64) for array in (exact, rounded, stored))
        # A row with infinity or NaN says nothing about rounding; `check` reports it elsewhere.
        finite = np.isfinite(wide) & np.isfinite(alone) & np.isfinite(found)
        flat = (-1, math.prod(exact.shape[1:]))
        sound = finite.reshape(flat).all(axis=1)
        wide, alone, found = wide[sound], alone[sound], found[sound]
        inside = tuple(map(slice, exact.shape[1:]))  # attention patterns are as wide as the context
        self._gap[inside] += np.square(wide - alone).sum(axis=0)
        self._size[inside] += np.square(wide).sum(axis=0)
        ours, theirs = wide.reshape(flat), found.reshape(flat)
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        known = lengths > 0
        self._cosines.append((ours * theirs).sum(axis=1)[known] / lengths[known])

    def result(self) -> Loss:
        gap, size = self._gap.reshape(-1), self._size.reshape(-1)
        used = size > 0
        each = np.sqrt(gap[used] / size[used])
        cosines = np.concatenate(self._cosines)
        return Loss(
            relative_l2=float(np.sqrt(gap.sum() / size.sum())) if used.any() else 0.0,
            typical_channel=float(np.median(each)) if used.any() else 0.0,
            cosine=float(cosines.mean()) if len(cosines) else 1.0,
        )


@dataclass(frozen=True)
class TapCheck:
    """The distances of one tap."""

    error: float
    floor: float
    allowed: float
    control: float
    loss: Loss  # the cost of storing alone
    bfloat16: float | None = None  # the reference's own distance in bfloat16, for float8
    really: str | None = None  # the tap or the token that rows too far off belong to, if known
    reconstruction: Reconstruction | None = None  # of a stored error

    @property
    def ok(self) -> bool:
        """Whether the error is within what is allowed, and a wrong tap would not be."""
        return self.error <= self.allowed < self.control


@dataclass(frozen=True)
class CheckReport:
    """The result of a check."""

    fingerprint: str
    documents: int
    tokens: int
    taps: Mapping[str, TapCheck]
    reference: str
    # The next token's Kullback-Leibler divergence from float32's, in nats, by compute dtype.
    next_token: Mapping[str, float] | None = None
    disagreement: Disagreement | None = None  # with the engine that sampled the documents

    @property
    def ok(self) -> bool:
        agrees = self.disagreement is None or self.disagreement.ok
        return agrees and all(tap.ok for tap in self.taps.values())

    def to_json(self) -> dict[str, Any]:
        taps = {name: {**asdict(tap), "ok": tap.ok} for name, tap in self.taps.items()}
        return {**asdict(self), "taps": taps, "ok": self.ok}


def check(
    out: str, *, samples: int = 4, recipe: Recipe | None = None, bound: float = BOUND
) -> CheckReport:
    """Recompute `samples` documents, spread over the dataset, and store the result.

    Taps that were added, or are being added, are checked by the same number of documents.

    Args:
            recipe: where model and corpus are now, if they have moved; they must be the same.
            bound: of the disagreement of all documents with the engine that sampled them.

    Raises:
        InputError: if transformers (or, for an adapter, peft) is not installed.
            StoreError: if the index's tokens differ from those of the corpus.
    """
    for name in ("transformers", "torch"):
        import_library(name, "check, which compares with HF transformers,", "'spile[check]'")
    ledger = Ledger(open_objects(out))
    stored = ledger.table()  # raises a clear error if there is no dataset
    if any(each.startswith(FUNCTION) for each in stored.recipe.splice):
        raise ConfigError(
            f"{out}: a function of your own changes its values, and check runs only the built-in "
            "changes of --splice"
        )
    if stored.recipe.is_crosscoded:
        raise ConfigError(
            f"{out}: its latents were encoded from the rows of other datasets; check those"
        )
    references = dict[str, References]()
    found: list[CheckReport] = []
    unchecked: list[str] = []
    for each in (ledger, *(found.ledger for found in live_passes(ledger))):
        moved = recipe or Recipe()
        if not each.table().recipe.encode:  # an encoder belongs to taps, and these have none
            moved = replace(moved, encode=None)
        table = each.table()
        taps, left_out = checkable(table.recipe)
        if left_out:
            _log.warning("%s", left_out)
            unchecked.append(left_out)
        if not taps:
            continue
        ingested = table.recipe.rows_by is not None
        job = stored_job(moved, table, out) if ingested else resolve(moved, each, "cpu")
        job = replace(job, recipe=replace(job.recipe, taps=taps))
        report = _check_taps(out, job, samples, references)
        found += [report] if report else []
    if not found and unchecked:
        raise ConfigError(f"{out}: {unchecked[0]}, and there is nothing else to check")
    if not found:
        raise StoreError(f"{out}: no unit is done yet, there is nothing to check")
    stored_rows = open_dataset(out, partial=True)
    report = replace(_joined(found), disagreement=disagreement_of(stored_rows, bound))
    ledger.objects.replace(fmt.CHECK, fmt.encode_record("check", report.to_json()))
    return report


def _check_taps(
    out: str, job: ExtractionJob, samples: int, references: "dict[str, References]"
) -> CheckReport | None:
    """Check the taps that a dataset was made with, or those of a pass; None if no unit is done.

    Args:
        references: by compute dtype; at most one is kept, because each holds a model.
    """
    dataset = open_dataset(out, partial=True, taps=list(job.table.taps))
    dtype = job.recipe.compute_dtype
    if dtype not in references:
        references.clear()
        references[dtype] = load_references(job)
    compared = _Comparison(dataset, job, references[dtype])
    documents = 0
    with warnings.catch_warnings():
        # On a processor without fast bfloat16, torch warns with a page of stack frames.
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        reduced = is_reduced(job.recipe.pool)
        for rows, sampled, count in sampled_units(dataset, job, samples) if reduced else ():
            compared.add_rows(rows, sampled)
            documents += count
        for document, tokens, prepared in () if reduced else _sampled(dataset, job, samples):
            if documents >= samples and compared.enough:
                break
            compared.add(document, tokens, prepared)
            documents += 1
    if not documents:
        return None
    if not compared.rows:
        raise StoreError(
            f"{out}: rounding decides between experts at the first token of all {documents} "
            "documents that were sampled; check more of them with --samples"
        )
    return CheckReport(
        dataset.fingerprint,
        documents,
        compared.tokens,
        compared.results(),
        f"{versions()}, {compared.reference}",
        compared.next_token(),
    )


def _joined(reports: Sequence[CheckReport]) -> CheckReport:
    """Join the reports of a dataset's own taps and of those that were added."""
    first = reports[0]
    return replace(
        first,
        documents=max(each.documents for each in reports),
        tokens=max(each.tokens for each in reports),
        taps={tap: found for each in reports for tap, found in each.taps.items()},
        reference="; ".join(dict.fromkeys(each.reference for each in reports)),
        next_token=next((each.next_token for each in reports if each.next_token), None),
    )


def _sampled(
    dataset: Dataset, job: ExtractionJob, samples: int
) -> Iterator[tuple[Document, np.ndarray, PreparedUnit | None]]:
    """Documents with stored rows, from evenly spread units, all tokens of each, and its unit.

    After `samples` documents it yields some more, in case those are not enough. Ingested rows have
    no corpus, and no unit to pack again.
    """
    units = dataset.units
    last = len(units) - 1
    chosen = [
        units[round(i * last / max(1, count - 1))]
        for count in (samples, _FEWEST_ROWS)
        for i in range(count)
        if units
    ]
    if job.recipe.rows_by is not None:
        yield from ingested_documents(dataset, chosen)
        return
    rng = np.random.default_rng(0)
    seen: set[int] = set()
    with closing(job.reader()) as reader:
        prepared: PreparedUnit | None = None
        for unit in chosen:
            if prepared is None or unit != prepared.unit:  # with few, each is chosen many times
                prepared = prepare_unit(job, reader, job.units[unit], with_table=False)
            read = list(prepared.tokens.items())
            for number in rng.permutation(len(read)):
                ordinal, tokens = read[int(number)]
                if ordinal not in seen and dataset.has_document(ordinal):
                    seen.add(ordinal)
                    yield dataset.document(ordinal), tokens, prepared
                    break


class _Comparison:
    """Squared distances, accumulated document by document."""

    def __init__(self, dataset: Dataset, job: ExtractionJob, computed: "References") -> None:
        self._dataset, self._recipe = dataset, job.recipe
        self._job, self._arch = job, job.checkpoint.arch
        self._experts = self._arch.experts
        # In float32 a single wrong row must show; below it, a single row says nothing.
        self._by_row = job.recipe.compute_dtype == "float32"
        self.reference = computed.told
        given = {name: getattr(job.recipe, name) for name in TOPS}
        tops = {name: top for name, top in given.items() if top is not None}
        self._exact, self._rough, self._again = (
            partial(_by_heads, taps, tops=tops)
            for taps in (computed.exact, computed.rough, computed.again)
        )
        self._half = partial(_by_heads, computed.half, tops=tops) if computed.half else None
        self._divergences: dict[str, list[np.ndarray]] = {}
        self._sparse = {tap: SparseTap(tap, each) for tap, each in job.encoders.items()}
        errors = error_taps(job.encoders, self._sparse)
        self._reconstructions = Reconstructions(errors, self._exact)
        self._exact, self._rough, self._again = (
            with_errors(taps, errors) for taps in (self._exact, self._rough, self._again)
        )
        self._half = with_errors(self._half, errors) if self._half else None
        self._wanted = (*job.recipe.taps, *(each.name for each in errors))
        self._errors = {each.name for each in errors}
        names = [self._name(tap) for tap in self._wanted]
        self._distances: dict[str, dict[str, list[np.ndarray]]] = {name: {} for name in names}
        self._losses = {name: LossCounter(dataset.shape(name)) for name in names}
        self._samples: list[tuple[Document, SampledRows]] = []
        self.tokens = self.rows = 0

    @property
    def enough(self) -> bool:
        """Whether the check has enough rows."""
        return self.rows >= (1 if self._by_row else _FEWEST_ROWS)

    def add(self, document: Document, tokens: np.ndarray, prepared: PreparedUnit | None) -> None:
        """`prepared`: the document's unit; None if its rows were ingested."""
        recipe = self._recipe
        offsets = document.index["offset"]
        inside = offsets.max() < len(tokens)
        if not inside or not np.array_equal(document.index["token_id"], tokens[offsets]):
            raise StoreError(
                f"document {document.index['doc'][0]}: its tokens differ from the corpus's"
            )
        packed, backward = prepared and prepared.packed, UnitBackward.of(self._job, prepared)
        every = sampled_rows(document, tokens, packed, recipe.pool, recipe.seq_len, backward)
        self._samples = [*self._samples, *((document, each) for each in every[:1])][:_MATCHED]
        for sampled in every:
            self.add_rows(document, sampled)
            for context in sampled.contexts:
                self._reconstructions.add(context)

    def add_rows(self, document: Document, sampled: SampledRows) -> None:
        """Compare some rows of a document, or the sums of a unit."""
        self.rows += self._add_rows(document, sampled)
        self.tokens += sum(map(len, sampled.contexts))

    def _add_rows(self, document: Document, sampled: SampledRows) -> int:
        """Compare some rows of a document; return how many have only one correct value."""
        wanted = self._wanted
        # (What is encoded with gradients is not computed at another layer.)
        apart = self._errors | {tap for tap in self._sparse if of_backward_pass(tap)}
        neighbours = {tap: None if tap in apart else _neighbour(tap, self._arch) for tap in wanted}
        experts = self._experts if self._by_row else None
        routers = {"router_logits"} if experts else set[str]()
        logits = {"logits"} if self._half else set[str]()
        beside = filter(None, neighbours.values())
        named = filter(None, map(named_in, wanted))
        exact = sampled.taps(self._exact, {*wanted, *routers, *logits, *beside, *named})
        rough = sampled.taps(self._rough, {*wanted, *routers, *logits})
        half = sampled.taps(self._half, {*wanted, *logits}) if self._half else {}
        for dtype, found in (("float8_e4m3", rough), ("bfloat16", half)) if half else ():
            moved = divergence(exact["logits"], found["logits"])
            self._divergences.setdefault(dtype, []).append(moved)
        everywhere = np.arange(sampled.count)
        if experts:
            decided = _before_a_tie(exact, rough, experts.chosen)
            sampled = sampled.before(decided)
            everywhere = sampled.places if sampled.by else np.arange(decided)
        rows, places = sampled.rows, sampled.places
        suspected: dict[str, Any] = {}

        def of_tap(tap: str, values: Any, tokens: np.ndarray | None = None) -> np.ndarray:
            tokens = np.arange(len(values)) if tokens is None else tokens
            if not sampled.spreads:
                return comparable(tap, values, tokens, exact)
            truth = self._rows_of(tap, sampled)(exact[tap])[tokens]
            return sampled.balanced(values, truth, math.prod(exact[tap].shape[1:]))

        for tap in wanted:
            beside, name, sparse = neighbours[tap], self._name(tap), self._sparse.get(tap)
            rows_of = self._rows_of(tap, sampled)
            truth, rounded = map(rows_of, (exact[tap], rough.get(tap, exact[tap])))
            other: Any = sampled.another(exact[tap]) if beside is None else rows_of(exact[beside])
            if sparse and beside is None:
                other = sparse.encode(other)
            if sparse:
                computed = rounded
                stored = sparse.stored(document, rows)
                rounded = sparse.as_stored(self._dataset, rounded)
                alone = sparse.as_stored(self._dataset, truth[places]).values
                self._losses[name].add(truth[places].values, alone, stored.values)
                zeros = truth.nothing()
            else:
                stored = _like(document.read(tap, dtype=STORED)[rows], truth)
                computed = rounded
                rounded = self._dataset.as_stored(tap, rounded)
                in_float32 = truth[places].astype(np.float32 if truth.dtype.kind == "f" else None)
                alone = self._dataset.as_stored(tap, in_float32)
                self._losses[name].add(in_float32, alone, stored)
                stored = of_tap(tap, stored, places)
                truth, computed, rounded, other = (
                    of_tap(tap, values) for values in (truth, computed, rounded, other)
                )
                zeros = np.zeros_like(truth)
            if half:
                other_dtype = rows_of(half.get(tap, exact[tap]))
                values = other_dtype if sparse else of_tap(tap, other_dtype)
                squares = _squares(values[places], truth[places], exact=_exactly(tap))
                self._distances[name].setdefault("bfloat16", []).append(squares)
            for kind, values, where in (
                ("error", stored, places),
                ("floor", rounded[places], places),
                ("control", other[places], places),
                ("length", zeros[places], places),
                # Few rows, or a single number in each, may have a low floor by chance.
                ("floor of all", rounded[everywhere], everywhere),
                ("computed of all", computed[everywhere], everywhere),
                ("length of all", zeros[everywhere], everywhere),
            ):
                squares = _squares(values, truth[where], exact=_exactly(tap))
                self._distances[name].setdefault(kind, []).append(squares)
            if self._by_row and len(rows) and self._beyond_the_reference(name):
                suspected[tap] = truth
        # A row that depends on the last digits may be as far off in another correct result.
        for seed in range(_DRAWS if suspected else 0):
            again = sampled.taps(self._again, suspected, noise=seed)
            for tap, truth in suspected.items():
                found = self._rows_of(tap, sampled)(again.get(tap, exact[tap]))
                values = (found if tap in self._sparse else of_tap(tap, found))[everywhere]
                squares = _squares(values, truth[everywhere], exact=_exactly(tap))
                known = self._distances[self._name(tap)]["computed of all"]
                known[-1] = np.maximum(known[-1], squares)
        return len(rows)

    def _rows_of(self, tap: str, sampled: SampledRows) -> Callable[[np.ndarray], Any]:
        """Return a function from a tap's values of tokens to its rows, before they are stored."""
        sparse = self._sparse.get(tap)
        return partial(sparse.pooled, sampled=sampled) if sparse else sampled.pooled

    def _beyond_the_reference(self, name: str) -> bool:
        """Whether a row of the last context is farther off than float32 alone explains."""
        last = {kind: parts[-1] for kind, parts in self._distances[name].items()}
        error = np.max(last["error"] / row_scales(last["length"]))
        floor = np.max(last["computed of all"] / row_scales(last["length of all"]))
        return bool(error > max(_FLOAT32**2, _MARGIN_OF_WORST**2 * floor))

    def _name(self, tap: str) -> str:
        """The name under which a tap is checked: for an encoded tap, that of its latents."""
        return self._sparse[tap].name if tap in self._sparse else tap

    def results(self) -> dict[str, TapCheck]:
        made = self._reconstructions.results()
        found = {tap: self._matched(tap, self._result(tap)) for tap in self._distances}
        return {tap: replace(each, reconstruction=made.get(tap)) for tap, each in found.items()}

    def _matched(self, tap: str, found: TapCheck) -> TapCheck:
        """Say what the rows of a tap really are, if they are too far and of single tokens."""
        if found.error <= found.allowed or tap not in self._recipe.taps or self._recipe.pool:
            return found
        really = match(tap, self._arch, self._exact, self._samples, found.allowed)
        return replace(found, really=really)

    def _result(self, tap: str) -> TapCheck:
        rows = {name: np.concatenate(parts) for name, parts in self._distances[tap].items()}
        # A latent at its threshold is either on or off: in any dtype some rows may differ by one.
        chosen = tap in self._errors or any(tap == each.name for each in self._sparse.values())
        scale, scale_of_all = map(row_scales, (rows["length"], rows["length of all"]))
        floor = max(
            self._overall(rows["floor"] / scale, _SPARED_FLOOR, chosen),
            self._overall(rows["floor of all"] / scale_of_all, _SPARED_FLOOR, chosen),
        )
        allowed = max(_FLOAT32, _MARGIN * floor)
        if self._by_row:
            computed = rows["computed of all"] / scale_of_all
            by_luck = _MARGIN_OF_WORST * self._overall(computed, _SPARED_FLOOR, chosen)
            allowed = max(allowed, by_luck)
        return TapCheck(
            error=self._overall(rows["error"] / scale, _SPARED, chosen),
            floor=floor,
            allowed=allowed,
            control=float(np.sqrt((rows["control"] / scale).mean())),
            loss=self._losses[tap].result(),
            bfloat16=self._overall(rows["bfloat16"] / scale, _SPARED_FLOOR, chosen)
            if "bfloat16" in rows
            else None,
        )

    def next_token(self) -> dict[str, float] | None:
        """How far the next token's probabilities are from float32's, on average."""
        means = {n: float(np.concatenate(parts).mean()) for n, parts in self._divergences.items()}
        return means or None

    def _overall(self, squares: np.ndarray, spared: float, chosen: bool) -> float:
        if chosen or (self._experts and not self._by_row):
            squares = np.sort(squares)[: max(1, int((1 - spared) * len(squares)))]
        return float(np.sqrt(squares.max() if self._by_row else squares.mean()))


def divergence(exact: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The Kullback-Leibler divergence of each row of logits from the exact one, in nats."""

    def log_probabilities(logits: np.ndarray) -> np.ndarray:
        shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    parts: list[np.ndarray] = []
    for start in range(0, len(exact), _ROWS):
        ours, theirs = (log_probabilities(a[start : start + _ROWS]) for a in (exact, found))
        parts.append((np.exp(ours) * (ours - theirs)).sum(axis=1))
    return np.concatenate(parts)


def row_scales(lengths: np.ndarray) -> np.ndarray:
    """The squared length that each row's squared distance is relative to.

    A few rows, mainly those of first tokens, may be a hundred times as long as the others, and are
    rounded accordingly: they must neither fail for that nor hide errors of the others.
    """
    typical = float(np.median(lengths)) or float(lengths.mean()) or 1.0
    return np.maximum(lengths, typical)


def _before_a_tie(exact: Mapping[str, Any], rough: Mapping[str, Any], chosen: int) -> int:
    """The number of tokens before the first one whose choice of experts depends on rounding.

    That token, and all tokens that attend to it, have more than one correct value.
    """
    decided = len(next(iter(exact.values())))
    for tap, logits in exact.items():
        if tap.startswith("router_logits") and logits.shape[1] > chosen:
            ranked = np.sort(logits, axis=1)[:, -chosen - 1 :]  # their order is stored, too
            noise = np.abs(rough[tap] - logits).max(axis=1)
            tied = np.diff(ranked, axis=1).min(axis=1) <= 2 * _MARGIN_OF_WORST * noise
            decided = min(decided, *np.flatnonzero(tied)[:1].tolist(), decided)
    return decided


def _exactly(tap: str) -> bool:
    """Whether a tap's values are right or wrong, and nothing between."""
    return tap.startswith("expert_ids")


def _squares(values: Any, truth: Any, *, exact: bool) -> np.ndarray:
    """Squared distance of each row; for expert ids, the share that differs."""
    if isinstance(truth, RowLatents):
        return np.nan_to_num(truth.squares(values), nan=_NOWHERE, posinf=_NOWHERE)
    flat = (len(truth), -1)
    if exact:
        same = values.reshape(flat) == truth.reshape(flat)
        return 1.0 - same.mean(axis=1)
    gap = values.reshape(flat).astype(np.float64) - truth.reshape(flat).astype(np.float64)
    return np.nan_to_num((gap * gap).sum(axis=1), nan=_NOWHERE, posinf=_NOWHERE)


def _like(stored: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Cut stored attention patterns to this context's length; NaN if they are not zero beyond."""
    if stored.shape[1:] == truth.shape[1:]:
        return stored
    inside = stored[..., : truth.shape[-1]]
    return np.where(np.any(stored[..., truth.shape[-1] :], axis=-1, keepdims=True), np.nan, inside)


def _neighbour(tap: str, arch: Arch) -> str | None:
    """The same site in the next layer where it has the same shape, or in the last before."""
    found = Tap.from_name(tap)
    if found.layer is None or found.site in LENSES:  # a lens may lack the next layer
        return None
    there, back = range(found.layer + 1, arch.num_layers), range(found.layer - 1, -1, -1)
    others = (replace(found, layer=layer) for layer in (*there, *back))
    alike = (
        other.name
        for other in others
        if other.why_not(arch) is None and other.shape(arch, 1) == found.shape(arch, 1)
    )
    return next(alike, None)


def _by_heads(
    taps: Taps, context: np.ndarray, names: Collection[str], **options: Any
) -> dict[str, np.ndarray]:
    """Taps by name, some for single heads, from a reference that returns all heads of a layer."""
    some = {name: tap for name in names if (tap := Tap.from_name(name)).heads}
    whole = {name: replace(tap, heads=()).name for name, tap in some.items()}
    found = taps(context, {*names, *whole.values()} - some.keys(), **options)
    of_heads = {
        name: found[whole[name]][:, list(tap.heads)]
        for name, tap in some.items()
        if whole[name] in found
    }
    return found | of_heads
