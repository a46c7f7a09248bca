"""DeepSpec's target cache, version 2: shards of samples, and an index of 56 bytes for each.

manifest.json      version, layers, width, dtypes, shards
samples.idx        of each sample: number, shard, tokens, and where its five arrays begin
shard-00000.bin    of each sample: ids (int32), attention and loss mask (uint8), the layers side by
                   side and the last hidden state (bfloat16)

Layer k is the output of block k, and -1 that of the embedding. The last hidden state is that after
the final norm.
"""

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from spile.core.tensors import as_bytes
from spile.dataset.records.chosen_taps import site_and_layer
from spile.interop.export.drafting import draft_samples, layers_and_last, side_by_side
from spile.interop.export.export_format import ExportFormat, write_json
from spile.interop.export.export_source import ExportSource

_RECORD = struct.Struct("<QIIQQQQQ")
_SHARD_BYTES = 1 << 30
_MANIFEST, _INDEX = "manifest.json", "samples.idx"


def _write(source: ExportSource, to: Path) -> int:
    layers, last = layers_and_last(source, "final_norm")
    rows = samples = 0
    shard = size = -1  # the open shard, and its bytes
    with (to / _INDEX).open("xb") as index:
        for number, sample in enumerate(draft_samples(source)):
            arrays = (
                sample.tokens.astype(np.int32),
                np.ones(len(sample.tokens), np.uint8),
                sample.loss_mask.astype(np.uint8),
                side_by_side(source, layers, sample),
                source.read(last, sample.start, sample.stop),
            )
            if shard < 0 or size >= _SHARD_BYTES:
                shard, size = shard + 1, 0
            places: list[int] = []
            with (to / _shard_name(shard)).open("ab") as file:
                for array in arrays:
                    places.append(size)
                    size += file.write(as_bytes(array))
            index.write(_RECORD.pack(number, shard, len(sample.tokens), *places))
            rows, samples = rows + len(sample.tokens), number + 1
    write_json(
        to / _MANIFEST,
        {
            "version": 2,
            "num_samples": samples,
            "num_shards": shard + 1,
            "target_layer_ids": [_layer_id(tap) for tap in layers],
            "hidden_dtype": "bfloat16",
            "token_dtype": "int32",
            "mask_dtype": "uint8",
            "index_record_size": _RECORD.size,
            "hidden_size": source.width(last),
            "shards": [{"shard_id": n, "file_name": _shard_name(n)} for n in range(shard + 1)],
            # DeepSpec compares it with the name in the trainer's configuration.
            "target_model_name_or_path": _model_name(source),
            "spile": source.about(),
        },
    )
    return rows


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"


def _layer_id(tap: str) -> int:
    layer = site_and_layer(tap)[1]
    return -1 if layer is None else layer


def _model_name(source: ExportSource) -> str:
    return re.sub(r"^hf://([^@]+)(@.*)?$", r"\1", source.dataset.recipe.model_source)


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    """Count the tokens of the samples whose arrays lie within their shard."""
    manifest = json.loads((at / _MANIFEST).read_bytes())
    sizes = [(at / shard["file_name"]).stat().st_size for shard in manifest["shards"]]
    width, layers = manifest["hidden_size"], len(manifest["target_layer_ids"])
    rows = 0
    for record in _RECORD.iter_unpack((at / _INDEX).read_bytes()):
        _, shard, tokens, *places = record
        each = (4, 1, 1, 2 * layers * width, 2 * width)  # bytes for each token
        ends = [place + tokens * size for place, size in zip(places, each, strict=True)]
        rows += tokens if ends[:-1] == places[1:] and ends[-1] <= sizes[shard] else 0
    return dict.fromkeys(source.taps, rows)


def _check(source: ExportSource) -> None:
    layers_and_last(source, "final_norm")


DEEPSPEC = ExportFormat(
    name="deepspec",
    about="DeepSpec: its target cache, shards of contexts with an index",
    write=_write,
    count=_count,
    check=_check,
    dtypes=("bfloat16",),
)
