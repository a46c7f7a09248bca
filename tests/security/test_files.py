"""Hostile GGUF files and corpora: read, or refused by a Spile error."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from security.hostile import DEEP, JSON, NUMBERS, damaged, fuzz, only_our_errors, refused
from security.parsers import read_corpus
from spile.models.files.gguf import convert

UINT8, UINT64, STRING, ARRAY = 0, 10, 8, 9


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file of one layer, without its tokenizer."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name in ("block_count", "context_length", "feed_forward_length", "vocab_size"):
        writer.add_uint32(f"llama.{name}", 1)
    writer.add_uint32("llama.embedding_length", 4)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("llama.rope.scaling.type", "linear")
    writer.add_float32("llama.rope.scaling.factor", 2.0)
    writer.add_array("tokenizer.ggml.tokens", ["a"])
    writer.add_array("tokenizer.ggml.scores", [1.0])
    writer.add_tensor("rope_freqs.weight", np.full(1, 2.0, np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def text_of(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()


def metadata(*entries: bytes, count: int | None = None, tensors: int = 0) -> bytes:
    """A GGUF file of these entries alone."""
    pairs = len(entries) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + b"".join(entries)


def convert_bytes(data: bytes, folder: Path) -> None:
    (folder / "m.gguf").write_bytes(data)
    convert(folder / "m.gguf", folder / "out")


@fuzz(120)
@given(data=st.data())
def test_a_gguf_file_of_any_bytes_is_refused(
    weights: bytes, data: st.DataObject, tmp_path: Path
) -> None:
    spoilt = bytearray(weights)
    number = st.sampled_from([0, 1, 2, 1 << 31, 1 << 40, (1 << 63) + 1, (1 << 64) - 1])
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(8, len(spoilt) - 8))
        struct.pack_into("<Q", spoilt, at, data.draw(number))
    with only_our_errors():
        convert_bytes(data.draw(st.just(bytes(spoilt)) | damaged(bytes(spoilt))), tmp_path)
        raise AssertionError("it has no tokenizer, and not all tensors")


@pytest.mark.parametrize(
    "data",
    [
        metadata(text_of("a") + struct.pack("<IIQ", ARRAY, UINT8, 1 << 60)),
        metadata(text_of("a") + struct.pack("<IIQ", ARRAY, UINT64, (1 << 64) - 1) + b"x" * 64),
        metadata(text_of("a") + struct.pack("<IIQ", ARRAY, STRING, 1 << 60) + b"\0" * 64),
        metadata(text_of("a") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 5000),
        metadata(text_of("a") + struct.pack("<IQ", STRING, 1 << 62)),
        metadata(text_of("a") + struct.pack("<I", 99)),
        metadata(count=1 << 60),
        metadata(tensors=1 << 60),
        metadata(text_of("w") + struct.pack("<I4Q", 2, 1 << 32, 1 << 32, 0, 0), count=0, tensors=1),
        metadata(text_of("w") + struct.pack("<IQIQ", 1, 1 << 50, 0, 0), count=0, tensors=1),
        metadata(text_of("w") + struct.pack("<IQIQ", 1 << 31, 1, 0, 0), count=0, tensors=1),
        b"GGUF", b"", b"\0" * 64,
    ],
    ids=range(14),
)  # fmt: skip
def test_a_gguf_file_that_promises_more_than_it_holds_is_refused_at_once(
    data: bytes, tmp_path: Path
) -> None:
    began = time.monotonic()
    with refused("not a GGUF file, or truncated"):
        convert_bytes(data, tmp_path)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [("general.architecture", ARRAY, struct.pack("<IQ", UINT8, 0)),
     ("general.architecture", UINT64, struct.pack("<Q", 1)),
     ("llama.rope.scaling.type", ARRAY, struct.pack("<IQB", UINT8, 1, 1)),
     ("llama.attention.key_length", UINT64, struct.pack("<Q", 1 << 62)),
     ("llama.attention.value_length", ARRAY, struct.pack("<IQB", UINT8, 1, 1)),
     ("tokenizer.ggml.tokens", UINT64, struct.pack("<Q", 1)),
     ("general.alignment", UINT64, struct.pack("<Q", 1))],
)  # fmt: skip
def test_metadata_of_another_kind_are_refused(
    weights: bytes, name: str, kind: int, value: bytes, tmp_path: Path
) -> None:
    added = text_of(name) + struct.pack("<I", kind) + value
    entries = weights[24:]
    if text_of(name) in entries:
        entries = entries.replace(text_of(name), text_of(name.replace(".", "_")))
    pairs = struct.unpack_from("<Q", weights, 16)[0]
    with refused("^/"):
        convert_bytes(metadata(added, entries, count=pairs + 1, tensors=2), tmp_path)


@fuzz(100)
@given(records=st.lists(JSON | st.dictionaries(st.just("text"), JSON), min_size=1, max_size=4))
def test_lines_of_any_json_are_refused_or_counted(records: list[Any], tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, records)))
    with only_our_errors():
        read_corpus(tmp_path / "c.jsonl")


@pytest.mark.parametrize("line", [*NUMBERS, "[" * DEEP, '{"text":' * DEEP, '{"text": "\\ud800"}'])
def test_a_hostile_line_is_refused_or_counted(line: str, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "one"}) + "\n" + line)
    with only_our_errors():
        read_corpus(tmp_path / "c.jsonl")
