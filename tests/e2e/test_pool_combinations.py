"""Pooled rows with everything else: growth, added taps, copies, splices, streams, stops."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import Work, check_same, launch, run
from e2e.test_growth import by_name, documents, extract, sound
from e2e.test_growth import check_same as check_same_documents
from spile.check.compare import check
from spile.core.config import Recipe, Runtime
from spile.core.errors import DataError, DriftError
from spile.dataset.maintain.assemble import merge
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.replica import replicate
from spile.dataset.maintain.shuffle import shuffle
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import drop_taps
from spile.objects import LocalObjects
from support import families, tiny

POOLED: dict[str, Any] = {"pool": "mean", "taps": "resid_post:0"}
Rows = dict[str, dict[str, np.ndarray]]


def check_close(one: Rows, other: Rows) -> None:
    """The same documents, in units of other documents: sums are rounded in another order."""
    assert one.keys() == other.keys()
    for name, rows in one.items():
        for what, values in rows.items():
            np.testing.assert_allclose(values, other[name][what], rtol=2e-5, atol=2e-6)


@pytest.mark.full
def test_a_pooled_dataset_grows_gains_taps_and_is_copied(model: Path, tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    documents(corpus / "a.jsonl", "abcdef", 1)
    extract(model, out, corpus=str(corpus), **POOLED)
    with pytest.raises(DriftError, match="pool: stored 'mean', now 'max'"):
        extract(model, out, pool="max")
    documents(corpus / "b.jsonl", "ghij", 2)
    extract(model, out, more=True, taps=None)
    extract(model, out, taps=None, add_taps="mlp_out:1")
    whole = tmp_path / "whole"
    extract(model, whole, corpus=str(corpus), pool="mean", taps="resid_post:0,mlp_out:1")
    wanted = by_name(whole)
    assert len(wanted) == 10 and all(len(each["offset"]) == 1 for each in wanted.values())
    check_close(by_name(out), wanted)
    sound(out)
    places = {name: LocalObjects(tmp_path / name) for name in ("copy", "compacted", "shuffled")}
    replicate(LocalObjects(out), places["copy"])
    compact(LocalObjects(whole), places["compacted"])
    shuffle(LocalObjects(whole), places["shuffled"], seed=3)
    for name in places:
        check_same_documents(by_name(tmp_path / name), by_name(out) if name == "copy" else wanted)
        sound(tmp_path / name)
    drop_taps(Ledger(LocalObjects(out)), ["mlp_out.1"])
    assert spile.open(out).taps == ["resid_post.0"]


@pytest.mark.full
def test_like_makes_pooled_rows_beside_those_of_tokens(model: Path, tmp_path: Path) -> None:
    corpora = [documents(tmp_path / f"{n}.jsonl", ids, n) for n, ids in enumerate(("abc", "defg"))]
    tokens, out = tmp_path / "tokens", tmp_path / "out"
    for number, corpus in enumerate(corpora):
        extract(model, tmp_path / f"{number}", corpus=str(corpus), **POOLED)
    merge([LocalObjects(tmp_path / "0"), LocalObjects(tmp_path / "1")], LocalObjects(out))
    sound(out)
    extract(model, tokens, corpus=f"{tmp_path}/*.jsonl", taps="resid_post:0")
    spile.extract(Recipe(like=str(tokens), pool="mean"), str(tmp_path / "like"))
    check_close(by_name(tmp_path / "like"), by_name(out))
    dense = spile.open(tokens).pooled("resid_post.0", "mean")
    rows = spile.open(tmp_path / "like").pooled("resid_post.0", "first")
    assert rows.doc.tolist() == dense.doc.tolist()
    np.testing.assert_allclose(rows.rows, dense.rows, rtol=2e-5, atol=2e-5)


@pytest.mark.full
def test_a_stopped_run_goes_on_to_the_same_bits(model: Path, corpus: Path, tmp_path: Path) -> None:
    recipe = Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:1,logprob", seq_len=32,
        unit_tokens=500, compute_dtype="float32", pool="mean", where="not bos",
    )  # fmt: skip
    spile.extract(recipe, str(tmp_path / "whole"), Runtime(batch_tokens=128))
    for most in (30_000, 60_000):
        spile.extract(recipe, str(tmp_path / "out"), Runtime(batch_tokens=128, max_bytes=most))
        assert not spile.open(tmp_path / "out", partial=True).is_complete
    spile.extract(Recipe(), str(tmp_path / "out"), Runtime(batch_tokens=128))
    check_same(tmp_path / "out", tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("chosen", [{"pool": "mean"}, {"reduce": "mean,cov", "by": "id"}])
def test_ten_kills_and_two_workers_make_the_same_bits(
    chosen: dict[str, str], model: Path, corpus: Path, tmp_path: Path
) -> None:
    options = {
        "taps": "resid_post:1,logprob", "seq_len": 32, "unit_tokens": 300, "batch_tokens": 128,
        "compute_dtype": "float32", "where": "not bos", "stale_after": 1, **chosen,
    }  # fmt: skip
    work = Work(model, corpus, options)
    work.extract(tmp_path / "whole")
    killed = 0
    for nth in range(10):
        spec = {"kill": ("commit before", "commit after")[nth % 2], "nth": 1}
        process = launch(spec, "extract", *work.flags(tmp_path / "killed"))
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    assert killed >= 8
    work.extract(tmp_path / "killed")
    check_same(tmp_path / "killed", tmp_path / "whole")
    both = [launch({}, "extract", *work.flags(tmp_path / "both")) for _ in range(2)]
    assert [process.communicate() and process.returncode for process in both] == [0, 0]
    check_same(tmp_path / "both", tmp_path / "whole")


def test_pooled_rows_are_streamed_read_in_batches_and_exported(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    recipe = Recipe(
        model=str(model), corpus=str(corpus), taps="resid_post:1", seq_len=32, unit_tokens=700,
        compute_dtype="float32", pool="max",
    )  # fmt: skip
    spile.extract(recipe, str(tmp_path / "out"))
    ds = spile.open(tmp_path / "out")
    rows, index = ds.read("resid_post.1"), ds.index(0, len(ds))
    with spile.stream(recipe, batch_size=7, shuffle=None, window=16) as stream:
        batches = list(stream)
    assert np.array_equal(np.concatenate([each["index"] for each in batches]), index)
    assert np.array_equal(np.concatenate([each["resid_post.1"] for each in batches]), rows)
    reading = ds.batches("resid_post.1", 8, seed=1, where="offset >= 40")
    first = next(reading)
    again = ds.batches("resid_post.1", 8, seed=1, where="offset >= 40")
    again.load_state_dict(reading.state_dict())
    rest = list(again)
    found = np.concatenate([first["index"], *(each["index"] for each in rest)])
    assert sorted(found["doc"]) == sorted(index["doc"][index["offset"] >= 40])
    table = ds.index_table()
    assert {"span", "start", "count"} <= {*table.column_names}
    spile.export(ds, tmp_path / "npy", to="npy")
    assert np.array_equal(np.load(tmp_path / "npy/index.npy"), index)
    spile.export(ds, tmp_path / "parquet", to="parquet")
    with pytest.raises(spile.ConfigError, match="holds pooled rows, and saelens has sequences"):
        spile.export(ds, tmp_path / "saelens", to="saelens")


@pytest.mark.full
def test_a_splice_changes_what_is_pooled(model: Path, corpus: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model": str(model), "corpus": str(corpus), "taps": "resid_post:2", "max_docs": 12,
        "seq_len": 32, "compute_dtype": "float32", "splice": "zero:mlp_out.1",
    }  # fmt: skip
    spile.extract(Recipe(**given), str(tmp_path / "tokens"))
    spile.extract(Recipe(**given, pool="mean"), str(tmp_path / "out"))
    dense = spile.open(tmp_path / "tokens").pooled("resid_post.2", "mean")
    found = spile.open(tmp_path / "out").pooled("resid_post.2", "first")
    assert found.doc.tolist() == dense.doc.tolist()
    np.testing.assert_allclose(found.rows, dense.rows, rtol=2e-5, atol=2e-5)


def test_a_plan_counts_spans(model: Path, corpus: Path, tmp_path: Path) -> None:
    flags = ["--model", model, "--corpus", corpus, "--taps", "resid_post:1", "--pool", "mean"]
    planned = run("plan", *flags, "--out", tmp_path / "out", "--exact", "--json")
    assert planned.code == 0, planned.err
    cost = planned.json
    assert cost["rows"] == 40
    assert cost["bytes_per_tap"] == {"resid_post.1": 40 * 32 * 2}
    assert cost["index_bytes"] == 40 * 34


def test_a_value_that_is_not_finite_ends_the_run_and_its_token_is_named(
    infinite: Path, tmp_path: Path
) -> None:
    texts = ["ok ok", "ok ok ok !!!!"]  # (! is token 0, whose embedding is not finite)
    corpus = tmp_path / "docs.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given: dict[str, Any] = {
        "model": str(infinite), "corpus": str(corpus), "taps": "embed", "pool": "mean",
        "seq_len": 32, "compute_dtype": "float32", "special_tokens": "none",
    }  # fmt: skip
    with pytest.raises(DataError, match=r"embed: NaN or infinity in unit 0, document 1.*token 9"):
        spile.extract(Recipe(**given), str(tmp_path / "out"))
    spile.extract(Recipe(**given), str(tmp_path / "kept"), Runtime(allow_nonfinite=True))
    ds = spile.open(tmp_path / "kept")
    broken = ds.index(0, 2)["doc"] == 1
    rows = ds.read("embed")
    assert np.isfinite(rows[~broken]).all() and np.isnan(rows[broken]).any()
    assert ds.statistics("embed").nonfinite == np.count_nonzero(~np.isfinite(rows))


@pytest.mark.full
@pytest.mark.parametrize(("pack", "chosen"), [
    ("ffd", {"pool": "mean"}), ("none", {"pool": "mean"}), ("ffd", {"reduce": "mean,var"}),
    ("none", {"reduce": "mean,cov"}),
])  # fmt: skip
@pytest.mark.parametrize("family", ["gpt2", "gemma2-gqa", "mixtral-gqa", "mamba2"])
def test_rows_and_sums_of_a_family_are_those_of_hf_pooled_in_float64(
    family: str, pack: str, chosen: dict[str, str], corpus: Path, tmp_path: Path
) -> None:
    """Most documents are cut into contexts."""
    families.save(families.randomised(families.FAMILIES[family]), tmp_path / "model")
    tiny.write_tokenizer(tmp_path / "model")
    recipe = Recipe(
        model=str(tmp_path / "model"), corpus=str(corpus), taps="resid_post:all,logprob",
        seq_len=32, compute_dtype="float32", pack=pack, max_docs=12, unit_tokens=400, **chosen,
    )  # fmt: skip
    spile.extract(recipe, str(tmp_path / "out"))
    checked = check(str(tmp_path / "out"), samples=2)
    assert checked.ok and max(tap.error for tap in checked.taps.values()) < 2e-5
