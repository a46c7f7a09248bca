"""The unit writer puts exact rows into shards of bounded size, or leaves nothing."""

import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash

from spile.core.errors import StoreError
from spile.core.index import INDEX_DTYPE
from spile.dataset.codec.shard import ShardWriter, open_tensor, read_shard_header
from spile.dataset.format import Done, TapInfo, decode_record, encode_record
from spile.dataset.write.unit_writer import UnitWriter, unit_bytes
from spile.objects import LocalObjects, LocalStream
from support import stored

DESCRIBED: dict[str, Any] = {
    "table": {"doc": np.arange(3)},
    "fingerprint": "f", "made_from": "", "tokens": 30, "documents": 1, "contexts": 1, "skipped": {},
    "text_digest": "1", "made_by": {},
}  # fmt: skip
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PAIR = {"a": TapInfo((2,), "bfloat16")}


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


def index_of(rows: int) -> np.ndarray:
    return stored.make_index(np.random.default_rng(0), 0, [rows], 8)


def write(
    objects: LocalObjects, rows: dict[str, np.ndarray], shard_bytes: int, pieces: int = 5
) -> Done:
    count = len(next(iter(rows.values())))
    taps = {tap: TapInfo(values.shape[1:], values.dtype.name) for tap, values in rows.items()}
    writer = UnitWriter(objects, 3, index_of(count), taps, shard_bytes)
    for tap, values in rows.items():
        for at in range(0, count, pieces):
            writer.write(tap, values[at : at + pieces])
    return writer.finish(**DESCRIBED)


def random_rows(count: int, width: int, dtype: np.dtype[Any] = BFLOAT16) -> np.ndarray:
    return np.random.default_rng(width).standard_normal((count, width)).astype(dtype)


