"""Files in a bucket are found and read like files on a disk, by ranges."""

import gzip
import io
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from spile.core.errors import ConfigError, DataError, InputError, StoreError
from spile.core.identity import full_digest, sampled_digest
from spile.core.units import Span
from spile.corpus.files import find_files
from spile.corpus.reader import CorpusReader
from spile.objects import open_objects
from spile.objects.paths import (
    AnyPath,
    RemotePath,
    files_below,
    files_matching,
    local_copy,
    path_of,
    read_json,
)
from support.marks import some
from support.remote import BUCKETS, Counting, counted, upload
from support.texts import units_of

NAMES = ("a-b.txt", "a/b.txt", "a/c.jsonl", "a/deep/er/d.txt", "b.txt", ".hidden/x.txt",
         "a/_skipped.txt", "a/.dotted.txt", "a b+c%20.txt")  # fmt: skip


@pytest.fixture(params=BUCKETS)
def bucket(request: pytest.FixtureRequest) -> str:
    """The URL of an empty folder."""
    return BUCKETS[request.param]()


def written(folder: Path) -> Path:
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def relative(paths: list[AnyPath], to: AnyPath) -> list[str]:
    return ["/".join(path.parts[len(to.parts) :]) for path in paths]


# -- finding ---------------------------------------------------------------------------------


def test_a_folder_holds_what_it_would_on_a_disk_in_the_same_order(
    bucket: str, tmp_path: Path
) -> None:
    upload(written(tmp_path), bucket)
    there, here = path_of(bucket), path_of(str(tmp_path))
    found = relative(files_below(there), there)
    assert found == relative(files_below(here), here)
    assert found[0] == "a/b.txt", "by folders: by letters, a-b.txt would be first"
    assert [path.read_bytes().decode() for path in files_below(there)] == found


@pytest.mark.parametrize(
    "pattern",
    ["*.txt", "a/*", "**/*.txt", "a/**", "**", "?.txt", "[ab].txt", "a/*/*/*.txt", "*/b.txt",
     ".hidden/*", "a/.*", "a/**/d.txt", "**/deep/**", "b.txt", "none*", "*.txt/x"],
)  # fmt: skip
def test_a_glob_finds_what_it_would_on_a_disk(pattern: str, tmp_path: Path) -> None:
    objects = open_objects(f"memory://{tmp_path.name}")
    for name in NAMES:
        objects.replace(f"top/{name}", name.encode())
    there = relative(files_matching(f"{objects.url}/top/{pattern}"), Path("top"))
    here = files_matching(f"{written(tmp_path)}/{pattern}")
    assert there == relative(here, tmp_path)


def test_a_glob_finds_files_in_a_bucket(bucket: str, tmp_path: Path) -> None:
    upload(written(tmp_path), bucket)
    found = relative(files_matching(f"{bucket}/a/*.txt"), path_of(bucket))
    assert found == ["a/_skipped.txt", "a/b.txt"]


def test_a_path_tells_files_folders_and_nothing_apart(bucket: str, tmp_path: Path) -> None:
    upload(written(tmp_path), bucket)
    folder = path_of(f"{bucket}/a/")
    assert (folder.is_dir(), folder.is_file()) == (True, False)
    file = folder / "b.txt"
    assert (file.is_dir(), file.is_file(), file.name) == (False, True, "b.txt")
    assert str(file) == f"{bucket}/a/b.txt"
    part_of_a_name = path_of(f"{bucket}/a/b")
    assert (part_of_a_name.is_dir(), part_of_a_name.is_file()) == (False, False)


def test_paths_and_file_urls_are_local() -> None:
    assert path_of("x/y.txt") == Path("x/y.txt")
    assert path_of("file:///x/y.txt") == Path("/x/y.txt")
    with pytest.raises(ConfigError, match="ftp"):
        path_of("ftp://host/x")


# -- reading ---------------------------------------------------------------------------------


@pytest.mark.parametrize("buffering", [0, 7, 4096])
def test_a_stream_reads_and_seeks_as_one_of_a_disk(buffering: int) -> None:
    data = random.Random(0).randbytes(10_000)
    _, path = counted(data, "x")
    rng, real = random.Random(1), io.BytesIO(data)
    with path.open("rb", buffering) as stream:
        for _ in range(500):
            if rng.random() < 0.4:
                whence = rng.choice([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END])
                low = {0: 0, 1: -real.tell(), 2: -len(data)}[whence]
                place = rng.randrange(low, low + 11_000)
                assert stream.seek(place, whence) == real.seek(place, whence)
            else:
                size = rng.choice([-1, 0, 1, 5, 900, 20_000])
                assert stream.read(size) == real.read(size)
            assert stream.tell() == real.tell()


