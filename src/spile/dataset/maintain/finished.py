"""A finished dataset as the source of a new one: its table and records, all of them checked.

A dataset that is made from it has one table and one recipe. So here the units of all generations
form one table, and the taps of all complete passes one recipe.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import xxhash

from spile.core.config import flag_of
from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.core.identity import summed_digest
from spile.core.recipe import TOPS, ResolvedRecipe
from spile.core.tap_order import LARGEST, OF_A_LENS, of_backward_pass
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.codec.statistics import TapStats
from spile.dataset.format import Done
from spile.dataset.records.chosen_taps import choose_taps
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.manifest import same_unit
from spile.dataset.records.passes import live_passes
from spile.dataset.records.segments import Catalog, read_statistics
from spile.dataset.records.table import Table
from spile.objects import Objects

_OF_ALL = ("corpus", "corpus_source", "max_docs", "max_tokens")  # what generations change


def read_finished(
    source: Objects, taps: str | Sequence[str] | None = None
) -> tuple[Table, "FinishedRecords"]:
    """Return the table and the records of a dataset, which must be finished; all are checked."""
    table, records = open_finished(source, taps)
    records.whole()
    return table, records


def open_finished(
    source: Objects, taps: str | Sequence[str] | None = None
) -> tuple[Table, "FinishedRecords"]:
    """Return the table of a dataset, which must be finished; records are checked when read.

    Args:
        taps: those to take, by any of their names; by default all that are complete.

    Raises:
        ConfigError: if the taps are not those of one recipe.
    """
    parts = finished_parts(source, taps)
    own = parts[0]
    aliases = {tap: info.aliases for part in parts for tap, info in part.table.taps.items()}
    kept = choose_taps(source.url, aliases, taps)
    recipe = _one_recipe(source.url, [with_taps(part.table.recipe, kept) for part in parts])
    whole = own.table.flattened()
    recipe = replace(recipe, **{name: getattr(whole.recipe, name) for name in _OF_ALL})
    infos = {tap: info for part in parts for tap, info in part.table.taps.items() if tap in kept}
    table = replace(whole, recipe=recipe, fingerprint=recipe.fingerprint(), taps=infos)
    return table, FinishedRecords(parts, kept)


def finished_parts(
    source: Objects, taps: str | Sequence[str] | None = None
) -> "list[FinishedPart]":
    """Return a dataset, which must be finished, and its passes that are complete.

    Args:
        taps: those that are needed, by any of their names: passes without one are left out.
    """
    ledger = Ledger(source)
    own = _finished_part(ledger)
    parts = [own]
    passes = [(each, each.table_over(own.table)) for each in live_passes(ledger)]
    found = [(each, table) for each, table in passes if table]
    every = {tap: info.aliases for _, table in found for tap, info in table.taps.items()}
    every |= {tap: info.aliases for tap, info in own.table.taps.items()}
    wanted = choose_taps(source.url, every, taps)
    # (By their taps: those of two datasets, which are to be merged, have different names.)
    for each, table in sorted(found, key=lambda pair: pair[1].recipe.taps):
        if table.taps.keys().isdisjoint(wanted):
            continue
        if each.is_behind(own.table):
            named = ",".join(table.recipe.taps)
            raise StoreError(
                f"{source.url}: {named} lack the documents that were added later; finish with "
                f"`spile extract --out {source.url} --add-taps {named}`, or choose others by --taps"
            )
        if each.finished(own.table):
            parts.append(_finished_part(each.ledger, own.catalog))
    return parts


@dataclass(frozen=True)
class FinishedPart:
    """A dataset without its passes, or one pass; every unit of it is done."""

    ledger: Ledger
    table: Table
    catalog: Catalog  # from the manifest: records without `made_by`
    base: Catalog | None = None  # of a pass: the units of the dataset

    @property
    def prefix(self) -> str:
        """The folder of the pass; empty for the dataset itself."""
        return self.ledger.prefix

    def read(self, unit: int) -> Done:
        """Return a record, which is checked."""
        key, done = self.ledger.layout.done_key(unit), self.ledger.read_done(unit)
        if done is None:
            raise CorruptError(self.prefix + key, "is missing")
        if why := self.ledger.other_origin(self.table, done):
            raise CorruptError(self.prefix + key, why)
        if done.rows and {shard.tap for shard in done.shards} != set(self.table.taps):
            raise CorruptError(self.prefix + key, "does not hold the recipe's taps")
        if not same_unit(self.catalog[unit], done):
            raise self.unfounded()
        of_pass = self.ledger.of_pass
        if of_pass and self.base is not None and of_pass.other_rows(done, self.base[unit]):
            raise CorruptError(self.prefix + key, "has other rows than the dataset")
        return done

    def unfounded(self) -> CorruptError:
        return CorruptError(
            self.prefix + self.table.layout.manifest_key,
            "does not follow from the done records; see `spile verify`",
        )


def _finished_part(ledger: Ledger, base: Catalog | None = None) -> FinishedPart:
    """Return a dataset without its passes, or a pass; it must be finished."""
    url, table = ledger.objects.url, ledger.table()
    if table.fingerprint != table.recipe.fingerprint():
        raise CorruptError(fmt.UNITS, "fingerprint does not match its recipe")
    manifest = ledger.derived.read_manifest(ledger.layout)
    if manifest is None:
        done = len(ledger.done_units().intersection(range(len(table.units))))
        if done < len(table.units):
            raise StoreError(
                f"{url}: {done} of {len(table.units)} units are done; finish with the same "
                "`spile extract` first"
            )
        if not ledger.holds_rows():
            raise StoreError(f"{url}: holds no rows; there is nothing to copy")
        raise StoreError(  # the last unit was committed just now
            f"{url}: every unit is done, but there is no {table.layout.manifest_key} yet; "
            "finish with the same `spile extract` first"
        )
    part = FinishedPart(ledger, table, ledger.derived.catalog(table, manifest), base)
    if not ledger.derived.manifest_follows(table):
        raise part.unfounded()
    return part


def with_taps(recipe: ResolvedRecipe, kept: Collection[str]) -> ResolvedRecipe:
    """Return the recipe that stores only some of the taps."""
    taps: list[str] = []
    for tap in recipe.taps:
        stored = recipe.stored_of(tap)
        found = [name for name in stored if name in kept]
        if found and len(found) < len(stored):
            raise ConfigError(f"--taps: {', '.join(stored)} go together; give all of them")
        taps += [tap] if found else []
    encode = {tap: name for tap, name in recipe.encode.items() if tap in taps}
    latents, error = recipe.latents if encode else None, recipe.encode_error and bool(encode)
    source = recipe.encode_source if encode else None
    sites = {tap.partition(".")[0] for tap in taps}
    tops: dict[str, Any] = {
        name: None
        for name, largest in LARGEST.items()
        if sites.isdisjoint((*largest, *OF_A_LENS) if name == "top_logits" else largest)
    }
    if sites.isdisjoint(OF_A_LENS):
        tops |= {"lens": None, "lens_source": None}
    made = {of_backward_pass(tap) for tap in taps}
    if not made - {None}:
        tops |= {"objective": None, "objective_source": None, "steps": None}
    if "_edge" not in made:
        tops |= {"writers": None}
    if made.isdisjoint(("_attr", "_edge")) and not (recipe.steps and made - {None}):
        tops |= {"baseline": None, "baseline_source": None}
    return replace(
        recipe,
        taps=tuple(taps),
        encode=encode,
        latents=latents,
        encode_error=error,
        encode_source=source,
        **tops,
    )


def _one_recipe(url: str, recipes: Sequence[ResolvedRecipe]) -> ResolvedRecipe:
    """Return the recipe of taps that several recipes have added to the same rows."""
    first, *others = [recipe for recipe in recipes if recipe.taps]
    encoded = [recipe for recipe in (first, *others) if recipe.encode]
    for other in others:
        for name in ("compute_dtype", "store_dtype"):
            if getattr(first, name) != getattr(other, name):
                raise _two_recipes_error(url, name, first, other)
    for other in encoded[1:]:
        for name in ("latents", "encode_error"):
            if getattr(other, name) != getattr(encoded[0], name):
                raise _two_recipes_error(url, name, encoded[0], other)
    tops: dict[str, Any] = {}
    for name in (*TOPS, "lens", "objective", "baseline", "steps", "writers"):
        sized = [recipe for recipe in (first, *others) if _applies(name, recipe)]
        for other in sized[1:]:
            if getattr(other, name) != getattr(sized[0], name):
                raise _two_recipes_error(url, name, sized[0], other)
        tops[name] = getattr(sized[0], name) if sized else None
        if name not in (*TOPS, "steps", "writers"):
            tops[f"{name}_source"] = getattr(sized[0], f"{name}_source") if sized else None
    return replace(
        first,
        taps=tuple(tap for recipe in (first, *others) for tap in recipe.taps),
        encode={tap: name for recipe in encoded for tap, name in recipe.encode.items()},
        encode_source=encoded[0].encode_source if encoded else None,
        latents=encoded[0].latents if encoded else None,
        encode_error=bool(encoded) and encoded[0].encode_error,
        **tops,
    )


def _applies(name: str, recipe: ResolvedRecipe) -> bool:
    """Return whether an option matters to a recipe's taps; None may, too."""
    made = {*map(of_backward_pass, recipe.taps)}
    if name == "steps":
        return bool(made - {None})
    if name == "baseline":
        return not made.isdisjoint(("_attr", "_edge"))
    return getattr(recipe, name) is not None


