"""Arrow IPC: both forms, texts and ids, batch by batch; damaged files refused in one line."""

import io
import struct
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spile.core.errors import DataError, InputError, SpileError
from spile.core.units import Unit
from spile.corpus.files import find_files
from spile.corpus.formats.arrow import ArrowFormat
from spile.corpus.formats.token_ids import TokenIds
from spile.corpus.reader import CorpusReader
from support.texts import NOT_UTF8, groups_of, read, units_of

FORMS = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}
DAMAGED = tempfile.TemporaryDirectory()
TEXTS = [f"row {n} " + "x" * (n % 9) for n in range(100)]


def write(path: Path, table: pa.Table, form: str = "stream", rows: int = 7, **options: Any) -> Path:
    with FORMS[form](str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("form", FORMS)
def test_both_forms_are_read_by_their_record_batches(
    form: str, compression: str | None, tmp_path: Path
) -> None:
    table = pa.table({"n": list(range(100)), "text": TEXTS})
    path = write(tmp_path / "a.arrow", table, form, compression=compression)
    assert [span.count for span, _ in groups_of(path, ArrowFormat)] == [7] * 14 + [2]
    assert read(path).texts == TEXTS
    files = find_files(str(path))
    reader = CorpusReader(files)
    for size in (1, 60, 1000):
        units = units_of(files, size)
        assert [unit.first_doc for unit in units] == sorted(unit.first_doc for unit in units)
        found = [text for u in reversed(units) for text in reader.read(u.spans, 0).texts[::-1]]
        assert found == TEXTS[::-1]


KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_texts_come_from_any_type_of_string(kind: pa.DataType, tmp_path: Path) -> None:
    values = [None if t is None else t.encode() for t in ["one", "zwei 🌳", None, "", " \t", "six"]]
    raw = pa.array([*values, NOT_UTF8], pa.binary())
    as_text = kind not in (pa.binary(), pa.large_binary(), pa.string_view())
    column = raw.cast(pa.large_binary() if "large" in str(kind) else pa.binary())
    column = column.view(kind) if as_text else (raw[:-1] if "view" in str(kind) else raw).cast(kind)
    found = read(write(tmp_path / "a.arrow", pa.table({"text": column})))
    assert (found.texts, found.ordinals) == (["one", "zwei 🌳", "six"], [0, 1, 5])
    counted = Counter({"null": 1, "empty": 1, "white space only": 1, "not UTF-8": 1})
    assert found.skipped == counted - Counter({"not UTF-8": len(raw) - len(column)})


def reader_of(path: Path, column: str = "input_ids") -> tuple[CorpusReader, list[Unit]]:
    files, ids = find_files(str(path)), TokenIds(1000, column)
    units = units_of(files, 60, reading=ids)
    return CorpusReader(files, reading=ids), units


LISTS = [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64(), 3),
         pa.list_(pa.uint64())]  # fmt: skip


@pytest.mark.parametrize("kind", LISTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_ids_come_from_any_list_of_integers(form: str, kind: pa.DataType, tmp_path: Path) -> None:
    lists = [[n, n + 1, n % 7] if n % 5 else None for n in range(60)]
    table = pa.table({"input_ids": pa.array(lists, kind), "n": list(range(60))})
    reader, units = reader_of(write(tmp_path / "a.arrow", table, form))
    parts = [reader.read(unit.spans, unit.first_doc) for unit in units]
    assert len(parts) > 3
    found = {o: i.tolist() for p in parts for o, i in zip(p.ordinals, p.ids, strict=True)}
    assert found == {n: ids for n, ids in enumerate(lists) if ids}
    assert sum(part.skipped["null"] for part in parts) == 12
    assert all(ids.dtype == np.dtype("<i4") for part in parts for ids in part.ids)


def test_what_datasets_saves_is_read_and_what_it_cached_is_not(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"input_ids": [[n, n + 1] for n in range(30)]})
    saved.save_to_disk(str(tmp_path / "d"), num_shards=3)
    (tmp_path / "d" / "cache-1234.arrow").write_bytes(b"what a computation left")
    files = find_files(str(tmp_path / "d"))
    assert [file.path.name[:10] for file in files] == ["data-00000", "data-00001", "data-00002"]
    reader, units = reader_of(tmp_path / "d")
    ids = [i.tolist() for u in units for i in reader.read(u.spans, u.first_doc).ids]
    assert ids == [[n, n + 1] for n in range(30)]