@pytest.mark.parametrize("pieces", [1, 3, 100])
@pytest.mark.parametrize("shard_bytes", [1, 48, 50, 4096])
def test_shards_hold_the_rows_in_order_and_no_more_bytes_than_asked(
    objects: LocalObjects, shard_bytes: int, pieces: int
) -> None:
    rows = {"resid_post.0": random_rows(23, 8), "mlp_out.1": random_rows(23, 3)}
    done = write(objects, rows, shard_bytes, pieces)
    for tap, values in rows.items():
        shards = [shard for shard in done.shards if shard.tap == tap]
        row_bytes = values.shape[1] * 2
        per_shard = max(1, shard_bytes // row_bytes)
        assert len(shards) == -(-23 // per_shard)
        assert [s.count for s in shards[:-1]] == [min(23, per_shard)] * (len(shards) - 1)
        read = []
        for shard in shards:
            info = read_shard_header(objects, shard.key)[tap]
            assert info.stop - info.start == shard.count * row_bytes
            read.append(open_tensor(objects, shard.key, info))
        assert np.concatenate(read).tobytes() == values.tobytes()


@pytest.mark.parametrize("pieces", [1, 4, 100])
@pytest.mark.parametrize("shard_bytes", [1, 50, 4096])
@pytest.mark.parametrize("tap", stored.SHAPED)
def test_rows_of_any_shape_and_dtype_keep_it(
    objects: LocalObjects, tap: str, shard_bytes: int, pieces: int
) -> None:
    info = stored.make_table(taps=stored.SHAPED).taps[tap]
    rows = stored.random_rows(np.random.default_rng(1), 23, info)
    done = write(objects, {tap: rows}, shard_bytes, pieces)
    assert info.row_bytes == rows[0].nbytes
    per_shard = min(23, max(1, shard_bytes // rows[0].nbytes))
    read = []
    for shard in done.shards:
        found = read_shard_header(objects, shard.key)[tap]
        assert found.shape == (shard.count, *info.shape)
        assert found.dtype.name == info.dtype
        assert shard.count <= per_shard
        read.append(open_tensor(objects, shard.key, found))
    assert np.concatenate(read).tobytes() == rows.tobytes()


# -- scales and compression ------------------------------------------------------------------


def coded_rows(info: TapInfo, count: int = 23) -> stored.Coded:
    values = np.random.default_rng(5).standard_normal((count, *info.shape)) * 3 + 1
    return stored.code(values.astype(np.float32), info)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("pieces", [1, 3, 7, 100])
@pytest.mark.parametrize("shard_bytes", [1, 50])
@pytest.mark.parametrize("shape", [(2, 3), ()])
def test_scales_of_rows_go_into_the_shard_of_their_rows(
    objects: LocalObjects, shape: tuple[int, ...], shard_bytes: int, pieces: int, compress: bool
) -> None:
    info = TapInfo(shape, "float8_e4m3")
    coded = coded_rows(info)
    writer = UnitWriter(objects, 3, index_of(23), {"a": info}, shard_bytes, compress=compress)
    for at in range(0, 23, pieces):
        scales = coded.scale[at : at + pieces].copy()
        writer.write("a", coded.codes[at : at + pieces], scales)
        scales[:] = -1  # the buffer is the caller's again
    done = writer.finish(**DESCRIBED)
    per_shard = max(1, shard_bytes // (info.width + 4))
    assert [s.count for s in done.shards[:-1]] == [min(23, per_shard)] * (len(done.shards) - 1)
    for shard in done.shards:
        assert shard.key.endswith(".safetensors.zst" if compress else ".safetensors")
        header = read_shard_header(objects, shard.key)
        assert {n: (i.dtype.name, i.shape) for n, i in header.items()} == {
            "a": ("float8_e4m3fn", (shard.count, *shape)),
            "a/scale": ("float32", (shard.count,)),
        }
        rows = slice(shard.first, shard.first + shard.count)
        for name, wanted in (("a", coded.codes), ("a/scale", coded.scale)):
            found = open_tensor(objects, shard.key, header[name])[:]
            assert found.tobytes() == wanted[rows].tobytes()


@pytest.mark.parametrize("dtype", ["float8_e4m3", "int8", "bfloat16"])
def test_rows_come_with_scales_exactly_where_each_has_one(
    objects: LocalObjects, dtype: str
) -> None:
    info = TapInfo((2,), dtype)
    rows = np.zeros((9, 2), info.storage)
    by_row = dtype == "float8_e4m3"
    writer = UnitWriter(objects, 0, index_of(9), {"a": info}, 1000)
    with pytest.raises(AssertionError, match=f"a: scaled by {info.scaled_by}"):
        writer.write("a", rows, None if by_row else np.ones(9, np.float32))
    writer.discard()
    assert list(objects.list()) == []
    writer = UnitWriter(objects, 0, index_of(9), {"a": info}, 1000)
    writer.write("a", rows, np.ones(9, np.float32) if by_row else None)
    assert len(writer.finish(**DESCRIBED).shards) == 1


@pytest.mark.parametrize("shape", [(8,), (10,), (0,), (9, 1), (3, 3), ()])
@pytest.mark.parametrize("shard_bytes", [18, 1000])
def test_as_many_scales_as_rows_are_expected(
    objects: LocalObjects, shape: tuple[int, ...], shard_bytes: int
) -> None:
    info = TapInfo((2,), "float8_e4m3")
    writer = UnitWriter(objects, 0, index_of(9), {"a": info}, shard_bytes)
    with pytest.raises(AssertionError, match="a: scales of"):
        writer.write("a", np.zeros((9, 2), info.storage), np.ones(shape, np.float32))
    writer.discard()
    assert list(objects.list()) == []


def test_only_rows_are_compressed(objects: LocalObjects) -> None:
    rows = {"a": random_rows(400, 8), "b": random_rows(400, 2)}
    taps = {tap: TapInfo(values.shape[1:], "bfloat16") for tap, values in rows.items()}
    writer = UnitWriter(objects, 3, index_of(400), taps, 1 << 20, compress=True)
    for tap, values in rows.items():
        writer.write(tap, values)
    done = writer.finish(**DESCRIBED)
    assert [s.key.endswith(".zst") for s in done.files()] == [True, True, *[False] * 3]
    for file in done.files():
        data = objects.get(file.key)
        assert (file.bytes, file.digest) == (len(data), xxhash.xxh3_128_hexdigest(data))
    assert done.shards[0].bytes < 4096 + rows["a"].nbytes, (
        "the size is that of the bytes, not of the decoded values"
    )


@pytest.mark.parametrize("written", [0, 1, 5, 9])
def test_discard_leaves_nothing_of_compressed_rows(objects: LocalObjects, written: int) -> None:
    writer = UnitWriter(objects, 3, index_of(9), PAIR, 12, compress=True)
    writer.write("a", random_rows(written, 2))
    writer.discard()
    assert list(objects.list()) == []


# -- whole units -----------------------------------------------------------------------------


def test_taps_of_one_unit_may_differ_in_shape_and_dtype(objects: LocalObjects) -> None:
    table, rng = stored.make_table([[12]], stored.SHAPED), np.random.default_rng(2)
    rows = {tap: stored.random_rows(rng, 12, info) for tap, info in table.taps.items()}
    done, writer = stored.write_unit(objects, table, 0, index_of(12), rows, 40)
    found = {shard.tap: read_shard_header(objects, shard.key)[shard.tap] for shard in done.shards}
    assert {tap: (i.shape[1:], i.dtype.name) for tap, i in found.items()} == {
        tap: (info.shape, info.dtype) for tap, info in table.taps.items()
    }
    assert {tap: len(stats.mean) for tap, stats in writer.stats.items()} == {
        "resid_post.0": 6, "q.1": 6, "expert_ids.1": 2, "logprob": 1,
    }  # fmt: skip


def test_the_record_describes_every_file(objects: LocalObjects) -> None:
    done = write(objects, {"a": random_rows(10, 4), "b": random_rows(10, 2)}, 40)
    assert {file.key for file in done.files()} == set(objects.list())
    for file in done.files():
        data = objects.get(file.key)
        assert (file.bytes, file.digest) == (len(data), xxhash.xxh3_128_hexdigest(data))
    # the audit on reading accepts it
    body = decode_record("k", encode_record("done", done.to_json()), "done")
    assert Done.from_json("k", body) == done


def test_the_index_and_the_statistics_are_stored_as_given(objects: LocalObjects) -> None:
    index, rows = index_of(10), random_rows(10, 4, np.dtype(np.float32))
    writer = UnitWriter(objects, 0, index, {"a": TapInfo((4,), "float32")}, 100)
    writer.stats["a"].merge(stored.describe(rows))
    writer.write("a", rows)
    done = writer.finish(**DESCRIBED)
    header = read_shard_header(objects, done.index.key)
    for name in index.dtype.names or ():
        assert np.array_equal(open_tensor(objects, done.index.key, header[name]), index[name])
    statistics = read_shard_header(objects, done.statistics.key)
    mean = open_tensor(objects, done.statistics.key, statistics["a/mean"])
    assert np.array_equal(mean, writer.stats["a"].mean)


def test_a_unit_without_rows_has_no_shards(objects: LocalObjects) -> None:
    done = write(objects, {"a": random_rows(0, 4)}, 40)
    assert (done.rows, done.shards) == (0, ())
    assert {*objects.list()} == {done.index.key, done.statistics.key, done.documents_table.key}


def test_two_attempts_at_a_unit_share_no_key(objects: LocalObjects) -> None:
    first, second = (write(objects, {"a": random_rows(5, 2)}, 8) for _ in range(2))
    assert first.attempt != second.attempt
    assert not {f.key for f in first.files()} & {f.key for f in second.files()}


@pytest.mark.parametrize("missing", ["a", "b"])
def test_a_unit_with_a_row_missing_cannot_be_finished(objects: LocalObjects, missing: str) -> None:
    taps = {**PAIR, "b": TapInfo((3,), "bfloat16")}
    writer = UnitWriter(objects, 0, index_of(9), taps, 10)
    for tap, width in (("a", 2), ("b", 3)):
        writer.write(tap, random_rows(9 - (tap == missing), width))
    with pytest.raises(AssertionError, match=missing):
        writer.finish(**DESCRIBED)
    writer.discard()
    assert list(objects.list()) == []


class FewStreams(LocalObjects):
    """Stops a writer that would never end."""

    streams = 0

    def stream(self, key: str) -> LocalStream:
        self.streams += 1
        if self.streams > 50:
            raise RuntimeError("the writer makes shards without end")
        return super().stream(key)


def test_a_row_too_many_is_refused(tmp_path: Path) -> None:
    objects = FewStreams(tmp_path)
    for at_once in (True, False):
        writer = UnitWriter(objects, 0, index_of(9), PAIR, 12)
        with pytest.raises(AssertionError):
            if at_once:
                writer.write("a", random_rows(10, 2))
            else:
                writer.write("a", random_rows(9, 2))
                writer.write("a", random_rows(1, 2))
        writer.discard()


@pytest.mark.parametrize(
    "rows",
    [
        random_rows(9, 3),
        random_rows(9, 1),
        random_rows(9, 2, np.dtype(np.float16)),
        random_rows(9, 2, np.dtype(np.float32)),
    ],
    ids=["wide", "narrow", "float16", "float32"],
)
def test_rows_of_another_width_or_dtype_are_refused(
    objects: LocalObjects, rows: np.ndarray
) -> None:
    writer = UnitWriter(objects, 0, index_of(9), PAIR, 1000)
    with pytest.raises(AssertionError):
        writer.write("a", rows)
        writer.finish(**DESCRIBED)
    writer.discard()
    assert list(objects.list()) == []


@pytest.mark.parametrize(
    ("info", "shape"),
    [
        (TapInfo((2, 3), "float32"), (9, 6)),
        (TapInfo((6,), "float32"), (9, 2, 3)),
        (TapInfo((2, 3), "float32"), (9, 3, 2)),
        (TapInfo((), "float32"), (9, 1)),
        (TapInfo((1,), "float32"), (9,)),
        (TapInfo((2,), "int16"), (9, 2)),
    ],
)
def test_as_many_values_in_another_shape_are_refused(
    objects: LocalObjects, info: TapInfo, shape: tuple[int, ...]
) -> None:
    writer = UnitWriter(objects, 0, index_of(9), {"a": info}, 1000)
    with pytest.raises(AssertionError, match="a: float32 rows"):
        writer.write("a", np.zeros(shape, np.float32))
    writer.discard()
    assert list(objects.list()) == []


@pytest.mark.parametrize("written", [0, 1, 5, 9])
def test_discard_leaves_nothing(objects: LocalObjects, written: int) -> None:
    kept = write(objects, {"a": random_rows(4, 2)}, 8)
    writer = UnitWriter(objects, 3, index_of(9), PAIR, 12)
    writer.write("a", random_rows(written, 2))
    writer.discard()
    assert set(objects.list()) == {file.key for file in kept.files()}


def test_a_finished_attempt_can_be_discarded(objects: LocalObjects) -> None:
    kept = write(objects, {"a": random_rows(4, 2)}, 8)
    table = stored.make_table([[9]], {"a": 2}, "bfloat16")
    rows = {"a": random_rows(9, 2)}
    _, writer = stored.write_unit(objects, table, 0, index_of(9), rows, 12)
    writer.discard()
    assert set(objects.list()) == {file.key for file in kept.files()}


@pytest.mark.parametrize("runs", [[(0, 7), (7, 3), (10, 0)], [(0, 0), (0, 10)], [(0, 10)]])
def test_parts_of_a_unit_are_recorded_as_if_one_had_written_it(
    objects: LocalObjects, runs: list[tuple[int, int]]
) -> None:
    index, rows = index_of(10), random_rows(10, 4, np.dtype(np.float32))
    taps = {"a": TapInfo((4,), "float32"), "b": TapInfo((4,), "float32")}
    writers = [
        UnitWriter(objects, 0, index, taps, 40, attempt="abc", part=part, run=run)
        for part, run in enumerate(runs)
    ]
    for writer, (first, count) in zip(writers, runs, strict=True):
        for tap in taps:
            writer.write(tap, rows[first : first + count])
            writer.stats[tap].merge(stored.describe(rows[first : first + count]))
    parts = [writer.finish_part() for writer in writers[1:]]
    done = writers[0].finish(parts, **DESCRIBED)
    assert set(objects.list()) == {file.key for file in done.files()}, "nothing else is left"
    body = decode_record("k", encode_record("done", done.to_json()), "done")
    assert Done.from_json("k", body) == done
    for tap in taps:
        shards = [shard for shard in done.shards if shard.tap == tap]
        read = [
            open_tensor(objects, shard.key, read_shard_header(objects, shard.key)[tap])
            for shard in shards
        ]
        assert np.concatenate(read).tobytes() == rows.tobytes()
        header = read_shard_header(objects, done.statistics.key)
        mean = open_tensor(objects, done.statistics.key, header[f"{tap}/mean"])
        np.testing.assert_allclose(mean, rows.astype(np.float64).mean(axis=0), rtol=1e-12)
        count = open_tensor(objects, done.statistics.key, header[f"{tap}/count"])
        assert int(count[0]) == done.rows == 10


def test_a_shard_that_cannot_be_stored_ends_the_writing_of_the_next_rows(
    objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes at once, not when the unit is finished minutes later."""

    def failing(self: ShardWriter) -> tuple[int, str, str]:
        raise StoreError("the bucket is closed")

    monkeypatch.setattr(ShardWriter, "close", failing)
    index = np.zeros(1000, INDEX_DTYPE)
    writer = UnitWriter(objects, 0, index, {"embed": TapInfo((4,), "float32")}, 64)
    row = np.zeros((1, 4), np.float32)
    with pytest.raises(StoreError, match="the bucket is closed"):
        for _ in range(1000):
            writer.write("embed", row)
            time.sleep(0.005)
    writer.discard()
    assert list(objects.list()) == []


# -- the bytes that a unit will take, against those that it took ---------------------------------


@pytest.mark.parametrize("shard_bytes", [60, 1000, 1 << 30])
@pytest.mark.parametrize("taps", [stored.TAPS, stored.SHAPED, stored.SCALED])
def test_every_unit_takes_the_bytes_that_were_foreseen(
    taps: stored.Taps, shard_bytes: int, tmp_path: Path
) -> None:
    made = stored.build(tmp_path / "out", taps=taps, shard_bytes=shard_bytes, keep=("url",))
    for unit in range(len(made.table.units)):
        done = made.done(unit)
        documents = stored.describe_documents(made.table, unit, made.read[unit])
        foreseen = unit_bytes(made.table.taps, [done.rows], documents, shard_bytes)
        assert foreseen == sum(file.bytes for file in done.files())


def test_parts_of_a_unit_are_files_of_their_own(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", taps=stored.TAPS)
    unit, index = 1, made.read[1]
    parts = [20, 0, len(index) - 20]
    documents = stored.describe_documents(made.table, unit, index)
    written, first = [], 0
    for part, rows in enumerate(parts):
        writer = UnitWriter(
            made.objects, unit, index, made.table.taps, 100, attempt="together", part=part,
            run=(first, rows),
        )  # fmt: skip
        for tap in made.table.taps:
            begin = made.starts[unit] + first
            writer.write(tap, made.rows[tap][begin : begin + rows])
        written.append(writer)
        first += rows
    others = [writer.finish_part() for writer in written[1:]]
    done = written[0].finish(
        others, table=documents, fingerprint="f", made_from="", tokens=1, documents=1, contexts=1,
        skipped={}, text_digest="1", made_by={},
    )  # fmt: skip
    foreseen = unit_bytes(made.table.taps, parts, documents, 100)
    assert foreseen == sum(file.bytes for file in done.files())
