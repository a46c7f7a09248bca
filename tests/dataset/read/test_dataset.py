"""The reader returns what was written, for any range, and copies only where it must."""

import json
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError, CorruptError, SpileError, StoreError
from spile.core.index import INDEX_DTYPE
from spile.core.tensors import DTYPES_BY_NAME
from spile.dataset import format as fmt
from support import stored, tiny
from support.marks import some

TAP = "resid_post.0"


# Mostly shards of four rows of one tap, and of eight of the other; of one to six where shaped.
PLAIN: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "shard_bytes": 96},
    "bfloat16": {"dtype": "bfloat16", "shard_bytes": 48},
    "float16": {"dtype": "float16", "shard_bytes": 48},
    "shaped": {"taps": stored.SHAPED, "shard_bytes": 24},
}
DECODED: dict[str, dict[str, Any]] = {
    "float8": {"dtype": "float8_e4m3", "shard_bytes": 40},
    "int8": {"dtype": "int8", "shard_bytes": 24},
    "scaled": {"taps": stored.SCALED, "shard_bytes": 24},
    "shaped.zst": {**PLAIN["shaped"], "compress": True},
    "scaled.zst": {"taps": stored.SCALED, "shard_bytes": 24, "compress": True},
}
KINDS = {**PLAIN, **DECODED}
KEPT = "float16", "shaped", "scaled", "scaled.zst"  # every dtype is in one of them


@pytest.fixture(scope="module", params=some(KINDS, *KEPT))
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> stored.Stored:
    return stored.copied(tmp_path_factory.mktemp("stored") / "out", **KINDS[request.param])


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    return stored.copied(tmp_path_factory.mktemp("shaped") / "out", taps=stored.SHAPED)


