"""`spile features` over stored latents: the figures of plain formulas, and the same bits anyhow."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.dataset.read.features import Features
from spile.dataset.records.features import FeatureSet
from spile.features import run, tally
from spile.features.run import FeatureRequest, make_features
from support import stored

UNITS = ((30, 20, 11), (41,), (0,), (25, 36), (60, 1))
VALUES, IDS = "mlp_out_latents.1", "mlp_out_latent_ids.1"
REQUEST = FeatureRequest(logits=0, examples=3)


@pytest.fixture
def made(tmp_path: Path) -> stored.Stored:
    return stored.copied(tmp_path / "out", UNITS, taps=stored.LATENTS, **stored.ENCODED)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part for each unit."""
    monkeypatch.setattr(run, "_DENSE_PARTS", 0)


def opened(path: Path) -> Features:
    return spile.open(path).features("mlp_out.1")


def summary(path: Path) -> dict[str, bytes]:
    """The records of summaries, and the files that they name."""
    features = FeatureSet(stored.LocalObjects(path), "mlp_out.1-1")
    found = {}
    for units in features.summaries():
        found[f"{units}"] = features.objects.get(f"summaries/{units:08d}.json")
        files = features.summary(units)
        assert files
        found |= {file.key: features.objects.get(file.key) for file in files.named()}
    return found


