"""`--pool`: one row for each span, equal to what numpy makes of the rows of its tokens."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import spile
from chaos.harness import check_refused, check_same, check_sound, run
from spile.check.compare import check
from spile.core.config import Recipe, Runtime
from spile.core.index import ROLES
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.replica import replicate
from spile.objects import LocalObjects
from support import saes, tiny
from support.marks import some

TAPS = "embed,resid_post:all,z:1.h1,mlp_hidden:0,logprob"
TOLERANCE = 2e-5  # of a row's length
OPTIONS: dict[str, Any] = {
    "taps": TAPS, "seq_len": 32, "unit_tokens": 700, "compute_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def recipe(model: Path, corpus: Path) -> Recipe:
    """Most documents are longer than a context, so that spans have parts in several rows."""
    return Recipe(model=str(model), corpus=str(corpus), **OPTIONS)


def made(recipe: Recipe, out: Path, batch_tokens: int = 128, **options: Any) -> spile.Dataset:
    changed = dataclasses.replace(recipe, **options)
    spile.extract(changed, str(out), Runtime(batch_tokens=batch_tokens))
    return spile.open(str(out))


@pytest.fixture(scope="module")
def tokens(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    return made(recipe, tmp_path_factory.mktemp("tokens") / "out")


def pooled_by_numpy(tokens: spile.Dataset, tap: str, index: np.ndarray, by: str) -> np.ndarray:
    """Pool all rows of each document in float64, in the order of an index of documents."""
    every = tokens.index(0, tokens.num_tokens)
    rows = tokens.read(tap).astype(np.float64)
    reduced = {"mean": lambda a: a.mean(axis=0), "max": lambda a: a.max(axis=0)}[by]
    return np.stack([reduced(rows[every["doc"] == doc]) for doc in index["doc"]])


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    flat = (len(wanted), -1)
    gaps = np.linalg.norm((found - wanted).reshape(flat), axis=1)
    lengths = np.linalg.norm(wanted.reshape(flat), axis=1)
    assert (gaps <= TOLERANCE * np.maximum(lengths, np.median(lengths))).all()


@pytest.mark.parametrize("by", some(["mean", "max"], "mean"))
def test_rows_are_numpys_mean_or_max_of_each_documents_rows(
    by: str, recipe: Recipe, tokens: spile.Dataset, tmp_path: Path
) -> None:
    ds = made(recipe, tmp_path / "out", pool=by)
    index = ds.index(0, len(ds))
    every = tokens.index(0, len(tokens))
    docs, counts = np.unique(every["doc"], return_counts=True)
    assert sorted(index["doc"]) == docs.tolist() and len(ds) == len(docs) == 40
    assert (index["count"] == counts[index["doc"]]).all() and not index["span"].any()
    assert not index["start"].any() and (index["offset"] == counts[index["doc"]] - 1).all()
    assert (index["count"] > 64).sum() > 5, "spans of several parts"
    for tap in ds.taps:
        assert ds.stored_dtype(tap) == "float32" and ds.shape(tap) == tokens.shape(tap)
        assert_close(ds.read(tap), pooled_by_numpy(tokens, tap, index, by))
        assert_close(ds.statistics(tap).mean[None], ds.read(tap).reshape(40, -1).mean(axis=0)[None])
    check_sound(tmp_path / "out")
    checked = check(str(tmp_path / "out"), samples=3)
    assert checked.ok and {*checked.taps} == {*ds.taps}


@pytest.mark.full
def test_bits_depend_neither_on_steps_nor_on_who_makes_them(recipe: Recipe, tmp_path: Path) -> None:
    made(recipe, tmp_path / "one", pool="mean")
    made(recipe, tmp_path / "other", batch_tokens=128 * 3, pool="mean")
    check_same(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("by", some(["last", "first"], "last"))
def test_last_and_first_are_rows_of_tokens_unchanged(
    by: str, recipe: Recipe, tokens: spile.Dataset, tmp_path: Path
) -> None:
    ds = made(recipe, tmp_path / "out", pool=by, where="offset > 1 and offset % 3 == 0")
    index, every = ds.index(0, len(ds)), tokens.index(0, len(tokens))
    kept = every[(every["offset"] > 1) & (every["offset"] % 3 == 0)]
    assert sorted(index["doc"]) == np.unique(kept["doc"]).tolist()
    for entry in index:
        offsets = kept["offset"][kept["doc"] == entry["doc"]]
        wanted = offsets.max() if by == "last" else offsets.min()
        assert entry["offset"] == wanted
        assert (entry["start"], entry["count"]) == (offsets.min(), len(offsets))
    rows = [np.flatnonzero((every["doc"] == e["doc"]) & (every["offset"] == e["offset"]))[0]
            for e in index]  # fmt: skip
    for tap in ds.taps:
        np.testing.assert_allclose(ds.read(tap), tokens.read(tap)[rows], rtol=2e-5, atol=2e-5)
    check_sound(tmp_path / "out")
    checked = check(str(tmp_path / "out"), samples=2)
    assert checked.ok and {*checked.taps} == {*ds.taps}


def test_where_chooses_what_is_pooled(
    recipe: Recipe, tokens: spile.Dataset, tmp_path: Path
) -> None:
    ds = made(recipe, tmp_path / "out", taps="resid_post:1", pool="mean", where="offset >= 40")
    index, every = ds.index(0, len(ds)), tokens.index(0, len(tokens))
    rows, chosen = tokens.read("resid_post.1").astype(np.float64), every["offset"] >= 40
    docs = np.unique(every["doc"][chosen])
    assert sorted(index["doc"]) == docs.tolist() and 5 < len(docs) < 40
    assert (index["start"] == 40).all() and (index["count"] == index["offset"] - 39).all()
    wanted = [rows[chosen & (every["doc"] == doc)].mean(axis=0) for doc in index["doc"]]
    assert_close(ds.read("resid_post.1"), np.stack(wanted))


@pytest.mark.full
@pytest.mark.parametrize("by", some(["mean", "max"], "mean"))
def test_latents_are_the_largest_of_all_means_not_means_of_the_largest(
    by: str, recipe: Recipe, tokens: spile.Dataset, tmp_path: Path
) -> None:
    sae = saes.write_sae(tmp_path / "sae", "topk", hook="blocks.1.hook_resid_post")
    ds = made(
        recipe, tmp_path / "out", pool=by, taps="resid_post:1,mlp_hidden:0", encode=str(sae),
        latents=12,
    )  # fmt: skip
    index, every = ds.index(0, len(ds)), tokens.index(0, len(tokens))
    tensors = saes.random_tensors("topk")
    latents = saes.plain_encode(tokens.read("resid_post.1"), tensors, "topk").astype(np.float64)
    reduce = np.mean if by == "mean" else np.max
    wanted = np.stack([reduce(latents[every["doc"] == doc], axis=0) for doc in index["doc"]])
    found = ds.latents("resid_post.1", 0, len(ds))
    least = -np.sort(-wanted, axis=1)[:, 11:12]
    np.testing.assert_allclose(found.dense(), np.where(wanted >= least, wanted, 0), atol=2e-5)
    more = np.count_nonzero(wanted, axis=1) > 12
    assert 0 < more.sum() == ds.statistics("resid_post_latents.1").truncated
    assert_close(ds.read("mlp_hidden.0"), pooled_by_numpy(tokens, "mlp_hidden.0", index, by))
    check_sound(tmp_path / "out")
    checked = check(str(tmp_path / "out"), samples=2)
    assert checked.ok and {*checked.taps} == {"resid_post_latents.1", "mlp_hidden.0"}


@pytest.mark.full
def test_all_latents_are_a_dense_row_in_the_order_of_their_ids(
    recipe: Recipe, tmp_path: Path
) -> None:
    sae = saes.write_sae(tmp_path / "sae", "topk", hook="blocks.1.hook_resid_post")
    given = {"pool": "mean", "taps": "resid_post:1", "encode": str(sae), "max_docs": 12}
    ds = made(recipe, tmp_path / "out", latents="all", **given)
    sparse = made(recipe, tmp_path / "sparse", latents=10_000, **given)
    width = sparse.num_latents("resid_post_latents.1")
    assert ds.taps == ["resid_post_latents.1"] and ds.shape("resid_post_latents.1") == (width,)
    found = ds.read("resid_post_latents.1")
    np.testing.assert_array_equal(found, sparse.latents("resid_post.1", 0, len(sparse)).dense())
    with pytest.raises(
        spile.ConfigError, match=r"rows have all of them.*ds.read\(.resid_post_latents.1"
    ):
        ds.latents("resid_post.1", 0, 1)
    assert spile.extract(Recipe(latents="all"), ds.url).complete, "it is the dataset's own"
    with pytest.raises(spile.DriftError, match="latents"):
        spile.extract(Recipe(latents=5), ds.url)
    with pytest.raises(spile.ConfigError, match="--latents all needs --pool mean or max"):
        made(recipe, tmp_path / "no", latents="all", **{**given, "pool": None})
    check_sound(tmp_path / "out")


@pytest.mark.full
@pytest.mark.parametrize("by", ["mean", "max"])
def test_all_latents_are_those_of_hf_and_can_be_added_and_copied(
    by: str, recipe: Recipe, tmp_path: Path
) -> None:
    sae = saes.write_sae(tmp_path / "sae", "topk", hook="blocks.1.hook_resid_post")
    out = tmp_path / "out"
    made(recipe, out, pool=by, taps="resid_post:1", max_docs=12)
    spile.extract(Recipe(add_taps="mlp_out:0", encode=f"mlp_out:0={sae}", latents="all"), str(out))
    ds = spile.open(str(out))
    assert ds.taps == ["mlp_out_latents.0", "resid_post.1"]
    checked = check(str(out), samples=2)
    assert checked.ok and {*checked.taps} == {*ds.taps}
    replicate(LocalObjects(out), LocalObjects(tmp_path / "copy"))
    compact(LocalObjects(out), LocalObjects(tmp_path / "compacted"))
    for copy in ("copy", "compacted"):
        check_sound(tmp_path / copy)
        np.testing.assert_array_equal(
            spile.open(str(tmp_path / copy)).read("mlp_out_latents.0"), ds.read("mlp_out_latents.0")
        )
    assert run("drop", out, "--taps", "mlp_out:0").code == 0
    assert spile.open(str(out)).taps == ["resid_post.1"]


CHATS = [
    [{"role": "user", "content": f"what is {n} and {n}?"},
     {"role": "assistant", "content": f"it is {2 * n}, and {n} is half of it"}] * (1 + n % 3)
    for n in range(12)
]  # fmt: skip


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, spile.Dataset]:
    """The recipe and the tokens of chats; most have turns that are cut into contexts."""
    folder = tmp_path_factory.mktemp("chats")
    model = tiny.write_model(folder / "model")
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>\n{% endfor %}"
    )
    corpus = folder / "chats.jsonl"
    corpus.write_text("".join(json.dumps({"chat": chat}) + "\n" for chat in CHATS))
    options = {**OPTIONS, "taps": "resid_post:1", "messages": "chat", "seq_len": 48}
    recipe = Recipe(model=str(model), corpus=str(corpus), **options)
    return recipe, made(recipe, folder / "tokens")


@pytest.mark.parametrize(
    ("pool", "role"),
    some([("mean:turn", None), ("last:assistant", "assistant")], ("last:assistant", "assistant")),
)
def test_turns_and_roles_have_their_own_tokens(
    pool: str, role: str | None, chats: tuple[Recipe, spile.Dataset], tmp_path: Path
) -> None:
    recipe, tokens = chats
    ds = made(recipe, tmp_path / "out", pool=pool)
    index, every = ds.index(0, len(ds)), tokens.index(0, len(tokens))
    rows = tokens.read("resid_post.1").astype(np.float64)
    seen = 0
    for doc, chat in enumerate(CHATS):
        own = np.flatnonzero(every["doc"] == doc)
        own = own[np.argsort(every["offset"][own])]
        said = every["flags"][own] & (ROLES["user"] | ROLES["assistant"])
        # (The template writes something between two messages.)
        turns = np.split(own, np.flatnonzero(np.diff(said)) + 1)
        turns = [turn for turn in turns if every["flags"][turn[0]] & (said.max() | ROLES["user"])
                 and not every["flags"][turn[0]] & ROLES["template"]]  # fmt: skip
        assert len(turns) == len(chat)
        if role:
            turns = [np.concatenate([t for t in turns if every["flags"][t[0]] & ROLES[role]])]
        for number, turn in enumerate(turns):
            (row,) = np.flatnonzero((index["doc"] == doc) & (index["span"] == number))
            offsets = every["offset"][turn]
            assert (index["start"][row], index["offset"][row]) == (offsets[0], offsets[-1])
            assert index["count"][row] == len(turn)
            wanted = rows[turn].mean(axis=0) if pool == "mean:turn" else rows[turn[-1]]
            assert_close(ds.read("resid_post.1", int(row), int(row) + 1), wanted[None])
            seen += 1
    assert seen == len(ds)
    check_sound(tmp_path / "out")


@pytest.mark.full
@pytest.mark.parametrize("options", [
    {"pool": "mean:turn"}, {"pool": "max:assistant"}, {"reduce": "mean,cov", "by": "role"},
])  # fmt: skip
def test_what_speakers_say_is_hfs_pooled_in_float64(
    options: dict[str, str], chats: tuple[Recipe, spile.Dataset], tmp_path: Path
) -> None:
    recipe, tokens = chats
    ds = made(recipe, tmp_path / "out", **options)
    checked = check(ds.url, samples=4)
    assert checked.ok and checked.taps["resid_post.1"].error < 2e-5
    if "reduce" in options:
        found, flags = ds.reduced("resid_post.1"), tokens.index(0, len(tokens))["flags"]
        assert found.labels == ("assistant", "user") and found.covariances is not None
        rows = tokens.read("resid_post.1").astype(np.float64)
        for place, label in enumerate(found.labels):
            own = rows[flags & ROLES[label] != 0]
            assert found.counts[place] == len(own)
            assert_close(found.means[place][None], own.mean(axis=0)[None])
            assert_close(found.covariances[place], np.cov(own.T, bias=True))


@pytest.mark.parametrize("kind", some(["jsonl", "parquet"], "parquet"))
def test_a_column_gives_spans_of_characters(
    kind: str, recipe: Recipe, tokens: spile.Dataset, tmp_path: Path
) -> None:
    texts = [json.loads(line)["text"] for line in Path(str(recipe.corpus)).read_text().splitlines()]
    spans: list[Any] = [[[0, 3], [5, min(60, len(t))]] if len(t) > 5 else [] for t in texts]
    spans[3] = [[1, len(texts[3]) + 1]]  # beyond the text: the document is left out
    spans[4] = None
    table = [{"text": t, "at": s} for t, s in zip(texts, spans, strict=True)]
    corpus = tmp_path / f"docs.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(table), corpus)
    else:
        corpus.write_text("".join(json.dumps(row) + "\n" for row in table))
    ds = made(recipe, tmp_path / "out", taps="embed", corpus=str(corpus), pool="mean:at")
    index, every = ds.index(0, len(ds)), tokens.index(0, len(tokens))
    rows = tokens.read("embed").astype(np.float64)
    wanted = [  # (a token is a byte, after BOS)
        (doc, n, begin + 1, end)
        for doc, pairs in enumerate(spans)
        for n, (begin, end) in enumerate(pairs or [] if doc != 3 else [])
    ]
    found = sorted(index[["doc", "span", "start", "offset"]].tolist())
    assert found == wanted and len(found) > 40
    for row, (doc, _, start, end) in enumerate(index[["doc", "span", "start", "offset"]].tolist()):
        own = (every["doc"] == doc) & (every["offset"] >= start) & (every["offset"] <= end)
        assert_close(ds.read("embed", row, row + 1), rows[own].mean(axis=0)[None])
    assert ds.about(3)["skipped"] == "unusable spans" and ds.about(4)["rows"] == 0
    check_sound(tmp_path / "out")
    refused = run("extract", "--model", recipe.model, "--corpus", corpus, "--taps", "embed",
                  "--pool", "mean:spans", "--out", tmp_path / "none")  # fmt: skip
    check_refused(refused, 2, "--pool mean:spans", "no column 'spans'", "at, text")


@pytest.mark.parametrize(("options", "named"), [
    ({"pool": "median"}, ["--pool must be mean, max, last or first", "median"]),
    ({"pool": "mean:"}, ["mean:"]),
    ({"pool": "mean:assistant"}, ["--pool mean:assistant", "holds no chats", "--messages"]),
    ({"pool": "max", "store_dtype": "int8"}, ["--pool max", "int8", "--store-dtype bfloat16"]),
])  # fmt: skip
def test_what_cannot_be_pooled_is_refused_in_one_line(
    options: dict[str, str], named: list[str], recipe: Recipe, tmp_path: Path
) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    refused = run(
        "extract", "--model", recipe.model, "--corpus", recipe.corpus, "--taps", "embed", *flags,
        "--out", tmp_path / "out",
    )  # fmt: skip
    check_refused(refused, 2, *named)
