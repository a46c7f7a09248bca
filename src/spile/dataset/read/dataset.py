"""Reading a dataset as numpy arrays, memory-mapped if the store is a local disk. No jax.

Row numbers count the dataset's rows in stored order: unit by unit, and within a unit as packed.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import numpy.typing as npt

from spile.core.errors import ConfigError, StoreError
from spile.core.recipe import ResolvedRecipe, latent_names
from spile.core.tap_order import sorted_taps
from spile.dataset import format as fmt
from spile.dataset.codec.columns import read_columns
from spile.dataset.codec.quantization import encode
from spile.dataset.codec.shard import read_tensors
from spile.dataset.codec.statistics import TapStats, merged
from spile.dataset.format import Shard
from spile.dataset.read.batches import Batches
from spile.dataset.read.checked_file import CheckedObjects
from spile.dataset.read.choice import RowChoice, row_choice
from spile.dataset.read.document import Document
from spile.dataset.read.dtypes import given_dtype
from spile.dataset.read.edges import Edges, edges_of
from spile.dataset.read.features import Features, choose_features, feature_sets
from spile.dataset.read.latents import Latents, read_latents
from spile.dataset.read.notebook import dataset_html
from spile.dataset.read.order import BatchOptions, Normalize, Order, Shuffle
from spile.dataset.read.pooled import PoolBy, PooledRows, pooled
from spile.dataset.read.reduced import ReducedRows, reduced
from spile.dataset.read.rows import StoredRows
from spile.dataset.read.tables import DocumentTables, index_table
from spile.dataset.read.tap_groups import TapGroup, rooted, taps_of
from spile.dataset.read.tap_rows import TapRows, refuse_if_large
from spile.dataset.read.window import View
from spile.dataset.records.segments import Totals
from spile.dataset.records.table import read_tokenizer
from spile.objects import Objects, open_objects
from spile.objects.cache import cached

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from spile.dataset.read.texts import Texts


class Dataset:
    """A stored dataset, open for reading."""

    def __init__(
        self,
        objects: Objects,
        parts: Sequence[TapGroup],
        verify: bool = False,
        tokenizer: str | None = None,
        only: Sequence[str] | None = None,
        cache: tuple[Path, int] | None = None,
    ) -> None:
        """Args:
        parts: the dataset itself, then its passes, all with the same units.
        verify: whether to check each file when it is first read.
        tokenizer: the directory or URL of a tokenizer to use instead of the model's.
        only: the taps to show; by default all.
        cache: the folder that keeps what was read from a bucket, and its largest size.
        """
        self._parts, self._tokenizer, self._only = tuple(parts), tokenizer, only
        self._store, self._verify, self._cache = objects, verify, cache
        self._objects = cached(objects, *cache, self._digest_of) if cache else objects
        if verify:
            self._objects = cast(Objects, CheckedObjects(self._objects, self._file_of))
        first, *passes = parts
        self._part_of = taps_of(parts, only)
        taps = {tap: part.table.taps[tap] for tap, part in self._part_of.items()}
        self._table = replace(first.table, taps=taps)
        self._units = first.units.with_passes({part.prefix: part.units for part in passes})
        scales = {tap: scale for part in parts for tap, scale in part.scales.items()}
        self._stored = StoredRows(self._objects, self._table, self._units, scales)
        self._tables = DocumentTables(
            self._objects, self._units, self._table.units, self._table.recipe.table_columns
        )
        self._aliases = {alias: tap for tap, info in taps.items() for alias in info.aliases}

    def __reduce__(self) -> Any:
        """Pickle the dataset so that another process opens the same units, not newer ones."""
        parts = [part.pickled() for part in self._parts]
        return _again, (self.url, parts, self._verify, self._tokenizer, self._only, self._cache)

    def _file_of(self, key: str) -> Shard | None:
        """Return the record of a unit's file."""
        prefix, inside = fmt.split_pass_key(key)
        attempt = fmt.parse_attempt_key(inside)
        units = next((part.units for part in self._parts if part.prefix == prefix), None)
        position = None if attempt is None or units is None else units.find(attempt[0])
        files = () if position is None or units is None else units[position].files()
        found = next((file for file in files if file.key == inside), None)
        return None if found is None else replace(found, key=key)

    def _digest_of(self, key: str) -> str | None:
        file = self._file_of(key)
        return None if file is None else file.digest

    def verified(self) -> "Dataset":
        """Return the same dataset, with each of its files checked when it is first read."""
        if self._verify:
            return self
        return Dataset(self._store, self._parts, True, self._tokenizer, self._only, self._cache)

    def __len__(self) -> int:
        """The number of rows of every tap; `num_documents` is that of documents."""
        return self.num_tokens

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, tap: str) -> TapRows:
        """Return a tap as an array that is read when it is sliced: `ds["resid_post.9"][:100]`."""
        if not isinstance(tap, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"ds[{tap!r}]: name a tap, as in ds[{self.taps[0]!r}][:100]; batches for torch "
                "come from spile.TorchLoader(ds, taps, 4096)"
            )
        return TapRows(self, self._stored, self.name(tap))

    __iter__ = None  # (or Python would try ds[0], ds[1], …)

    def close(self) -> None:
        """Drop open files and tables in memory, as the end of `with` does; reading opens again."""
        self._stored.forget()
        self._tables.forget()

    def __enter__(self) -> "Dataset":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def taps(self) -> list[str]:
        """The taps that rows have, by layer (`core/tap_order.py`)."""
        return sorted_taps(self._table.taps)

    def recipe_of(self, tap: str) -> ResolvedRecipe:
        """Return the recipe that a tap was made by: the dataset's, or that of its pass."""
        return self._part_of[self.name(tap)].table.recipe

    @property
    def encoded(self) -> list[str]:
        """The taps that are stored as sparse latents (`--encode`)."""
        recipes = [part.table.recipe for part in self._parts]
        found = dict.fromkeys(tap for recipe in recipes for tap in recipe.encode)
        return [tap for tap in found if all(name in self._table.taps for name in latent_names(tap))]

    @property
    def num_tokens(self) -> int:
        """The number of rows of every tap: one for each kept token (with --pool, each span)."""
        return self._stored.count

    @property
    def num_documents(self) -> int:
        return self._totals.documents

    @cached_property
    def _totals(self) -> Totals:
        return self._units.totals()

    @property
    def units(self) -> list[int]:
        return self._units.units.tolist()

    @property
    def num_units(self) -> int:
        """The number of `units`."""
        return len(self._units)

    @property
    def is_complete(self) -> bool:
        """Whether every unit is done; False only if it was opened with `partial`."""
        return len(self._units) == len(self._table.units)

    @property
    def unit_documents(self) -> np.ndarray:
        """The number of documents, read or skipped, of each of `units`."""
        return self._table.units.num_docs[self._units.units]

    @property
    def unit_starts(self) -> list[int]:
        """The first row of each of `units`, then the total number of rows."""
        return self._stored.starts.tolist()

    def rows_of_unit(self, unit: int) -> tuple[int, int] | None:
        """Return the first row of a unit and the row after its last; None if it is not done."""
        place = self._units.find(unit)
        return None if place is None else tuple(self._stored.starts[place : place + 2].tolist())

    @property
    def recipe(self) -> ResolvedRecipe:
        """The recipe, with the corpus files and limits of all generations that are open.

        Taps of passes have their own (`recipe_of`).
        """
        return self._table.whole_recipe

    @property
    def fingerprint(self) -> str:
        return self._table.fingerprint

    def name(self, tap: str) -> str:
        """Return the canonical name of a tap, which may be given by another tool's name for it."""
        tap = self._aliases.get(tap, tap)
        if tap not in self._table.taps:
            raise ConfigError(
                f"no tap {tap!r} in {self._objects.url}; it has {', '.join(self.taps)}"
            )
        return tap

    def aliases(self, tap: str) -> tuple[str, ...]:
        """Return the names of a tap in other tools."""
        return self._table.taps[self.name(tap)].aliases

    def dtype(self, tap: str, dtype: npt.DTypeLike | None = None) -> np.dtype[Any]:
        """Return the dtype in which `read(tap, dtype=dtype)` gives rows."""
        return given_dtype(self._table.taps[self.name(tap)], dtype)

    def stored_dtype(self, tap: str) -> str:
        """Return the stored dtype by its name in `--store-dtype`."""
        return self._table.taps[self.name(tap)].dtype

    def as_stored(self, tap: str, values: np.ndarray) -> np.ndarray:
        """Return values as they would read back if they had been stored."""
        tap = self.name(tap)
        scale = self._stored.scales.get(tap)
        if scale is not None:  # attention patterns may be only as wide as their context
            scale = scale[tuple(map(slice, values.shape[1:]))]
        return encode(values, self._table.taps[tap], scale)

    def shape(self, tap: str) -> tuple[int, ...]:
        """Return the shape of a row: (width,), (heads, dim), or () for a single number."""
        return self._table.taps[self.name(tap)].shape

    def width(self, tap: str) -> int:
        """Return the number of values in a row."""
        return self._table.taps[self.name(tap)].width

    def read(
        self,
        tap: str,
        start: int = 0,
        stop: int | None = None,
        *,
        dtype: npt.DTypeLike | None = None,
    ) -> np.ndarray:
        """Return rows start..stop of a tap, in float32.

        There are fewer rows if `stop` is beyond the last. Rows count from 0, never from the end.

        Rows come in stored order: documents are packed, so neither documents nor their parts are in
        the order of the corpus, and labels in that order do not belong to these rows. `index` names
        the document of each row; `pooled` returns one row for each document, beside its columns.

        Args:
            stop: the row after the last. Without it, all rows from `start` on are read, if they
                take at most 4 GiB.
            dtype: any float dtype; by default float32, which holds stored values exactly. "stored"
                is the file's own (float32 for eight bits): a read-only view of the file, if one
                shard holds the rows. numpy's sums over bfloat16 or float16 are wrong. Ids of
                experts and latents stay integers.
        """
        tap, given = self.name(tap), self.dtype(tap, dtype)
        if stop is None:
            stop = self.num_tokens
            refuse_if_large(self, tap, stop - start, given)
        start, stop = self._bounds(start, stop)
        pieces = list(self._stored.pieces(tap, start, stop))
        for shard, _, _ in pieces:
            self._stored.tensor(shard)  # checks the file before memory is allocated
        info = self._table.taps[tap]
        if len(pieces) == 1 and not info.scaled_by and given == info.storage:
            shard, a, b = pieces[0]
            return self._stored.tensor(shard)[a:b]
        out = np.empty((max(0, stop - start), *info.shape), given)
        self._stored.fill(tap, pieces, out)
        return out

    def num_latents(self, tap: str) -> int:
        """Return the number of latents of a tap's encoder; 0 if its rows are not latents."""
        return self._table.taps[self.name(tap)].latents

    def latents(
        self, tap: str, start: int, stop: int, *, dtype: npt.DTypeLike | None = None
    ) -> Latents:
        """Return the active latents of rows start..stop of an encoded tap; see `Latents`.

        `dtype`, of their values, is that of `read`.
        """
        return read_latents(self, tap, start, stop, dtype)

    def features(self, tap: str) -> Features:
        """Return what `spile features` has counted of a tap's latents; see `Features`.

        Args:
            tap: any name of the tap; or `TAP:DIRECTION`, or the name of a set of features.

        Raises:
            ConfigError: if there are none.
        """
        return choose_features(self.feature_sets, self._aliases.get(tap, tap), self.url)

    @property
    def feature_sets(self) -> list[Features]:
        """Everything that `spile features` has summarized of the taps that are open."""
        return feature_sets(self, self._store, self.taps)

    def read_at(self, tap: str, rows: npt.NDArray[np.int64]) -> np.ndarray:
        """Return rows of a tap by their numbers, ascending."""
        tap = self.name(tap)
        out = np.empty((len(rows), *self.shape(tap)), self.dtype(tap))
        self._stored.take(tap, rows, out)
        return out

    def index_at(self, rows: npt.NDArray[np.int64]) -> np.ndarray:
        """Return index entries of rows by their numbers, ascending."""
        out = np.empty(len(rows), self._table.index_dtype)
        for job in self._stored.index_jobs(rows, out):
            job()
        return out

    def pass_of(self, tap: str) -> str:
        """Return the folder of the pass that holds a tap; empty: the dataset itself."""
        return self._part_of[self.name(tap)].prefix

    def record(self, unit: int) -> fmt.Done:
        """Return the record of a unit, with the files of all taps."""
        place = self._units.find(unit)
        if place is None:
            raise StoreError(f"{self.url}: unit {unit} is not done")
        return self._units[place]

    @property
    def is_shuffled(self) -> bool:
        """Whether the rows of a document lie all over the dataset."""
        return bool(self._table.shuffled)

    def read_into(self, tap: str, start: int, out: np.ndarray) -> None:
        """Read rows from `start` on into a buffer of any float dtype, without a temporary."""
        tap = self.name(tap)
        if out.dtype.kind in "iub" and self.dtype(tap).kind not in "iu":
            raise ConfigError(f"read_into: {out.dtype} cannot hold {tap}; give a float32 buffer")
        if not 0 <= start <= self.num_tokens - len(out):
            raise ConfigError(
                f"rows {start} to {start + len(out)} of {self.num_tokens} do not exist"
            )
        self._stored.fill(tap, self._stored.pieces(tap, start, start + len(out)), out)

    def index(self, start: int, stop: int) -> np.ndarray:
        """Return the index entries of rows start..stop: token_id, doc, offset, pos, flags.

        Those of a dataset made with --pool also have span, start and count: the number of the row's
        span in its document, the offset of its first token, and how many tokens it has.
        """
        return self._stored.index(*self._bounds(start, stop))

    def index_table(self, start: int = 0, stop: int | None = None) -> Any:
        """Return index entries as a pyarrow.Table: row numbers, columns, flags as booleans.

        The flags have their names in `where`; `special` is any special token.
        """
        stop = self.num_tokens if stop is None else stop
        return index_table(self.index(start, stop), self._bounds(start, stop)[0])

    def _bounds(self, start: int, stop: int) -> tuple[int, int]:
        if start < 0 or stop < 0:
            raise ConfigError(
                f"rows {start} to {stop}: rows count from 0 to {self.num_tokens:,} (num_tokens); "
                "write num_tokens - 10 for the last ten"
            )
        return min(start, self.num_tokens), min(max(start, stop), self.num_tokens)

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """The columns of `index`: those of tokens, and of a dataset made with --pool three more."""
        return self._table.index_dtype

    @property
    def url(self) -> str:
        return self._objects.url

    def has_document(self, doc: int) -> bool:
        """Return whether any row of a document is stored."""
        return any(len(rows) for rows in self._rows_of(doc))

    def document(self, doc: int | str) -> Document:
        """Return a document, in reading order; a shuffled dataset is searched for it.

        Args:
            doc: its ordinal in the corpus, or its value of the kept column `id`, a text.
        """
        doc = self._tables.ordinal(doc)
        rows = np.concatenate([np.empty(0, np.int64), *self._rows_of(doc)])
        if len(rows):
            entries = self.index_at(rows)
            order = np.argsort(entries["offset"], kind="stable")
            return Document(entries[order], self, rows[order])
        raise StoreError(
            f"{self._objects.url}: document {doc} is not in the dataset (out of range, skipped as "
            "unusable, none of it kept by --where, or its unit is not done; see `about`)"
        )

    @property
    def tokenizer(self) -> "Tokenizer":
        """The tokenizer of the model that read the corpus: `ds.tokenizer.decode(ids)`.

        Raises:
            ConfigError: if the dataset does not hold it and it is not on this machine;
                `spile.open(..., tokenizer=DIR)` names one.
            CorruptError: if the dataset's own is damaged.
        """
        found = self.texts.tokenizer
        assert found is not None
        return found

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return the tokenizer's files that the dataset holds, by name, checked.

        There are none if `tokenizer` was given.
        """
        if self._tokenizer:
            return {}
        return read_tokenizer(self._store, self._table)

    def tokens(self, doc: int | str) -> list[str]:
        """Return the text of each stored token of a document, one per row of `document(doc)`."""
        return self.document(doc).tokens

    def text(self, doc: int | str) -> str:
        """Return the text of a document's stored tokens, also special ones; `…` marks gaps."""
        return self.document(doc).text

    @property
    def texts(self) -> "Texts":
        """The stored tokens as text; an error if there is no tokenizer."""
        if self._texts.tokenizer is None:
            raise ConfigError(
                f"{self.url}: {self._texts.missing}: open it with tokenizer=DIRECTORY"
            )
        return self._texts

    @cached_property
    def _texts(self) -> "Texts":
        texts: Any = importlib.import_module("spile.dataset.read.texts")  # (rarely needed)
        return texts.Texts(self.recipe, self._tokenizer, self.tokenizer_files())

    def about(self, doc: int | str) -> dict[str, Any]:
        """Return a document's entry in the documents table; a skipped one has the reason."""
        return self._tables.about(self._tables.ordinal(doc))

    def documents(self, columns: Sequence[str] | None = None, *, unit: int | None = None) -> Any:
        """Return every document of the corpus or of a unit, read or skipped, as a pyarrow.Table.

        Args:
            columns: some of `document_columns`; all by default.
        """
        return self._tables.table(columns, unit)

    @property
    def document_columns(self) -> list[str]:
        """The columns of `documents`: its own, then those that were kept of the corpus."""
        return self._tables.columns

    @overload
    def columns(self, name: str, /) -> np.ndarray: ...
    @overload
    def columns(self) -> dict[str, np.ndarray]: ...
    @overload
    def columns(self, name: str, other: str, /, *more: str) -> dict[str, np.ndarray]: ...
    def columns(self, *names: str) -> np.ndarray | dict[str, np.ndarray]:
        """Return columns of documents: one value for each document that has rows, in corpus order.

        The values belong to `pooled(tap)`, row by row; they do not belong to rows of `read`, which
        come in stored order. Texts are in an array of objects; a missing number is NaN.

        Args:
            names: some of `document_columns`. For one, its values; for several, a dictionary; by
                default the ordinals (`doc`) and all columns that were kept of the corpus.
        """
        found = self._tables.arrays(names or ["doc", *self.recipe.keep])
        return found[names[0]] if len(names) == 1 else found

    def pooled(self, tap: str, by: PoolBy = "mean", *, where: str | None = None) -> PooledRows:
        """Return one row for each document, in the order of the corpus, beside its columns.

        `last = ds.pooled(tap, "last")` gives `last.rows` and, for the same documents,
        `last["label"]`. Documents without rows are left out. Works for every dataset, also a
        shuffled one, and reads the rows once (for "first" and "last", only those).

        Args:
            by: "mean" (summed in float64) or "max", of each channel; the "first" or the "last" row
                of each document, by its place in the text.
            where: the rows to pool, as in `batches`: "not special", "label == 'law'". Documents
                without such rows are left out.
        """
        return pooled(self._stored, self._tables, self.name(tap), by, self._choice(where))

    def reduced(self, tap: str) -> ReducedRows:
        """Return what `--reduce` stored: for each label of `--by` the count, mean and variance.

        `ds.reduced("resid_post.9")["refusal"]` is the mean over the tokens of that label.
        """
        return reduced(self._stored, self._tables, self.name(tap))

    def edges(self) -> Edges:
        """Return the sums of edges between writers and the stream (`--writers`); see `Edges`."""
        return edges_of(self.url, self.taps, lambda tap: self.recipe_of(tap).writers, self.reduced)

    def find(self, **columns: Any) -> list[int]:
        """Return the ordinals of documents with these values: `ds.find(id="doc-17")`.

        The documents of one unit are held at a time.
        """
        return self._tables.find(**columns)

    @property
    def nbytes(self) -> int:
        """The size of the stored rows in bytes, as files hold them."""
        return self._units.bytes_of(self._table.taps.__contains__)

    def __repr__(self) -> str:
        taps = ", ".join(self.taps[:3]) + (", …" if len(self.taps) > 3 else "")
        done = len(self._units)
        units = (
            f"{done}" if done == len(self._table.units) else f"{done} of {len(self._table.units)}"
        )
        return (
            f"<spile.Dataset {self.url}: {self.num_tokens:,} rows x {len(self.taps)} taps "
            f"({taps}), {self.num_documents:,} documents, {units} units>"
        )

    def _repr_html_(self) -> str:
        counts = {
            "rows": f"{self.num_tokens:,} per tap",
            "documents": f"{self.num_documents:,}",
            "stored": f"{self.nbytes / 1e6:,.1f} MB",
        }
        taps = {tap: (self.shape(tap), self.stored_dtype(tap)) for tap in self.taps}
        return dataset_html(self.url, taps, counts, self.recipe)

    def statistics(self, tap: str) -> TapStats:
        """Return count, mean, variance, norms and extremes of a tap over the whole dataset."""
        tap = self.name(tap)
        part = self._part_of[tap]
        width = part.table.taps[tap].channels
        objects = rooted(self._objects, part.prefix)
        if part.merged is not None:
            return TapStats.from_tensors(tap, read_columns(objects, part.merged), width)

        def parts() -> Iterator[TapStats]:
            for unit in part.units:
                tensors = read_tensors(objects, unit.statistics.key)
                yield TapStats.from_tensors(tap, tensors, width)

        return merged(parts(), width)

    def batches(
        self,
        taps: str | Sequence[str],
        batch_size: int,
        *,
        index: bool = True,
        seed: int = 0,
        shuffle: Shuffle = "window",
        window: int | str = 1 << 16,
        block: int | None = None,
        epochs: int | None = 1,
        where: str | None = None,
        normalize: Normalize = None,
        dtype: npt.DTypeLike | None = None,
        encoded: bool = False,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
    ) -> Batches:
        """Iterate over shuffled batches `{tap: rows, "index": entries}`; each row once an epoch.

        The iteration is resumable: see `Batches.state_dict`.

        Args:
            taps: any name of each tap; batches use the same names as keys.
            batch_size: rows of all ranks together.
            index: whether to include the index entries of the rows.
            seed: the order follows from it: the same seed gives the same batches in every run,
                and each epoch has an order of its own.
            shuffle: True or "window" permutes blocks of rows, and rows within a window of blocks;
                "full" permutes all rows, at eight bytes of memory for each; False or None keeps the
                stored order, which `seed` does not change.
            window: rows to hold (and as many to read ahead), or their size, as in "512MiB".
            block: consecutive rows to read together; 256 on a disk, 8 MiB of rows on a bucket.
            epochs: number of epochs, each with its own order; None: without end.
            where: rows to include, as in "not special and pos >= 1" (see `extract --where`): BOS,
                EOS and every other special token are `special`. Columns of documents can be named,
                too: "topic == 'law' and pos >= 1".
            normalize: normalize by the stored statistics. "mean" subtracts the mean; "std" also
                divides channels by their deviation; "norm" scales all rows so that their mean
                length is sqrt(width), computed in float32.
            dtype: that of `read`: by default float32. (`TorchLoader` and `on_devices` keep the
                stored dtype, unless it is given: torch and JAX accumulate in float32.)
            encoded: return taps of eight bits as `Encoded` codes and scales.
            rank: the rank, of `world`, whose share of every batch to return.
            drop_last: whether to drop the last batch of an epoch if it is short.
        """
        options = BatchOptions(
            batch_size,
            index=index,
            seed=seed,
            shuffle=shuffle,
            window=window,
            block=block,
            epochs=epochs,
            where=where,
            normalize=normalize,
            dtype=dtype,
            encoded=encoded,
            rank=rank,
            world=world,
            drop_last=drop_last,
        )
        names = [taps] if isinstance(taps, str) else list(taps)
        view = self.view({name: self.name(name) for name in names}, options)
        return Batches([view], self.order(options, view.row_bytes), options)

    def view(self, names: Mapping[str, str], options: BatchOptions) -> View:
        """Return what batches show: taps by the names that they have there."""
        made_by = {name: self._part_of[tap].table.fingerprint for name, tap in names.items()}
        return View(self._stored, names, options, self.statistics, made_by)

    def order(self, options: BatchOptions, row_bytes: int) -> Order:
        """Return the order of rows in batches; a window holds `row_bytes` of each."""
        return Order(self._stored, options, row_bytes, self._choice(options.where))

    def _choice(self, where: str | None) -> RowChoice | None:
        if where is None:
            return None
        return row_choice(where, self.url, self.document_columns, self.documents)

    def index_digests(self) -> Iterator[str]:
        """Yield the digest of each unit's index: equal ones stand for the same rows."""
        for segment in self._units.segments():
            yield from segment.index_digests

    def _rows_of(self, doc: int) -> Iterator[np.ndarray]:
        """Yield the rows of a document, ascending, unit by unit."""
        places = range(len(self._units))
        if not self._table.shuffled:
            places = [position for position, _, _ in self._tables.units_with(doc)]
        for position in places:
            docs = self._stored.column(self._units[position].index.key, "doc")
            yield np.flatnonzero(docs == doc) + int(self._stored.starts[position])


def _again(url: str, parts: Sequence[tuple[Any, ...]], *options: Any) -> Dataset:
    objects = open_objects(url)
    return Dataset(objects, [TapGroup.unpickled(objects, *part) for part in parts], *options)
