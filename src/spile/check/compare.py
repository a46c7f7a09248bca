"""`spile check`: sampled documents recomputed with HF transformers, against what is stored.

For each tap: how far the stored rows are from the reference in float32 (`error`), how far the
reference itself moves when it computes and rounds as the recipe does (`floor`), and how far the
reference's neighbouring layer (or token) is (`control`): a check that could not tell those apart
would prove nothing. Of an encoded tap all of that is of the latents, and its encoder is computed
from what the reference has. The result is kept in the store beside the manifest.
"""

import importlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from spile.core.config import Recipe
from spile.core.errors import InputError, StoreError
from spile.core.recipe import latent_names
from spile.corpus.units import Unit
from spile.dataset import format as fmt
from spile.dataset.ledger import Ledger
from spile.dataset.read.dataset import Dataset, Document, open_dataset
from spile.models.files.sae import Arrays, SparseEncoder, activations, load_arrays
from spile.objects import open_objects
from spile.objects.paths import local_copy
from spile.plan.job import ExtractionJob, prepare_unit
from spile.plan.resolve import resolve

_log = logging.getLogger("spile")
_FLOAT32 = 2e-5  # what parity in float32 is held to
_MARGIN = 2.0  # over the reference's own floor
_CONTEXTS_PER_DOCUMENT = 2
# Below float32 a token may fairly take another expert: so many of the stored rows, and of the
# reference's own, are allowed to be far off. Unequal, so that as many on both sides never matter.
_SPARED, _SPARED_FLOOR = 0.2, 0.1
_FEWEST_ROWS = 16  # below float32, where fewer would make it a matter of luck
_ROWS = 64  # whose latents, all of them, are held at once
_NOWHERE = 1e200  # stands for an infinite squared distance (of NaN), which JSON cannot hold


@dataclass(frozen=True)
class Loss:
    """Distances that rounding alone makes, and how well the stored rows still point.

    A few channels are much larger than all others and dominate any total: `typical_channel`, the
    median over channels of each one's own relative distance, shows what the rest has become.
    """

    relative_l2: float
    typical_channel: float
    cosine: float  # between stored and exact rows, averaged over rows


class LossCounter:
    """Gathers the rows of one tap."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._gap, self._size = np.zeros(shape), np.zeros(shape)  # sums of squares, by channel
        self._cosines: list[np.ndarray] = []

    def add(self, exact: np.ndarray, rounded: np.ndarray, stored: np.ndarray) -> None:
        """Rows in float32, the same as storing them alone would leave them, and as they are."""
        wide, alone, found = (array.astype(np.float64) for array in (exact, rounded, stored))
        # A row with infinity or NaN says nothing of rounding; `check` has other words for it.
        finite = np.isfinite(wide) & np.isfinite(alone) & np.isfinite(found)
        flat = (-1, math.prod(exact.shape[1:]))
        sound = finite.reshape(flat).all(axis=1)
        wide, alone, found = wide[sound], alone[sound], found[sound]
        inside = tuple(map(slice, exact.shape[1:]))  # attention patterns: as long as the context
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
    """One tap's distances, relative to the length of its typical row."""

    error: float
    floor: float
    control: float
    loss: Loss  # of it, what storing alone costs

    @property
    def allowed(self) -> float:
        return max(_FLOAT32, _MARGIN * self.floor)

    @property
    def ok(self) -> bool:
        """Close enough, where being wrong would have shown."""
        return self.error <= self.allowed < self.control


@dataclass(frozen=True)
class CheckReport:
    """What a check found."""

    fingerprint: str
    documents: int
    tokens: int
    taps: Mapping[str, TapCheck]
    reference: str

    @property
    def ok(self) -> bool:
        return all(tap.ok for tap in self.taps.values())

    def to_json(self) -> dict[str, Any]:
        taps = {
            name: {**asdict(tap), "allowed": tap.allowed, "ok": tap.ok}
            for name, tap in self.taps.items()
        }
        return {**asdict(self), "taps": taps, "ok": self.ok}


