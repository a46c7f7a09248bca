"""activault: a folder per hook of `torch.save` files, all of the same length.

Its reader fetches `bytes_per_file` bytes of each file and copies them into buffers of one shape, so
no file may be shorter: sequences that do not fill a file are left over.
"""

import json
import uuid
import zipfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from spile.interop.export.export_format import ExportFormat, check_hooks, write_json
from spile.interop.export.export_source import FILE_BYTES, ExportSource

_METADATA = "metadata.json"


def split_evenly(contexts: int, most: int) -> tuple[int, int]:
    """(files, contexts per file) of equal files with at most `most` contexts, fewest left over."""
    least = -(-contexts // most)
    files = min(range(least, min(contexts, 2 * least + 8) + 1), key=lambda n: (contexts % n, n))
    return files, contexts // files


def _write(source: ExportSource, to: Path) -> int:
    torch: Any = import_module("torch")
    widest = max(source.row_bytes(tap) for tap in source.taps)
    most = max(1, FILE_BYTES // (widest * source.context))
    files, each = split_evenly(source.contexts, most)
    for tap in source.taps:
        folder = to / source.hook(tap)
        folder.mkdir()
        size = 0
        for number in range(files):
            start = number * each * source.context
            path = folder / f"{_group(source, number)}--{number + 1}_0.saved.pt"
            _write_file(torch, source, tap, start, start + each * source.context, path)
            size = path.stat().st_size
        shape = [each, source.context, source.width(tap)]
        write_json(
            folder / _METADATA,
            {
                "batch_size": each,
                "sequence_length": source.context,
                "dtype": f"torch.{source.dtypes[tap].name}",
                "d_in": shape[2],
                "batches_per_file": 1,
                "shape": shape,
                "input_ids_shape": shape[:2],
                "bytes_per_file": size,
            },
        )
        stats = source.dataset.statistics(tap)
        described = {"mean": stats.mean.tolist(), "std": np.sqrt(stats.variance).tolist()}
        described |= {"norm": stats.mean_norm, "M2": stats.m2.tolist()}
        write_json(folder / "statistics.json", described)
    write_json(to / "cfg.json", _config(source, files, each))
    return files * each * source.context


def _group(source: ExportSource, number: int) -> uuid.UUID:
    """Ids that sort in the order of the rows, for readers that sort names."""
    return uuid.UUID(int=number << 96 | int(source.dataset.fingerprint[:24], 16))


def _write_file(
    torch: Any, source: ExportSource, tap: str, start: int, stop: int, path: Path
) -> None:
    values = source.read(tap, start, stop).reshape(-1, source.context, source.width(tap))
    if values.dtype.name == "bfloat16":  # torch does not support numpy's bfloat16
        states = torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    else:
        states = torch.from_numpy(values.copy())
    tokens = source.tokens(start, stop).astype(np.int64).reshape(-1, source.context)
    bundle = {
        "states": states,
        "input_ids": torch.from_numpy(tokens),
        "tensor_bytes": values.nbytes + tokens.nbytes,
    }
    # Open the file: torch would store the name of a path inside, which changes the length.
    with path.open("xb") as file:
        torch.save(bundle, file)


def _config(source: ExportSource, files: int, each: int) -> dict[str, Any]:
    recipe = source.dataset.recipe
    return {
        "run_name": f"spile-{source.dataset.fingerprint[:12]}",
        "transformer_config": {"model_name": recipe.model_source, "dtype": recipe.compute_dtype},
        "data_config": {
            "dataset": recipe.corpus_source,
            "seq_length": source.context,
            "batch_size": each,
            "n_batches": files,
        },
        "upload_config": {
            "hooks": [source.hook(tap) for tap in source.taps],
            "batches_per_upload": 1,
        },
        "total_tokens": files * each * source.context,
        "d_model": max(map(source.width, source.taps)),
        "n_total_files": files,
        "batches_processed": files,
        "num_runs": 1,
        "spile": source.about(),
    }


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    """Count by the sizes of the stored tensors in the zip archives, without reading a pickle."""
    rows = dict.fromkeys(source.taps, 0)
    for tap in source.taps:
        folder = at / source.hook(tap)
        size = json.loads((folder / _METADATA).read_bytes())["bytes_per_file"]
        for path in folder.glob("*.saved.pt"):
            with zipfile.ZipFile(path) as archive:
                stored = archive.getinfo("archive/data/0").file_size
            if path.stat().st_size == size:
                rows[tap] += stored // source.row_bytes(tap)
    return rows


ACTIVAULT = ExportFormat(
    name="activault",
    about="activault: torch.save files of one length in a folder per hook",
    write=_write,
    count=_count,
    check=check_hooks,
    dtypes=("float32", "float16", "bfloat16"),
    contexts=True,
    needs=(("torch", "torch"),),
)
