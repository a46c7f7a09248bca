"""`--reduce`: for each label what numpy makes of the rows of all its tokens, and nothing else."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from chaos.harness import check_refused, check_same, check_sound, run
from spile.check import sampled
from spile.check.compare import check
from spile.core.config import Recipe, Runtime
from spile.dataset.maintain.assemble import merge
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.replica import replicate
from spile.dataset.maintain.shuffle import shuffle
from spile.objects import LocalObjects
from support import saes
from support.marks import some

TAPS = "embed,resid_post:all,z:1.h1,logprob"
TOLERANCE = 1e-6  # of the largest value
OPTIONS: dict[str, Any] = {
    "taps": TAPS, "seq_len": 32, "unit_tokens": 700, "compute_dtype": "float32",
}  # fmt: skip
LABELS = ("red", "blue", None)


@pytest.fixture(scope="module")
def labelled(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus with columns; every third document has no label, every fifth no month."""
    path = tmp_path_factory.mktemp("labelled") / "docs.jsonl"
    lines = [json.loads(line) for line in corpus.read_text().splitlines()]
    more = [
        {"label": LABELS[n % 3], "year": 1990 + n % 2, "month": 1 + n % 2 if n % 5 else None}
        for n in range(len(lines))
    ]
    path.write_text(
        "".join(json.dumps({**a, **b}) + "\n" for a, b in zip(lines, more, strict=True))
    )
    return path


@pytest.fixture(scope="module")
def recipe(model: Path, labelled: Path) -> Recipe:
    return Recipe(model=str(model), corpus=str(labelled), **OPTIONS)


def made(recipe: Recipe, out: Path, batch_tokens: int = 128, **options: Any) -> spile.Dataset:
    changed = dataclasses.replace(recipe, **options)
    spile.extract(changed, str(out), Runtime(batch_tokens=batch_tokens))
    return spile.open(str(out))


@pytest.fixture(scope="module")
def tokens(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    return made(recipe, tmp_path_factory.mktemp("tokens") / "out", keep="label,year,month")


def labels_of(tokens: spile.Dataset, *names: str) -> list[Any]:
    """The label of each token."""
    docs = tokens.index(0, len(tokens))["doc"]
    columns = [tokens.columns(name)[docs].tolist() for name in names]
    return columns[0] if len(names) == 1 else [*zip(*columns, strict=True)]


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == np.float64 and found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max()


def test_means_and_variances_are_numpys_of_each_labels_rows(
    recipe: Recipe, tokens: spile.Dataset, tmp_path: Path
) -> None:
    ds = made(recipe, tmp_path / "out", reduce="mean,var", by="label")
    said = np.array(labels_of(tokens, "label"), object)
    for tap in tokens.taps:
        rows, found = tokens.read(tap).astype(np.float64), ds.reduced(tap)
        assert found.labels == ("blue", "red") and found.variances is not None
        for label, count, mean, variance in zip(
            found.labels, found.counts, found.means, found.variances, strict=True
        ):
            own = rows[said == label]
            assert count == len(own)
            assert_close(mean, own.mean(axis=0))
            assert_close(variance, own.var(axis=0))
            assert (found[label] == mean).all()
    direction = spile.direction(ds, "red", "blue", "resid_post.1")
    dense = spile.direction(tokens, "red", "blue", "resid_post.1", by="label", over="tokens")
    np.testing.assert_allclose(direction, dense, rtol=1e-3, atol=1e-6)
    assert direction.rows == dense.rows and f"'red' ({dense.rows['red']:,} tokens)" in repr(
        direction
    )
    assert (
        spile.direction(ds, "red", "blue", "resid_post.1", by="label").values == direction
    ).all()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"whiten": True}, "holds no covariances.*--reduce mean,cov"),
        ({"over": "documents"}, "sums by label"),
        ({"by": "year"}, "sums by label"),
        ({"where": "pos"}, "sums by label"),
    ]
    for options, why in refused:
        with pytest.raises(spile.ConfigError, match=why):
            spile.direction(ds, "red", "blue", "resid_post.1", **options)
    with pytest.raises(spile.ConfigError, match="second moments need --reduce mean,cov"):
        _ = ds.reduced("embed").second_moments
    assert ds.num_units == tokens.num_units > 2 and len(ds) == 2 * ds.num_units
    with pytest.raises(spile.ConfigError, match=r"holds sums by label.*ds\.reduced\('embed'\)"):
        ds.pooled("embed")
    check_sound(tmp_path / "out")


