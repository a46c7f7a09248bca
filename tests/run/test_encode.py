"""Crosscoders over datasets of two models: stored latents are those of the project's own code."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.cli.parser import run as spile_command
from spile.core.errors import ConfigError, CorruptError
from spile.dataset.maintain.verify import verify
from spile.features.run import FeatureRequest, make_features
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.tensors import load_arrays
from spile.objects import LocalObjects
from spile.run import encode as module
from spile.run.encode import EncodeRequest, encode
from support import stored
from support.marks import some

FIXTURES = Path(__file__).parents[1] / "fixtures" / "encoders"
LENGTHS = ((4, 2), (3,), (1,))
TAP, VALUES, IDS = "resid_post.1", "resid_post_latents.1", "resid_post_latent_ids.1"


def wanted(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "wanted.npz") as found:
        return dict(found)


def built(path: Path, rows: np.ndarray, **changes: Any) -> stored.Stored:
    """A dataset of these rows, in float32."""
    return stored.build(path, LENGTHS, taps={TAP: 16}, rows_of=lambda *_: rows, **changes)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    return pair_of(tmp_path, "crosscoder_batchtopk")


def pair_of(folder: Path, name: str) -> tuple[str, str]:
    rows = wanted(name)["rows"]
    chat = {"model": {"config": "beef", "weights": "cafe"}}
    built(folder / "base", rows[:, :16])
    built(folder / "chat", rows[:, 16:], **chat)
    return str(folder / "base"), str(folder / "chat")


def request(name: str, **options: Any) -> EncodeRequest:
    chosen = {"latents": 48, "store_dtype": "float32", **options}
    return EncodeRequest(encoder=str(FIXTURES / name), tap="resid_post:1", **chosen)


NAMES = ("crosscoder", "crosscoder_batchtopk", "crosscoder_kissane", "crosscoder_trained")


@pytest.mark.parametrize("name", some(NAMES, "crosscoder_batchtopk"))
def test_latents_are_those_of_the_projects_own_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WINDOW", 4 * 32 * 4)  # four rows
    sources, dest = pair_of(tmp_path, name), LocalObjects(tmp_path / "made")
    scale = (1.0, 1.0) if name == "crosscoder_kissane" else None
    made = encode(sources, dest, request(name, scale=scale))
    assert (made.rows, made.units, made.kept, made.truncated) == (10, 3, 48, 0)
    ds = spile.open(tmp_path / "made")
    assert ds.taps == [VALUES, IDS] and ds.encoded == [TAP]
    np.testing.assert_array_equal(ds.index(0, 10), spile.open(sources[1]).index(0, 10))
    found, expected = ds.latents(TAP, 0, 10).dense(), wanted(name)["latents"]
    np.testing.assert_array_equal(found != 0, expected != 0)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    report = verify(dest)
    assert report.ok and report.rows
    # A row that has more keeps the largest, and is counted.
    few = encode(sources, LocalObjects(tmp_path / "few"), request(name, latents=5, scale=scale))
    active = np.count_nonzero(expected, axis=1)
    assert few.truncated == np.count_nonzero(active > 5) > 0
    largest = spile.open(tmp_path / "few").read(VALUES, 0, 10)
    np.testing.assert_allclose(largest, -np.sort(-expected, axis=1)[:, :5], atol=1e-5)


def test_rows_are_scaled_and_latents_stored_in_sixteen_bits(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    name = "crosscoder_kissane"
    rows = wanted("crosscoder_batchtopk")["rows"]
    asked = request(name, scale=(0.5, 2.0), store_dtype="bfloat16")
    encode(pair, LocalObjects(tmp_path / "made"), asked)
    scaled = np.concatenate([rows[:, :16] * 0.5, rows[:, 16:] * 2.0], axis=1)
    tensors = load_arrays(open_sae(str(FIXTURES / name), sides=2))[0]
    expected = np.maximum(scaled @ tensors["W_enc"] + tensors["b_enc"], 0)
    found = spile.open(tmp_path / "made")
    assert found.stored_dtype(VALUES) == "bfloat16"
    np.testing.assert_allclose(found.latents(TAP, 0, 10).dense(), expected, rtol=0.01, atol=1e-3)
    assert "scaled 0.5,2.0" in found.recipe.encode[TAP]


def test_a_killed_call_continues_and_makes_the_same(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest, asked = LocalObjects(tmp_path / "made"), request("crosscoder_batchtopk")
    write, written = module._Job.write, []

    def killed(job: Any, number: int) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(number)
        return write(job, number)

    monkeypatch.setattr(module._Job, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        encode(pair, dest, asked)
    assert not (tmp_path / "made/units.json").exists()
    with pytest.raises(ConfigError, match="holds another dataset, or one of other rows, or of an"):
        encode(pair, dest, request("crosscoder_trained"))
    monkeypatch.undo()
    assert encode(pair, dest, asked).units == 3
    assert encode(pair, dest, asked).rows == 10, "it is whole, and the same"
    encode(pair, LocalObjects(tmp_path / "whole"), asked)
    one, other = spile.open(tmp_path / "made"), spile.open(tmp_path / "whole")
    for tap in (VALUES, IDS):
        np.testing.assert_array_equal(one.read(tap, 0, 10), other.read(tap, 0, 10))


def test_datasets_that_grew_need_another_place(tmp_path: Path) -> None:
    """All documents of both generations are encoded there."""
    rows, name = wanted("crosscoder_batchtopk")["rows"], "crosscoder_batchtopk"
    sides = {"base": rows[:, :16], "chat": rows[:, 16:]}
    other = {"base": {}, "chat": {"model": {"config": "beef", "weights": "cafe"}}}
    for side, own in sides.items():
        built(tmp_path / "grown" / side, own, grown=(2,), **other[side])
        shutil.copytree(
            tmp_path / "grown" / side, tmp_path / side, ignore=lambda *_: ["generations"]
        )
        (tmp_path / side / "done/000000/00000002.json").unlink()
    before = [str(tmp_path / side) for side in sides]
    grown = [str(tmp_path / "grown" / side) for side in sides]
    dest = LocalObjects(tmp_path / "made")
    assert encode(before, dest, request(name)).rows == 9
    with pytest.raises(ConfigError, match="holds another dataset, .*; choose an empty place"):
        encode(grown, dest, request(name))
    made = encode(grown, LocalObjects(tmp_path / "all"), request(name))
    assert (made.rows, made.units) == (10, 3)
    found = spile.open(tmp_path / "all").latents(TAP, 0, 10).dense()
    np.testing.assert_allclose(found, wanted(name)["latents"], atol=1e-5)


def test_damage_in_a_source_is_noticed(pair: tuple[str, str], tmp_path: Path) -> None:
    (shard, *_) = sorted((tmp_path / "base").rglob("*resid_post*safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptError, match="checksum does not match"):
        encode(pair, LocalObjects(tmp_path / "made"), request("crosscoder"))


def test_what_does_not_fit_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    dest = LocalObjects(tmp_path / "made")
    for asked, why in (
        (request("dictionary_learning_topk"), "reads one model; give it to `spile extract"),
        (request("crosscoder", scale=(1.0,)), "give one positive number for each of 2 datasets"),
        (request("crosscoder", scale=(1.0, 0.0)), "give one positive number for each"),
        (request("crosscoder", store_dtype="int8"), "--store-dtype int8: choose bfloat16"),
        (request("crosscoder_kissane"), "does not hold the factors .* --scale 1,1 if the weights"),
    ):
        with pytest.raises(spile.SpileError, match=why):
            encode(pair, dest, asked)
    with pytest.raises(ConfigError, match="align takes two datasets or more"):
        encode(pair[:1], dest, request("crosscoder"))
    with pytest.raises(ConfigError, match="must not contain one another"):
        encode(pair, LocalObjects(tmp_path / "base" / "x"), request("crosscoder"))
    narrow = stored.build(tmp_path / "narrow", LENGTHS, taps={TAP: 8})
    with pytest.raises(ConfigError, match="reads rows of 16 values, and resid_post.1 has 12"):
        encode((pair[0], str(narrow.path)), dest, request("crosscoder"))
    other = stored.build(tmp_path / "other", ((5,),), taps={TAP: 16})
    with pytest.raises(ConfigError, match="does not hold the rows of"):
        encode((pair[0], str(other.path)), dest, request("crosscoder"))
    assert not dest.root.exists()


def test_other_verbs_know_what_such_a_dataset_is(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "made")
    line = [*pair, out, "--encode", str(FIXTURES / "crosscoder"), "--tap", TAP, "--latents", "9"]
    assert spile_command(["encode", *line]) == 0
    told = capsys.readouterr().out
    assert "10 rows of resid_post.1, 9 of 48 latents each, in 3 units" in told
    assert "had more active latents; --latents keeps more" in told
    assert spile_command(["encode", *line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == 9
    made = make_features(out, FeatureRequest())
    assert made.latents == 48 and made.note
    assert made.note == "no logits: a crosscoder's latents write to several models"
    assert spile.open(out).features(TAP).rows == 10
    for asked, why in (
        (["check", out], "were encoded from the rows of other datasets; check those"),
        (["extract", "--like", out, "--model", "x", "--out", f"{out}2"], "spile encode"),
        (["encode", *line[:3], "--encode", "x", "--tap", TAP, "--scale", "a"], "give a number"),
    ):
        assert spile_command(asked) == 2
        assert why in capsys.readouterr().err
    shutil.rmtree(next((tmp_path / "made").rglob("*latents*")).parent)
    assert spile_command(["verify", out, "--repair"]) == 2
    assert "run `spile encode` again" in capsys.readouterr().err