@pytest.fixture(scope="module", params=["shaped", "scaled.zst"])
def aliased(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> stored.Stored:
    return stored.copied(tmp_path_factory.mktemp("aliased") / "out", **KINDS[request.param])


@pytest.fixture(scope="module", params=["shaped", "scaled.zst"])
def filtered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> stored.Stored:
    """No row of documents 5 and 9, which have two tokens and one, is kept."""
    path = tmp_path_factory.mktemp("filtered") / "out"
    return stored.copied(path, where="pos >= 2", every=2, **KINDS[request.param])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    return stored.copied(tmp_path_factory.mktemp("stored") / "out")


@pytest.fixture(params=some(["float32", "float8", "int8", "scaled.zst"], "float32", "scaled.zst"))
def partial(request: pytest.FixtureRequest, tmp_path: Path) -> stored.Stored:
    """Units 1 and 3 of five are done."""
    return stored.copied(tmp_path / "out", commit=(3, 1), **KINDS[request.param])


def rows_of(source: stored.Stored, units: tuple[int, ...]) -> np.ndarray:
    """Row numbers of some units, in the whole dataset."""
    return np.concatenate([np.arange(source.starts[u], source.starts[u + 1]) for u in units])


# -- what it is ------------------------------------------------------------------------------


def test_it_says_what_it_holds(written: stored.Stored) -> None:
    ds = spile.open(str(written.path))
    infos = {tap: (ds.shape(tap), ds.stored_dtype(tap), ds.aliases(tap)) for tap in ds.taps}
    taps = written.table.taps
    assert infos == {tap: (info.shape, info.dtype, info.aliases) for tap, info in taps.items()}
    assert {tap: ds.width(tap) for tap in ds.taps} == {
        tap: values[0].size for tap, values in written.rows.items()
    }
    assert ds.num_tokens == len(written.index) == 111
    assert ds.num_documents == 8
    assert ds.recipe == written.table.recipe
    assert ds.fingerprint == written.table.fingerprint
    for tap, values in written.rows.items():
        assert ds.dtype(tap) == written.given[tap].dtype
        assert ds.dtype(tap, "stored") == values.dtype
        scaled = ds.stored_dtype(tap) in stored.SCALED_NAMES
        assert ds.dtype(tap, "stored").name == ("float32" if scaled else taps[tap].dtype)


def test_a_row_may_be_a_vector_heads_or_a_single_number(shaped: stored.Stored) -> None:
    ds = spile.open(str(shaped.path))
    assert {tap: ds.shape(tap) for tap in ds.taps} == {
        "resid_post.0": (6,), "q.1": (2, 3), "expert_ids.1": (2,), "logprob": (),
    }  # fmt: skip
    assert {tap: ds.width(tap) for tap in ds.taps} == {
        "resid_post.0": 6, "q.1": 6, "expert_ids.1": 2, "logprob": 1,
    }  # fmt: skip
    assert {tap: ds.dtype(tap, "stored").name for tap in ds.taps} == {
        "resid_post.0": "float32", "q.1": "bfloat16", "expert_ids.1": "int16",
        "logprob": "float32",
    }  # fmt: skip
    assert ds.read("q.1", 3, 5).shape == (2, 2, 3)
    assert ds.read("logprob", 3, 5).shape == (2,)
    assert ds.document(0)["q.1"].shape == (5, 2, 3)


def test_taps_come_in_the_recipes_order(source: stored.Stored) -> None:
    ds = spile.open(str(source.path))
    assert ds.taps == list(ds.recipe.taps) == ["resid_post.0", "mlp_out.1"]


def test_an_unknown_tap_is_named_beside_those_there_are(source: stored.Stored) -> None:
    ds = spile.open(str(source.path))
    asks: list[Callable[[str], object]] = [
        ds.width, ds.shape, ds.dtype, ds.stored_dtype, ds.aliases, ds.name, ds.statistics,
        lambda t: ds.read(t, 0, 1), lambda t: ds.batches([t], 4),
        lambda t: ds.read_into(t, 0, np.zeros((1, 6), np.float32)),
    ]  # fmt: skip
    for ask in asks:
        with pytest.raises(ConfigError, match=r"'resid_post\.9'.* it has ") as caught:
            ask("resid_post.9")
        assert all(tap in str(caught.value) for tap in ds.taps)
    with pytest.raises(ConfigError):
        ds.document(0).read("resid_post.9")


# -- names of other tools --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "tap"),
    [
        ("blocks.0.hook_resid_post", "resid_post.0"),
        ("hidden_states[1]", "resid_post.0"),
        ("blocks.1.attn.q.hook_out", "q.1"),
        ("blocks.1.mlp.hook_expert_indices", "expert_ids.1"),
    ],
)
def test_a_tap_may_be_read_by_another_tools_name(
    aliased: stored.Stored, alias: str, tap: str
) -> None:
    ds = spile.open(str(aliased.path))
    assert alias in ds.aliases(tap)
    assert ds.name(alias) == ds.name(tap) == tap
    assert (ds.shape(alias), ds.width(alias), ds.dtype(alias), ds.aliases(alias)) == (
        ds.shape(tap), ds.width(tap), ds.dtype(tap), ds.aliases(tap),
    )  # fmt: skip
    assert ds.stored_dtype(alias) == ds.stored_dtype(tap) == aliased.table.taps[tap].dtype
    rows = aliased.given[tap]
    assert ds.read(alias, 20, 90).tobytes() == rows[20:90].tobytes()
    out = np.zeros_like(rows[20:90])
    ds.read_into(alias, 20, out)
    assert out.tobytes() == rows[20:90].tobytes()
    assert ds.document(3)[alias].tobytes() == ds.document(3)[tap].tobytes()
    assert np.array_equal(ds.statistics(alias).mean, ds.statistics(tap).mean)
    assert ds.as_stored(alias, rows).tobytes() == ds.as_stored(tap, rows).tobytes()


def test_batches_come_under_the_names_that_were_asked_for(aliased: stored.Stored) -> None:
    ds = spile.open(str(aliased.path))
    both = ds.batches(["hidden_states[1]", "resid_post.0", "blocks.1.attn.hook_q"], 16, seed=3)
    for batch, plain in zip(both, ds.batches(["q.1"], 16, seed=3), strict=True):
        assert batch.keys() == {
            "hidden_states[1]", "resid_post.0", "blocks.1.attn.hook_q", "index",
        }  # fmt: skip
        assert np.array_equal(batch["hidden_states[1]"], batch["resid_post.0"])
        assert np.array_equal(batch["blocks.1.attn.hook_q"], plain["q.1"])
    (alone,) = ds.batches("hidden_states[1]", 1000)
    assert alone["hidden_states[1]"].shape == (111, 6)


