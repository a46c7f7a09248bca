"""`spile features`: count what is missing, then summarize.

Work is cut into pieces: the parts of the units, and blocks of logits. Each has a create-only record
under a name that follows from the piece, and files that follow from its content. So several
machines may run the same command at once, a killed one continues, and a piece that two of them do
ends as one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from spile.core.errors import ConfigError
from spile.core.options import listed
from spile.core.tap_order import of_backward_pass
from spile.core.threads import OnProgress, cancellation
from spile.dataset import format as fmt
from spile.dataset.codec.columns import read_columns
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.latents import pair_of
from spile.dataset.read.opening import open_dataset
from spile.dataset.records.features import (
    FeatureFiles,
    FeatureOptions,
    FeatureSet,
    FeatureSpec,
    digest_of_units,
    live_sets,
    set_name,
    set_names,
)
from spile.dataset.records.ledger import Ledger
from spile.features.decoders import decoder_rows, open_decoder, read_directions
from spile.features.logits import BLOCK, extremes, read_head
from spile.features.parts import Source, count_part, summarize
from spile.features.source import AlongDirections, StoredLatents
from spile.features.tally import range_bounds
from spile.models.files.checkpoint import read_arch
from spile.models.files.encoders.sae import Sae
from spile.models.sites import STREAMS
from spile.models.taps import Tap
from spile.objects import open_objects
from spile.plan.encoders import reconstructed_tap

_DENSE_PARTS = 32  # latents that are active in a part, for each entry that is kept


@dataclass(frozen=True, kw_only=True)
class MadeFeatures:
    """The result of `make_features`.

    Attributes:
        name: that of the set of features.
        parts: how many parts there are now, and in all.
        counted: the parts that this call counted.
        units: how many units the summary covers; None before all parts are there.
        note: why there are no logits, or None.
    """

    dataset: str
    tap: str
    name: str
    latents: int
    parts: tuple[int, int]
    counted: int
    rows: int
    units: int | None
    bytes: int
    note: str | None


@dataclass(frozen=True, kw_only=True)
class FeatureRequest:
    """What to make features of.

    Attributes:
        tap: an encoded tap, or with `directions` a dense one; None: the only encoded tap.
        directions: `.npy` files.
        options: None leaves the choice to the features that are there, or to the defaults.
        model: the model's place now, if it has moved; `encode`: the encoder's.
        share: (i, n): count share i of n first, then what is left.
    """

    tap: str | None = None
    directions: Sequence[str] = ()
    examples: int | None = None
    rows: int | None = None
    logits: int | None = None
    model: str | None = None
    encode: str | None = None
    share: tuple[int, int] = (0, 1)

    def options(self) -> FeatureOptions:
        """Return the options; those that were not given have their defaults."""
        if self.examples is not None and self.examples < 1:
            raise ConfigError(f"--examples must be at least 1, got {self.examples}")
        given = {"examples": self.examples, "rows": self.rows, "logits": self.logits}
        chosen = {name: value for name, value in given.items() if value is not None}
        found = FeatureOptions(**chosen)
        return replace(found, drawn=12 * found.examples)


def make_features(
    url: str, request: FeatureRequest, *, progress: OnProgress | None = None
) -> MadeFeatures:
    """Count the latents of a tap in the units that are not counted yet, and summarize them.

    Args:
        progress: called with the number of pieces done so far, and of all.
    """
    job = FeatureJob(url, request)
    job.run(progress)
    return job.made()


class FeatureJob:
    """One call: the set of features, and what of it is there."""

    def __init__(self, url: str, request: FeatureRequest) -> None:
        self.request, self.url = request, url
        self.dataset = open_dataset(url, partial=True)
        _refuse_unfit(self.dataset)
        self.ledger = Ledger(open_objects(url))
        self.table = self.ledger.table()
        self.source, names = self._source()
        self.features, self.spec = self._set(names)
        self.counted, self.note = 0, None

    @property
    def tap(self) -> str:
        """The tap that features are of, by its name in the model."""
        return self.spec.tap

    def _source(self) -> tuple[Source, tuple[str, ...]]:
        request, dataset = self.request, self.dataset
        if request.directions:
            dense = [tap for tap in dataset.taps if not dataset.num_latents(tap)]
            if request.tap is None and len(dense) != 1:
                raise ConfigError(f"--directions needs --tap; there are {listed(dense)}")
            tap = dataset.name(request.tap or dense[0])
            if dataset.num_latents(tap) or dataset.dtype(tap).kind == "i":
                raise ConfigError(f"--tap {tap}: holds ranks; directions need a dense tap")
            names, vectors = read_directions(request.directions, dataset.width(tap))
            return AlongDirections(dataset, tap, vectors), names
        if request.tap is None and len(dataset.encoded) != 1:
            raise ConfigError(
                f"{self.url}: name an encoded tap with --tap; there are {listed(dataset.encoded)} "
                "(`extract --encode` makes one, and --directions takes dense taps)"
            )
        pair = pair_of(dataset, request.tap or dataset.encoded[0])
        if pair and of_backward_pass(pair[0]):
            raise ConfigError(
                f"{self.url}: {pair[0]} holds attributions, and features count activations; name "
                "the tap of the latents with --tap"
            )
        if pair is None:
            encoded = listed(dataset.encoded)
            raise ConfigError(f"--tap {request.tap}: holds no latents; encoded taps: {encoded}")
        return StoredLatents(dataset, pair), ()

    def _set(self, names: tuple[str, ...]) -> tuple[FeatureSet, FeatureSpec]:
        """Find the set of features, or begin it."""
        source = self.source
        if isinstance(source, StoredLatents):
            stored = source.taps[0]
            tap = next(t for t in self.dataset.encoded if pair_of(self.dataset, t) == source.taps)
        else:
            stored = tap = source.tap
        of, request = self.dataset.pass_of(stored), self.request
        for features, spec in live_sets(self.ledger):
            if (spec.tap, spec.of, spec.names) == (tap, of, names):
                self._refuse_other(features, spec)
                return features, spec
        taken = {*set_names(self.ledger.objects)}
        number = next(n for n in range(1, len(taken) + 2) if set_name(tap, n) not in taken)
        features = FeatureSet(self.ledger.objects, set_name(tap, number))
        options = request.options()
        vectors = None
        if isinstance(source, AlongDirections):
            vectors = features.store(fmt.FEATURE_COLUMNS, {"directions": source.vectors})
            options = replace(options, rows=0, neighbours=0)
        spec = FeatureSpec(
            tap=tap,
            of=of,
            latents=source.latents,
            names=names,
            bounds=range_bounds(source.latents, options, signed=bool(names)),
            stride=self._stride(source, options),
            options=options,
            vectors=vectors,
        )
        stored_spec = features.create(spec)
        if (stored_spec.tap, stored_spec.of, stored_spec.names) != (tap, of, names):
            raise ConfigError(f"{self.url}: another process began {features.name}; run this again")
        self._refuse_other(features, stored_spec)
        return features, stored_spec

    def _refuse_other(self, features: FeatureSet, spec: FeatureSpec) -> None:
        for name in ("examples", "rows", "logits"):
            asked, have = getattr(self.request, name), getattr(spec.options, name)
            if asked not in (None, have) and (name, asked) != ("logits", 0):
                flag = "neighbour-rows" if name == "rows" else name
                raise ConfigError(
                    f"{self.url}: {features.name} was begun with --{flag} {have}, not {asked}; "
                    f"leave the flag out, or `spile drop {self.url} --features {features.name}`"
                )
        if spec.vectors and isinstance(self.source, AlongDirections):
            stored = read_columns(features.objects, spec.vectors)["directions"]
            if not np.array_equal(stored, self.source.vectors):
                raise ConfigError(
                    f"{self.url}: {features.name} has other directions of these names; rename the "
                    f"files, or `spile drop {self.url} --features {features.name}`"
                )

    def _stride(self, source: Source, options: FeatureOptions) -> int:
        """Return how many units make a part: a part is small beside the rows that it stands for."""
        kept = (options.examples + options.drawn) * source.latents
        tokens = max(1, int(self.table.units.tokens.sum()) // max(1, len(self.table.units)))
        per_row = source.width if isinstance(source, StoredLatents) else source.latents
        return max(1, -(-kept * _DENSE_PARTS // (tokens * per_row)))

    # -- the work ----------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> list[range]:
        """The units of each part of the dataset as it is now."""
        ends = [each.before for each in self.table.generations]
        return self.spec.parts([*ends, len(self.table.units)])

    def run(self, progress: OnProgress | None) -> None:
        """Count what is missing; summarize once all parts are there."""
        mine, of = self.request.share
        done = {*self.dataset.units}
        before = self.features.newest(len(self.table.units))
        behind = before.units if before else 0
        wanted = [part for part in self.parts if part.start >= behind and done.issuperset(part)]
        wanted = sorted(wanted, key=lambda part: (self.parts.index(part) - mine) % of)
        blocks = self._missing_logits()
        decoder = self._open_decoder() if blocks else None  # before hours of counting
        total = len(wanted) + len(blocks)
        there = self.features.parts()
        for number, part in enumerate(wanted):
            if progress:
                progress(number, total)
            cancellation().check()
            if part.start in there or self.features.part(part.start):
                continue
            made_from = digest_of_units(self._records(part), self.spec.stored)
            made = count_part(self.features, self.spec, self.source, part, made_from)
            self.features.create_part(made)
            self.counted += 1
        if behind < len(self.table.units) and len(done) == len(self.table.units):
            self._summarize(before)
        if decoder:
            tell = partial(_told, progress, len(wanted), total)
            self._make_logits(blocks, decoder, tell)
        if progress:
            progress(total, total)

    def _records(self, units: range) -> list[fmt.Done]:
        return [self.dataset.record(unit) for unit in units]

    def _summarize(self, before: FeatureFiles | None) -> None:
        behind = before.units if before else 0
        parts = [self.features.part(part.start) for part in self.parts if part.start >= behind]
        found = [part for part in parts if part]
        if len(found) < len(parts) or not found:
            return
        for part in found:
            records = self._records(range(part.first, part.first + part.units))
            if digest_of_units(records, self.spec.stored) != part.made_from:
                raise ConfigError(
                    f"{self.dataset.url}: {self.features.name} counted units from {part.first} on "
                    "before they were made again; run `spile drop` with --features "
                    f"{self.features.name}, and count anew"
                )
        made_from = before.made_from if before else ""
        made_from = digest_of_units(
            self._records(range(behind, len(self.table.units))), self.spec.stored, made_from
        )
        whole = [before, *found] if before else found
        made = summarize(self.features, self.spec, self.source.width, whole, made_from)
        self.features.create_summary(made)

    def _missing_logits(self) -> list[int]:
        if not self.spec.options.logits or self.request.logits == 0:
            return []
        there = {*self.features.blocks()}
        return [at for at in range(-(-self.spec.latents // BLOCK)) if at not in there]

    def _open_decoder(self) -> "_Decoder | None":
        """Find the model and the encoder; None, with a note, if the tap is not of the stream.

        Raises:
            InputError: if one of them is not where it was.
        """
        recipe = self.dataset.recipe_of(self.spec.stored[0])
        if recipe.is_crosscoded:
            self.note = "no logits: a crosscoder's latents write to several models"
            return None
        model = self.request.model or recipe.model_source
        arch = read_arch(model)
        sae, where = None, self.tap
        if isinstance(self.source, StoredLatents):
            sae = open_decoder(recipe, self.tap, arch, self.request.encode)
            if sae.crosses:
                self.note = (
                    "no logits: the latents of a cross-layer transcoder write to many layers"
                )
                return None
            tap = reconstructed_tap(sae, Tap.from_name(self.tap), arch)
            where = tap.name if tap else str(sae.writes)
        if where.split(".")[0] not in STREAMS:
            self.note = f"no logits: {where} is no part of the residual stream"
            return None
        return _Decoder(model, recipe.lora_source, sae)

    def _make_logits(
        self, blocks: list[int], decoder: "_Decoder", tell: Callable[[int], None]
    ) -> None:
        head = read_head(decoder.model, decoder.lora)
        if isinstance(self.source, AlongDirections):
            rows = self.source.vectors
        else:
            assert decoder.sae is not None
            rows = decoder_rows(decoder.sae)
        mine, of = self.request.share
        check = cancellation().check
        for number, block in enumerate(sorted(blocks, key=lambda b: (b - mine) % of)):
            tell(number)
            if self.features.logits(block):
                continue
            own = rows[block * BLOCK : (block + 1) * BLOCK]
            columns = extremes(head, own, self.spec.options.logits, check)
            self.features.create_logits(block, self.features.store(fmt.FEATURE_COLUMNS, columns))

    def made(self) -> MadeFeatures:
        """Return what there is now."""
        newest = self.features.newest(len(self.table.units))
        behind = newest.units if newest else 0
        there = self.features.parts()
        parts = [part for part in self.parts if part.start < behind or part.start in there]
        return MadeFeatures(
            dataset=self.url,
            tap=self.tap,
            name=self.features.name,
            latents=self.spec.latents,
            parts=(len(parts), len(self.parts)),
            counted=self.counted,
            rows=newest.rows if newest else 0,
            units=newest.units if newest else None,
            bytes=self.features.bytes,
            note=self.note,
        )


@dataclass(frozen=True)
class _Decoder:
    """Where logits come from: the model, and the encoder of latents."""

    model: str
    lora: str | None
    sae: Sae | None


def _told(progress: OnProgress | None, before: int, total: int, number: int) -> None:
    if progress:
        progress(before + number, total)


def _refuse_unfit(dataset: Dataset) -> None:
    if dataset.recipe.pool:
        raise ConfigError(
            f"{dataset.url}: was made with --pool {dataset.recipe.pool}: its rows stand for "
            "several tokens, and features are of tokens"
        )
    if dataset.is_shuffled:
        raise ConfigError(
            f"{dataset.url}: was shuffled, so that the tokens around a row are elsewhere; make "
            "features of the dataset that it was shuffled from"
        )
