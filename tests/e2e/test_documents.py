"""Columns kept of documents, from every corpus format through every verb."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spile
from chaos.harness import check_refused, run
from e2e.test_selection import ROWS, extracted, write
from support.marks import some


def documents(out: Path) -> list[dict[str, Any]]:
    return spile.open(str(out)).documents().to_pylist()


@pytest.mark.parametrize("kind", some(["parquet", "jsonl", "csv"], "parquet", "csv"))
def test_documents_keep_their_labels_and_a_preview(kind: str, model: Path, tmp_path: Path) -> None:
    extracted(model, write(tmp_path, kind), tmp_path / "out", unit_tokens=1500, preview=12)
    dataset = spile.open(str(tmp_path / "out"))
    assert dataset.recipe.keep == ("id", "language", "score")
    told = dataset.documents(["doc", *dataset.recipe.keep, "preview", "skipped"]).to_pylist()
    assert told == [
        {"doc": n, **{name: row[name] for name in dataset.recipe.keep},
         "preview": row["text"][:12], "skipped": None}
        for n, row in enumerate(ROWS)
    ]  # fmt: skip
    assert dataset.document(7).about["id"] == "doc-7"


def test_columns_are_chosen_and_what_is_left_out_says_why(model: Path, tmp_path: Path) -> None:
    rows = [*ROWS[:40], {"text": " ", "language": "en", "score": 9.0}, ROWS[3]]
    corpus = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), corpus, row_group_size=25)
    outcome = extracted(
        model, corpus, tmp_path / "out", keep="score, language", min_tokens=30, dedupe=True,
        filter="language == 'en' or score >= 1", fraction=0.9, preview=0,
    )  # fmt: skip
    found = documents(tmp_path / "out")
    assert len(found) == len(rows) and {row["preview"] for row in found} == {None}
    reasons = [row["skipped"] for row in found if row["skipped"]]
    assert {reason: reasons.count(reason) for reason in reasons} == outcome.skipped
    assert {"left out by --filter", "under --min-tokens", "white space only", "beyond --fraction",
            "duplicate"} == {*reasons}  # fmt: skip
    for row, given in zip(found, rows, strict=True):
        filtered = row["skipped"] == "left out by --filter"
        wanted = {"score": None, "language": None} if filtered else given
        assert (row["score"], row["language"]) == (wanted["score"], wanted["language"])
    assert sum(row["tokens"] for row in found) == outcome.tokens


def test_tokens_are_those_that_were_read_and_rows_those_that_were_kept(
    model: Path, tmp_path: Path
) -> None:
    corpus = write(tmp_path, "jsonl")
    extracted(model, corpus, tmp_path / "out", long_docs="truncate", seq_len=64, where="pos >= 60")
    found = documents(tmp_path / "out")
    lengths = [1 + len(row["text"]) for row in ROWS]
    assert [row["tokens"] for row in found] == [min(64, length) for length in lengths]
    assert [row["rows"] for row in found] == [max(0, min(64, n) - 60) for n in lengths]
    assert [row["first_row"] is None for row in found] == [n <= 60 for n in lengths]


def test_a_programs_documents_keep_all_that_it_says_of_them(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(
        "def create_dataset():\n"
        "    for n in range(9):\n"
        "        yield {'text': f'document {n}', 'part': {'n': [n]}, 'odd': n if n % 2 else 'even'}"
    )
    extracted(model, program, tmp_path / "out", unit_tokens=40)
    found = documents(tmp_path / "out")
    assert [json.loads(row["part"]) for row in found] == [{"n": [n]} for n in range(9)]
    assert [row["odd"] for row in found] == ["even", "1", "even", "3", "even", "5", "even", "7",
                                             "even"]  # fmt: skip
    assert run("extract", "--out", tmp_path / "out", "--corpus", program).code == 0


def test_arc_documents_know_task_and_augmentation(model: Path, tmp_path: Path) -> None:
    tasks = Path(__file__).parents[1] / "fixtures" / "arc" / "training"
    corpus = f'arc:{tasks}(predictions=3, augment="rotate,colors")'
    extracted(model, corpus, tmp_path / "out", unit_tokens=4000)
    found = documents(tmp_path / "out")
    assert {row["task_id"] for row in found} == {path.stem for path in tasks.glob("*.json")}
    assert {row["prediction"] for row in found} == {0, 1, 2}
    turned = [json.loads(row["augmentation"])["turns"] for row in found]
    assert [turns for row, turns in zip(found, turned, strict=True) if not row["prediction"]] == [
        0
    ] * (len(found) // 3)
    assert len({*turned}) > 1


def test_a_run_goes_on_with_the_columns_it_began_with(model: Path, tmp_path: Path) -> None:
    corpus, out = write(tmp_path, "jsonl"), tmp_path / "out"
    extracted(model, corpus, out, keep="language,id", preview=0)
    assert run("extract", "--out", out).code == 0, "whatever is kept of others by default"
    assert spile.open(str(out)).recipe.keep == ("id", "language")
    assert run("extract", "--out", out, "--keep", "id,language", "--preview", "0").code == 0
    check_refused(run("extract", "--out", out, "--keep", "id"), 2, "keep", "language")
    check_refused(run("extract", "--out", out, "--preview", "9"), 2, "preview")


def test_a_column_that_is_not_there_is_one_line(model: Path, tmp_path: Path) -> None:
    for kind in ("parquet", "jsonl"):
        corpus = write(tmp_path / kind, kind)
        asked = ("--model", model, "--corpus", corpus, "--taps", "embed", "--keep", "id,title")
        for verb in ("plan", "extract"):
            result = run(verb, *asked, "--out", tmp_path / "out")
            check_refused(result, 2, corpus, "title", "--keep", "language")
    assert not (tmp_path / "out").exists()


def test_every_verb_takes_the_table_along(model: Path, tmp_path: Path) -> None:
    out, made = tmp_path / "out", tmp_path / "made"
    extracted(model, write(tmp_path, "jsonl"), out, unit_tokens=900)
    tables = [*(out / "attempts").rglob("documents.safetensors")]
    assert len(tables) > 3
    assert run("gc", out, "--abandoned", "--json").json == {"removed": []}
    assert run("compact", out, made).code == 0
    assert run("verify", made).code == 0
    wanted = spile.open(str(out)).documents(["doc", "tokens", "rows", "preview", "id"])
    found = spile.open(str(made)).documents(["doc", "tokens", "rows", "preview", "id"])
    assert found.equals(wanted)
    tables[0].unlink()
    assert run("verify", out, "--quick").code == 3
