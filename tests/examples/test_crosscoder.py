"""The example crosscoder finds which features two models share, and which only one has."""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from support import stored

WIDTHS = {"base": 24, "tuned": 20}
SHARED, BASE, TUNED = range(8), range(8, 12), range(12, 16)  # features


def planted(rng: np.random.Generator) -> Iterator[tuple[np.ndarray, dict[str, Any]]]:
    """Rows of two models that are sums of a few features, with those features."""
    features = max(TUNED) + 1
    directions = {side: rng.standard_normal((features, width)) for side, width in WIDTHS.items()}
    directions["base"][TUNED] = directions["tuned"][BASE] = 0
    while True:
        found = (rng.random((128, features)) < 0.15) * rng.uniform(1, 3, (128, features))
        rows = {side: found @ d / np.sqrt(d.shape[1]) for side, d in directions.items()}
        yield found, {side: jnp.asarray(x, jnp.float32) for side, x in rows.items()}


@pytest.mark.full
def test_each_feature_gets_a_latent_of_the_models_that_have_it(
    imported: Callable[[str], Any],
) -> None:
    crosscoder, batches = imported("crosscoder"), planted(np.random.default_rng(0))
    args = Namespace(latents=24, steps=300, rate=1e-2, sparsity=0.3, seed=0)
    coder = crosscoder.train((rows for _, rows in batches), args)
    features, x = next(islice(batches, 1))
    latents = np.asarray(crosscoder.encode(coder, x))
    live = latents.std(axis=0) > 0
    alike = np.corrcoef(features.T, latents[:, live].T)[: features.shape[1], features.shape[1] :]
    norms = crosscoder.norms(coder)
    share = np.asarray(norms["tuned"] / (norms["base"] + norms["tuned"]))[live]
    of_feature = share[alike.argmax(axis=1)]
    assert alike.max(axis=1).min() > 0.8
    assert np.abs(of_feature[SHARED] - 0.5).max() < 0.2
    assert of_feature[BASE].max() < 0.1 and of_feature[TUNED].min() > 0.9
    found = crosscoder.evaluate(coder, x)
    assert min(found[f"explained variance, {side}"] for side in WIDTHS) > 0.9
    assert found["only base"] >= len(BASE) and found["only tuned"] >= len(TUNED)


def test_it_reads_an_aligned_pair_and_refuses_any_other(
    imported: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ((40, 30), (25, 45), (50,))
    base, tuned, other = (str(tmp_path / name) for name in ("base", "tuned", "other"))
    stored.build(Path(base), lengths, taps={"resid_post.0": 6})
    stored.build(Path(tuned), lengths, taps={"resid_post.0": 5}, model={"weights": "cafe"})
    stored.build(Path(other), lengths[1:], taps={"resid_post.0": 6})
    main = imported("crosscoder").main
    small = ["--tap", "resid_post.0", "--latents", "32", "--steps", "100", "--batch", "64"]
    main([base, tuned, *small, "--rate", "1e-2", "--sparsity", "0.01"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert min(found[f"explained variance, {side}"] for side in ("base", "tuned")) > 0.5
    assert found["shared"] + found["only base"] + found["only tuned"] <= found["live latents"] <= 32
    with pytest.raises(SystemExit, match="does not hold the rows of"):
        main([base, other, *small])
