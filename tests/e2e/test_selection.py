"""Selected documents become rows, and the others are counted by the reason."""

import csv
import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spile
from chaos import harness
from chaos.harness import check_refused, run
from spile.corpus.tokenize import TextTokenizer
from support import tiny
from support.marks import some

ROWS = [
    {"text": tiny.words(np.random.default_rng(n), 4 + n % 30), "language": "de" if n % 3 else "en",
     "score": n / 10, "id": f"doc-{n}"}
    for n in range(120)
]  # fmt: skip

extracted = partial(harness.extracted, unit_tokens=3000)


def write(folder: Path, kind: str) -> Path:
    """The same rows in every file format."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=25)
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == "json.gz":
        path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def kept(out: Path) -> list[int]:
    dataset = spile.open(str(out))
    return sorted({int(doc) for doc in dataset.index(0, dataset.num_tokens)["doc"]})


@pytest.mark.parametrize(
    "kind", some(["parquet", "jsonl", "json", "json.gz", "csv"], "parquet", "json.gz", "csv")
)
def test_every_kind_of_file_gives_the_same_documents(
    kind: str, model: Path, tmp_path: Path
) -> None:
    outcome = extracted(model, write(tmp_path, kind), tmp_path / "out", unit_tokens=2000)
    assert outcome.documents == len(ROWS) and outcome.units > 3
    assert kept(tmp_path / "out") == list(range(len(ROWS)))
    dataset = spile.open(str(tmp_path / "out"))
    wanted = TextTokenizer(model, "tokenizer").encode([row["text"] for row in ROWS])
    for number in (0, 57, 119):
        assert np.array_equal(dataset.document(number).index["token_id"], wanted[number])


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
def test_a_filter_keeps_the_documents_whose_columns_are_so(
    kind: str, model: Path, tmp_path: Path
) -> None:
    outcome = extracted(
        model, write(tmp_path, kind), tmp_path / "out",
        filter="language == 'en' and score >= 4.2",
    )  # fmt: skip
    wanted = [n for n, row in enumerate(ROWS) if row["language"] == "en" and row["score"] >= 4.2]
    assert kept(tmp_path / "out") == wanted
    assert outcome.skipped == {"left out by --filter": len(ROWS) - len(wanted)}


def test_row_groups_that_cannot_match_are_not_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    real = pq.ParquetFile.iter_batches

    def counting(self: Any, *sizes: Any, row_groups: list[int], **options: Any) -> Any:
        decoded.extend(row_groups)
        return real(self, *sizes, row_groups=row_groups, **options)

    corpus = write(tmp_path, "parquet")
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counting)
    extracted(model, corpus, tmp_path / "out", filter="score >= 10.5", unit_tokens=100_000)
    # (the sample that sizes units, and the fit of rows to a filter, read the head)
    assert {*decoded[-1:]} == {4}, decoded


def test_parts_by_hash_are_the_whole_together(model: Path, tmp_path: Path) -> None:
    corpus = write(tmp_path, "jsonl")
    for part in ("rest", "holdout"):
        extracted(model, corpus, tmp_path / part, holdout=0.3, part=part)
    parts = [kept(tmp_path / part) for part in ("rest", "holdout")]
    assert sorted(parts[0] + parts[1]) == list(range(len(ROWS)))
    assert all(len(part) > 10 for part in parts)


def test_lengths_choose_documents_and_are_counted(model: Path, tmp_path: Path) -> None:
    outcome = extracted(
        model, write(tmp_path, "jsonl"), tmp_path / "out", min_tokens=20, max_doc_tokens=80
    )
    dataset = spile.open(str(tmp_path / "out"))
    lengths = [len(dataset.document(doc)) for doc in kept(tmp_path / "out")]
    assert min(lengths) >= 20 and max(lengths) <= 80
    assert set(outcome.skipped) == {"under --min-tokens", "over --max-doc-tokens"}
    assert outcome.documents + sum(outcome.skipped.values()) == len(ROWS)


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_a_document_too_large_is_counted_and_never_held(
    kind: str, model: Path, tmp_path: Path
) -> None:
    path = tmp_path / f"c.{kind}"
    huge = "word " * 500_000
    rows = ["one two", huge, "three four", huge]
    lines = rows if kind == "txt" else [json.dumps({"text": row}) for row in rows]
    path.write_text("\n".join(lines))
    outcome = extracted(model, path, tmp_path / "out", max_doc_bytes=1 << 20)
    assert kept(tmp_path / "out") == [0, 2]
    assert outcome.skipped == {"over --max-doc-bytes": 2}


def test_odd_rows_are_counted_by_reason(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    rows: list[Any] = [{"text": "\0a\0b"}, {"text": "\ud800"}, {"text": ""}, {"text": None}, {},
                       {"text": "مرحبا بالعالم"}, {"text": "👩‍👩‍👧‍👦" * 5}]  # fmt: skip
    path.write_text("\n".join(json.dumps(row) for row in rows))
    outcome = extracted(model, path, tmp_path / "out")
    assert kept(tmp_path / "out") == [0, 5, 6]
    assert outcome.skipped == {"not UTF-8": 1, "empty": 1, "null": 2}


def test_options_that_do_not_go_together_are_refused(model: Path, tmp_path: Path) -> None:
    corpus, text = write(tmp_path, "jsonl"), tmp_path / "a.txt"
    text.write_text("one\ntwo\n")
    base = ["extract", "--model", model, "--taps", "embed", "--out", tmp_path / "out"]
    for flags, named in (
        (["--corpus", text, "--filter", "a == 1"], ["a.txt", "--filter"]),
        (["--corpus", corpus, "--filter", "a ="], ["--filter"]),
        (["--corpus", corpus, "--fraction", "1.5"], ["--fraction", "1.5"]),
        (["--corpus", corpus, "--system", "x"], ["--system", "--messages"]),
        (["--corpus", corpus, "--response-column", "x"], ["--response-column"]),
        (["--corpus", write(tmp_path, "parquet"), "--filter", "nope == 1"], ["nope", "language"]),
        (
            ["--corpus", corpus, "--filter", "langauge == 'en' and score >= 4"],
            ["'langauge'", "did you mean 'language'"],
        ),
    ):
        check_refused(run(*base, *flags), 2, *named)


def test_texts_that_came_before_are_left_out_whatever_unit_they_are_in(
    model: Path, tmp_path: Path
) -> None:
    texts = [f"document {n % 17} of seventeen" for n in range(60)]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    outcome = extracted(model, path, tmp_path / "out", dedupe=True, unit_tokens=100)
    assert outcome.units > 5
    assert kept(tmp_path / "out") == list(range(17))
    assert outcome.skipped == {"duplicate": 43}
    assert run("extract", "--out", tmp_path / "out").code == 0