def test_another_tools_name_of_a_tap_that_is_not_there_is_refused(shaped: stored.Stored) -> None:
    ds = spile.open(str(shaped.path))
    for alias in ("blocks.1.hook_resid_post", "hidden_states[2]", "hidden_states[1] "):
        with pytest.raises(ConfigError, match="it has resid_post.0, q.1, expert_ids.1, logprob"):
            ds.read(alias, 0, 1)


# -- rows and index --------------------------------------------------------------------------


def test_the_test_data_crosses_shards_and_units(written: stored.Stored) -> None:
    for unit in (0, 1, 3, 4):
        for tap in written.rows:
            assert sum(s.tap == tap for s in written.done(unit).shards) > 1
    assert written.done(2).rows == 0


@pytest.mark.varied
def test_any_range_reads_as_it_was_written(
    written: stored.Stored, pytestconfig: pytest.Config
) -> None:
    ds = spile.open(str(written.path))
    rng = np.random.default_rng(0)
    full = pytestconfig.getoption("--chaos-full")
    ranges = np.sort(rng.integers(0, 112, (60 if full else 20, 2)), axis=1).tolist()
    bounds = [(0, 111), *ranges]
    bounds += [(start, start + 1) for start in range(0, 111, 3 if full else 10)]
    for start, stop in bounds:
        for dtype, rows in ((None, written.given), ("stored", written.rows)):
            for tap, values in rows.items():
                read = ds.read(tap, start, stop, dtype=dtype)
                assert read.dtype == values.dtype
                assert read.shape == (stop - start, *values.shape[1:])
                assert read.tobytes() == values[start:stop].tobytes()
        entries = ds.index(start, stop)
        assert entries.dtype == INDEX_DTYPE
        assert np.array_equal(entries, written.index[start:stop])


@pytest.mark.parametrize(("start", "stop"), [(105, 500), (50, 40), (200, 300), (7, 7)])
def test_ranges_end_where_the_rows_end(source: stored.Stored, start: int, stop: int) -> None:
    ds = spile.open(str(source.path))
    wanted = source.rows[TAP][start:stop]
    assert np.array_equal(ds.read(TAP, start, stop), wanted)
    assert ds.read(TAP, start, stop).shape == wanted.shape
    assert np.array_equal(ds.index(start, stop), source.index[start:stop])


def test_reading_into_a_buffer_gives_the_same_rows(written: stored.Stored) -> None:
    ds = spile.open(str(written.path))
    for tap, values in written.rows.items():
        for start, count in ((0, 111), (3, 1), (25, 60)):
            out = np.zeros((count, *values.shape[1:]), values.dtype)
            ds.read_into(tap, start, out)
            assert out.tobytes() == values[start : start + count].tobytes()


def test_a_buffer_of_another_dtype_is_filled_with_values_rounded_once(
    written: stored.Stored,
) -> None:
    ds = spile.open(str(written.path))
    for tap, values in written.rows.items():
        for dtype in ("float64", "float32", "bfloat16", "float16"):
            spread = np.zeros((60, *values.shape[1:], 2), DTYPES_BY_NAME[dtype])
            out = spread[..., 0]  # not contiguous
            ds.read_into(tap, 25, out)
            assert out.tobytes() == values[25:85].astype(out.dtype).tobytes()


def test_batches_hold_the_rows_of_their_index(written: stored.Stored) -> None:
    ds = spile.open(str(written.path))
    found = list(ds.batches(ds.taps, 10, window=1, seed=4))
    where = {(e["doc"], e["offset"]): row for row, e in enumerate(written.index)}
    entries = np.concatenate([batch["index"] for batch in found])
    rows = np.array([where[e["doc"], e["offset"]] for e in entries])
    assert sorted(rows.tolist()) == list(range(111))
    assert (np.diff(rows) < 0).any()
    for tap, values in written.given.items():
        got = np.concatenate([batch[tap] for batch in found])
        assert (got.dtype, got.shape) == (values.dtype, values.shape)
        assert got.tobytes() == values[rows].tobytes()