def of_latent(made: stored.Stored, latent: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows in which a latent is active, and its values."""
    rows, places = np.nonzero((made.rows[IDS] == latent) & (made.rows[VALUES] > 0))
    return rows, made.rows[VALUES][rows, places]


def test_figures_are_those_of_plain_formulas(made: stored.Stored) -> None:
    told = make_features(str(made.path), REQUEST)
    features = opened(made.path)
    assert (told.parts, told.units, told.rows) == ((1, 1), 5, len(made.index))
    for latent in range(40):
        rows, values = of_latent(made, latent)
        assert features.counts[latent] == len(rows)
        assert features.density[latent] == len(rows) / len(made.index)
        assert features.means[latent] == pytest.approx(values.mean())
        assert features.largest[latent] == values.max()
        best = np.lexsort((rows, -values))[:3]
        top = features.top(latent)
        assert top.rows.tolist() == rows[best].tolist()
        assert top.values.tolist() == values[best].tolist()
        assert np.array_equal(top.tokens, made.index["token_id"][top.rows])
        edges, counts = features.histogram(latent)
        assert np.array_equal(counts, np.histogram(values, edges)[0])
        assert len(values) <= features.drawn, "so quantiles are exact"
        wanted = np.quantile(values, [0, 0.3, 1], method="inverted_cdf")
        assert np.array_equal(features.quantiles(latent, [0, 0.3, 1]), wanted)


def test_bands_hold_a_sample_of_rows_between_quantiles(made: stored.Stored) -> None:
    make_features(str(made.path), REQUEST)
    features = opened(made.path)
    for latent in range(40):
        rows, values = of_latent(made, latent)
        known = dict(zip(rows.tolist(), values.tolist(), strict=True))
        bands = features.bands(latent)
        assert sum(band.share for band in bands) == pytest.approx(1)
        assert [band.low for band in bands] == sorted((band.low for band in bands), reverse=True)
        for band in bands:
            assert 0 < len(band.examples) <= 3
            for row, value in zip(band.examples.rows, band.examples.values, strict=True):
                assert known[int(row)] == value and band.low <= value <= band.high


def test_the_sample_does_not_prefer_large_or_early_rows(tmp_path: Path) -> None:
    made = stored.build(
        tmp_path / "out",
        [[200] * 10] * 4,
        taps=stored.LATENTS,
        seq_len=256,
        shard_bytes=1 << 20,
        **stored.ENCODED,
    )
    make_features(str(made.path), REQUEST)
    features = opened(made.path)
    shares, places = [], []
    for latent in range(40):
        rows, values = of_latent(made, latent)
        assert len(rows) > 4 * features.drawn, "a sample, not all of them"
        median = features.quantiles(latent, 0.5)
        shares.append((np.mean(values < median) + np.mean(values <= median)) / 2)
        for band in features.bands(latent):
            places += (band.examples.rows / len(made.index)).tolist()
    # 36 are drawn: the rank of a median has a standard error of 1/12, that of the mean of 40 1/76.
    assert abs(np.mean(shares) - 0.5) < 0.06
    assert abs(np.mean(places) - 0.5) < 0.05


def test_parts_in_any_order_give_the_same_bits(
    made: stored.Stored, tmp_path: Path, small_parts: None
) -> None:
    shutil.copytree(made.path, tmp_path / "other")
    told = make_features(str(made.path), REQUEST)
    assert told.parts == (5, 5) and told.counted == 5
    for share in ((3, 5), (1, 5)):
        other = make_features(
            str(tmp_path / "other"), FeatureRequest(logits=0, examples=3, share=share)
        )
    assert other.counted == 0, "the first has done the parts of the others, too"
    assert summary(made.path) == summary(tmp_path / "other") != {}


def test_ranges_of_latents_give_the_same_figures(
    made: stored.Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made.path, tmp_path / "other")
    make_features(str(made.path), REQUEST)
    monkeypatch.setattr(tally, "MEMORY", 60_000)
    make_features(str(tmp_path / "other"), REQUEST)
    one, several = opened(made.path), opened(tmp_path / "other")
    assert len(FeatureSet(made.objects, one.name).spec().bounds) == 2
    assert len(FeatureSet(stored.LocalObjects(tmp_path / "other"), one.name).spec().bounds) > 3
    for name in ("counts", "means", "largest"):
        assert np.array_equal(getattr(one, name), getattr(several, name))
    for latent in (0, 17, 39):
        assert np.array_equal(one.top(latent).rows, several.top(latent).rows)
        for mine, theirs in zip(one.bands(latent), several.bands(latent), strict=True):
            assert np.array_equal(mine.examples.rows, theirs.examples.rows)
        assert np.array_equal(one.neighbours(latent)[0], several.neighbours(latent)[0])


def test_a_grown_dataset_counts_its_new_units_only(tmp_path: Path, small_parts: None) -> None:
    options = {"taps": stored.LATENTS, **stored.ENCODED}
    whole = stored.build(tmp_path / "whole", UNITS, grown=(2,), **options)
    make_features(str(whole.path), REQUEST)
    growing = stored.build(tmp_path / "growing", UNITS, grown=(2,), commit=[0, 1], **options)
    first = make_features(str(growing.path), REQUEST)
    assert (first.parts, first.units) == ((2, 5), None), "the other units are not done"
    before = opened_units(growing)
    assert before == []
    for unit in (2, 3, 4):
        growing.ledger.commit(growing.attempt(unit))
    growing.ledger.complete(growing.ledger.table())
    told = make_features(str(growing.path), REQUEST)
    assert (told.counted, told.units) == (3, 5)
    assert summary(growing.path) == summary(whole.path)


def opened_units(made: stored.Stored) -> list[int]:
    return [each.units for each in spile.open(made.path, partial=True).feature_sets]


def test_a_summary_grows_from_the_one_before(tmp_path: Path, small_parts: None) -> None:
    options = {"taps": stored.LATENTS, **stored.ENCODED}
    whole = stored.build(tmp_path / "whole", UNITS, grown=(2,), **options)
    make_features(str(whole.path), REQUEST)
    # The same dataset before it grew.
    grown = tmp_path / "grown"
    shutil.copytree(whole.path, grown, ignore=shutil.ignore_patterns("generations", "features"))
    for unit in (2, 3, 4):
        (grown / f"done/000000/{unit:08d}.json").unlink()
    assert make_features(str(grown), REQUEST).units == 2
    for folder in ("generations", "done"):
        shutil.copytree(whole.path / folder, grown / folder, dirs_exist_ok=True)
    assert opened(grown).units == 2, "until its new units are counted"
    assert make_features(str(grown), REQUEST).counted == 3
    assert opened(grown).units == 5
    assert summary(grown).items() > summary(whole.path).items()


def test_parts_of_units_that_were_made_again_are_refused(
    made: stored.Stored, tmp_path: Path, small_parts: None
) -> None:
    make_features(str(made.path), REQUEST)
    options = {"taps": stored.LATENTS, **stored.ENCODED}
    other = stored.build(tmp_path / "other", UNITS, seed=1, **options)
    counted = tmp_path / "counted"
    shutil.copytree(other.path, counted)
    shutil.copytree(made.path / "features", counted / "features")
    shutil.rmtree(counted / "features/mlp_out.1-1/summaries")
    with pytest.raises(ConfigError, match="counted units from 0 on before they were made again"):
        make_features(str(counted), REQUEST)


def test_a_second_call_does_nothing(made: stored.Stored) -> None:
    make_features(str(made.path), REQUEST)
    before = made.listed()
    assert make_features(str(made.path), FeatureRequest(logits=0)).counted == 0
    assert made.listed() == before
    with pytest.raises(ConfigError, match="begun with --examples 3, not 4; leave the flag out"):
        make_features(str(made.path), FeatureRequest(examples=4))


def test_directions_are_features_of_a_dense_tap(made: stored.Stored, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((3, 6)).astype(np.float32)
    np.save(tmp_path / "refusal.npy", vectors[0])
    np.save(tmp_path / "probes.npy", vectors[1:])
    files = [str(tmp_path / "refusal.npy"), str(tmp_path / "probes.npy")]
    told = make_features(str(made.path), FeatureRequest(directions=files, logits=0))
    assert (told.tap, told.latents) == ("resid_post.0", 3)
    features = spile.open(made.path).features("resid_post.0:refusal")
    assert features.names == ("refusal", "probes[0]", "probes[1]")
    values = made.rows["resid_post.0"] @ vectors.T
    for number in range(3):
        own = values[:, number]
        assert features.counts[number] == len(own)
        assert features.means[number] == pytest.approx(own.mean(), abs=1e-6)
        order = np.argsort(-own, kind="stable")[:10]
        assert features.top(number).rows.tolist() == order.tolist()
        edges, counts = features.histogram(number)
        assert np.array_equal(counts, np.histogram(own, edges)[0])
        around = features.windows(number, features.top(number).rows, 2, 2)
        assert around.values[:, 2] == pytest.approx(features.top(number).values, rel=1e-5)
    # Two files of one name are told apart by the user, and other values by name are refused.
    np.save(tmp_path / "refusal.npy", -vectors[0])
    with pytest.raises(ConfigError, match="has other directions of these names"):
        make_features(str(made.path), FeatureRequest(directions=files, logits=0))


def test_what_has_no_latents_is_refused(made: stored.Stored, tmp_path: Path) -> None:
    dense = stored.build(tmp_path / "dense")
    with pytest.raises(ConfigError, match="name an encoded tap with --tap; there are none"):
        make_features(str(dense.path), FeatureRequest())
    with pytest.raises(
        ConfigError, match="--tap resid_post.0: holds no latents; encoded taps: mlp"
    ):
        make_features(str(made.path), FeatureRequest(tap="resid_post.0"))
    with pytest.raises(
        ConfigError, match="no features of 'mlp_out.1' in .*; there are none: `spile"
    ):
        spile.open(made.path).features("mlp_out.1")
    pooled = stored.build(tmp_path / "pooled", taps=stored.LATENTS, pool="last", **stored.ENCODED)
    with pytest.raises(ConfigError, match="was made with --pool last: its rows stand for several"):
        make_features(str(pooled.path), FeatureRequest())
