"""Parquet files of rows, with the index's columns and a list per tap; and the documents."""

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from spile.dataset.codec.documents import joined
from spile.interop.export.export_format import ExportFormat
from spile.interop.export.export_source import ExportSource

_FILE_BYTES = 1 << 30


def _write(source: ExportSource, to: Path) -> int:
    pa: Any = import_module("pyarrow")
    pq: Any = import_module("pyarrow.parquet")
    row_bytes = source.row_bytes() + source.dataset.index_dtype.itemsize
    schema = pa.schema(list(_fields(pa, source)), {"spile": json.dumps(source.about())})
    for number, (start, stop) in enumerate(source.windows(0, source.rows, row_bytes, _FILE_BYTES)):
        # zstd: float32 made from bfloat16 is half zeros.
        options = {"compression": "zstd", "compression_level": 1, "use_dictionary": False}
        path = to / f"rows-{number:05d}.parquet"
        with pq.ParquetWriter(path, schema, **options) as file:
            for a, b in source.windows(start, stop, row_bytes):
                file.write_table(_table(pa, source, schema, a, b), row_group_size=b - a)
    _write_documents(pa, source, to / "documents.arrow")
    (to / "README.md").write_text(_readme(source))
    return source.rows


def _write_documents(pa: Any, source: ExportSource, path: Path) -> None:
    """Write a row for every document, even without rows, unit by unit, in columns of one type.

    (Not as Parquet: `*.parquet` are the rows.)
    """
    dataset = source.dataset
    columns = [name for name in dataset.document_columns if name != "first_row"]  # a unit's

    def tables() -> Iterator[Any]:
        return (dataset.documents(columns, unit=unit) for unit in dataset.units)

    empty = joined([table.slice(0, 0) for table in tables()])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, empty.schema) as stream:
        for table in tables():
            stream.write_table(joined([empty, table]))


def _fields(pa: Any, source: ExportSource) -> Iterator[Any]:
    entries = source.dataset.index_dtype
    for name in entries.names or ():
        yield pa.field(name, pa.from_numpy_dtype(entries[name]), nullable=False)
    for tap in source.taps:
        kind = pa.from_numpy_dtype(source.dtypes[tap])
        if source.dataset.shape(tap):
            kind = pa.list_(pa.field("element", kind, nullable=False), source.width(tap))
        yield pa.field(tap, kind, nullable=False)


def _table(pa: Any, source: ExportSource, schema: Any, start: int, stop: int) -> Any:
    index = source.dataset.index(start, stop)
    columns = [pa.array(np.ascontiguousarray(index[name])) for name in index.dtype.names or ()]
    for tap in source.taps:
        values = pa.array(source.read(tap, start, stop).reshape(-1))
        if source.dataset.shape(tap):
            values = pa.FixedSizeListArray.from_arrays(values, type=schema.field(tap).type)
        columns.append(values)
    return pa.table(columns, schema=schema)


def _readme(source: ExportSource) -> str:
    index = source.dataset.index_dtype
    lines = [
        f"# Activations: {source.rows:,} tokens",
        "",
        f"Written by spile from `{source.dataset.url}`,",
        f"fingerprint `{source.dataset.fingerprint}`.",
        "The whole recipe is in each file's metadata, key `spile`.",
        "`documents.arrow` has a row for every document, by the same `doc`.",
        "",
        "| column | type | shape | also called |",
        "|---|---|---|---|",
        *(f"| `{name}` | {index[name].name} | | |" for name in index.names or ()),
    ]
    for tap in source.taps:
        shape = "×".join(map(str, source.dataset.shape(tap)))
        names = ", ".join(f"`{name}`" for name in source.dataset.aliases(tap))
        lines.append(f"| `{tap}` | {source.dtypes[tap].name} | {shape} | {names} |")
    return "\n".join(lines) + "\n"


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    pq: Any = import_module("pyarrow.parquet")
    rows = dict.fromkeys(source.taps, 0)
    for path in at.glob("rows-*.parquet"):
        with pq.ParquetFile(path) as file:
            for tap in rows.keys() & set(file.schema_arrow.names):
                rows[tap] += file.metadata.num_rows
    return rows


PARQUET = ExportFormat(
    name="parquet",
    about="Parquet files: the index's columns and a list per tap; and one of the documents",
    write=_write,
    count=_count,
    integers=True,
    needs=(("pyarrow", "pyarrow"), ("pyarrow.parquet", "pyarrow")),
)