def test_what_would_be_read_back_can_be_asked_without_storing(written: stored.Stored) -> None:
    """Values that were read come back unchanged."""
    ds = spile.open(str(written.path))
    for tap, values in written.rows.items():
        again = ds.as_stored(tap, values)
        assert (again.dtype, again.shape) == (values.dtype, values.shape)
        np.testing.assert_allclose(again.astype(float), values.astype(float), rtol=1e-6, atol=0)


def test_of_values_with_fewer_channels_the_first_ones_scales_are_taken(
    aliased: stored.Stored,
) -> None:
    """Attention patterns are only as wide as their context."""
    ds = spile.open(str(aliased.path))
    rows = aliased.rows["q.1"]
    narrow = ds.as_stored("q.1", rows[:, :1, :2])
    assert narrow.tobytes() == ds.as_stored("q.1", rows)[:, :1, :2].tobytes()


@pytest.mark.parametrize("written", some(DECODED, *KEPT[2:]), indirect=True)
def test_rows_that_are_not_stored_as_read_are_the_callers_own(written: stored.Stored) -> None:
    ds = spile.open(str(written.path))
    for shard in written.done(1).shards:
        info = written.table.taps[shard.tap]
        if info.scaled_by is None and not shard.key.endswith(fmt.COMPRESSED):
            continue
        first = written.starts[1] + shard.first
        rows = ds.read(shard.tap, first, first + shard.count)
        rows[...] = 0
        wanted = written.given[shard.tap][first : first + shard.count]
        assert ds.read(shard.tap, first, first + shard.count).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("written", some(PLAIN, *KEPT[:2]), indirect=True)
def test_rows_of_one_shard_are_a_read_only_view_of_the_file(written: stored.Stored) -> None:
    ds = spile.open(str(written.path))
    shard = next(s for s in written.done(1).shards if s.first > 0 and s.count > 1)
    first = written.starts[1] + shard.first
    rows = ds.read(shard.tap, first, first + shard.count, dtype="stored")
    assert isinstance(rows.base, np.ndarray)
    assert isinstance(rows.base.base, mmap.mmap)
    assert np.shares_memory(rows, ds.read(shard.tap, first + 1, first + 2, dtype="stored"))
    assert not rows.flags.writeable
    across = ds.read(shard.tap, first - 1, first + 1, dtype="stored")
    assert not np.shares_memory(rows, across)


@pytest.mark.parametrize(
    "kind",
    some(["float32", "float8", "int8", "shaped.zst", "scaled.zst"], "float32", "scaled.zst"),
)
def test_a_missing_or_damaged_shard_is_named_when_it_is_read(tmp_path: Path, kind: str) -> None:
    source = stored.copied(tmp_path / "out", **KINDS[kind])
    first, second = source.done(0).shards[:2]
    source.objects.delete(first.key)
    path = source.path / second.key
    path.write_bytes(path.read_bytes()[:-1])
    ds = spile.open(str(source.path))
    with pytest.raises(CorruptError, match=first.key):
        ds.read(first.tap, 0, 1)
    with pytest.raises(CorruptError, match=second.key):
        ds.read(second.tap, second.first, second.first + 1)
    last = source.starts[-1]
    assert np.array_equal(ds.read(TAP, last - 1, last), source.rows[TAP][-1:])


# -- documents -------------------------------------------------------------------------------


def test_the_test_data_has_split_documents_and_contexts_out_of_order(
    source: stored.Stored,
) -> None:
    offsets = source.index["offset"][source.index["doc"] == 3]
    assert len(offsets) == 40
    assert (np.diff(offsets) < 0).any()


def test_a_document_is_in_reading_order(written: stored.Stored) -> None:
    ds = spile.open(str(written.path))
    for doc in np.unique(written.index["doc"]).tolist():
        rows = np.flatnonzero(written.index["doc"] == doc)
        rows = rows[np.argsort(written.index["offset"][rows])]
        document = ds.document(doc)
        assert len(document) == len(rows)
        assert document.index["offset"].tolist() == list(range(len(rows)))
        assert np.array_equal(document.index, written.index[rows])
        for tap, values in written.given.items():
            assert document.read(tap).tobytes() == values[rows].tobytes()
            assert document[tap].tobytes() == values[rows].tobytes()
            kept = document.read(tap, dtype="stored")
            assert kept.tobytes() == written.rows[tap][rows].tobytes()


