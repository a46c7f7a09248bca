"""SAELens' cached activations: a Hugging Face dataset, with a column per hook, in Arrow."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from spile.core.errors import ConfigError
from spile.interop.export.export_format import ExportFormat, check_hooks, write_json
from spile.interop.export.export_source import ExportSource

_SHARD_BYTES = 500_000_000  # the size of HF datasets' own shards; its readers need less than 2 GB
_TOKENS = "token_ids"


def _write(source: ExportSource, to: Path) -> int:
    pa: Any = import_module("pyarrow")
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


def _features(source: ExportSource) -> dict[str, Any]:
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


def _schema(pa: Any, source: ExportSource, features: Mapping[str, Any]) -> Any:
    """The Arrow schema. Array2D, a type of `datasets`, is lists of lists with two metadata keys."""
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


def _batch(pa: Any, source: ExportSource, schema: Any, start: int, stop: int) -> Any:
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


def _check(source: ExportSource) -> None:
    check_hooks(source)
    widest = max(map(source.width, source.taps))
    if source.context * widest >= 1 << 31:
        raise ConfigError(
            f"a sequence of {source.context} rows of {widest} values is more than Arrow's lists "
            "hold; give a smaller --context-size"
        )


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    pa: Any = import_module("pyarrow")
    rows = dict.fromkeys(source.taps, 0)
    for entry in json.loads((at / "state.json").read_bytes())["_data_files"]:
        with pa.memory_map(str(at / entry["filename"])) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                for tap in source.taps:
                    column = batch.column(source.hook(tap))
                    # (if `datasets` has been imported too, its type wraps the lists)
                    values = getattr(column, "storage", column).flatten().flatten()
                    rows[tap] += len(values) // source.width(tap)
    return rows


SAELENS = ExportFormat(
    name="saelens",
    about="SAELens' cached activations: a HF dataset with a column per hook",
    write=_write,
    count=_count,
    check=_check,
    contexts=True,
    needs=(("pyarrow", "pyarrow"),),
)
