"""`--add-taps`: more taps of the same rows; all other options must agree with the dataset."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError, DriftError
from spile.dataset.maintain.shuffle import shuffle
from spile.dataset.records.ledger import Ledger
from spile.objects import open_objects
from spile.plan.passes import opened_for
from support import tiny

TAPS, MORE = "resid_post:1", "mlp_out:0,resid_post:2,logprob"
OPTIONS: dict[str, Any] = {"seq_len": 32, "unit_tokens": 400, "compute_dtype": "float32"}


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of one tap, one of all taps, and the corpus of both."""
    folder = tmp_path_factory.mktemp("passes")
    corpus = tiny.write_corpus(folder / "corpus.jsonl", 30)
    both = {"one": TAPS, "all": f"{TAPS},{MORE}"}
    for name, taps in both.items():
        recipe = spile.Recipe(model=str(model), corpus=str(corpus), taps=taps, **OPTIONS)
        spile.extract(recipe, str(folder / name))
    return folder


@pytest.fixture
def one(made: Path, tmp_path: Path) -> str:
    shutil.copytree(made / "one", tmp_path / "acts")
    return str(tmp_path / "acts")


def test_added_taps_are_those_of_one_extraction_bit_for_bit(
    made: Path, one: str, model: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(model, tmp_path / "elsewhere")
    outcome = spile.extract(spile.Recipe(add_taps=MORE, model=str(moved)), one)
    grown, whole = spile.open(one), spile.open(made / "all")
    assert (outcome.out, outcome.rows) == (one, whole.num_tokens)
    assert sorted(grown.taps) == sorted(whole.taps) and grown.num_tokens == whole.num_tokens
    np.testing.assert_array_equal(
        grown.index(0, grown.num_tokens), whole.index(0, whole.num_tokens)
    )
    for tap in whole.taps:
        rows, wanted = (each.read(tap, 0, each.num_tokens) for each in (grown, whole))
        assert rows.dtype == wanted.dtype == np.float32
        np.testing.assert_array_equal(rows.view(np.uint32), wanted.view(np.uint32))
        np.testing.assert_array_equal(grown.statistics(tap).mean, whole.statistics(tap).mean)
    assert grown.recipe_of("resid_post.2").model_source == str(moved)
    # The same command has nothing left to do, and another dtype is another pass.
    again = spile.extract(spile.Recipe(add_taps=MORE, model=str(moved)), one)
    assert again.bytes == outcome.bytes
    spile.extract(spile.Recipe(add_taps="z:1", store_dtype="int8"), one)
    assert spile.open(one).stored_dtype("z.1") == "int8"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"add_taps": "resid_post:1"}, "has resid_post.1; leave it out of --add-taps$"),
        ({"add_taps": "z:0", "taps": "z:2"}, "--taps z:2: .* was made with resid_post.1"),
        ({"add_taps": "z:0", "like": "acts/other"}, "--like makes a new dataset"),
        ({"add_taps": "z:0", "more": True}, "use one, then the other$"),
        ({"add_taps": "z:0", "add_corpus": "more.jsonl"}, "use one, then the other$"),
        ({"add_taps": "z:9"}, "z"),
    ],
)
def test_what_cannot_be_added_is_refused_in_one_line(
    one: str, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        opened_for(spile.Recipe(**asked), Ledger(open_objects(one)))
    assert "\n" not in str(caught.value)


def test_a_tap_of_another_pass_is_refused_with_what_to_do(one: str) -> None:
    ledger = opened_for(spile.Recipe(add_taps="z:0"), Ledger(open_objects(one)))[1]
    assert ledger.of_pass and ledger.of_pass.planned
    ledger.create_table(ledger.of_pass.planned)
    refused = r"has z.0 \(with --store-dtype float32\); leave.*spile drop"
    with pytest.raises(ConfigError, match=refused):
        opened_for(spile.Recipe(add_taps="z:0", store_dtype="int8"), Ledger(open_objects(one)))
    same = opened_for(spile.Recipe(add_taps="z:0"), Ledger(open_objects(one)))[1]
    assert same.objects.url == ledger.objects.url


@pytest.mark.parametrize("changed", [{"seq_len": 16}, {"where": "pos >= 1"}, {"model": "other"}])
def test_another_recipe_is_drift(one: str, tmp_path: Path, changed: dict[str, Any]) -> None:
    if "model" in changed:
        changed = {"model": str(tiny.write_model(tmp_path / "other", seed=3))}
    with pytest.raises(DriftError, match=f"^{one} was made by another recipe .{[*changed][0]}"):
        spile.extract(spile.Recipe(add_taps="z:0", **changed), one)
    assert not (Path(one) / "passes").exists()


def test_a_dataset_must_be_finished_and_not_shuffled(one: str, tmp_path: Path) -> None:
    asked = spile.Recipe(add_taps="z:0")
    with pytest.raises(ConfigError, match="there is no dataset in"):
        opened_for(asked, Ledger(open_objects(str(tmp_path / "none"))))
    (tmp_path / "half" / "scratch").mkdir(parents=True)
    (tmp_path / "half" / "scratch" / "run").write_bytes(b"rows")
    with pytest.raises(ConfigError, match="it is being shuffled"):
        opened_for(asked, Ledger(open_objects(str(tmp_path / "half"))))
    shuffle(open_objects(one), open_objects(str(tmp_path / "shuffled")))
    with pytest.raises(ConfigError, match="was shuffled; add taps to the dataset"):
        opened_for(asked, Ledger(open_objects(str(tmp_path / "shuffled"))))
    (Path(one) / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="is not finished; run the same"):
        opened_for(asked, Ledger(open_objects(one)))