@pytest.mark.parametrize("doc", [4, 6, 7, 11, 1000, -1])
def test_a_document_that_is_not_there_is_said_so(source: stored.Stored, doc: int) -> None:
    with pytest.raises(StoreError, match=f"document {doc} is not in the dataset"):
        spile.open(str(source.path)).document(doc)


# -- filtered rows ---------------------------------------------------------------------------


def test_the_rows_that_were_kept_are_all_there_is(filtered: stored.Stored) -> None:
    ds = spile.open(str(filtered.path))
    everything = np.concatenate(filtered.read)
    assert 0 < ds.num_tokens == len(filtered.index) < len(everything) == 111
    assert ds.num_documents == 8, "documents are counted as they were read"
    assert np.array_equal(ds.index(0, ds.num_tokens), filtered.index)
    assert set(filtered.index["pos"]) == {2, 4, 6}
    for tap, values in filtered.given.items():
        assert ds.read(tap, 0, ds.num_tokens).tobytes() == values.tobytes()
        assert ds.statistics(tap).count == ds.num_tokens
    seen = np.concatenate([batch["index"] for batch in ds.batches(ds.taps, 7)])
    keys = ["doc", "offset"]
    assert np.array_equal(np.sort(seen, order=keys), np.sort(filtered.index, order=keys))


def test_a_document_is_the_rows_that_were_kept_of_it(filtered: stored.Stored) -> None:
    ds = spile.open(str(filtered.path))
    for doc in np.unique(filtered.index["doc"]).tolist():
        rows = np.flatnonzero(filtered.index["doc"] == doc)
        rows = rows[np.argsort(filtered.index["offset"][rows])]
        assert ds.has_document(doc)
        document = ds.document(doc)
        assert np.array_equal(document.index, filtered.index[rows])
        for tap, values in filtered.given.items():
            assert document[tap].tobytes() == values[rows].tobytes()


@pytest.mark.parametrize("doc", [5, 9])
def test_a_document_of_which_nothing_was_kept_is_said_so(filtered: stored.Stored, doc: int) -> None:
    ds = spile.open(str(filtered.path))
    assert doc in np.concatenate(filtered.read)["doc"]
    assert not ds.has_document(doc)
    with pytest.raises(StoreError, match=f"document {doc} is not in .*--where"):
        ds.document(doc)


# -- statistics ------------------------------------------------------------------------------


