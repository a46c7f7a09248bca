"""OpenMOSS Language-Model-SAEs: a folder per hook, safetensors chunks of whole sequences."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from spile.core.tensors import as_bytes, build_header, read_header
from spile.interop.export.export_format import ExportFormat, check_hooks, write_json
from spile.interop.export.export_source import FILE_BYTES, ExportSource

_INT64, _BOOL = np.dtype(np.int64), np.dtype(np.bool_)


def _write(source: ExportSource, to: Path) -> int:
    # Its loader needs the same chunks for every hook, so the widest tap decides for all.
    widest = max(source.row_bytes(tap) for tap in source.taps)
    for tap in source.taps:
        (to / source.hook(tap)).mkdir()
    for number, (start, stop) in enumerate(source.windows(0, source.rows, widest, FILE_BYTES)):
        for tap in source.taps:
            path = to / source.hook(tap) / f"chunk-{number:08d}.safetensors"
            _write_chunk(source, tap, start, stop, path)
    write_json(to / "spile.json", source.about())
    return source.rows


def _write_chunk(source: ExportSource, tap: str, start: int, stop: int, path: Path) -> None:
    shape = ((stop - start) // source.context, source.context)
    tensors = [
        ("activation", source.dtypes[tap], (*shape, source.width(tap))),
        ("tokens", _INT64, shape),
        ("attention_mask", _INT64, shape),
        ("mask", _BOOL, shape),
    ]
    with path.open("xb") as file:
        file.write(build_header(tensors))
        for a, b in source.windows(start, stop, source.row_bytes(tap)):
            file.write(as_bytes(source.read(tap, a, b)))
        file.write(as_bytes(source.tokens(start, stop).astype(_INT64)))
        file.write(as_bytes(np.ones(shape, _INT64)))
        file.write(as_bytes(np.ones(shape, _BOOL)))  # use every stored row


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    rows = dict.fromkeys(source.taps, 0)
    for tap in source.taps:
        for path in (at / source.hook(tap)).glob("chunk-*.safetensors"):
            contexts, length, _ = read_header(path)["activation"].shape
            rows[tap] += contexts * length
    return rows


OPENMOSS = ExportFormat(
    name="openmoss",
    about="OpenMOSS Language-Model-SAEs: safetensors chunks in a folder per hook",
    write=_write,
    count=_count,
    check=check_hooks,
    dtypes=("float32", "float16", "bfloat16"),
    contexts=True,
)