def check(out: str, *, samples: int = 4, recipe: Recipe | None = None) -> CheckReport:
    """Recompute `samples` documents, spread over the dataset, and store the result.

    Args:
        recipe: where model and corpus are now, if they have moved; their identity must be the same.

    Raises:
        InputError: if transformers (or, for an adapter, peft) is not installed.
        StoreError: if the index does not hold the tokens the corpus has there.
    """
    _require("transformers", "torch")
    ledger = Ledger(open_objects(out))
    ledger.table()  # a clear line if there is no dataset
    job = resolve(recipe or Recipe(), ledger, "cpu")
    dataset = open_dataset(out, partial=True)
    compared = _Comparison(dataset, job)
    documents = 0
    with warnings.catch_warnings():
        # Where a processor has no fast bfloat16, torch says so with a page of stack frames.
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        for document, tokens in _sampled(dataset, job, samples):
            if documents >= samples and compared.enough:
                break
            compared.add(document, tokens)
            documents += 1
    if not documents:
        raise StoreError(f"{out}: no unit is done yet, there is nothing to check")
    report = CheckReport(
        dataset.fingerprint, documents, compared.tokens, compared.results(), _versions()
    )
    ledger.objects.replace(fmt.CHECK, fmt.encode_record("check", report.to_json()))
    return report


def _sampled(
    dataset: Dataset, job: ExtractionJob, samples: int
) -> Iterator[tuple[Document, np.ndarray]]:
    """Documents with stored rows, from units spread evenly, and all tokens of each.

    After `samples` of them come some more, should those not be enough.
    """
    done = Ledger(open_objects(dataset.url)).done_units()
    units = [unit for unit in job.units if unit.id in done]
    last = len(units) - 1
    chosen = [
        units[round(i * last / max(1, count - 1))]
        for count in (samples, _FEWEST_ROWS)
        for i in range(count)
        if units
    ]
    rng = np.random.default_rng(0)
    seen: set[int] = set()
    with closing(job.reader()) as reader:
        prepared: Unit | None = None
        read: list[tuple[int, np.ndarray]] = []
        for unit in chosen:
            if unit is not prepared:  # of few units each is chosen many times, one after another
                prepared = unit
                read = list(prepare_unit(job, reader, unit, with_table=False).tokens.items())
            for number in rng.permutation(len(read)):
                ordinal, tokens = read[int(number)]
                if ordinal not in seen and dataset.has_document(ordinal):
                    seen.add(ordinal)
                    yield dataset.document(ordinal), tokens
                    break