@pytest.mark.parametrize("form", FORMS)
def test_a_file_cut_short_anywhere_is_refused_in_one_line(form: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", pa.table({"text": TEXTS[:20]}), form)
    data = path.read_bytes()
    stop = groups_of(path, ArrowFormat)[-1][0].stop  # after it, a file has its table of contents
    for keep in {0, 3, 8, 50, len(data) // 2, stop - 1, stop, stop + 7}:
        path.write_bytes(data[:keep])
        with pytest.raises(InputError, match="cannot read Arrow IPC .*whole") as caught:
            read(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_a_damaged_file_is_read_or_refused_and_never_more(data: st.DataObject) -> None:
    """Offsets that lead out of a buffer would end the process."""
    out = io.BytesIO()
    lists = pa.array([[1, 2, 3], None, [4], []] * 5, pa.list_(pa.int32()))
    table = pa.table({"input_ids": lists, "text": ["a", "bc", None, ""] * 5})
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=8)
    whole = bytearray(out.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] = data.draw(st.integers(0, 255))
    path = Path(DAMAGED.name) / "a.arrow"
    path.write_bytes(whole)
    for reading in (None, TokenIds(1000, "input_ids")):
        try:
            files = find_files(str(path))
            reader = CorpusReader(files, reading=reading)
            reader.sample(0)
            for unit in units_of(files, 50, reading=reading, max_docs=10_000):
                reader.read(unit.spans, unit.first_doc)
        except SpileError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("column", ["input_ids", "text"])
def test_offsets_that_lead_out_of_a_buffer_are_refused(column: str, tmp_path: Path) -> None:
    lists = pa.array([[1, 2, 3], [4], [5, 6]], pa.list_(pa.int32()))
    table = pa.table({"input_ids": lists, "text": ["ab", "c", "defgh"]})
    path = write(tmp_path / "a.arrow", table)
    offsets = {"input_ids": (0, 3, 4, 6), "text": (0, 2, 3, 8)}[column]
    true, data = struct.pack("<4i", *offsets), path.read_bytes()
    assert data.count(true) == 1
    for place in (1, 3):  # within, and at the end
        lie = [1 << 28 if number == place else each for number, each in enumerate(offsets)]
        path.write_bytes(data.replace(true, struct.pack("<4i", *lie)))
        with pytest.raises(InputError, match="cannot read Arrow IPC"):
            if column == "text":
                read(path)
            else:
                reader, units = reader_of(path)
                reader.read(units[0].spans, 0)


def test_a_batch_that_changed_since_the_table_was_made_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", pa.table({"text": TEXTS}))
    files = find_files(str(path))
    (unit,) = units_of(files)
    for other in (TEXTS[:50], [text + "!" for text in TEXTS]):
        write(path, pa.table({"text": other}))
        with pytest.raises(DataError, match="changed since the unit table was made") as caught:
            CorpusReader(files).read(unit.spans, 0)
        assert str(path) in str(caught.value)


def test_columns_that_are_not_there_or_not_read_are_refused(tmp_path: Path) -> None:
    coded = pa.array(["a", "b"]).dictionary_encode()
    path = write(tmp_path / "a.arrow", pa.table({"text": ["x", "y"], "c": coded}))
    with pytest.raises(InputError, match="'c' is dictionary-encoded"):
        read(path)
    path = write(tmp_path / "a.arrow", pa.table({"n": [1, 2]}))
    with pytest.raises(InputError, match="no column holds strings, .* it has n: int64. Token ids"):
        read(path)
    with pytest.raises(InputError, match="no column 'input_ids'; it has n"):
        reader_of(path)
