"""Parquet with a row for each feature: readable by the Hub's viewer, DuckDB, pandas."""

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from spile.dataset.read.features import Features
from spile.interop.export.export_format import ExportFormat
from spile.interop.export.export_source import ExportSource
from spile.interop.export.feature_source import (
    QUANTILES,
    ShownBand,
    ShownFeature,
    about_features,
    chosen_features,
    shown_features,
)

_BEFORE, _AFTER = 24, 8  # tokens around each example
_TOGETHER = 1024  # features of a row group


def _write(source: ExportSource, to: Path) -> int:
    pa: Any = import_module("pyarrow")
    pq: Any = import_module("pyarrow.parquet")
    found = chosen_features(source)
    schema = _schema(pa).with_metadata({"spile": json.dumps(about_features(source, found))})
    for features in found:
        with pq.ParquetWriter(to / f"{features.name}.parquet", schema, compression="zstd") as file:
            rows: list[dict[str, Any]] = []
            for row in _rows(source, features):
                rows.append(row)
                if len(rows) == _TOGETHER:
                    file.write_table(pa.Table.from_pylist(rows, schema))
                    rows = []
            file.write_table(pa.Table.from_pylist(rows, schema))
    (to / "README.md").write_text(_readme(source, found))
    return sum(map(len, found))


def _schema(pa: Any) -> Any:
    example = pa.struct(
        [("text", pa.string()), ("tokens", pa.list_(pa.string())),
         ("values", pa.list_(pa.float32())), ("at", pa.int32())]
    )  # fmt: skip
    band = pa.struct(
        [("low", pa.float32()), ("high", pa.float32()), ("share", pa.float32()),
         ("examples", pa.list_(example))]
    )  # fmt: skip
    token = pa.struct([("token", pa.string()), ("value", pa.float32())])
    near = pa.struct([("feature", pa.int32()), ("score", pa.float32())])
    return pa.schema(
        [
            ("tap", pa.string()), ("feature", pa.int32()), ("name", pa.string()),
            ("count", pa.int64()), ("density", pa.float64()), ("mean", pa.float64()),
            ("largest", pa.float32()),
            *((f"q{round(100 * q)}", pa.float32()) for q in QUANTILES[1:-1]),
            ("raised", pa.list_(token)), ("lowered", pa.list_(token)),
            ("neighbours", pa.list_(near)), ("top", pa.list_(example)), ("bands", pa.list_(band)),
        ]
    )  # fmt: skip


def _rows(source: ExportSource, features: Features) -> Iterator[dict[str, Any]]:
    for shown in shown_features(source, features, _BEFORE, _AFTER):
        yield {
            "tap": features.tap, "feature": shown.index, "name": shown.name, "count": shown.count,
            "density": shown.density, "mean": shown.mean, "largest": shown.largest,
            **{f"q{round(100 * q)}": value
               for q, value in [*zip(QUANTILES, shown.quantiles, strict=True)][1:-1]},
            "raised": _tokens(shown.raised), "lowered": _tokens(shown.lowered),
            "neighbours": [{"feature": each, "score": score} for each, score in shown.neighbours],
            "top": _examples(shown.top), "bands": _bands(shown),
        }  # fmt: skip


def _tokens(pairs: list[tuple[str, float]] | None) -> list[dict[str, Any]] | None:
    return None if pairs is None else [{"token": token, "value": value} for token, value in pairs]


def _bands(shown: ShownFeature) -> list[dict[str, Any]]:
    return [
        {"low": band.low, "high": band.high, "share": band.share, "examples": _examples(band)}
        for band in shown.bands
    ]


def _examples(band: ShownBand) -> list[dict[str, Any]]:
    return [
        {"text": "".join(each.tokens), "tokens": each.tokens, "values": each.values, "at": each.at}
        for each in band.examples
    ]


def _readme(source: ExportSource, found: list[Features]) -> str:
    files = "\n".join(f"* `{each.name}.parquet`: {len(each):,} features of {each.tap}, over "
                      f"{each.rows:,} rows" for each in found)  # fmt: skip
    return (
        f"---\nconfigs:\n- config_name: default\n  data_files: '*.parquet'\n---\n"
        f"Features of {source.dataset.recipe.model_source}, counted by Spile: a row for each.\n\n"
        f"{files}\n"
    )


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    pq: Any = import_module("pyarrow.parquet")
    return {path.stem: pq.ParquetFile(path).metadata.num_rows for path in at.glob("*.parquet")}


def _check(source: ExportSource) -> None:
    chosen_features(source)


FEATURE_TABLE = ExportFormat(
    name="feature-table",
    about="Parquet with a row for each feature, for the Hub's viewer",
    write=_write,
    count=_count,
    check=_check,
    integers=True,
    features=True,
)
