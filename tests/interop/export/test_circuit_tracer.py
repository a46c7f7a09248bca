"""circuit-tracer's packed features, read as its page does (`frontend/assets/util.js`)."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import spile
from spile.interop.export import export
from support import web_page

# The fields of `Model` and `Example` in circuit-tracer 0.5.0, frontend/feature_models.py.
FIELDS = {
    "transcoder_id": str, "index": int, "examples_quantiles": list, "top_logits": list,
    "bottom_logits": list, "act_min": float, "act_max": float, "quantile_values": list,
    "histogram": list, "activation_frequency": float,
}  # fmt: skip
EXAMPLE = {
    "tokens_acts_list": list, "train_token_ind": int, "is_repeated_datapoint": bool, "tokens": list
}  # fmt: skip


def fetched(folder: Path, layer: int, feature: int) -> dict[str, Any]:
    """Return a record by a range of bytes, of which the page also asks for the one after it."""
    index = json.loads(gzip.decompress((folder / "features/index.json.gz").read_bytes()))[
        str(layer)
    ]
    start, stop = index["offsets"][feature : feature + 2]
    data = (folder / "features" / index["filename"]).read_bytes()[start : stop + 1]
    length = data[0] | data[1] << 8 | data[2] << 16 | data[3] << 24
    return json.loads(zlib.decompress(data[4 : 4 + length], 31))


def test_each_feature_is_found_by_its_offsets(counted: Path, tmp_path: Path) -> None:
    made = export(str(counted), tmp_path / "dest", to="circuit-tracer")
    assert (made.features, made.rows, made.left_over) == (80, 0, 0)
    for layer in (0, 1):
        features = spile.open(counted).features(f"resid_post.{layer}")
        for feature in (0, web_page.LOUD_LATENT, web_page.SILENT_LATENT):
            record = fetched(tmp_path / "dest", layer, feature)
            assert {name: type(value) for name, value in record.items()} == FIELDS
            total = layer + feature
            assert record["index"] == total * (total + 1) // 2 + feature
            assert record["activation_frequency"] == features.density[feature]
            names = [each["quantile_name"] for each in record["examples_quantiles"]]
            assert names[0] == "Top activations" and len(names) == 1 + len(features.bands(feature))
            for quantile in record["examples_quantiles"]:
                for example in quantile["examples"]:
                    assert {name: type(value) for name, value in example.items()} == EXAMPLE
                    assert len(example["tokens"]) == len(example["tokens_acts_list"])
        loud = fetched(tmp_path / "dest", layer, web_page.LOUD_LATENT)["examples_quantiles"][0]
        example = loud["examples"][0]
        assert example["tokens"][example["train_token_ind"]] == web_page.LOUD_TOKEN


def test_the_same_features_give_the_same_bytes(counted: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        export(str(counted), tmp_path / name, to="circuit-tracer", taps=web_page.LATENT_PAIR)
    for file in ("index.json.gz", "layer_1.bin"):
        one, two = ((tmp_path / name / "features" / file).read_bytes() for name in ("one", "two"))
        assert one == two