def _two_recipes_error(
    url: str, name: str, one: ResolvedRecipe, other: ResolvedRecipe
) -> ConfigError:
    return ConfigError(
        f"{url}: {', '.join(one.taps)} and {', '.join(other.taps)} differ in {flag_of(name)} "
        f"({getattr(one, name)} and {getattr(other, name)}), and a new dataset can have one value "
        "only; choose taps with --taps"
    )


@dataclass
class Sizes:
    """Sums over units."""

    rows: int = 0
    shards: int = 0
    bytes: int = 0  # of all files

    def add(self, done: Done) -> None:
        self.rows += done.rows
        self.shards += len(done.shards)
        self.bytes += sum(file.bytes for file in done.files())

    def add_sizes(self, other: "Sizes") -> None:
        self.rows += other.rows
        self.shards += other.shards
        self.bytes += other.bytes


@dataclass(frozen=True)
class RecordsSummary:
    """Summary of the source records, stored in a derived unit's `made_by`."""

    digest: str  # equal only for exactly the same files
    text_digest: str
    tokens: int
    documents: int
    contexts: int
    skipped: Mapping[str, int]
    makers: Sequence[Mapping[str, object]]  # the original makers of the rows
    sizes: Sizes


def summarize(records: Iterable[Done]) -> RecordsSummary:
    """Sum up records, of which none is kept."""
    digest, texts, counts = xxhash.xxh3_128(), 0, Counter[str]()
    skipped, makers, sizes = Counter[str](), list[Mapping[str, object]](), Sizes()
    for done in records:
        digest.update(fmt.encode_record("done", done.to_json()))
        texts += done.text_hash
        counts.update(tokens=done.tokens, documents=done.documents, contexts=done.contexts)
        skipped.update(done.skipped)
        maker = {k: v for k, v in done.made_by.items() if k not in fmt.MADE_WHEN}
        if maker not in makers:
            makers.append(maker)
        sizes.add(done)
    return RecordsSummary(
        digest=digest.hexdigest(),
        text_digest=summed_digest([texts]),
        tokens=counts["tokens"],
        documents=counts["documents"],
        contexts=counts["contexts"],
        skipped=dict(skipped),
        makers=makers,
        sizes=sizes,
    )


