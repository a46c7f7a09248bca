"""Documents of any size, and a million of none: memory is bounded, and all of them are counted.

In the suite the document has 96 MB; `make chaos-kills` makes it a gigabyte.
"""

import gzip
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from support import tiny
from support.marks import some

pytestmark = pytest.mark.chaos

MOST = 4 << 20
PIECE = b"a few words of a document that goes on for very long; " * 4096
KINDS = ["jsonl", "json", "txt", "jsonl.gz", "jsonl.zst", "parquet"]


@pytest.fixture(scope="module")
def pieces(pytestconfig: pytest.Config) -> int:
    """How many pieces the large document has."""
    return (1 << 30 if pytestconfig.getoption("--chaos-full") else 96 << 20) // len(PIECE)


def measured(corpus: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("reading.py")
    process = subprocess.run(
        [sys.executable, str(script), str(corpus), str(MOST)],
        env=tiny.environment(), stdout=subprocess.PIPE, text=True, timeout=600, check=True,
    )  # fmt: skip
    return json.loads(process.stdout)


def digest_of(texts: dict[int, str]) -> str:
    lines = "".join(f"{ordinal} {text}\n" for ordinal, text in texts.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def raw(kind: str, pieces: int) -> Iterator[bytes]:
    """Three documents; the second one is large."""
    before, open_, close, after = {
        "jsonl": (b'{"text": "one"}\n', b'{"text": "', b'"}\n', b'{"text": "three"}\n'),
        "json": (b'[{"text": "one"}, ', b'{"text": "', b'"},', b'{"text": "three"}]'),
        "txt": (b"one\n", b"", b"\n", b"three\n"),
    }[kind.split(".")[0]]
    yield before + open_
    for _ in range(pieces):
        yield PIECE
    yield close + after


def write(path: Path, kind: str, pieces: int) -> None:
    if kind == "parquet":
        texts = pa.array([b"one", PIECE * pieces, b"three"], pa.large_binary())
        pq.write_table(pa.table({"text": texts}), path)
        return
    how = {".gz": partial(gzip.open, compresslevel=1), ".zst": zstandard.open}
    with how.get(path.suffix, open)(path, "wb") as file:
        for data in raw(kind, pieces):
            file.write(data)


@pytest.mark.parametrize("kind", some(KINDS, "jsonl.zst"))
def test_a_document_of_any_size_is_passed_over_and_counted(
    kind: str, pieces: int, tmp_path: Path
) -> None:
    path = tmp_path / f"a.{kind}"
    write(path, kind, pieces)
    found = measured(path)
    path.unlink()
    assert (found["read"], found["skipped"]) == (2, {"over --max-doc-bytes": 1})
    assert found["digest"] == digest_of({0: "one", 2: "three"})
    # Memory holds a few chunks of lines; for Parquet a page, a dictionary and a value from it.
    size = pieces * len(PIECE)
    assert found["took"] < (5 * size if kind == "parquet" else min(80 << 20, size)), found


@pytest.mark.parametrize("kind", some(["jsonl", "json", "txt", "parquet"]))
def test_a_million_empty_rows_are_counted(kind: str, tmp_path: Path) -> None:
    rows = 1_000_000
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        texts = pa.array([""] * rows + ["last"])
        pq.write_table(pa.table({"text": texts}), path, row_group_size=rows // 10)
    else:
        row, end = {"jsonl": ('{"text": ""}\n', '{"text": "last"}\n'), "txt": ("\n", "last\n"),
                    "json": ('{"text": ""},\n', '{"text": "last"}]')}[kind]  # fmt: skip
        path.write_text("[" * (kind == "json") + row * rows + end)
    found = measured(path)
    assert (found["read"], found["skipped"]) == (1, {"empty": rows})
    assert found["digest"] == digest_of({rows: "last"})
    assert found["took"] < 262 * rows  # bytes
