"""`spile.Writer` stores the rows it is given, bit for bit, once, whoever kills it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import spile
from spile.core.config import Recipe
from spile.core.errors import ConfigError, DriftError, InputError
from spile.core.index import BOS, END, FIRST, LAST
from spile.dataset.maintain.verify import verify
from spile.dataset.records.ledger import Ledger
from spile.interop.ingest import writer as writing
from spile.interop.ingest.writer import Writer
from spile.objects import LocalObjects
from support import tiny

TAPS = ("resid_post.0", "resid_post.2")
WIDTH = 32
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Given = tuple[list[int], dict[str, np.ndarray]]


def given(count: int = 12, seed: int = 0, dtype: Any = BFLOAT16) -> list[Given]:
    """Documents of a few tokens, with random rows."""
    rng = np.random.default_rng(seed)
    found: list[Given] = []
    for _ in range(count):
        tokens = [tiny.BOS, *rng.integers(0, 250, rng.integers(1, 9)).tolist()]
        rows = {tap: rng.standard_normal((len(tokens), WIDTH)).astype(dtype) for tap in TAPS}
        found.append((tokens, rows))
    return found


def opened(out: Path, model: Path, **options: Any) -> Writer:
    given = {"taps": "resid_post:0+2", "rows_by": "an engine", "unit_tokens": 20}
    return Writer(out, model=str(model), **{**given, **options})


def write(out: Path, model: Path, documents: Sequence[Given], **options: Any) -> Path:
    with opened(out, model, **options) as made:
        for tokens, rows in documents[made.documents :]:
            made.add(tokens, rows)
    return out


def digests(out: Path) -> list[list[str]]:
    """The hash of every file of every unit."""
    ledger = Ledger(LocalObjects(out))
    table = ledger.table()
    records = (ledger.must_be_done(table, unit.id) for unit in table.units)
    return [[file.digest for file in done.files()] for done in records]


def test_rows_come_back_bit_for_bit_with_their_index(model: Path, tmp_path: Path) -> None:
    documents = given()
    ds = spile.open(str(write(tmp_path / "out", model, documents)))
    assert ds.num_documents == len(documents) and ds.num_units > 2
    for number, (tokens, rows) in enumerate(documents):
        document = ds.document(number)
        assert document.index["token_id"].tolist() == tokens
        assert document.index["pos"].tolist() == document.index["offset"].tolist()
        assert document.index["flags"][0] == BOS | FIRST
        assert document.index["flags"][-1] == LAST | END
        for tap in TAPS:
            assert document.read(tap, dtype="stored").tobytes() == rows[tap].tobytes()
    report = verify(LocalObjects(tmp_path / "out"))
    assert report.ok and not report.orphans and report.rows == ds.num_tokens
    assert ds.recipe.rows_by == "an engine"
    stats, every = ds.statistics(TAPS[0]), np.concatenate([r[TAPS[0]] for _, r in documents])
    wide = every.astype(np.float64)
    np.testing.assert_allclose(stats.mean, wide.mean(axis=0), atol=1e-7)
    np.testing.assert_allclose(stats.variance, wide.var(axis=0), rtol=1e-6)
    assert stats.mean_norm == pytest.approx(np.linalg.norm(wide, axis=1).mean(), rel=1e-6)
    assert ds.text(0) == ds.tokenizer.decode(documents[0][0], skip_special_tokens=False)


def test_what_an_extraction_made_is_written_again_the_same(model: Path, tmp_path: Path) -> None:
    corpus = tiny.write_corpus(tmp_path / "docs.jsonl", 9, mean=1.5)
    recipe = Recipe(model=str(model), corpus=str(corpus), taps="resid_post:0+2", pack="none")
    spile.extract(recipe, str(tmp_path / "out"))
    ds = spile.open(str(tmp_path / "out"))
    documents: list[Given] = []
    for number in range(ds.num_documents):
        found = ds.document(number)
        rows = {tap: found.read(tap, dtype="stored") for tap in TAPS}
        documents.append((found.index["token_id"].tolist(), rows))
    again = spile.open(str(write(tmp_path / "again", model, documents)))
    assert again.index(0, again.num_tokens).tobytes() == ds.index(0, ds.num_tokens).tobytes()
    for tap in TAPS:
        assert again.read(tap, dtype=BFLOAT16).tobytes() == ds.read(tap, dtype=BFLOAT16).tobytes()
        assert again.aliases(tap) == ds.aliases(tap) and again.shape(tap) == ds.shape(tap)
        ours, theirs = again.statistics(tap), ds.statistics(tap)
        np.testing.assert_allclose(ours.mean, theirs.mean, atol=1e-6)
        np.testing.assert_allclose(ours.variance, theirs.variance, rtol=1e-5)


class Killed(Exception): ...


@pytest.mark.parametrize("stops", [(1,), (4, 5, 11), (12,)])
def test_a_writer_that_was_stopped_continues_with_the_next_document(
    model: Path, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    documents = given()
    whole = write(tmp_path / "whole", model, documents)
    seen: list[int] = []
    for stop in stops:
        with pytest.raises(Killed), opened(tmp_path / "out", model) as made:
            seen.append(made.documents)
            for tokens, rows in documents[made.documents : stop]:
                made.add(tokens, rows)
            raise Killed
        with pytest.raises(spile.StoreError, match="no dataset there"):
            spile.open(str(tmp_path / "out"))
    write(tmp_path / "out", model, documents)
    assert digests(tmp_path / "out") == digests(whole)
    assert seen == sorted(seen)
    report = verify(LocalObjects(tmp_path / "out"))
    assert report.ok


def test_a_finished_dataset_is_left_as_it_is(model: Path, tmp_path: Path) -> None:
    documents = given(4)
    out = write(tmp_path / "out", model, documents)
    before = digests(out)
    with opened(out, model) as again:
        assert again.finished and again.documents == 4
        with pytest.raises(ConfigError, match="is finished"):
            again.add(*documents[0])
    assert digests(out) == before


def spoilt(tokens: list[int], rows: dict[str, np.ndarray]) -> Iterator[tuple[str, Any, Any]]:
    nan = {tap: values.copy() for tap, values in rows.items()}
    nan[TAPS[1]][0, 3] = np.nan
    infinite = {tap: values.copy() for tap, values in rows.items()}
    infinite[TAPS[0]][-1, 0] = -np.inf
    short = {**rows, TAPS[1]: rows[TAPS[1]][:-1]}
    yield writing.NONFINITE, tokens, nan
    yield writing.NONFINITE, tokens, infinite
    yield writing.LENGTHS, tokens, short
    yield writing.LENGTHS, tokens[:-1], rows
    yield writing.OUTSIDE, [tiny.VOCAB, *tokens[1:]], rows
    yield writing.OUTSIDE, [-1, *tokens[1:]], rows
    yield writing.EMPTY, [], {tap: values[:0] for tap, values in rows.items()}
    many = [*tokens] * 40
    repeated = {tap: np.concatenate([values] * 40) for tap, values in rows.items()}
    yield writing.TOO_LONG, many, repeated


def test_faulty_documents_are_refused_with_their_reason(model: Path, tmp_path: Path) -> None:
    (tokens, rows), *_ = given(1)
    faults = list(spoilt(tokens, rows))
    with opened(tmp_path / "out", model, keep=("name",)) as made:
        for number, (reason, ids, values) in enumerate(faults):
            assert made.add(ids, values, columns={"name": f"fault {number}"}) == reason
            assert made.add(tokens, rows, columns={"name": "sound"}) is None
        made.refuse("no answer", columns={"name": "silent"})
        assert made.documents == 2 * len(faults) + 1
        refused = made.refused
    assert refused[writing.NONFINITE] == 2 and refused["no answer"] == 1
    ds = spile.open(str(tmp_path / "out"))
    told = ds.documents().to_pydict()
    assert told["skipped"][::2] == [reason for reason, _, _ in faults] + ["no answer"]
    assert set(told["skipped"][1::2]) == {None} and told["name"][0] == "fault 0"
    assert ds.num_tokens == len(faults) * len(tokens)
    assert verify(LocalObjects(tmp_path / "out")).ok


@pytest.mark.parametrize("kind", ["tap", "unknown", "width", "integers", "columns", "flags"])
def test_what_is_wrong_with_every_document_is_an_error(
    model: Path, tmp_path: Path, kind: str
) -> None:
    (tokens, rows), *_ = given(1)
    changed: dict[str, Any] = {
        "tap": {TAPS[0]: rows[TAPS[0]]},
        "unknown": {**rows, "mlp_out.1": rows[TAPS[0]]},
        "width": {**rows, TAPS[1]: rows[TAPS[1]][:, :-1]},
        "integers": {**rows, TAPS[1]: rows[TAPS[1]].astype(np.int32)},
    }
    more: dict[str, Any] = {
        "columns": {"columns": {"url": "x"}},
        "flags": {"flags": np.zeros(1, np.uint16)},
    }.get(kind, {})
    told = {"tap": "no rows of resid_post.2", "unknown": "rows of mlp_out.1", "width": "31",
            "integers": "must be floating", "columns": "columns url",
            "flags": "flags of 1"}  # fmt: skip
    with (
        pytest.raises(ConfigError, match=told[kind]),
        opened(tmp_path / "out", model) as made,
    ):
        made.add(tokens, changed.get(kind, rows), **more)


def test_arrays_of_torch_and_rows_in_eight_bits(model: Path, tmp_path: Path) -> None:
    (tokens, rows), *_ = given(1)
    held = {tap: torch.from_numpy(each.astype(np.float32)).bfloat16() for tap, each in rows.items()}
    with opened(tmp_path / "out", model) as made:
        assert made.add(torch.tensor(tokens), held) is None
    ds = spile.open(str(tmp_path / "out"))
    assert ds.read(TAPS[0], dtype=BFLOAT16).tobytes() == rows[TAPS[0]].tobytes()
    scales = np.linspace(0.5, 2, len(tokens)).astype(np.float32)
    coded = {tap: (values.astype(ml_dtypes.float8_e4m3fn), scales) for tap, values in rows.items()}
    with opened(tmp_path / "eight", model, store_dtype="float8_e4m3") as made:
        assert made.add(tokens, coded) is None
        with pytest.raises(ConfigError, match="give \\(values, scales\\)"):
            made.add(tokens, rows)
    ds = spile.open(str(tmp_path / "eight"))
    wanted = coded[TAPS[1]][0].astype(np.float32) * scales[:, None]
    assert ds.read(TAPS[1]).tobytes() == wanted.tobytes()
    assert verify(LocalObjects(tmp_path / "eight")).ok


def test_the_rows_that_were_given_may_change_afterwards(model: Path, tmp_path: Path) -> None:
    (tokens, rows), *_ = given(1)
    reused = {tap: values.copy() for tap, values in rows.items()}
    with opened(tmp_path / "out", model) as made:
        made.add(tokens, reused, flags=np.full(len(tokens), spile.FLAGS["assistant"]))
        for values in reused.values():
            values[...] = 0
    ds = spile.open(str(tmp_path / "out"))
    assert ds.read(TAPS[0], dtype=BFLOAT16).tobytes() == rows[TAPS[0]].tobytes()
    assert (ds.index(0, len(tokens))["flags"] & spile.FLAGS["assistant"]).all()


def test_another_recipe_or_another_begun_dataset_is_refused(model: Path, tmp_path: Path) -> None:
    documents = given()
    out = write(tmp_path / "out", model, documents)
    with pytest.raises(DriftError, match="store_dtype: stored 'bfloat16', now 'float16'"):
        opened(out, model, store_dtype="float16")
    with pytest.raises(Killed), opened(tmp_path / "part", model) as made:
        for each in documents:
            made.add(*each)
        made._sink.close()
        raise Killed
    with pytest.raises(ConfigError, match="holds units of other rows"):
        opened(tmp_path / "part", model, rows_by="another engine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds notes\.txt"):
        opened(tmp_path / "mine", model)


def test_no_command_makes_more_of_such_rows(model: Path, corpus: Path, tmp_path: Path) -> None:
    out = write(tmp_path / "out", model, given(3))
    recipe = Recipe(model=str(model), corpus=str(corpus), taps="resid_post:0")
    for asked in (recipe, Recipe(add_taps="mlp_out:1")):
        with pytest.raises(ConfigError, match="were made by an engine and ingested"):
            spile.extract(asked, str(out))
    with pytest.raises(ConfigError, match="were made by an engine and ingested"):
        spile.extract(Recipe(like=str(out)), str(tmp_path / "like"))


def test_a_dataset_without_any_row_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no document has rows that can be stored"):
        write(tmp_path / "out", model, [])
    with (
        pytest.raises(InputError, match="2 no answer"),
        opened(tmp_path / "silent", model) as made,
    ):
        made.refuse("no answer")
        made.refuse("no answer")