def test_covariances_are_numpys_and_whiten_a_direction(
    recipe: Recipe, tokens: spile.Dataset, tmp_path: Path
) -> None:
    ds = made(recipe, tmp_path / "out", reduce="mean,cov", by="label")
    said = np.array(labels_of(tokens, "label"), object)
    for tap in tokens.taps:
        found = ds.reduced(tap)
        assert found.means.shape == (2, *tokens.shape(tap)) and found.covariances is not None
        assert found.variances is not None and found.variances.shape == found.means.shape
        assert ds.statistics(tap).mean.shape == (tokens.width(tap),), "of the means alone"
        for place, label in enumerate(found.labels):
            rows = tokens.read(tap)[said == label].astype(np.float64)
            flat = rows.reshape(len(rows), -1)
            assert_close(found[label], rows.mean(axis=0))
            assert_close(found.variances[place], rows.var(axis=0))
            assert_close(found.covariances[place], np.atleast_2d(np.cov(flat.T, bias=True)))
            assert_close(found.second_moments[place], flat.T @ flat / len(flat))
    white = spile.direction(ds, "red", "blue", "resid_post.1", whiten=True)
    dense = spile.direction(
        tokens, "red", "blue", "resid_post.1", by="label", over="tokens", whiten=True
    )
    assert white.shrinkage is not None and 0 < white.shrinkage < 0.1
    cosine = white @ dense.values / np.linalg.norm(white) / np.linalg.norm(dense)
    assert cosine > 0.999, "they are shrunk a little differently"
    with pytest.raises(spile.ConfigError, match="holds sums by label.*leave out normalize"):
        next(ds.batches("resid_post.1", 2, normalize="std"))
    check_refused(run("serve", tmp_path / "out"), 2, "holds covariances by label", "ds.reduced")
    check_sound(tmp_path / "out")


@pytest.mark.full
def test_a_covariance_with_another_tap_is_numpys_of_both_side_by_side(
    recipe: Recipe, tokens: spile.Dataset, tmp_path: Path
) -> None:
    ds = made(recipe, tmp_path / "out", taps="embed,resid_post:0", reduce="mean,cov:resid_post.1")
    assert ds.taps == ["embed", "resid_post.0"] and ds.recipe.pool == "reduce mean,cov:resid_post.1"
    last = tokens.read("resid_post.1").astype(np.float64)
    for tap in ds.taps:
        both, found = np.concatenate([tokens.read(tap), last], axis=1), ds.reduced(tap)
        assert found.covariances is not None
        assert_close(found.means, both.mean(axis=0)[None])
        assert_close(found.covariances, np.cov(both.T, bias=True)[None])
    checked = check(ds.url, samples=2)
    assert checked.ok and max(tap.error for tap in checked.taps.values()) < 2e-5
    check_sound(tmp_path / "out")
    refused = [
        ("embed,resid_post:1", "cov:resid_post.1", "leave resid_post.1 out of --taps"),
        ("embed", "cov:resid_post.7", "layer 7 does not exist"),
        ("embed", "cov:z.1.h0", "none of"),
        ("embed", "cov:logits.0", "--reduce"),
    ]
    for taps, reduce, why in refused:
        with pytest.raises(spile.ConfigError, match=why):
            made(recipe, tmp_path / "no", taps=taps, reduce=reduce)


