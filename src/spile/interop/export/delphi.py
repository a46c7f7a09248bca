"""delphi's cache of latents: where each is active and how much, one file per range of latents.

latents/TAP/FIRST_LAST.safetensors   of those latents: `locations` [entries, 3] (sequence, token,
                                     latent counted from FIRST), `activations`, all `tokens`
latents/TAP/config.json              what delphi needs to know about model and text
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from spile.core.errors import ConfigError
from spile.core.recipe import latent_names
from spile.core.tensors import as_bytes, build_header, read_header
from spile.interop.export.export_format import ExportFormat, write_json
from spile.interop.export.export_source import FILE_BYTES, ExportSource

_FOLDER = "latents"  # delphi's readers take every entry of this folder for a module
_SPLITS = 5  # files, at least, as many as delphi itself writes
_LEAST = 1e-5  # delphi treats smaller values as zero
_TOKEN = _ID = np.dtype(np.int64)


def _write(source: ExportSource, to: Path) -> int:
    for tap, pair in _pairs(source).items():
        folder = to / _FOLDER / tap
        folder.mkdir(parents=True)
        splits = _write_splits(source, pair, folder)
        write_json(folder / "config.json", _config(source, splits))
    write_json(to / "spile.json", source.about())
    return source.rows


def _write_splits(source: ExportSource, pair: tuple[str, str], folder: Path) -> int:
    """Write the files. Entries are read twice: once to count those of each file, once to write."""
    latents, dtype = source.dataset.num_latents(pair[0]), source.dtypes[pair[0]]
    counts = np.zeros(latents, np.int64)
    for _, ids, _ in _entries(source, pair):
        counts += np.bincount(ids, minlength=latents)
    each = 3 * 4 + dtype.itemsize
    splits = min(latents, max(_SPLITS, -(-int(counts.sum()) * each // FILE_BYTES)))
    bounds = np.linspace(0, latents, splits + 1).astype(np.int64)
    widest = max(source.contexts, source.context, int(np.diff(bounds).max()))
    place = np.dtype(np.uint16 if widest <= 1 << 16 else np.uint32)
    files = [
        _Split(folder, first, last, int(counts[first:last].sum()), source, place, dtype)
        for first, last in zip(bounds.tolist(), bounds[1:].tolist(), strict=False)
    ]
    for rows, ids, values in _entries(source, pair):
        split = np.searchsorted(bounds, ids, side="right") - 1
        for number, file in enumerate(files):
            chosen = np.flatnonzero(split == number)
            file.add(rows[chosen], ids[chosen], values[chosen])
    return splits


class _Split:
    """A file that is filled piece by piece."""

    def __init__(
        self,
        folder: Path,
        first: int,
        last: int,
        count: int,
        source: ExportSource,
        place: np.dtype[np.unsignedinteger],
        dtype: np.dtype[np.floating],
    ) -> None:
        self._path = folder / f"{first}_{last - 1}.safetensors"
        self._first, self._context, self._place, self._dtype = first, source.context, place, dtype
        shape = (source.contexts, source.context)
        header = build_header(
            [
                ("tokens", _TOKEN, shape),
                ("locations", place, (count, 3)),
                ("activations", dtype, (count,)),
            ]
        )
        self._locations = len(header) + source.rows * _TOKEN.itemsize
        self._activations = self._locations + count * 3 * place.itemsize
        with self._path.open("xb") as file:
            file.write(header)
            for start, stop in source.windows(0, source.rows, _TOKEN.itemsize):
                file.write(as_bytes(source.tokens(start, stop).astype(_TOKEN)))
            file.truncate(self._activations + count * dtype.itemsize)

    def add(self, rows: np.ndarray, ids: np.ndarray, values: np.ndarray) -> None:
        sequence, token = np.divmod(rows, self._context)
        places = np.stack([sequence, token, ids - self._first], axis=1).astype(self._place)
        with self._path.open("r+b") as file:
            file.seek(self._locations)
            self._locations += file.write(as_bytes(places))
            file.seek(self._activations)
            self._activations += file.write(as_bytes(values))


def _entries(
    source: ExportSource, pair: tuple[str, str]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Row, latent and value of every active entry, by row and then by latent."""
    each = _ID.itemsize + source.dtypes[pair[0]].itemsize
    for start, stop in source.windows(0, source.rows, source.width(pair[0]) * each):
        ids = np.asarray(source.dataset.read(pair[1], start, stop)).astype(_ID)
        order = np.argsort(ids, axis=1)
        ids = np.take_along_axis(ids, order, axis=1)
        values = np.take_along_axis(source.read(pair[0], start, stop), order, axis=1)
        rows, places = np.nonzero(np.abs(values) > _LEAST)
        yield start + rows, ids[rows, places], values[rows, places]


def _config(source: ExportSource, splits: int) -> dict[str, object]:
    recipe = source.dataset.recipe
    # delphi uses the Hub's bare names.
    model = re.sub(r"^hf://([^@]+)(@.*)?$", r"\1", recipe.model_source)
    return {
        "dataset_repo": recipe.corpus_source,
        "dataset_split": "",
        "dataset_name": "",
        "dataset_column": recipe.text_column or "text",
        "batch_size": 32,
        "ctx_len": source.context,
        "cache_ctx_len": source.context,
        "n_tokens": source.rows,
        "n_splits": splits,
        "model_name": model,
    }


def _pairs(source: ExportSource) -> dict[str, tuple[str, str]]:
    """The chosen encoded taps, by their names in the model."""
    pairs = {tap: latent_names(tap) for tap in source.dataset.encoded}
    return {tap: pair for tap, pair in pairs.items() if pair[0] in source.taps}


def _check(source: ExportSource) -> None:
    encoded = source.dataset.encoded
    if not encoded:
        raise ConfigError(f"{source.dataset.url} holds no latents: it was made without --encode")
    known = {name for pair in _pairs(source).values() for name in pair}
    if not {*source.taps} <= known:
        wanted = ",".join(latent_names(tap)[0] for tap in encoded)
        raise ConfigError(f"delphi holds latents and nothing else; choose them: --taps {wanted}")


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    rows = dict.fromkeys(source.taps, 0)
    for tap, pair in _pairs(source).items():
        files = sorted((at / _FOLDER / tap).glob("*.safetensors"))
        shapes = [{n: info.shape for n, info in read_header(path).items()} for path in files]
        whole = all(s["locations"] == (*s["activations"], 3) for s in shapes)
        found = min(s["tokens"][0] * s["tokens"][1] for s in shapes) if whole else 0
        rows |= {name: found for name in pair if name in rows}
    return rows


DELPHI = ExportFormat(
    name="delphi",
    about="delphi: locations and activations of latents, by ranges of them",
    write=_write,
    count=_count,
    check=_check,
    contexts=True,
    integers=True,
)
