"""speculators: an HF dataset of token ids and loss masks, and a file of hidden states for each.

data-00000-of-00001.arrow          `input_ids`, `loss_mask`, `seq_len`
hidden_states/hs_NUMBER.safetensors  `hidden_states` [tokens, layers, width], `token_ids`

The last layer is the verifier's last hidden state: the stream after the last block, to which
speculators applies the final norm itself.
"""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from spile.core.tensors import read_header, write_tensors
from spile.interop.export.drafting import draft_samples, layers_and_last, side_by_side
from spile.interop.export.export_format import ExportFormat, write_json
from spile.interop.export.export_source import ExportSource

_FOLDER = "hidden_states"
_TABLE = "data-00000-of-00001.arrow"
_TOGETHER = 1000  # samples of a record batch


def _write(source: ExportSource, to: Path) -> int:
    pa: Any = import_module("pyarrow")
    layers, last = layers_and_last(source, None)
    (to / _FOLDER).mkdir()
    features = {
        **{name: _list_of_integers() for name in ("input_ids", "loss_mask")},
        "seq_len": {"dtype": "int64", "_type": "Value"},
    }
    lists = [pa.field(name, pa.list_(pa.int64())) for name in ("input_ids", "loss_mask")]
    told = {"huggingface": json.dumps({"info": {"features": features}})}
    schema = pa.schema([*lists, pa.field("seq_len", pa.int64())], told)
    rows, batch = 0, list[dict[str, Any]]()
    with pa.OSFile(str(to / _TABLE), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
        for number, sample in enumerate(draft_samples(source)):
            tensors = {
                "hidden_states": side_by_side(source, [*layers, last], sample),
                "token_ids": sample.tokens,
            }
            write_tensors(to / _FOLDER / f"hs_{number}.safetensors", tensors)
            batch.append(
                {
                    "input_ids": sample.tokens,
                    "loss_mask": sample.loss_mask,
                    "seq_len": len(sample.tokens),
                }
            )
            rows += len(sample.tokens)
            if len(batch) == _TOGETHER:
                stream.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
                batch.clear()
        stream.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))
    about = f"Token ids of activations written by spile from {source.dataset.url}"
    described = {"citation": "", "description": about, "homepage": "", "license": ""}
    write_json(to / "dataset_info.json", {**described, "features": features})
    write_json(
        to / "state.json",
        {
            "_data_files": [{"filename": _TABLE}],
            "_fingerprint": source.dataset.fingerprint[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        },
    )
    write_json(to / "spile.json", source.about())
    return rows


def _list_of_integers() -> dict[str, Any]:
    # (its older name for a list, which every version reads)
    item = {"dtype": "int64", "_type": "Value"}
    return {"feature": item, "length": -1, "_type": "Sequence"}


def _count(source: ExportSource, at: Path) -> Mapping[str, int]:
    rows = 0
    for path in (at / _FOLDER).glob("hs_*.safetensors"):
        header = read_header(path)
        tokens, layers, _ = header["hidden_states"].shape
        whole = header["token_ids"].shape == (tokens,) and layers == len(source.taps)
        rows += tokens if whole else 0
    return dict.fromkeys(source.taps, rows)


def _check(source: ExportSource) -> None:
    layers_and_last(source, None)


SPECULATORS = ExportFormat(
    name="speculators",
    about="speculators: hidden states of layers and the last block, a file for each context",
    write=_write,
    count=_count,
    check=_check,
    dtypes=("float32", "float16", "bfloat16"),
    needs=(("pyarrow", "pyarrow"),),
)
