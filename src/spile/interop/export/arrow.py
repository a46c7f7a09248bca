"""Formats that Arrow writes: SAELens' cached activations (a HF dataset), and Parquet."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.core.index import INDEX_DTYPE
from spile.dataset.write.documents import joined
from spile.interop.export.format import Format, check_hooks, library, write_json
from spile.interop.export.source import Source

_SHARD_BYTES = 500_000_000  # as HF datasets itself cuts; its readers want less than 2 GB
_FILE_BYTES = 1 << 30
_TOKENS = "token_ids"


def _write_saelens(source: Source, to: Path) -> int:
    pa: Any = library("pyarrow")
    features = _features(source)
    schema = _schema(pa, source, features)
    context_bytes = source.context * (source.row_bytes() + 4)
    per_shard = max(1, _SHARD_BYTES // context_bytes) * source.context
    starts = range(0, source.rows, per_shard)
    names = [f"data-{i:05d}-of-{len(starts):05d}.arrow" for i in range(len(starts))]
    for name, start in zip(names, starts, strict=True):
        stop = min(start + per_shard, source.rows)
        with pa.OSFile(str(to / name), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for a, b in source.windows(start, stop, source.row_bytes()):
                stream.write_batch(_batch(pa, source, schema, a, b))
    about = f"Activations written by spile from {source.dataset.url}"
    write_json(
        to / "dataset_info.json",
        {"citation": "", "description": about, "features": features, "homepage": "", "license": ""},
    )
    write_json(
        to / "state.json",
        {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": source.dataset.fingerprint[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        },
    )
    write_json(to / "spile.json", source.about())
    return source.rows


def _features(source: Source) -> dict[str, Any]:
    """The columns as `datasets` describes them."""
    columns: dict[str, Any] = {
        source.hook(tap): {
            "shape": [source.context, source.width(tap)],
            "dtype": source.dtypes[tap].name,
            "_type": "Array2D",
        }
        for tap in source.taps
    }
    # (its older name for a list, which every version reads)
    item = {"dtype": "int32", "_type": "Value"}
    columns[_TOKENS] = {"feature": item, "length": source.context, "_type": "Sequence"}
    return columns


def _schema(pa: Any, source: Source, features: Mapping[str, Any]) -> Any:
    """Array2D is an extension type of `datasets`: lists of lists with two keys of metadata."""
    fields: list[Any] = []
    for tap in source.taps:
        feature = features[source.hook(tap)]
        kind = pa.list_(pa.list_(pa.from_numpy_dtype(source.dtypes[tap])))
        extension = {
            "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
            "ARROW:extension:metadata": json.dumps([feature["shape"], feature["dtype"]]),
        }
        fields.append(pa.field(source.hook(tap), kind, metadata=extension))
    fields.append(pa.field(_TOKENS, pa.list_(pa.int32(), source.context)))
    return pa.schema(fields, {"huggingface": json.dumps({"info": {"features": features}})})


def _batch(pa: Any, source: Source, schema: Any, start: int, stop: int) -> Any:
    contexts = (stop - start) // source.context
    columns: list[Any] = []
    for tap in source.taps:
        values, width = source.read(tap, start, stop), source.width(tap)
        inner = np.arange(0, (stop - start) * width + 1, width, dtype=np.int32)
        outer = np.arange(0, stop - start + 1, source.context, dtype=np.int32)
        rows = pa.ListArray.from_arrays(pa.array(inner), pa.array(values.reshape(-1)))
        columns.append(pa.ListArray.from_arrays(pa.array(outer), rows))
    tokens = pa.array(np.ascontiguousarray(source.tokens(start, stop)))
    columns.append(pa.FixedSizeListArray.from_arrays(tokens, source.context))
    if any(len(column) != contexts for column in columns):
        raise AssertionError(f"rows {start} to {stop} are not {contexts} contexts")
    return pa.record_batch(columns, schema=schema)


def _check_saelens(source: Source) -> None:
    check_hooks(source)
    widest = max(map(source.width, source.taps))
    if source.context * widest >= 1 << 31:
        raise ConfigError(
            f"a sequence of {source.context} rows of {widest} values is more than Arrow's lists "
            "hold; give a smaller --context-size"
        )


def _count_saelens(source: Source, at: Path) -> Mapping[str, int]:
    pa: Any = library("pyarrow")
    rows = dict.fromkeys(source.taps, 0)
    for entry in json.loads((at / "state.json").read_bytes())["_data_files"]:
        with pa.memory_map(str(at / entry["filename"])) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                for tap in source.taps:
                    column = batch.column(source.hook(tap))
                    # (where `datasets` has been imported too, its type wraps the lists)
                    values = getattr(column, "storage", column).flatten().flatten()
                    rows[tap] += len(values) // source.width(tap)
    return rows


def _write_parquet(source: Source, to: Path) -> int:
    pa: Any = library("pyarrow")
    pq: Any = library("pyarrow.parquet")
    row_bytes = source.row_bytes() + INDEX_DTYPE.itemsize
    schema = pa.schema(list(_parquet_fields(pa, source)), {"spile": json.dumps(source.about())})
    for number, (start, stop) in enumerate(source.windows(0, source.rows, row_bytes, _FILE_BYTES)):
        # zstd: float32 made of bfloat16 is half zeros.
        options = {"compression": "zstd", "compression_level": 1, "use_dictionary": False}
        path = to / f"rows-{number:05d}.parquet"
        with pq.ParquetWriter(path, schema, **options) as file:
            for a, b in source.windows(start, stop, row_bytes):
                file.write_table(_table(pa, source, schema, a, b), row_group_size=b - a)
    _write_documents(pa, source, to / "documents.arrow")
    (to / "README.md").write_text(_readme(source))
    return source.rows


def _write_documents(pa: Any, source: Source, path: Path) -> None:
    """Of every document, also of those without rows: unit by unit, in columns of one type.

    (Not as Parquet: `*.parquet` are the rows.)
    """
    dataset = source.dataset
    columns = [name for name in dataset.document_columns if name != "first_row"]  # of its unit

    def tables() -> Iterator[Any]:
        return (dataset.documents(columns, unit=unit) for unit in dataset.units)

    empty = joined([table.slice(0, 0) for table in tables()])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, empty.schema) as stream:
        for table in tables():
            stream.write_table(joined([empty, table]))


def _parquet_fields(pa: Any, source: Source) -> Iterator[Any]:
    for name in INDEX_DTYPE.names or ():
        yield pa.field(name, pa.from_numpy_dtype(INDEX_DTYPE[name]), nullable=False)
    for tap in source.taps:
        kind = pa.from_numpy_dtype(source.dtypes[tap])
        if source.dataset.shape(tap):
            kind = pa.list_(pa.field("element", kind, nullable=False), source.width(tap))
        yield pa.field(tap, kind, nullable=False)


def _table(pa: Any, source: Source, schema: Any, start: int, stop: int) -> Any:
    index = source.dataset.index(start, stop)
    columns = [pa.array(np.ascontiguousarray(index[name])) for name in INDEX_DTYPE.names or ()]
    for tap in source.taps:
        values = pa.array(source.read(tap, start, stop).reshape(-1))
        if source.dataset.shape(tap):
            values = pa.FixedSizeListArray.from_arrays(values, type=schema.field(tap).type)
        columns.append(values)
    return pa.table(columns, schema=schema)


def _readme(source: Source) -> str:
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
        *(f"| `{name}` | {INDEX_DTYPE[name].name} | | |" for name in INDEX_DTYPE.names or ()),
    ]
    for tap in source.taps:
        shape = "×".join(map(str, source.dataset.shape(tap)))
        names = ", ".join(f"`{name}`" for name in source.dataset.aliases(tap))
        lines.append(f"| `{tap}` | {source.dtypes[tap].name} | {shape} | {names} |")
    return "\n".join(lines) + "\n"


def _count_parquet(source: Source, at: Path) -> Mapping[str, int]:
    pq: Any = library("pyarrow.parquet")
    rows = dict.fromkeys(source.taps, 0)
    for path in at.glob("rows-*.parquet"):
        with pq.ParquetFile(path) as file:
            for tap in rows.keys() & set(file.schema_arrow.names):
                rows[tap] += file.metadata.num_rows
    return rows


_PYARROW = ("pyarrow", "pyarrow")
SAELENS = Format(
    name="saelens",
    about="SAELens' cached activations: a HF dataset with a column per hook",
    write=_write_saelens,
    count=_count_saelens,
    check=_check_saelens,
    contexts=True,
    needs=(_PYARROW,),
)
PARQUET = Format(
    name="parquet",
    about="Parquet files: the index's columns and a list per tap; and one of the documents",
    write=_write_parquet,
    count=_count_parquet,
    integers=True,
    needs=(_PYARROW, ("pyarrow.parquet", "pyarrow")),
)