def test_large_ranges_come_in_pieces_side_by_side_and_in_place() -> None:
    data = np.random.default_rng(0).bytes(20 << 20)
    objects, path = counted(data, "x")
    out = bytearray(len(data) - 3)
    path.read_into(2, memoryview(out))
    assert out == data[2:-1]
    assert sorted(objects.ranges)[0] == (2, 2 + (8 << 20))
    assert len(objects.ranges) == 3


def test_what_is_absent_or_goes_while_it_is_read_is_one_line(bucket: str) -> None:
    with pytest.raises(FileNotFoundError, match="no absent"):
        path_of(f"{bucket.partition('://')[0]}://spile-tests/absent").open("rb")
    objects = open_objects(bucket)
    objects.replace("x", b"0123456789")
    path = path_of(f"{bucket}/x")
    assert isinstance(path, RemotePath)
    with path.open("rb") as stream:
        objects.replace("x", b"0123")
        with pytest.raises(InputError, match="/x: became shorter while it was read"):
            stream.read(10)
        objects.delete("x")
        with pytest.raises(InputError, match="/x: was removed while it was read"):
            path.read_range(0, 4)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_files_identity_does_not_depend_on_where_it_lies(
    size: int, bucket: str, tmp_path: Path
) -> None:
    local = tmp_path / "file"
    local.write_bytes(np.random.default_rng(size).bytes(size))
    remote = path_of(upload(local, bucket))
    assert sampled_digest(remote) == sampled_digest(local)
    assert full_digest(remote, local) == full_digest(local, remote)


def test_a_large_files_identity_takes_sixteen_blocks_of_it() -> None:
    objects, path = counted(bytes(50 << 20), "x")
    sampled_digest(path)
    assert len(objects.ranges) == 16
    assert objects.fetched == 16 << 16


def test_a_copy_for_other_programs_goes_when_it_is_no_longer_used(
    bucket: str, tmp_path: Path
) -> None:
    upload(written(tmp_path), bucket)
    with local_copy(path_of(f"{bucket}/a")) as folder:
        found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == {n: f"a/{n}" for n in ("b.txt", "c.jsonl", "_skipped.txt", ".dotted.txt")}
    assert not folder.exists()
    with local_copy(tmp_path) as folder:
        assert folder == tmp_path


# -- what is read of them --------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Eight row groups of text that does not compress, beside a column of no interest."""
    rng = np.random.default_rng(0)
    texts = [rng.bytes(1000).hex() for _ in range(800)]
    others = pa.array([rng.bytes(4000) for _ in texts])
    columns = {"a": others, "text": pa.array(texts), "z": others}
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=100, use_dictionary=False,
                   write_statistics=False)  # fmt: skip
    return path


def counted_corpus(path: Path) -> tuple[Counting, CorpusReader]:
    objects, remote = counted(path.read_bytes(), path.name)
    (file,) = find_files(str(path))
    return objects, CorpusReader([replace(file, path=remote)])


def test_only_the_row_groups_and_columns_read_of_parquet_are_fetched(
    table: Path,
) -> None:
    objects, reader = counted_corpus(table)
    found = reader.read((Span(0, 310, 20),), 310)
    local = CorpusReader(find_files(str(table))).read((Span(0, 310, 20),), 310)
    assert found == local
    group = pq.ParquetFile(table).metadata.row_group(3).column(1)
    footer = 64 << 10
    assert objects.fetched <= group.total_compressed_size + footer + 4096
    assert objects.fetched < table.stat().st_size / 15
    assert len(objects.ranges) <= 3


def test_a_parquet_file_is_cut_into_units_by_its_footer_alone(table: Path) -> None:
    objects, reader = counted_corpus(table)
    units = units_of(reader.files, 300_000)
    assert units == units_of(find_files(str(table)), 300_000)
    assert len(units) > 3
    assert objects.fetched <= 64 << 10


