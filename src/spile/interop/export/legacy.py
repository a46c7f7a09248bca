"""The format of activation-extract: gzipped pickles of whole documents, for scripts that read it.

Shards are only written, never read: reading a pickle runs whatever code it holds.
"""

import gzip
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash

from spile.core.errors import ConfigError
from spile.dataset.read.dtypes import STORED
from spile.dataset.records.chosen_taps import site_and_layer
from spile.interop.export.export_format import ExportFormat, write_json
from spile.interop.export.export_source import FILE_BYTES, ExportSource

_PREVIEW = 200  # characters, as in activation-extract
_METADATA = "metadata.json"

Samples = dict[int, list[dict[str, Any]]]  # by layer


def _write(source: ExportSource, to: Path) -> int:
    taps = _by_layer(source)
    decode = _decoder(source)
    shards: list[dict[str, Any]] = []
    held, size, rows = _empty(taps), 0, 0

    def finish() -> None:
        nonlocal held, size, rows
        if rows:
            name = f"shard_{len(shards) + 1:04d}.pkl.gz"
            samples = len(next(iter(held.values())))
            shards.append({"name": name, "samples": samples, "rows": rows, **_dump(to, name, held)})
        held, size, rows = _empty(taps), 0, 0

    for doc in _documents(source):
        document = source.dataset.document(doc)
        stored = str(source.dataset.about(doc)["preview"] or "")
        text = stored[:_PREVIEW] or decode(document.index["token_id"])
        for layer, tap in taps.items():
            values = source.convert(tap, document.read(tap, dtype=STORED))
            sample = {"sample_idx": doc, "activation": values, "shape": values.shape}
            held[layer].append({**sample, "text_preview": text})
            size += values.nbytes
        rows += len(document)
        if size >= FILE_BYTES:
            finish()
    finish()
    metadata = {
        "total_shards": len(shards),
        "total_samples": sum(shard["samples"] for shard in shards),
        "layers": list(taps),
        "taps": list(source.taps),
        "model_path": source.dataset.recipe.model_source,
        "dataset": source.dataset.recipe.corpus_source,
        "shards": shards,
        "spile": source.about(),
    }
    write_json(to / _METADATA, metadata)
    return sum(shard["rows"] for shard in shards)


def _empty(taps: Mapping[int, str]) -> Samples:
    return {layer: [] for layer in taps}


def _dump(to: Path, name: str, samples: Samples) -> dict[str, Any]:
    data = pickle.dumps(samples, protocol=4)
    with gzip.open(to / name, "xb", compresslevel=1) as file:
        file.write(data)
    return {"bytes": len(data), "digest": xxhash.xxh3_128_hexdigest(data)}


def _documents(source: ExportSource) -> Iterator[int]:
    """Every document with stored rows, once, in stored order."""
    seen: set[int] = set()
    for start, stop in source.windows(0, source.rows, source.dataset.index_dtype.itemsize):
        docs = source.dataset.index(start, stop)["doc"]
        new, first = np.unique(docs, return_index=True)
        for doc in new[np.argsort(first)].tolist():
            if doc not in seen:
                seen.add(doc)
                yield doc


def _decoder(source: ExportSource) -> Callable[[np.ndarray], str]:
    """Return a function that decodes the beginning of a document without a stored preview; it
    returns "" if there is no tokenizer."""
    try:
        tokenizer = source.dataset.tokenizer
    except ConfigError:
        return lambda tokens: ""

    def decode(tokens: np.ndarray) -> str:
        # (a token has at least one character, except for pieces of characters)
        text: str = tokenizer.decode(tokens[: 4 * _PREVIEW].tolist(), skip_special_tokens=True)
        return text[:_PREVIEW]

    return decode


def _by_layer(source: ExportSource) -> dict[int, str]:
    layers = {layer: tap for tap in source.taps for _, layer in [site_and_layer(tap)]}
    if None in layers or len(layers) < len(source.taps):
        raise ConfigError(
            "legacy shards hold one tap per layer; choose with --taps, "
            f"e.g. --taps {source.taps[0]} (chosen: {', '.join(source.taps)})"
        )
    return {layer: tap for layer, tap in layers.items() if layer is not None}


def _check(source: ExportSource) -> None:
    _by_layer(source)


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    """Rows of the shards whose bytes equal those that were pickled."""
    rows = 0
    metadata = cast(dict[str, Any], json.loads((at / _METADATA).read_bytes()))
    for shard in metadata["shards"]:
        digest = xxhash.xxh3_128()
        with gzip.open(at / shard["name"]) as file:
            while block := file.read(1 << 20):
                digest.update(block)
        rows += shard["rows"] if digest.hexdigest() == shard["digest"] else 0
    return dict.fromkeys(source.taps, rows)


LEGACY = ExportFormat(
    name="legacy",
    about="activation-extract's shard_0001.pkl.gz, by layer and document (written, never read)",
    write=_write,
    count=_count,
    check=_check,
    needs=(("tokenizers", "tokenizers"),),
)
