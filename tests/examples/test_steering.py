"""The steering example: its vector moves its measure more than a random one of its length."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from support import tiny

TAPS = ["--tap", "resid_post.0", "--later", "resid_post.1"]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of two alphabets."""
    folder, rng = tmp_path_factory.mktemp("steering"), np.random.default_rng(0)
    with (folder / "docs.jsonl").open("w") as file:
        for number in range(20):
            early = number % 4 < 2
            text = "".join(rng.choice(list("abcdef" if early else "uvwxyz"), 30))
            file.write(json.dumps({"text": text, "kind": "early" if early else "late"}) + "\n")
    recipe = spile.Recipe(
        model=str(tiny.write_model(folder / "model")), corpus=str(folder / "docs.jsonl"),
        taps="resid_post:0+1,logprob", keep="kind", seq_len=64,
    )  # fmt: skip
    spile.extract(recipe, str(folder / "clean"))
    return folder / "clean"


@pytest.mark.full
def test_the_vector_moves_a_later_tap_and_a_random_one_does_not(
    clean: Path,
    imported: Callable[[str], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    imported("steering").main([
        str(clean), *TAPS, "--label", "kind == 'late'", "--out", str(tmp_path), "--factor", "2"
    ])  # fmt: skip
    printed = capsys.readouterr().out
    found = {
        name: (float(shift), float(rise))
        for name, shift, rise in re.findall(
            r"^(.+): resid_post.1 moved by (\S+), loss (\S+) nats a token$", printed, re.M
        )
    }
    names = [f"{run}, documents {kind}" for run in ("steered", "random")
             for kind in ("with the label", "without")]  # fmt: skip
    assert [*found] == names
    for kind in ("with the label", "without"):
        assert found[f"steered, documents {kind}"][0] > 1
        most = found[f"steered, documents {kind}"][0] / 2
        assert abs(found[f"random, documents {kind}"][0]) < most
    vector, drawn = (np.load(tmp_path / f"{name}.npy") for name in ("steered", "random"))
    assert np.linalg.norm(vector) == pytest.approx(np.linalg.norm(drawn), rel=1e-5)
    # By hand, of one kind.
    before, after = (spile.open(path) for path in (clean, tmp_path / "steered"))
    rose = [
        (before.document(doc)["logprob"] - after.document(doc)["logprob"])[1:-1]
        for doc in range(0, 20, 2) if doc % 4 >= 2
    ]  # fmt: skip
    told = found["steered, documents with the label"][1]
    assert told == pytest.approx(float(np.concatenate(rose).mean()), abs=1e-3)


def test_a_label_of_no_column_is_refused(
    clean: Path, imported: Callable[[str], Any], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="no column 'topic'"):
        imported("steering").main([
            str(clean), *TAPS, "--label", "topic == 'law'", "--out", str(tmp_path)
        ])  # fmt: skip
    assert not [*tmp_path.iterdir()]