def test_a_large_row_group_is_fetched_as_it_is_decoded(tmp_path: Path) -> None:
    """Otherwise memory would depend on the largest row group in the file."""
    rng = np.random.default_rng(0)
    texts = [rng.bytes(2_000).hex() for _ in range(8000)]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": pa.array(texts)}), path, use_dictionary=False,
                   write_batch_size=16)  # fmt: skip
    objects, reader = counted_corpus(path)
    assert reader.read((Span(0, 0, 10),), 0).texts == texts[:10]
    assert max(stop - start for start, stop in objects.ranges) <= 4 << 20
    assert objects.fetched < path.stat().st_size / 2 < 32 << 20


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_lines_are_fetched_by_ranges(suffix: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    plain = b"".join(rng.randbytes(500).hex().encode() + b"\n" for _ in range(6000))
    path = tmp_path / f"t.txt{suffix}"
    compressors = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}
    path.write_bytes(compressors[suffix](plain))
    objects, reader = counted_corpus(path)
    units = units_of(reader.files, 500_000)
    assert units == units_of(find_files(str(path)), 500_000)
    assert objects.fetched <= 1.01 * path.stat().st_size, "one pass"
    assert len(objects.ranges) <= 8
    objects.ranges.clear()
    last = units[-1]
    found = reader.read(last.spans, last.first_doc)
    assert "\n".join(found.texts).encode() + b"\n" == plain[last.spans[0].start :]
    if not suffix:
        assert objects.fetched <= last.spans[0].stop - last.spans[0].start
    else:
        assert len(objects.ranges) <= 5, "as a stream"
    reader.close()


def test_bytes_that_changed_in_the_bucket_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("one\ntwo\n")
    objects, reader = counted_corpus(path)
    (unit,) = units_of(reader.files)
    objects.replace("t.txt", b"one\ntoo\n")
    with pytest.raises(DataError, match="memory://counted/t.txt: changed since"):
        reader.read(unit.spans, 0)


@pytest.mark.parametrize("name", some(["t.parquet", "t.txt.gz", "t.txt.zst"], "t.txt.gz"))
def test_a_damaged_file_in_a_bucket_is_one_line(name: str, table: Path, bucket: str) -> None:
    plain = table.read_bytes()
    whole = {"t.parquet": plain, "t.txt.gz": gzip.compress(plain),
             "t.txt.zst": zstandard.compress(plain)}[name]  # fmt: skip
    open_objects(bucket).replace(name, whole[: len(whole) // 2])
    with pytest.raises(InputError, match="is it whole") as caught:
        units_of(find_files(f"{bucket}/{name}"))
    assert f"{bucket}/{name}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["t.parquet", "t.txt", "t.txt.gz", "t.txt.zst"])
def test_a_bucket_that_fails_during_a_read_is_not_a_damaged_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, path = counted(bytes(1000), name)

    def fail(key: str, start: int, stop: int) -> bytes:
        raise StoreError("reading memory://counted: no rights")  # as buckets do

    monkeypatch.setattr(objects, "get_range", fail)
    local = tmp_path / name
    local.touch()
    file = replace(*find_files(str(local)), path=path)
    with pytest.raises(StoreError, match="^reading memory://counted: no rights$"):
        units_of([file])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", "nested too deeply: 32 levels at most"),
        (b'{"a": "' + b"x" * 200 + b'"}', "larger than 200 bytes"),
    ],
)
def test_a_json_file_that_is_no_object_is_one_line(data: bytes, said: str, tmp_path: Path) -> None:
    local = tmp_path / "a.json"
    local.write_bytes(data)
    _, remote = counted(data, "a.json")
    for path in (local, remote):
        with pytest.raises(InputError) as caught:
            read_json(path, max_bytes=200)
        assert str(caught.value).startswith(f"{path}: {said}")


def test_a_json_file_is_read_wherever_it_lies_and_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a": [1]}')
    _, remote = counted(b'{"a": [1]}', "a.json")
    assert read_json(tmp_path / "a.json") == read_json(remote) == {"a": [1]}
    missing = tmp_path / "b.json"
    assert read_json(missing, missing_ok=True) == {}
    for path, said in ((missing, "no such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=said):
            read_json(path)


def test_a_pattern_with_many_stars_is_matched_by_one_walk(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*"abcdefghijklmn")
    deep.mkdir(parents=True)
    (deep / "z.txt").touch()
    (tmp_path / "top.txt").touch()
    began = time.process_time()
    assert files_matching(f"{tmp_path}/{'**/' * 12}*.txt") == [deep / "z.txt", tmp_path / "top.txt"]
    assert files_matching(f"{tmp_path}/{'**/*/' * 6}*.txt") == [deep / "z.txt"]
    assert files_matching(f"{tmp_path}/{'**/x/' * 12}*.txt") == []
    assert time.process_time() - began < 2