class _Comparison:
    """Squared distances, gathered document by document."""

    def __init__(self, dataset: Dataset, job: ExtractionJob) -> None:
        self._dataset, self._recipe = dataset, job.recipe
        self._layers = job.checkpoint.arch.num_layers
        self._experts = job.checkpoint.arch.experts is not None
        self._exact = _reference(job, "float32")
        # In float32 the reference has no floor but rounding.
        rough = job.recipe.compute_dtype != "float32"
        self._rough = _reference(job, job.recipe.compute_dtype) if rough else self._exact
        self._sparse = {tap: SparseTap(tap, each) for tap, each in job.encoders.items()}
        names = [self._name(tap) for tap in job.recipe.taps]
        self._distances: dict[str, dict[str, list[np.ndarray]]] = {name: {} for name in names}
        self._losses = {name: LossCounter(dataset.shape(name)) for name in names}
        self.tokens = self.rows = 0

    @property
    def enough(self) -> bool:
        """Whether more documents would not help."""
        return self._recipe.compute_dtype == "float32" or self.rows >= _FEWEST_ROWS

    def add(self, document: Document, tokens: np.ndarray) -> None:
        recipe = self._recipe
        offsets = document.index["offset"]
        inside = offsets.max() < len(tokens)
        if not inside or not np.array_equal(document.index["token_id"], tokens[offsets]):
            raise StoreError(f"document {document.index['doc'][0]}: other tokens than the corpus's")
        starts = np.unique(offsets // recipe.seq_len)[:_CONTEXTS_PER_DOCUMENT] * recipe.seq_len
        for start in starts.tolist():
            context = tokens[start : start + recipe.seq_len]
            rows = np.flatnonzero((offsets >= start) & (offsets < start + len(context)))
            self._add_context(document, context, rows, offsets[rows] - start)
            self.tokens += len(context)
            self.rows += len(rows)

    def _add_context(
        self, document: Document, context: np.ndarray, rows: np.ndarray, places: np.ndarray
    ) -> None:
        wanted = self._recipe.taps
        neighbours = {tap: _neighbour(tap, self._layers) for tap in wanted}
        exact = self._exact.taps(context, {*wanted, *filter(None, neighbours.values())})
        rough = exact if self._rough is self._exact else self._rough.taps(context, wanted)
        everywhere = np.arange(len(context))
        for tap in wanted:
            beside, name, sparse = neighbours[tap], self._name(tap), self._sparse.get(tap)
            truth, rounded = exact[tap], rough[tap]
            other = np.roll(truth, 1, axis=0) if beside is None else exact[beside]
            if sparse:
                truth, rounded, other = map(sparse.encode, (truth, rounded, other))
                stored = sparse.stored(document, rows)
                rounded = sparse.as_stored(self._dataset, rounded)
                alone = sparse.as_stored(self._dataset, truth[places]).values
                self._losses[name].add(truth[places].values, alone, stored.values)
                zeros = truth.nothing()
            else:
                stored = _like(np.asarray(document.read(tap)[rows]), truth)
                rounded = self._dataset.as_stored(tap, rounded)
                alone = self._dataset.as_stored(tap, truth[places])
                self._losses[name].add(truth[places], alone, stored)
                zeros = np.zeros_like(truth)
            for kind, values, where in (
                ("error", stored, places),
                ("floor", rounded[places], places),
                ("control", other[places], places),
                ("length", zeros[places], places),
                # Few rows, or a single number in each, may have a low floor by chance.
                ("floor of all", rounded, everywhere),
                ("length of all", zeros, everywhere),
            ):
                squares = _squares(values, truth[where], exact=tap.startswith("expert_ids"))
                self._distances[name].setdefault(kind, []).append(squares)

    def _name(self, tap: str) -> str:
        """What is checked of a tap is called that."""
        return self._sparse[tap].name if tap in self._sparse else tap

    def results(self) -> dict[str, TapCheck]:
        return {tap: self._result(tap) for tap in self._distances}

    def _result(self, tap: str) -> TapCheck:
        rows = {name: np.concatenate(parts) for name, parts in self._distances[tap].items()}
        typical = float(np.sqrt(rows["length"].mean())) or 1.0
        of_all = float(np.sqrt(rows["length of all"].mean())) or 1.0
        # At its threshold a latent is there or not: in any dtype some rows may differ by one.
        chosen = any(tap == sparse.name for sparse in self._sparse.values())
        floors = (
            self._overall(rows["floor"], _SPARED_FLOOR, chosen) / typical,
            self._overall(rows["floor of all"], _SPARED_FLOOR, chosen) / of_all,
        )
        return TapCheck(
            error=self._overall(rows["error"], _SPARED, chosen) / typical,
            floor=max(floors),
            control=float(np.sqrt(rows["control"].mean())) / typical,
            loss=self._losses[tap].result(),
        )

    def _overall(self, squares: np.ndarray, spared: float, chosen: bool) -> float:
        """In float32 one wrong row must show; below it, a single row says nothing."""
        wide = self._recipe.compute_dtype == "float32"
        if chosen or (self._experts and not wide):
            squares = np.sort(squares)[: max(1, int((1 - spared) * len(squares)))]
        return float(np.sqrt(squares.max() if wide else squares.mean()))


@dataclass(frozen=True)
class RowLatents:
    """The largest latents of rows, and which they are."""

    values: np.ndarray
    ids: np.ndarray

    def __getitem__(self, rows: np.ndarray) -> "RowLatents":
        return RowLatents(self.values[rows], self.ids[rows])

    def nothing(self) -> "RowLatents":
        return RowLatents(np.zeros_like(self.values), self.ids)

    def squares(self, other: "RowLatents") -> np.ndarray:
        """Squared distance of each row from another's, over all latents."""
        ours, theirs = (each.values.astype(np.float64) for each in (self, other))
        rows = np.arange(len(ours))[:, None]
        most = 1 + max(int(self.ids.max(initial=0)), int(other.ids.max(initial=0)))
        keys = [(rows * most + each.ids.astype(np.int64)).reshape(-1) for each in (self, other)]
        _, here, there = np.intersect1d(*keys, assume_unique=True, return_indices=True)
        common = ours.reshape(-1)[here] * theirs.reshape(-1)[there]
        dots = np.bincount(here // ours.shape[1], common, minlength=len(ours))
        lengths: np.ndarray = np.square(ours).sum(axis=1) + np.square(theirs).sum(axis=1)
        return np.where(np.isnan(lengths), lengths, np.maximum(lengths - 2 * dots, 0.0))


class SparseTap:
    """An encoded tap."""

    def __init__(self, tap: str, encoder: SparseEncoder) -> None:
        self.name, self._ids = latent_names(tap)
        self._encoder = encoder
        self._arrays: Arrays = load_arrays(encoder.sae)[0]

    @property
    def kept(self) -> int:
        return self._encoder.kept

    def encode(self, rows: np.ndarray) -> RowLatents:
        """Of rows as the reference has them."""
        flat = rows.reshape(len(rows), -1).astype(np.float32)
        parts = [self._encode(flat[i : i + _ROWS]) for i in range(0, len(flat), _ROWS)]
        values, ids = zip(*parts, strict=True)
        return RowLatents(np.concatenate(values), np.concatenate(ids))

    def _encode(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = activations(self._encoder.sae, self._arrays, rows, np, np.matmul)
        ids = np.argsort(-found, axis=1, kind="stable")[:, : self.kept]
        return np.take_along_axis(found, ids, axis=1), ids

    def stored(self, document: Document, rows: np.ndarray) -> RowLatents:
        return RowLatents(document.read(self.name)[rows], document.read(self._ids)[rows])

    def as_stored(self, dataset: Dataset, top: RowLatents) -> RowLatents:
        return RowLatents(dataset.as_stored(self.name, top.values), top.ids)


def _squares(values: Any, truth: Any, *, exact: bool) -> np.ndarray:
    """Squared distance of each row; of choices, the share that differs."""
    if isinstance(truth, RowLatents):
        return np.nan_to_num(truth.squares(values), nan=_NOWHERE, posinf=_NOWHERE)
    flat = (len(truth), -1)
    if exact:
        same = values.reshape(flat) == truth.reshape(flat)
        return 1.0 - same.mean(axis=1)
    gap = values.reshape(flat).astype(np.float64) - truth.reshape(flat).astype(np.float64)
    return np.nan_to_num((gap * gap).sum(axis=1), nan=_NOWHERE, posinf=_NOWHERE)


def _like(stored: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Attention patterns are stored as wide as a context may be; beyond this one all is zero."""
    if stored.shape[1:] == truth.shape[1:]:
        return stored
    inside = stored[..., : truth.shape[-1]]
    return np.where(np.any(stored[..., truth.shape[-1] :], axis=-1, keepdims=True), np.nan, inside)


def _neighbour(tap: str, num_layers: int) -> str | None:
    """The same site one layer on (or back); None where it has no layers."""
    site, dot, layer = tap.partition(".")
    if not dot or num_layers < 2:
        return None
    return f"{site}.{int(layer) + 1 if int(layer) + 1 < num_layers else int(layer) - 1}"


def _reference(job: ExtractionJob, dtype: str) -> Any:
    """The model in transformers, its taps within reach."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    reference = importlib.import_module("spile.check.reference")
    # Not the recipe's sources, which are the stored ones: things may have moved since.
    directory, adapter = job.checkpoint.directory, job.checkpoint.adapter
    _log.info("loading %s with transformers in %s", directory, dtype)
    transformers.utils.logging.disable_progress_bar()
    with local_copy(directory) as folder:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
    if adapter:
        _require("peft", install="peft")
        peft = importlib.import_module("peft")
        with local_copy(adapter.directory) as folder:
            model = peft.PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    return reference.Reference(model.to("cuda" if torch.cuda.is_available() else "cpu"))


def _require(*names: str, install: str = "'spile[check]'") -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise InputError(
                f"check compares with HF transformers, and {name} is not installed ({error}): "
                f"pip install {install}"
            ) from error


def _versions() -> str:
    return ", ".join(
        f"{name} {importlib.import_module(name).__version__}" for name in ("transformers", "torch")
    )
