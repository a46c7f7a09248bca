"""The figures of CE-Bench, held against its formula, written out pair by pair from dense rows."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from support import saes, tiny

EXAMPLE = Path(__file__).parents[2] / "examples" / "ce_bench.py"
TAP = "resid_post.1"
LATENTS = 80


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stories, with dense rows of their tokens, and with all and a few of their mean latents."""
    folder, rng = tmp_path_factory.mktemp("ce_bench"), np.random.default_rng(0)
    with (folder / "pairs.jsonl").open("w") as file:
        for number in range(5):
            texts = {f"story{n}": tiny.words(rng, int(rng.integers(4, 12))) for n in (1, 2)}
            file.write(json.dumps({**texts, "subject": f"subject {number}"}) + "\n")
    corpus = f"{EXAMPLE}:stories(path={str(folder / 'pairs.jsonl')!r})"
    recipe = spile.Recipe(
        model=str(tiny.write_model(folder / "model")), corpus=corpus, taps=TAP,
        seq_len=128, compute_dtype="float32", store_dtype="float32",
    )  # fmt: skip
    spile.extract(recipe, str(folder / "dense"))
    saes.write_sae(folder / "sae", "standard", latents=LATENTS)
    encoded = replace(recipe, encode=str(folder / "sae"), pool="mean")
    spile.extract(replace(encoded, latents=LATENTS), str(folder / "latents"))
    spile.extract(replace(encoded, latents=4), str(folder / "few"))
    return folder


def by_the_formula(folder: Path, average: bool) -> list[float]:
    """Pair by pair and token by token, as the published code goes through them."""
    ds = spile.open(folder / "dense")
    tensors = saes.random_tensors("standard", latents=LATENTS)
    wide = {name: values.astype(np.float64) for name, values in tensors.items()}
    stories: dict[tuple[int, int], np.ndarray] = {}
    for doc in range(10):
        rows = ds.document(doc)[TAP].astype(np.float64) - wide["b_dec"]
        about = ds.about(doc)
        found = np.maximum(rows @ wide["W_enc"] + wide["b_enc"], 0)
        stories[about["pair"], about["story"]] = found
    commons = [np.concatenate([stories[n, 1], stories[n, 2]]).mean(axis=0) for n in range(5)]
    subtracted = np.mean(commons, axis=0) if average else np.zeros(LATENTS)
    scores: list[list[float]] = [[], [], []]
    for number, common in enumerate(commons):
        apart = abs(stories[number, 1].mean(axis=0) - stories[number, 2].mean(axis=0))
        beyond = abs(common - subtracted)
        for score, distance in zip(scores, (apart, beyond, apart + beyond), strict=True):
            centred = distance - distance.mean()
            score.append(max(centred / np.sqrt((centred**2).sum() / (LATENTS - 1))))
    return [float(np.mean(score)) for score in scores]


@pytest.mark.full
@pytest.mark.parametrize("average", [False, True])
def test_the_figures_are_those_of_the_formula(
    pairs: Path, imported: Callable[[str], Any], average: bool
) -> None:
    found, count = imported("ce_bench").measured(spile.open(pairs / "latents"), TAP, average)
    assert [*found] == ["contrastive", "independent", "interpretability"] and count == 5
    assert [*found.values()] == pytest.approx(by_the_formula(pairs, average), rel=1e-6)


def test_what_is_printed_and_what_is_refused(
    pairs: Path, imported: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    example = imported("ce_bench")
    example.main([str(pairs / "latents"), "--tap", TAP])
    printed = [float(figure) for figure in re.findall(r"\d\.\d{4}", capsys.readouterr().out)]
    assert printed == pytest.approx(by_the_formula(pairs, False), abs=1e-4)
    with pytest.raises(SystemExit, match="more latents were active than were stored; .* 80"):
        example.main([str(pairs / "few"), "--tap", TAP])
    with pytest.raises(SystemExit, match="does not hold means of documents; .* --pool mean"):
        example.main([str(pairs / "dense"), "--tap", TAP])
