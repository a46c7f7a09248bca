"""Stored tokens as text, by the tokenizer of the model that read them."""

import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

import spile
from spile.core.errors import ConfigError, CorruptError
from spile.core.index import INDEX_DTYPE
from spile.dataset import format as fmt
from spile.dataset.read.texts import Texts
from spile.objects import LocalObjects
from support import stored, tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    model = tiny.write_model(folder / "model")
    (folder / "docs.jsonl").write_text('{"text": "häuser am Fluß 🌊 now"}\n{"text": "two"}\n')
    spile.extract(
        spile.Recipe(model=str(model), corpus=str(folder / "docs.jsonl"), taps="embed"),
        str(folder / "out"),
    )
    return folder


def test_a_document_is_given_as_text_and_as_pieces_for_each_row(made: Path) -> None:
    ds = spile.open(made / "out")
    pieces = ds.tokens(0)
    assert len(pieces) == len(ds.document(0))
    doc = ds.document(0)
    assert doc.tokens == pieces and doc.text == ds.text(0) == "".join(pieces)
    assert ds.text(0).endswith("häuser am Fluß 🌊 now")
    ids = ds.document(0).index["token_id"].tolist()
    assert ds.tokenizer.decode(ids, skip_special_tokens=False) == ds.text(0)
    assert pickle.loads(pickle.dumps(ds)).text(1) == ds.text(1)


def test_dropped_tokens_are_shown_as_a_gap(made: Path) -> None:
    ds = spile.open(made / "out")
    index = ds.document(0).index
    kept = index[[0, 1, 2, 8, 9]]
    texts = Texts(ds.recipe)
    assert list(texts.runs(kept)) == [
        texts.pieces(index["token_id"][:3].tolist()),
        texts.pieces(index["token_id"][8:10].tolist()),
    ]
    assert list(texts.runs(np.empty(0, INDEX_DTYPE))) == [[]]


def test_a_tokenizer_that_is_gone_or_another_is_said_with_what_to_do(
    made: Path, tmp_path: Path
) -> None:
    elsewhere = stored.copied(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"no usable tokenizer.json .*tokenizer=DIRECTORY"):
        spile.open(elsewhere.path).text(0)
    with pytest.raises(ConfigError, match=r"no usable tokenizer.json there"):
        spile.open(elsewhere.path, tokenizer=str(tmp_path)).text(0)
    given = spile.open(elsewhere.path, tokenizer=str(made / "model"))
    assert isinstance(given.tokenizer, Tokenizer)
    doc = int(given.index(0, 1)["doc"][0])
    assert len(given.tokens(doc)) == len(given.document(doc))


def test_a_tokenizer_that_has_changed_is_not_used_unless_asked_for(
    made: Path, tmp_path: Path
) -> None:
    recipe = spile.open(made / "out").recipe
    other = tiny.write_model(tmp_path / "other")
    (other / "tokenizer_config.json").write_text('{"bos_token": "<other>"}')
    object.__setattr__(recipe, "model_source", str(other))
    found = Texts(recipe)
    assert found.tokenizer is None and "holds another tokenizer by now" in (found.missing or "")
    assert Texts(recipe, str(other)).note is not None


def test_models_that_are_not_on_this_machine_are_never_fetched(made: Path) -> None:
    recipe = spile.open(made / "out").recipe
    object.__setattr__(recipe, "model_source", "hf://someone/model")
    assert "is not on this machine" in (Texts(recipe).missing or "")


def moved(made: Path, tmp_path: Path) -> Path:
    """The dataset, on a machine without its model."""
    shutil.copytree(made / "out", tmp_path / "out")
    objects = LocalObjects(tmp_path / "out")
    body = fmt.decode_record(fmt.UNITS, objects.get(fmt.UNITS), "units")
    body["recipe"]["model_source"] = "/nowhere/model"
    objects.replace(fmt.UNITS, fmt.encode_record("units", body))
    return tmp_path / "out"


def test_texts_need_no_model(made: Path, tmp_path: Path) -> None:
    ds = spile.open(moved(made, tmp_path))
    here = spile.open(made / "out", tokenizer=str(made / "model"))
    assert [ds.text(0), ds.tokens(1)] == [here.text(0), here.tokens(1)]
    assert pickle.loads(pickle.dumps(ds)).text(1) == here.text(1)
    assert ds.tokenizer_files()["tokenizer.json"] == (made / "model/tokenizer.json").read_bytes()
    assert here.tokenizer_files() == {}


def test_a_dataset_without_its_own_tokenizer_takes_the_models(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out", tmp_path / "out")
    objects = LocalObjects(tmp_path / "out")
    body = fmt.decode_record(fmt.UNITS, objects.get(fmt.UNITS), "units")
    objects.replace(fmt.UNITS, fmt.encode_record("units", {**body, "tokenizer": {}}))
    assert spile.open(tmp_path / "out").text(0) == spile.open(made / "out").text(0)


def test_a_damaged_tokenizer_is_not_used_unless_another_is_given(
    made: Path, tmp_path: Path
) -> None:
    out = moved(made, tmp_path)
    (path,) = out.glob("tokenizer/*/tokenizer.json")
    stored.flip(path, 100, 1)
    with pytest.raises(CorruptError, match=r"restores it from the model's tokenizer.json"):
        spile.open(out).text(0)
    assert spile.open(out, tokenizer=str(made / "model")).text(0)
    path.unlink()
    with pytest.raises(CorruptError, match=r"tokenizer.json: is missing"):
        spile.open(out).tokens(0)
    shutil.copy(made / "model/tokenizer.json", path)
    assert spile.open(out).text(0)


def test_another_tokenizer_than_the_recipes_is_not_used(tmp_path: Path) -> None:
    options = {**stored.WITH_TOKENIZER, "tokenizer": {"tokenizer.json": b"{}"}}
    made = stored.build(tmp_path / "out", **options)
    with pytest.raises(CorruptError, match=r"names another tokenizer than that of its recipe"):
        _ = spile.open(made.path).tokenizer


def test_a_tokenizer_of_a_store_that_makes_the_library_panic_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """An exception as the Rust library raises it: no module exports its name."""

    def panic(data: bytes) -> None:
        raise PanicException("index out of bounds")

    made = stored.build(tmp_path / "out", **stored.WITH_TOKENIZER)
    with pytest.raises(ConfigError, match=r"no usable tokenizer.json in the dataset"):
        _ = spile.open(made.path).tokenizer
    monkeypatch.setattr("spile.dataset.read.texts.Tokenizer", SimpleNamespace(from_buffer=panic))
    with pytest.raises(ConfigError, match=r"no usable tokenizer.json in the dataset"):
        _ = spile.open(made.path).tokenizer
