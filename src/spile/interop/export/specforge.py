"""SpecForge's offline features for EAGLE-3: a `torch.save` file for each context.

rows_FIRST-STOP/data_NUMBER.ckpt   `input_ids`, `loss_mask` [tokens]; `aux_hidden_state`
                                   [1, tokens, layers · width]; `hidden_state` [1, tokens, width]

`hidden_state` is what the head reads, after the final norm.
"""

import zipfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from spile.interop.export.drafting import draft_samples, layers_and_last, side_by_side
from spile.interop.export.export_format import ExportFormat, write_json
from spile.interop.export.export_source import ExportSource

_GROUP = 2000  # files in a folder
_IDS = "archive/data/0"  # the first tensor that is saved: eight bytes for each token


def _write(source: ExportSource, to: Path) -> int:
    torch: Any = import_module("torch")
    layers, last = layers_and_last(source, "final_norm")

    def tensor(values: np.ndarray) -> Any:
        if values.dtype.name != "bfloat16":  # torch does not support numpy's bfloat16
            return torch.from_numpy(values)
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)

    rows = 0
    for number, sample in enumerate(draft_samples(source)):
        first = number // _GROUP * _GROUP
        folder = to / f"rows_{first}-{first + _GROUP}"
        folder.mkdir(exist_ok=True)
        aux = side_by_side(source, layers, sample).reshape(1, len(sample.tokens), -1)
        target = source.read(last, sample.start, sample.stop)
        record = {
            "input_ids": tensor(sample.tokens),
            "loss_mask": tensor(sample.loss_mask),
            "aux_hidden_state": tensor(aux),
            "hidden_state": tensor(target.copy()[None]),
        }
        # Open the file: torch would store the name of a path inside.
        with (folder / f"data_{number}.ckpt").open("xb") as file:
            torch.save(record, file)
        rows += len(sample.tokens)
    write_json(to / "spile.json", source.about())
    return rows


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    """Count by the sizes of the stored ids in the zip archives, without reading a pickle."""
    rows = 0
    for path in at.glob("rows_*/data_*.ckpt"):
        with zipfile.ZipFile(path) as archive:
            rows += archive.getinfo(_IDS).file_size // 8
    return dict.fromkeys(source.taps, rows)


def _check(source: ExportSource) -> None:
    layers_and_last(source, "final_norm")


SPECFORGE = ExportFormat(
    name="specforge",
    about="SpecForge: EAGLE-3's offline features, a torch.save file for each context",
    write=_write,
    count=_count,
    check=_check,
    dtypes=("float32", "float16", "bfloat16"),
    needs=(("torch", "torch"),),
)