class FinishedRecords(Sequence[Done]):
    """The done records of a finished dataset, each read when it is asked for, and checked.

    Each names the shards of the taps that were chosen, those of passes by their keys in the
    dataset.
    """

    def __init__(self, parts: Sequence[FinishedPart], taps: Collection[str]) -> None:
        """Args:
        parts: the dataset itself, then its passes.
        """
        self.fingerprint = parts[0].table.flattened().fingerprint  # of the dataset, with all taps
        self._own, self._taps, self._parallel = parts[0], taps, parts[0].ledger.objects.parallel
        self._parts = [part for part in parts[1:] if not part.table.taps.keys().isdisjoint(taps)]
        passes = {part.prefix: part.catalog for part in self._parts}
        # The same units from the manifests, which are cheaper: without `made_by`, with all taps.
        self.catalog = self._own.catalog.with_passes(passes)
        self._whole: RecordsSummary | None = None

    def __len__(self) -> int:
        return len(self._own.table.units)

    @overload
    def __getitem__(self, at: int) -> Done: ...
    @overload
    def __getitem__(self, at: slice) -> list[Done]: ...
    def __getitem__(self, at: int | slice) -> Done | list[Done]:
        if isinstance(at, slice):
            return list(self.of(range(*at.indices(len(self)))))
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        return self._read(at % len(self))

    def __iter__(self) -> Iterator[Done]:
        return self.of(range(len(self)))

    def of(self, units: Iterable[int]) -> Iterator[Done]:
        """Yield the records of some units; a few are read ahead."""
        return mapped(self._read, units, self._parallel)

    def _read(self, unit: int) -> Done:
        done = self._own.read(unit)
        shards = [
            replace(shard, key=part.prefix + shard.key)
            for part in self._parts
            for shard in part.read(unit).shards
        ]
        wanted = (shard for shard in (*done.shards, *shards) if shard.tap in self._taps)
        return replace(done, shards=tuple(wanted))

    def summary(self, units: Iterable[int]) -> RecordsSummary:
        """Read the records of some units, each once, and sum them up."""
        return summarize(self.of(units))

    def whole(self) -> RecordsSummary:
        """Return the summary of all records, which are read by the first call alone."""
        if self._whole is None:
            self._whole = self.summary(range(len(self)))
        return self._whole

    def bytes_of_units(self) -> Iterator[tuple[int, int]]:
        """Yield the bytes of each unit's files, and of its documents table, from the manifests."""
        of_all = {*self._taps, *fmt.BESIDE_TAPS}
        others = (part.catalog.segments() for part in self._parts)
        for own, *more in zip(self._own.catalog.segments(), *others, strict=True):
            size = own.bytes_of_units(of_all)
            for each in more:
                size = size + each.bytes_of_units(self._taps)
            documents = own.bytes_of_units(fmt.BESIDE_TAPS[-1:])
            yield from zip(size.tolist(), documents.tolist(), strict=True)

    def statistics(self, unit: int) -> dict[str, TapStats]:
        """Return the statistics of a unit's rows by tap, which are compared with their records."""
        found: dict[str, TapStats] = {}
        for part in (self._own, *self._parts):
            done = part.catalog[unit]
            found |= read_statistics(part.ledger.objects, done, part.table.taps)
        return {tap: stats for tap, stats in found.items() if tap in self._taps}

    @property
    def rewrites_statistics(self) -> bool:
        """Whether no single file holds the statistics of the taps of a unit."""
        return bool(self._parts) or {*self._own.table.taps} != {*self._taps}

    def weights(self) -> dict[str, Any] | None:
        """Return the hashes of all weights that the taps were made with; None if there are none."""
        found = [part.ledger.read_weights() for part in (self._own, *self._parts)]
        known = [weights for weights in found if weights is not None]
        return {k: v for weights in known for k, v in weights.items()} if known else None

    def scales(self) -> dict[str, np.ndarray]:
        """Return the scale of each channel, for taps that have them."""
        scales: dict[str, np.ndarray] = {}
        for part in (self._own, *self._parts):
            found = part.ledger.read_scales(part.table)
            if found is None:
                raise CorruptError(part.prefix + fmt.SCALES, "is missing; see `spile verify`")
            scales |= found
        return {tap: scale for tap, scale in scales.items() if tap in self._taps}