def test_statistics_are_those_of_all_rows(written: stored.Stored) -> None:
    ds = spile.open(str(written.path))
    for tap, values in written.rows.items():
        wide = values.reshape(111, -1).astype(np.float64)  # each value of a row is a channel
        stats = ds.statistics(tap)
        assert stats.count == 111
        np.testing.assert_allclose(stats.mean, wide.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(stats.variance, wide.var(axis=0), rtol=1e-12)
        assert stats.mean_norm == pytest.approx(np.linalg.norm(wide, axis=1).mean(), rel=1e-12)
        assert stats.max_abs == np.abs(wide).max()
        coded = written.coded.get(tap)
        assert stats.clipped == (coded.clipped.sum() if coded else 0)
        assert (stats.clipped > 0) == (ds.stored_dtype(tap) == "int8"), "the data has some"


# -- finished and not ------------------------------------------------------------------------


def test_an_unfinished_dataset_is_refused_with_advice(partial: stored.Stored) -> None:
    with pytest.raises(StoreError, match="2 of 5 units are done.*partial=True"):
        spile.open(str(partial.path))


def test_a_partial_dataset_reads_the_units_that_are_done(partial: stored.Stored) -> None:
    ds = spile.open(str(partial.path), partial=True)
    rows = rows_of(partial, (1, 3))
    assert ds.num_tokens == len(rows) == 51
    assert np.array_equal(ds.index(0, 51), partial.index[rows])
    assert np.array_equal(ds.read(TAP, 0, 51), partial.rows[TAP][rows])
    assert ds.statistics(TAP).count == 51
    assert len(ds.document(3)) == 40
    with pytest.raises(StoreError, match="document 0"):
        ds.document(0)


@pytest.mark.parametrize("scales", ["measured", "not yet"])
@pytest.mark.parametrize("kind", some(["float32", "float8", "int8", "scaled.zst"], "scaled.zst"))
def test_nothing_done_yet_reads_as_nothing(tmp_path: Path, kind: str, scales: str) -> None:
    source = stored.copied(tmp_path / "out", commit=(), **KINDS[kind])
    if scales == "not yet":
        source.objects.delete(fmt.SCALES)
    ds = spile.open(str(source.path), partial=True)
    assert ds.num_tokens == 0
    assert ds.dtype(TAP) == np.float32
    assert ds.read(TAP, 0, 10).shape == (0, 6)
    assert ds.index(0, 10).shape == (0,)
    assert ds.statistics(TAP).count == 0
    assert list(ds.batches([TAP], 4)) == []


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("commit", [None, (1,)])
@pytest.mark.parametrize("kind", some(["int8", "scaled.zst"], "int8"))
def test_rows_scaled_by_channel_are_not_opened_without_the_scales(
    tmp_path: Path, kind: str, commit: tuple[int] | None, partial: bool
) -> None:
    source = stored.copied(tmp_path / "out", commit=commit, **KINDS[kind])
    if commit is None and partial:
        source.objects.delete(fmt.MANIFEST)
    source.objects.delete(fmt.SCALES)
    reason = "units are done" if commit and not partial else "scales.json: is missing.*int8"
    with pytest.raises(StoreError, match=reason):
        spile.open(str(source.path), partial=partial)


def test_rows_scaled_by_row_need_no_record_of_scales(tmp_path: Path) -> None:
    source = stored.copied(tmp_path / "out", **KINDS["float8"])
    assert fmt.SCALES not in source.listed()
    source.objects.create(fmt.SCALES, b"of no interest")
    ds = spile.open(str(source.path))
    assert ds.read(TAP, 0, 111).tobytes() == source.rows[TAP].tobytes()


@pytest.mark.parametrize("kind", some(["float32", "float8", "int8", "scaled.zst"], "scaled.zst"))
def test_all_records_are_enough_without_the_manifest(tmp_path: Path, kind: str) -> None:
    source = stored.copied(tmp_path / "out", **KINDS[kind])
    source.objects.delete(fmt.MANIFEST)
    ds = spile.open(str(source.path))
    assert np.array_equal(ds.read(TAP, 0, 111), source.rows[TAP])


def test_no_dataset_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no dataset there"):
        spile.open(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("key", ["units.json", "manifest.json", "scales.json"])
def test_a_damaged_record_is_not_read(tmp_path: Path, key: str) -> None:
    source = stored.copied(tmp_path / "out", dtype="int8")
    path = source.path / key
    data = path.read_bytes()
    edited = data.replace(b'"tokens":', b'"tokens":1').replace(b'"ffd"', b'"none"')
    edited = edited.replace(b'"resid_post.0":"', b'"resid_post.0":"AAAA')
    assert edited != data
    path.write_bytes(edited)
    with pytest.raises(CorruptError, match=key):
        spile.open(str(source.path))


def test_a_record_of_no_unit_of_the_table_is_not_read(partial: stored.Stored) -> None:
    text = json.dumps(partial.done(1).to_json()).replace("00000001", "00000099")
    body = {**json.loads(text), "unit": 99}
    partial.objects.create(fmt.CURRENT.done_key(99), fmt.encode_record("done", body))
    try:
        ds = spile.open(str(partial.path), partial=True)
    except SpileError:
        return
    assert ds.num_tokens == 51
    assert len(ds.document(3)) == 40


def test_a_unit_of_another_recipe_is_not_read(partial: stored.Stored) -> None:
    partial.ledger.commit(partial.attempt(0, fingerprint="of another dataset"))
    with pytest.raises(SpileError, match="done/000000/00000000.json"):
        spile.open(str(partial.path), partial=True)


# -- a light import --------------------------------------------------------------------------


def test_reading_imports_no_jax(source: stored.Stored) -> None:
    script = f"""
import sys, spile
assert "numpy" not in sys.modules, "import spile should cost nothing"
ds = spile.open({str(source.path)!r})
ds.read("resid_post.0", 0, 50), ds.index(0, 9), ds.document(3), ds.statistics("mlp_out.1")
next(ds.batches(["resid_post.0"], 8))
heavy = {{"jax", "jaxlib", "torch", "transformers", "tokenizers", "pyarrow"}} & set(sys.modules)
assert not heavy, heavy
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=tiny.environment()
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("start", "stop"), [(-10, 10), (0, -1), (-2, -1)])
def test_rows_are_not_counted_from_the_end(source: stored.Stored, start: int, stop: int) -> None:
    ds = spile.open(str(source.path))
    for read in (lambda: ds.read("resid_post.0", start, stop), lambda: ds.index(start, stop)):
        with pytest.raises(ConfigError, match=rf"rows {start} to {stop}: rows count from 0"):
            read()


def test_a_dataset_a_document_and_statistics_are_short_when_printed(source: stored.Stored) -> None:
    ds = spile.open(str(source.path))
    told = repr(ds)
    assert told.startswith(
        f"<spile.Dataset {ds.url}: {ds.num_tokens:,} rows x 2 taps (resid_post.0"
    )
    assert f"{ds.num_documents} documents, {len(ds.units)} units>" in told
    doc = int(ds.index(0, 1)["doc"][0])
    assert repr(ds.document(doc)).startswith(f"<spile document {doc}: {len(ds.document(doc))} rows")
    statistics = ds.statistics("resid_post.0")
    assert repr(statistics).startswith(f"TapStats(count={statistics.count}, width=6, mean_norm=")
    assert max(map(len, (told, repr(statistics)))) < 400


def test_documents_are_found_by_their_columns(source: stored.Stored) -> None:
    ds = spile.open(str(source.path))
    table = ds.documents().to_pylist()
    doc = next(row["doc"] for row in table if row["tokens"])
    counts = next(row["tokens"] for row in table if row["doc"] == doc)
    assert ds.find(tokens=counts) == [row["doc"] for row in table if row["tokens"] == counts]
    assert ds.find(doc=doc, tokens=counts) == [doc]
    assert ds.find(tokens=-1) == []
    with pytest.raises(ConfigError, match="no column 'topic' of documents"):
        ds.find(topic="law")


def test_batches_can_be_chosen_by_columns_of_documents(tmp_path: Path) -> None:
    source = stored.copied(tmp_path / "out", keep=("topic",))
    ds = spile.open(source.path)
    topics = {row["doc"]: row["topic"] for row in ds.documents().to_pylist()}
    index = ds.index(0, ds.num_tokens)
    wanted = next(topic for topic in topics.values() if topic is not None)
    where = f"pos >= 1 and topic == {wanted!r}"
    of_topic = np.array([topics[int(doc)] == wanted for doc in index["doc"]])
    assert 0 < of_topic.sum() < len(index)
    batches = ds.batches("mlp_out.1", 3, where=where)
    given = np.concatenate([batch["index"] for batch in batches])
    expected = index[of_topic & (index["pos"] >= 1)]
    assert sorted(given.tolist()) == sorted(expected.tolist())
    state = batches.state_dict()
    with pytest.raises(ConfigError, match="this state is of another"):
        ds.batches("mlp_out.1", 3, where=f"topic == {wanted!r}").load_state_dict(state)
    with pytest.raises(ConfigError, match="matches no document"):
        ds.batches("mlp_out.1", 3, where="topic == 'nothing of the kind'")
    with pytest.raises(ConfigError, match="with `and` only"):
        ds.batches("mlp_out.1", 3, where=f"topic == {wanted!r} or pos > 3")


def test_a_mixed_column_compares_its_numbers_with_numbers(
    tmp_path: Path,
) -> None:
    ds = spile.open(stored.copied(tmp_path / "out", keep=("mixed",)).path)
    told = {row["doc"]: row["mixed"] for row in ds.documents().to_pylist()}
    numbers = {doc for doc, value in told.items() if not value.startswith("mixed")}
    given = np.concatenate([b["index"] for b in ds.batches("mlp_out.1", 3, where="mixed >= 0")])
    stored_docs = {*ds.index(0, ds.num_tokens)["doc"].tolist()}
    assert {*given["doc"].tolist()} == numbers & stored_docs < stored_docs


def test_several_datasets_are_not_opened_as_one(source: stored.Stored) -> None:
    paths: Any = [source.path, source.path]
    with pytest.raises(ConfigError, match=r"takes one dataset, got a list: open each"):
        spile.open(paths)