@pytest.mark.full
@pytest.mark.parametrize("reduce", ["mean", "mean,var", "mean,cov"])
def test_check_recomputes_whole_units(
    reduce: str, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = made(recipe, tmp_path / "out", taps="resid_post:1,logprob", reduce=reduce, by="label")
    checked = check(ds.url, samples=2)
    assert checked.ok and {*checked.taps} == {*ds.taps} and checked.documents > 2
    assert max(tap.error for tap in checked.taps.values()) < 2e-5
    for shard in sorted((tmp_path / "out/attempts").rglob("resid_post.1*")):
        data = bytearray(shard.read_bytes())
        data[-8:] = np.float64(np.frombuffer(data[-8:])[0] * 1.5 + 0.1).tobytes()
        shard.write_bytes(data)  # (the last channel's mean, or variance)
    wrong = check(ds.url, samples=2)
    assert not wrong.taps["resid_post.1"].ok and wrong.taps["logprob"].ok
    monkeypatch.setattr(sampled, "_MOST_TOKENS", 100)
    with pytest.raises(spile.ConfigError, match=r"the smallest has \d+ tokens.*--unit-tokens 50"):
        check(ds.url)


@pytest.mark.parametrize(("by", "labels"), [
    ("label,year", [("blue", 1990), ("blue", 1991), ("red", 1990), ("red", 1991)]),
    ("month", [1, 2]),
    (None, [None]),
])  # fmt: skip
def test_labels_are_of_several_columns_or_of_none(
    by: str | None, labels: list[Any], recipe: Recipe, tokens: spile.Dataset, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"taps": "resid_post:1", "where": "pos >= 2"}
    ds = made(recipe, tmp_path / "out", reduce="mean", by=by, **options)
    found, kept = ds.reduced("resid_post.1"), tokens.index(0, len(tokens))["pos"] >= 2
    assert [*found.labels] == labels and found.variances is None
    assert [*map(type, found.labels)] == [*map(type, labels)], "whole numbers stay whole"
    rows = tokens.read("resid_post.1").astype(np.float64)
    said = labels_of(tokens, *by.split(",")) if by else [None] * len(rows)
    for label, mean in zip(labels, found.means, strict=True):
        assert_close(mean, rows[kept & np.array([each == label for each in said])].mean(axis=0))


@pytest.mark.full
def test_sums_have_the_same_bits_however_they_are_made(recipe: Recipe, tmp_path: Path) -> None:
    options: dict[str, Any] = {"reduce": "mean,var", "by": "label"}
    made(recipe, tmp_path / "one", **options)
    made(recipe, tmp_path / "other", batch_tokens=128 * 3, **options)
    check_same(tmp_path / "one", tmp_path / "other")
    made(recipe, tmp_path / "one", **options)  # the same command again has nothing to do
    other = dataclasses.replace(recipe, reduce="mean", by="year")
    with pytest.raises(spile.DriftError, match="reduce mean,var by label"):
        spile.extract(other, str(tmp_path / "one"))


@pytest.mark.full
def test_sums_grow_with_the_dataset_and_with_taps(recipe: Recipe, tmp_path: Path) -> None:
    whole = made(recipe, tmp_path / "whole", reduce="mean,var", by="label")
    part = dataclasses.replace(recipe, taps="resid_post:0")
    made(part, tmp_path / "out", reduce="mean,var", by="label", max_docs=25)
    spile.extract(Recipe(more=True, max_docs=40), str(tmp_path / "out"))
    for tap in ("resid_post:1", "embed"):
        assert run("extract", "--out", tmp_path / "out", "--add-taps", tap).code == 0
    assert run("drop", tmp_path / "out", "--taps", "embed").code == 0
    grown = spile.open(str(tmp_path / "out"))
    assert grown.taps == ["resid_post.0", "resid_post.1"]
    for tap in ("resid_post.0", "resid_post.1"):
        found, wanted = grown.reduced(tap), whole.reduced(tap)
        assert found.labels == wanted.labels and (found.counts == wanted.counts).all()
        assert_close(found.means, wanted.means)
        assert found.variances is not None and wanted.variances is not None
        assert_close(found.variances, wanted.variances)
    check_sound(tmp_path / "out")


@pytest.mark.full
def test_sums_are_copied_merged_shuffled_dropped_and_made_beside_tokens(
    recipe: Recipe, tokens: spile.Dataset, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"taps": "resid_post:0,embed", "reduce": "mean,var", "by": "label"}
    whole = made(recipe, tmp_path / "whole", **options)
    source = LocalObjects(tmp_path / "whole")
    places = {
        name: LocalObjects(tmp_path / name) for name in ("copy", "compacted", "merged", "shuffled")
    }
    replicate(source, places["copy"])
    compact(source, places["compacted"])
    second = tmp_path / "second.jsonl"
    second.write_text(Path(str(recipe.corpus)).read_text().replace('"text": "', '"text": "again '))
    other = made(recipe, tmp_path / "other", corpus=str(second), **options)
    merge([source, LocalObjects(tmp_path / "other")], places["merged"])
    shuffle(source, places["shuffled"], seed=1)
    for name in places:
        check_sound(tmp_path / name)
        ds = spile.open(str(tmp_path / name))
        found, parts = ds.reduced("resid_post.0"), [whole.reduced("resid_post.0")]
        parts += [other.reduced("resid_post.0")] if name == "merged" else []
        assert found.labels == ("blue", "red")
        assert (found.counts == sum(part.counts for part in parts)).all()
        for label in found.labels:
            weighed = sum(part.counts[part.labels.index(label)] * part[label] for part in parts)
            assert_close(found[label], weighed / found.counts[found.labels.index(label)])
    spile.extract(
        Recipe(like=tokens.url, taps="resid_post:0", reduce="mean", by="label"),
        str(tmp_path / "beside"),
    )
    beside = spile.open(str(tmp_path / "beside"))
    assert_close(beside.reduced("resid_post.0").means, whole.reduced("resid_post.0").means)


@pytest.mark.full
def test_a_splice_changes_what_is_reduced(recipe: Recipe, tmp_path: Path) -> None:
    given: dict[str, Any] = {"taps": "resid_post:2", "splice": "zero:mlp_out.1", "max_docs": 20}
    rows = made(recipe, tmp_path / "tokens", **given).read("resid_post.2").astype(np.float64)
    ds = made(recipe, tmp_path / "out", reduce="moments", where="pos >= 1", **given)
    kept = spile.open(str(tmp_path / "tokens")).index(0, len(rows))["pos"] > 0
    found = ds.reduced("resid_post.2")
    assert_close(found.means[0], rows[kept].mean(axis=0))
    assert_close(found.second_moments[0], rows[kept].T @ rows[kept] / kept.sum())
    assert check(ds.url, samples=2).ok


@pytest.mark.full
@pytest.mark.parametrize("weights", ["resident", "host", "disk"])
def test_sums_are_the_same_wherever_the_weights_are(
    weights: str, recipe: Recipe, tokens: spile.Dataset, tmp_path: Path
) -> None:
    changed = dataclasses.replace(recipe, taps="resid_post:1", reduce="mean,cov", by="label")
    spile.extract(changed, str(tmp_path / "out"), Runtime(batch_tokens=128, weights=weights))
    found = spile.open(str(tmp_path / "out")).reduced("resid_post.1")
    said = np.array(labels_of(tokens, "label"), object)
    assert found.covariances is not None
    for place, label in enumerate(found.labels):
        own = tokens.read("resid_post.1")[said == label].astype(np.float64)
        assert_close(found.covariances[place], np.cov(own.T, bias=True))


def test_latents_are_not_reduced(recipe: Recipe, tmp_path: Path) -> None:
    sae = saes.write_sae(tmp_path / "sae", width=32, latents=64)
    with pytest.raises(spile.ConfigError, match="latents are not reduced by label; leave out --en"):
        made(recipe, tmp_path / "out", taps="resid_post:1", reduce="mean", encode=str(sae))


@pytest.mark.parametrize(("options", "named"), [
    ({"reduce": "median"}, ["--reduce 'median'", "count, mean, var, cov"]),
    ({"by": "label"}, ["--by needs --reduce"]),
    ({"reduce": "mean", "by": "label,label"}, ["--by 'label,label'", "once"]),
    ({"reduce": "mean", "pool": "max"}, ["--pool and --reduce exclude each other"]),
    ({"reduce": "mean", "store_dtype": "int8"}, ["float64", "leave out --store-dtype"]),
    ({"reduce": "mean", "by": "role"}, ["--reduce mean --by role", "holds no chats"]),
    ({"reduce": "mean", "by": "colour"}, ["no 'colour'", "--keep or --by"]),
])  # fmt: skip
def test_what_cannot_be_reduced_is_refused_in_one_line(
    options: dict[str, str], named: list[str], recipe: Recipe, tmp_path: Path
) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    refused = run(
        "extract", "--model", recipe.model, "--corpus", recipe.corpus, "--taps", "embed", *flags,
        "--out", tmp_path / "out",
    )  # fmt: skip
    check_refused(refused, 2, *named)


@pytest.mark.parametrize("reduce", some(["mean,var", "mean,cov"], "mean,cov"))
def test_a_plan_counts_sums_in_float64(reduce: str, recipe: Recipe, tmp_path: Path) -> None:
    made(recipe, tmp_path / "out", taps="resid_post:1", reduce=reduce, by="label")
    flags = [
        "--model", recipe.model, "--corpus", recipe.corpus, "--taps", "resid_post:1", "--reduce",
        reduce, "--by", "label", "--seq-len", 32, "--unit-tokens", 700, "--out",
        tmp_path / "none", "--exact", "--calibrate", "off",
    ]  # fmt: skip
    planned = run("plan", *flags)
    assert planned.code == 0, planned.err
    (told,) = [line for line in planned.out.splitlines() if line.startswith("to store")]
    files = [path for path in (tmp_path / "out/attempts").rglob("*") if path.is_file()]
    assert f" as float64 = {sum(path.stat().st_size for path in files):,} bytes" in told
    assert "  as " not in planned.out and "--compress" not in planned.out


def test_rows_are_not_sums(tokens: spile.Dataset) -> None:
    with pytest.raises(spile.ConfigError, match="holds rows, not sums of --reduce"):
        tokens.reduced("embed")
