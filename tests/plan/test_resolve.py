"""Resolving a recipe: by current defaults for a new dataset, by the stored ones when resuming."""

import dataclasses
import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spile.core.config import Recipe
from spile.core.errors import ConfigError, InputError
from spile.core.index import BOS, SPECIAL
from spile.core.recipe import RULES
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import read_tokenizer
from spile.objects import MemoryObjects, open_objects
from spile.plan.job import ExtractionJob, prepare_unit
from spile.plan.resolve import resolve, store_table
from support import tiny

MARK = [0xEF, 0xBB, 0xBF]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["\ufeffone", "two", "\ufeff three"]}), path)
    return path


def asked(model: Path, corpus: Path) -> Recipe:
    return Recipe(model=str(model), corpus=str(corpus), taps="embed", where="not special")


def rows(job: ExtractionJob) -> tuple[list[str], np.ndarray]:
    """The texts of the only unit, and the index of its rows."""
    with closing(job.reader()) as reader:
        texts = reader.read(job.units[0].spans, 0).texts
        return texts, prepare_unit(job, reader, job.units[0]).packed.index


def test_a_new_dataset_follows_todays_rules(model: Path, corpus: Path) -> None:
    job = resolve(asked(model, corpus), Ledger(MemoryObjects("memory://new")), "cpu")
    assert job.recipe.rules == RULES
    texts, index = rows(job)
    assert texts == ["\ufeffone", "two", "\ufeff three"]
    assert tiny.BOS not in index["token_id"]
    assert not (index["flags"] & (BOS | SPECIAL)).any()


