"""The Parquet table of features: a row for each, with plain columns."""

from pathlib import Path

import pyarrow.parquet as pq

import spile
from spile.interop.export import export
from support import web_page


def test_every_feature_is_a_row(counted: Path, tmp_path: Path) -> None:
    assert export(str(counted), tmp_path / "dest", to="feature-table").features == 80
    table = pq.read_table(tmp_path / "dest" / "resid_post.1-1.parquet")
    features = spile.open(counted).features("resid_post.1")
    assert table["feature"].to_pylist() == [*range(40)]
    assert table["count"].to_pylist() == features.counts.tolist()
    row = table.slice(web_page.LOUD_LATENT, 1).to_pylist()[0]
    assert row["largest"] == row["top"][0]["values"][row["top"][0]["at"]]
    assert row["q50"] == features.quantiles(web_page.LOUD_LATENT, 0.5)
    assert row["top"][0]["text"] == "".join(row["top"][0]["tokens"])
    assert len(row["bands"]) == len(features.bands(web_page.LOUD_LATENT))
    near = features.neighbours(web_page.LOUD_LATENT)[0].tolist()
    assert [each["feature"] for each in row["neighbours"]] == near
    assert "data_files: '*.parquet'" in (tmp_path / "dest" / "README.md").read_text()
