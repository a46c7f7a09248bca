"""Token ids give the rows of their texts, from every file format; invalid ids are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spile
from chaos.harness import check_refused, extracted, run
from spile.corpus.tokenize import TextTokenizer
from support import servers, tiny
from support.remote import upload

TEXTS = [tiny.words(np.random.default_rng(n), 3 + n % 14) for n in range(40)]
OPTIONS: dict[str, Any] = {"compute_dtype": "float32", "unit_tokens": 100_000}
BOTH = "embed,resid_post:1"
# Of each kind of file, what must be said so that it is the texts': the tiny tokenizer puts a BOS
# before each of them.
KINDS: dict[str, dict[str, Any]] = {
    "parquet": {},
    "jsonl": {"tokens_column": "input_ids"},
    "stream.arrow": {},
    "file.arrow": {},
    "uint16.bin": {"doc_separator": "bos"},
    "uint32.bin": {"doc_separator": "bos", "tokens_dtype": "uint32"},
}


def write_texts(folder: Path, end: str = "") -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text + end}) + "\n" for text in TEXTS))
    return path


def ids_of(model: Path) -> list[np.ndarray]:
    return TextTokenizer(model, "tokenizer").encode(TEXTS)


def write_ids(path: Path, ids: list[np.ndarray]) -> Path:
    """Write the ids in one of the file formats."""
    kind = path.suffix
    if kind == ".bin":
        path.write_bytes(np.concatenate(ids).astype(path.name.split(".")[-2]).tobytes())
    elif kind == ".jsonl":
        path.write_text("".join(json.dumps({"input_ids": i.tolist()}) + "\n" for i in ids))
    else:
        table = pa.table({"input_ids": ids, "n": list(range(len(ids)))})
        if kind == ".parquet":
            pq.write_table(table, path, row_group_size=13)
        else:
            new = pa.ipc.new_file if "file" in path.name else pa.ipc.new_stream
            with new(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=17)
    return path


def extracted_whole(model: Path, corpus: Path, out: Path, **options: Any) -> spile.Dataset:
    """All in one unit, so that the whole corpus is packed alike."""
    extracted(model, corpus, out, **OPTIONS, **options)
    return spile.open(str(out))


def check_equal(one: spile.Dataset, other: spile.Dataset) -> None:
    total = one.num_tokens
    assert other.num_tokens == total > 1000
    assert np.array_equal(one.index(0, total), other.index(0, total))
    for tap in other.taps:
        assert np.array_equal(one.read(tap, 0, total), other.read(tap, 0, total))


def test_ids_give_bit_for_bit_the_rows_of_their_texts(model: Path, tmp_path: Path) -> None:
    ids = ids_of(model)
    texts = extracted_whole(model, write_texts(tmp_path), tmp_path / "texts", taps=BOTH)
    for kind, options in KINDS.items():
        corpus, out = write_ids(tmp_path / f"ids.{kind}", ids), tmp_path / f"out-{kind}"
        taps = BOTH if kind == "parquet" else "embed"
        check_equal(texts, extracted_whole(model, corpus, out, taps=taps, **options))


def test_an_id_that_ends_documents_stays_with_the_one_before_it(
    model: Path, tmp_path: Path
) -> None:
    ended = write_texts(tmp_path, "</s>")
    ids = [np.append(each, tiny.EOS) for each in ids_of(model)]
    texts = extracted_whole(model, ended, tmp_path / "texts")
    corpus = write_ids(tmp_path / "ids.uint32.bin", ids)
    check_equal(texts, extracted_whole(model, corpus, tmp_path / "out", tokens_dtype="uint32"))


@pytest.mark.parametrize("kind", ["parquet", "stream.arrow", "uint16.bin"])
def test_ids_cut_into_many_units_are_the_same_documents(
    kind: str, model: Path, tmp_path: Path
) -> None:
    corpus, out = write_ids(tmp_path / f"ids.{kind}", ids_of(model)), tmp_path / "out"
    outcome = extracted(model, corpus, out, unit_tokens=300, **KINDS[kind])
    assert outcome.units > 5 and outcome.documents == len(TEXTS)
    dataset = spile.open(str(out))
    for doc, wanted in enumerate(ids_of(model)):
        assert np.array_equal(dataset.document(doc).index["token_id"], wanted)


def test_plan_check_and_resume_know_ids(model: Path, tmp_path: Path) -> None:
    ids = ids_of(model)
    for kind in ("parquet", "stream.arrow", "uint16.bin"):
        corpus, out = write_ids(tmp_path / f"ids.{kind}", ids), tmp_path / "out"
        flags = ["--model", model, "--corpus", corpus, "--taps", "resid_post:1", "--seq-len", 64]
        flags += ["--compute-dtype", "float32", "--unit-tokens", 700, "--out", out]
        flags += ["--doc-separator", "bos"] if "bin" in kind else []
        planned = run("plan", "--calibrate", "off", *flags, "--json")
        assert planned.code == 0, planned.err
        assert planned.json["documents"] == len(TEXTS)
        assert planned.json["tokens"] == pytest.approx(sum(map(len, ids)), rel=0.02)
    assert run("extract", *flags).code == 0
    assert run("extract", "--out", out).code == 0  # all of it from the store
    other = run("extract", "--out", out, "--doc-separator", "eos")
    check_refused(other, 2, "doc_separator: stored", "bos", "eos")
    checked = run("check", out, "--samples", 1, "--json")
    assert checked.code == 0, checked.err


def test_ids_choose_documents_as_texts_do(model: Path, tmp_path: Path) -> None:
    ids = [np.array([n % 7 + 1] * (5 + n % 7), np.uint16) for n in range(63)]
    corpus = write_ids(tmp_path / "ids.parquet", ids)
    outcome = extracted(model, corpus, tmp_path / "once", dedupe=True, unit_tokens=100)
    assert (outcome.documents, outcome.skipped) == (7, {"duplicate": 56})
    parts = [
        {*rows_of(model, corpus, tmp_path / part, holdout=0.3, part=part)}
        for part in ("rest", "holdout")
    ]
    assert parts[0] | parts[1] == {*range(63)} and not parts[0] & parts[1]
    assert {n % 7 for n in parts[0]}.isdisjoint(n % 7 for n in parts[1]), "equal ones go together"
    found = rows_of(
        model, corpus, tmp_path / "cut", min_tokens=7, max_doc_tokens=9, max_docs=20, filter="n > 3"
    )
    assert found == [n for n in range(4, 20) if 7 <= len(ids[n]) <= 9]


def rows_of(model: Path, corpus: Path, out: Path, **options: Any) -> list[int]:
    extracted(model, corpus, out, **options)
    dataset = spile.open(str(out))
    return np.unique(dataset.index(0, dataset.num_tokens)["doc"]).tolist()


@pytest.mark.parametrize("kind", ["parquet", "file.arrow", "uint16.bin"])
def test_an_id_beyond_the_vocabulary_is_refused_by_file_row_and_id(
    kind: str, model: Path, tmp_path: Path
) -> None:
    ids = [*ids_of(model)[:30], np.array([tiny.BOS, 5, tiny.VOCAB]), *ids_of(model)[30:]]
    corpus = write_ids(tmp_path / f"ids.{kind}", ids)
    flags = ["--model", model, "--corpus", corpus, "--taps", "embed", "--out", tmp_path / "out"]
    flags += ["--doc-separator", "bos"] if "bin" in kind else []
    where = "document 30" if "bin" in kind else "row 30"
    check_refused(run("extract", *flags), 2, str(corpus), where, str(tiny.VOCAB))


def test_what_does_not_go_with_ids_is_refused(model: Path, tmp_path: Path) -> None:
    ids = ids_of(model)
    table, array = write_ids(tmp_path / "i.parquet", ids), write_ids(tmp_path / "i.uint16.bin", ids)
    wide, texts = write_ids(tmp_path / "w.uint32.bin", ids), write_texts(tmp_path)
    odd = tmp_path / "odd.bin"
    odd.write_bytes(array.read_bytes()[:-1])
    both = tmp_path / "both.parquet"
    pq.write_table(pa.table({"input_ids": ids, "url": ["u"] * len(ids)}), both)
    plain = tmp_path / "plain.txt"
    plain.write_text("one\n")
    base = ["extract", "--model", model, "--taps", "embed", "--out", tmp_path / "out"]
    for flags, named in (
        (["--corpus", table, "--special-tokens", "bos"], ["--special-tokens bos", "as they are"]),
        (["--corpus", table, "--text-column", "n"], ["--text-column", "n"]),
        (["--corpus", table, "--tokens-column", "n"], ["row 0", "'n'", "--tokens-column"]),
        (["--corpus", table, "--tokens-column", "x"], ["no column 'x'"]),
        (["--corpus", array, "--tokens-column", "x"], ["--tokens-column", "no columns"]),
        (["--corpus", array, "--messages", "x"], ["--messages", "token ids"]),
        (["--corpus", array, "--filter", "n == 1"], ["--filter", "no columns"]),
        (["--corpus", array, "--doc-separator", "260"], ["--doc-separator", "below 260"]),
        (["--corpus", array, "--tokens-dtype", "uint32"], [str(array), "--tokens-dtype"]),
        (["--corpus", wide], [str(wide), "every other", "--tokens-dtype"]),
        (["--corpus", odd], [str(odd), "is not a multiple of 2 bytes"]),
        (["--corpus", both], [str(both), "--tokens-column (input_ids)", "--text-column (url)"]),
        (["--corpus", texts, "--tokens-dtype", "uint16"], ["--tokens-dtype", ".bin"]),
        (["--corpus", plain, "--tokens-column", "x"], [str(plain), "--tokens-column"]),
        (["--corpus", f"{tmp_path}/[ip]*", "--doc-separator", "eos"], ["of one kind"]),
    ):
        check_refused(run(*base, *flags), 2, *named)


def test_ids_and_arrow_texts_in_a_bucket_are_those_on_a_disk(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    ids = ids_of(model)
    array = write_ids(folder / "ids.uint16.bin", ids)
    texts = folder / "texts.arrow"
    table = pa.table({"text": TEXTS, "n": list(range(len(TEXTS)))})
    with pa.ipc.new_stream(str(texts), table.schema) as writer:
        writer.write_table(table, max_chunksize=11)
    there = upload(folder, servers.new_s3_store())
    for file in (array, texts):
        more = {"doc_separator": "bos"} if file.suffix == ".bin" else {"filter": "n >= 9"}
        places = {"here": str(file), "there": f"{there}/{file.name}"}
        for name, corpus in places.items():
            extracted(model, corpus, tmp_path / f"{name}-{file.name}", unit_tokens=400, **more)
        one, other = (spile.open(str(tmp_path / f"{name}-{file.name}")) for name in places)
        assert one.fingerprint == other.fingerprint
        total = one.num_tokens
        assert np.array_equal(one.index(0, total), other.index(0, other.num_tokens))
        assert np.array_equal(one.read("embed", 0, total), other.read("embed", 0, total))