def test_a_dataset_begun_by_other_rules_is_not_continued(model: Path, corpus: Path) -> None:
    ledger = Ledger(MemoryObjects("memory://later"))
    job = resolve(asked(model, corpus), ledger, "cpu")
    later = dataclasses.replace(job.recipe, rules=RULES + 1)
    table = dataclasses.replace(job.table, recipe=later, fingerprint=later.fingerprint())
    with pytest.raises(ConfigError, match="rules 3"):
        ledger.create_table(table)  # writes it, and reads it back
    with pytest.raises(ConfigError, match="rules 3, and this version of spile knows rules 2"):
        resolve(Recipe(), Ledger(ledger.objects), "cpu")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("pos >= 0", "--where 'pos >= 0' keeps all of the first 21 tokens"),
        ("pos > 1000", "--where 'pos > 1000' keeps none of the first 21 tokens"),
        ("user", "keeps none of the first 21 tokens: none of them is marked `user`"),
        ("pos >= 1", None),
        ("bos", None),
    ],
)
def test_a_choice_of_rows_that_keeps_all_or_none_of_a_sample_is_said(
    where: str, said: str | None, model: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = dataclasses.replace(asked(model, corpus), where=where, every=2)
    resolve(recipe, Ledger(MemoryObjects("memory://rows")), "cpu")
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [said in line for line in warned] == [True] if said else not warned


def test_that_a_tokenizer_adds_no_bos_is_said_with_what_to_use_instead(
    model: Path, corpus: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = dataclasses.replace(asked(model, corpus), where="not bos", special_tokens="none")
    resolve(recipe, Ledger(MemoryObjects("memory://rows")), "cpu")
    assert "keeps all of the first" in caplog.text
    assert "adds no BOS; to drop each context's first token use `pos >= 1`" in caplog.text


def test_the_tokenizers_files_are_stored_with_the_table(model: Path, corpus: Path) -> None:
    ledger = Ledger(MemoryObjects("memory://tokenizer"))
    job = store_table(resolve(asked(model, corpus), ledger, "cpu"), ledger)
    names = ("tokenizer.json", "tokenizer_config.json")
    wanted = {name: (model / name).read_bytes() for name in names}
    assert read_tokenizer(ledger.objects, job.table) == wanted
    assert store_table(resolve(Recipe(), ledger, "cpu"), ledger).table == job.table


def test_a_tokenizer_that_changes_before_it_is_stored_is_refused(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(model, tmp_path / "model")
    ledger = Ledger(MemoryObjects("memory://changed"))
    job = resolve(asked(copy, corpus), ledger, "cpu")
    (copy / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match="the tokenizer's files changed"):
        store_table(job, ledger)
    assert [*ledger.objects.list()] == []


def likened(model: Path, corpus: Path, out: Path, /, **changes: object) -> ExtractionJob:
    """A recipe like that of a dataset, whose table is stored at `out`."""
    ledger = Ledger(open_objects(str(out)))
    if ledger.read_table() is None:
        recipe = dataclasses.replace(asked(model, corpus), every=2, seq_len=64, unit_tokens=8)
        store_table(resolve(recipe, ledger, "cpu"), ledger)
    recipe = Recipe(like=str(out), **changes)  # type: ignore[arg-type]
    return resolve(recipe, Ledger(MemoryObjects("memory://new")), "gpu")


def test_like_a_dataset_all_options_but_those_of_a_model_are_its(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    other = tiny.write_model(tmp_path / "other", seed=1, num_hidden_layers=1)
    config = other / "tokenizer_config.json"
    config.write_text('{"model_max_length": 4}')  # that of a chat model differs so
    job = likened(model, corpus, tmp_path / "out", model=str(other), taps="resid_post:0")
    like = Ledger(open_objects(str(tmp_path / "out"))).table()
    assert job.table.units == like.units and len(like.units) > 1
    assert (job.recipe.every, job.recipe.seq_len, job.recipe.unit_tokens) == (2, 64, 8)
    assert (job.recipe.taps, job.recipe.compute_dtype) == (("resid_post.0",), "float32")
    assert job.recipe.model != like.recipe.model


@pytest.mark.parametrize(("changes", "reason"), [
    ({"seq_len": 32}, "--seq-len is 64 there, 32 here"),
    ({"pack": "none"}, "--pack is ffd there, none here"),
    ({"where": "pos >= 1"}, "--where is not special there, pos >= 1 here"),
])  # fmt: skip
def test_like_a_dataset_other_rows_are_refused(
    changes: dict[str, object], reason: str, model: Path, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        likened(model, corpus, tmp_path / "out", **changes)


def test_like_a_dataset_another_tokenizer_is_refused(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    other = tiny.write_model(tmp_path / "other")
    path = other / "tokenizer.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "normalizer": {"type": "Lowercase"}}))
    with pytest.raises(ConfigError, match="another tokenizer: normalizer of tokenizer.json differ"):
        likened(model, corpus, tmp_path / "out", model=str(other))


def test_like_a_dataset_a_changed_corpus_is_refused(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    likened(model, corpus, tmp_path / "out")
    pq.write_table(pa.table({"text": ["other"]}), corpus)
    with pytest.raises(ConfigError, match="the corpus has changed"):
        likened(model, corpus, tmp_path / "out")


def test_like_is_compared_where_the_dataset_exists_too(
    model: Path, corpus: Path, tmp_path: Path
) -> None:
    likes = [Ledger(open_objects(str(tmp_path / name))) for name in ("one", "other")]
    for ledger, seq_len in zip(likes, (64, 32), strict=True):
        recipe = dataclasses.replace(asked(model, corpus), seq_len=seq_len)
        store_table(resolve(recipe, ledger, "cpu"), ledger)
    ledger = Ledger(MemoryObjects("memory://pair"))
    pair = store_table(resolve(Recipe(like=likes[0].url), ledger, "cpu"), ledger)
    assert resolve(Recipe(like=likes[0].url), ledger, "cpu").table == pair.table
    with pytest.raises(ConfigError, match="--like .*other: .* differ: --seq-len is 32 there, 64"):
        resolve(Recipe(like=likes[1].url), ledger, "cpu")
    shuffled = Ledger(MemoryObjects("memory://shuffled"))
    drawn = {"seed": 1, "drawn": "00", "entries": "00"}
    tokenizer = read_tokenizer(ledger.objects, pair.table)
    shuffled.create_table(dataclasses.replace(pair.table, shuffled=drawn), tokenizer)
    with pytest.raises(ConfigError, match="the dataset in --out was shuffled"):
        resolve(Recipe(like=likes[0].url), shuffled, "cpu")
    # A pair of a dataset that grows must grow, too.
    more = tmp_path / "more.parquet"
    pq.write_table(pa.table({"text": ["one more document"]}), more)
    grow = Recipe(add_corpus=str(more))
    store_table(resolve(grow, likes[0], "cpu"), likes[0])
    with pytest.raises(ConfigError, match="--like .*one: .* the corpus has changed"):
        resolve(Recipe(like=likes[0].url), ledger, "cpu")
    grown = resolve(dataclasses.replace(grow, like=likes[0].url), ledger, "cpu").table
    assert grown.files == likes[0].table().files
