"""saev (protocol 2.1): raw float32 [sequence, layer, token, channel] in numbered files."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.tensors import as_bytes
from spile.dataset.records.chosen_taps import site_and_layer
from spile.interop.export.export_format import ExportFormat, write_json
from spile.interop.export.export_source import ExportSource
from spile.interop.export.npy import write_npy

_FILE_BYTES = 1 << 30
_SHARDS = Path("saev", "shards")  # its readers accept no other place
_TOKEN = np.dtype(np.int32)


def _write(source: ExportSource, to: Path) -> int:
    layers = _layers(source)
    width = source.width(source.taps[0])
    per_example = source.context * source.row_bytes()
    each = min(source.contexts, max(1, _FILE_BYTES // per_example))
    metadata = {
        # Its readers know only families of vision models; this one is their placeholder.
        "family": "fake-clip",
        "ckpt": source.dataset.recipe.model_source,
        "layers": layers,
        "content_tokens_per_example": source.context,
        "cls_token": False,
        "d_model": width,
        "n_examples": source.contexts,
        "max_tokens_per_shard": each * source.context * len(layers),
        "data": "",  # otherwise a pickle of its image dataset
        "dataset": source.dataset.recipe.corpus_source,
        "pixel_agg": None,
        "dtype": "float32",
        "protocol": "2.1",
    }
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    folder = to / _SHARDS / hashlib.sha256(text.encode()).hexdigest()
    folder.mkdir(parents=True)
    write_json(folder / "metadata.json", metadata, indent=2)
    shards: list[dict[str, Any]] = []
    for number, first in enumerate(range(0, source.contexts, each)):
        last = min(first + each, source.contexts)
        name = f"acts{number:06d}.bin"
        with (folder / name).open("xb") as file:
            for start, stop in source.windows(
                first * source.context, last * source.context, source.row_bytes()
            ):
                parts = [source.read(tap, start, stop) for tap in source.taps]
                by_layer = [part.reshape(-1, source.context, width) for part in parts]
                file.write(as_bytes(np.stack(by_layer, axis=1)))
            file.truncate(each * per_example)  # its readers map every file with the same shape
        shards.append({"name": name, "n_examples": last - first})
    write_json(folder / "shards.json", shards, indent=2)
    # The format has no place for token ids, and without them no row can be traced.
    windows = source.windows(0, source.rows, _TOKEN.itemsize)
    tokens = (source.tokens(a, b) for a, b in windows)
    write_npy(to / "token_ids.npy", _TOKEN, (source.contexts, source.context), tokens)
    write_json(to / "spile.json", source.about())
    return source.rows


def _layers(source: ExportSource) -> list[int]:
    return [layer for _, layer in map(site_and_layer, source.taps) if layer is not None]


def _check(source: ExportSource) -> None:
    sites = {site for site, _ in map(site_and_layer, source.taps)}
    widths = {source.width(tap) for tap in source.taps}
    if len(sites) > 1 or len(widths) > 1 or len(_layers(source)) < len(source.taps):
        raise ConfigError(
            "saev holds layers of one site and width; choose them with --taps, "
            f"e.g. --taps {source.taps[0]} (chosen: {', '.join(source.taps)})"
        )


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    (folder,) = (at / _SHARDS).iterdir()
    metadata = json.loads((folder / "metadata.json").read_bytes())
    each = metadata["max_tokens_per_shard"] // source.context // len(source.taps)
    size = each * source.context * source.row_bytes()
    examples = 0
    for shard in json.loads((folder / "shards.json").read_bytes()):
        path: Path = folder / shard["name"]
        examples += shard["n_examples"] if path.stat().st_size == size else 0
    return dict.fromkeys(source.taps, examples * source.context)


SAEV = ExportFormat(
    name="saev",
    about="saev: raw float32 by sequence, layer and token",
    write=_write,
    count=_count,
    check=_check,
    dtypes=("float32",),
    contexts=True,
)
