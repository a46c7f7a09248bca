"""The documents file: values survive a round trip, and other files are refused."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load

from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.core.index import DOCUMENT_COLUMNS, INDEX_DTYPE
from spile.dataset.codec.documents import encode_documents, joined, merge_documents, read_documents
from spile.dataset.codec.shard import ShardWriter
from spile.dataset.format import Shard
from spile.dataset.read.dataset import Dataset
from spile.dataset.read.opening import open_dataset
from spile.objects import MemoryObjects
from support.marks import examples
from support.stored import build

KEY = "attempts/000000/00000000/a/documents.safetensors"
Tensors = dict[str, np.ndarray]


def index_of(*docs: int) -> np.ndarray:
    index = np.zeros(len(docs), INDEX_DTYPE)
    index["doc"] = docs
    return index


def encode(kept: dict[str, list[Any]], docs: list[int], index: np.ndarray, **own: Any) -> Tensors:
    counts = [int(np.count_nonzero(index["doc"] == doc)) for doc in docs]
    given: dict[str, Any] = {
        "tokens": counts,
        "skipped": [None if count else "empty" for count in counts],
        "previews": ["text" if count else None for count in counts],
        **own,
    }
    return encode_documents(docs=docs, kept=kept, index=index, **given)


def stored(tensors: Tensors, count: int) -> tuple[MemoryObjects, Shard]:
    objects = MemoryObjects("memory://test")
    writer = ShardWriter(objects, KEY, [(n, a.dtype, a.shape) for n, a in tensors.items()])
    for array in tensors.values():
        writer.write(array)
    return objects, Shard("documents", KEY, 0, count, *writer.close())


def decode(tensors: Tensors, count: int, keep: list[str]) -> Any:
    return read_documents(*stored(tensors, count), keep)


def test_a_table_says_of_each_document_what_became_of_it() -> None:
    data = encode({"id": ["a", "b", "c"]}, [7, 8, 9], index_of(9, 9, 7, 7, 7), tokens=[4, 0, 2])
    table = decode(data, 3, ["id"])
    assert table.column_names == [*DOCUMENT_COLUMNS, "id"]
    assert table.to_pylist() == [
        {"doc": 7, "tokens": 4, "rows": 3, "first_row": 2, "skipped": None, "preview": "text",
         "id": "a"},
        {"doc": 8, "tokens": 0, "rows": 0, "first_row": None, "skipped": "empty", "preview": None,
         "id": "b"},
        {"doc": 9, "tokens": 2, "rows": 2, "first_row": 0, "skipped": None, "preview": "text",
         "id": "c"},
    ]  # fmt: skip


def test_it_is_a_safetensors_file_whose_numbers_are_aligned() -> None:
    tensors = encode({"id": ["é", None, "b"], "n": [1, 2, 3]}, [0, 1, 2], index_of(0))
    objects, _ = stored(tensors, 3)
    found = load(objects.get(KEY))
    assert {*found} == {*tensors}
    assert bytes(found["kept/id"]) == "éb".encode()
    assert found["ends/kept/id"].tolist() == [2, 2, 3]
    sizes = [array.itemsize for array in tensors.values()]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([None, None], "null"),
        ([True, None], "bool"),
        ([1, -(1 << 63)], "int64"),
        ([1, 0.5], "double"),
        ([float("inf"), None], "double"),
        (["", "a\0b\r\n🌳"], "string"),
    ],
)
def test_columns_have_the_type_of_their_values(values: list[Any], kind: str) -> None:
    column = decode(encode({"x": values}, [0, 1], index_of()), 2, ["x"])["x"]
    assert (str(column.type), column.to_pylist()) == (kind, values)


def test_values_of_several_types_become_text() -> None:
    values = ["one", 1, True, 0.5, None]
    column = decode(encode({"x": values}, list(range(5)), index_of()), 5, ["x"])["x"]
    assert column.to_pylist() == ["one", "1", "true", "0.5", None]


VALUES = st.lists(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False) | st.text(max_size=9), min_size=1, max_size=9,
)  # fmt: skip


@examples(60)
@given(values=VALUES, previews=st.booleans())
def test_any_values_can_be_read_back(values: list[Any], previews: bool) -> None:
    docs = list(range(3, 3 + len(values)))
    own = {"previews": [str(v) if previews else None for v in values]}
    table = decode(encode({"x": values}, docs, index_of(*docs[::2]), **own), len(docs), ["x"])
    table.validate(full=True)
    assert table["preview"].to_pylist() == own["previews"]
    found = table["x"].to_pylist()
    if table["x"].type in ("string", "null"):
        assert [v is None for v in found] == [v is None for v in values]
        assert [v for v in values if isinstance(v, str)] == [
            f for f, v in zip(found, values, strict=True) if isinstance(v, str)
        ]
    else:
        assert found == [v if v is None else type(f)(v) for f, v in zip(found, values, strict=True)]


def test_tables_of_units_that_become_one_follow_each_other() -> None:
    parts = [
        decode(encode({"x": [1, 2]}, [0, 1], index_of(1, 1, 0)), 2, ["x"]),
        decode(encode({"x": [None]}, [2], index_of()), 1, ["x"]),
        decode(encode({"x": [5]}, [3], index_of(3)), 1, ["x"]),
    ]
    index = index_of(1, 1, 0, 3)
    merged = merge_documents(parts, index)
    table = decode(merged, 4, ["x"])
    assert table["doc"].to_pylist() == [0, 1, 2, 3]
    assert table["first_row"].to_pylist() == [2, 0, None, 3]
    assert table["x"].to_pylist() == [1, 2, None, 5]
    at_once = encode({"x": [1, 2, None, 5]}, [0, 1, 2, 3], index)
    assert {n: a.tobytes() for n, a in merged.items()} == {
        n: a.tobytes() for n, a in at_once.items()
    }, "no byte tells how it was made"


@pytest.mark.parametrize(
    ("one", "other", "kind", "wanted"),
    [
        ([1], [0.5], "double", [1.0, 0.5]),
        ([None], [True], "bool", [None, True]),
        ([1], ["b"], "string", ["1", "b"]),
        ([True], [2], "string", ["true", "2"]),
        ([None], [None], "null", [None, None]),
    ],
)
def test_a_column_that_changes_its_type_between_units_can_be_read(
    one: list[Any], other: list[Any], kind: str, wanted: list[Any]
) -> None:
    parts = [
        decode(encode({"x": values}, [doc], index_of()), 1, ["x"])
        for doc, values in enumerate((one, other))
    ]
    column = joined(parts)["x"]
    assert (str(column.type), column.to_pylist()) == (kind, wanted)


def test_ints_keep_their_spelling_if_text_follows_much_later() -> None:
    tables = [
        decode(encode({"x": [value]}, [doc], index_of()), 1, ["x"])
        for doc, value in enumerate((1, 2, 0.5, "b"))
    ]
    many = [tables[0]] * 300 + [tables[1]] * 300 + tables[2:]
    column = joined(iter(many))["x"]
    assert column.to_pylist() == ["1"] * 300 + ["2"] * 300 + ["0.5", "b"]


def test_tables_of_one_type_share_chunks() -> None:
    table = decode(encode({"x": [1]}, [0], index_of()), 1, ["x"])
    assert joined([table] * 600)["x"].num_chunks == 3


# -- of a dataset ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("documents") / "out"
    return open_dataset(str(build(path, keep=("id", "url"), preview=6).path))


def test_a_table_of_documents_keeps_no_file_open_or_mapped(dataset: Dataset) -> None:
    table = dataset.documents()
    tables = [f"/{name}" for name in ("attempts", "documents.safetensors")]
    opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    assert not [each for each in (*opened, *mapped) if all(name in each for name in tables)]
    assert table.num_rows


def test_a_dataset_has_every_document_of_the_corpus(dataset: Dataset) -> None:
    table = dataset.documents()
    assert table.column_names == dataset.document_columns == [*DOCUMENT_COLUMNS, "id", "url"]
    assert table["doc"].to_pylist() == list(range(11))
    assert sum(table["rows"].to_pylist()) == dataset.num_tokens
    assert table["skipped"].null_count == dataset.num_documents
    assert {*table["preview"].to_pylist()} == {"text o"}


def test_columns_and_units_can_be_chosen(dataset: Dataset) -> None:
    table = dataset.documents(["id", "doc"], unit=1)
    assert table.to_pylist() == [{"id": f"id-{doc}", "doc": doc} for doc in (3, 4, 5)]
    with pytest.raises(ConfigError, match="no column 'title' of documents; there are doc, tokens"):
        dataset.documents(["title"])
    with pytest.raises(ConfigError, match="unit 9 does not exist"):
        dataset.documents(unit=9)


def test_a_document_says_what_is_known_of_it(dataset: Dataset) -> None:
    found = dataset.document(3)
    assert found.about == dataset.about(3)
    assert (found.about["id"], found.about["tokens"]) == ("id-3", len(found))
    skipped = dataset.about(4)
    assert (skipped["skipped"], skipped["url"], skipped["first_row"]) == (
        "no tokens",
        "url-4",
        None,
    )
    with pytest.raises(StoreError, match="no unit that is done has a document 11"):
        dataset.about(11)


def test_the_first_row_is_where_a_documents_rows_begin(dataset: Dataset) -> None:
    first = dataset.documents(["doc", "first_row"], unit=0).to_pylist()
    docs = dataset.index(0, dataset.num_tokens)["doc"]
    assert all(docs[row["first_row"]] == row["doc"] for row in first)


def test_nobody_reads_it_who_does_not_ask(dataset: Dataset, tmp_path: Path) -> None:
    made = build(tmp_path / "out")
    for unit in range(5):
        (made.path / made.done(unit).documents_table.key).unlink()
    opened = open_dataset(str(made.path))
    assert len(opened.document(0)) == 5 and len(opened.index(0, 9)) == 9
    with pytest.raises(CorruptError, match="is missing"):
        opened.documents()


# -- what is no such table -------------------------------------------------------------------


def changed(**changes: Any) -> Tensors:
    made = encode({"id": ["é", None, "b"], "n": [1, 2, 3]}, [0, 1, 2], index_of(0, 1))
    given = {name.replace("__", "/"): value for name, value in changes.items()}
    return {n: a for n, a in {**made, **given}.items() if a is not None}


def test_what_is_changed_below_is_a_table() -> None:
    table = decode(changed(), 3, ["id", "n"])
    assert table["id"].to_pylist() == ["é", None, "b"]
    loose = decode(changed(valid__kept__n=np.array([2, 0, 255], np.uint8).view(np.bool_)), 3, ["n"])
    assert loose["n"].to_pylist() == [1, None, 3], "a byte that is not 0 is true"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"doc": None}, "does not hold doc of 3"),
        ({"doc": np.arange(2)}, "does not hold doc of 3"),
        ({"doc": np.arange(3, dtype=np.int32)}, "does not hold doc of 3"),
        ({"tokens": np.zeros((3, 1), np.int32)}, "does not hold tokens of 3"),
        ({"valid__skipped": None}, "does not hold 'skipped' of 3"),
        ({"valid__skipped": np.ones(3, np.uint8)}, "does not hold 'skipped' of 3"),
        ({"ends__preview": None}, "does not hold 'preview' of 3"),
        ({"ends__kept__id": np.array([2, 2], np.int64)}, "does not hold 'kept/id' of 3"),
        ({"ends__kept__id": np.array([2, 2, 3], np.int32)}, "does not hold 'kept/id' of 3"),
        ({"ends__kept__id": np.array([2, 1, 3])}, "ends where none"),
        ({"ends__kept__id": np.array([-1, 2, 3])}, "ends where none"),
        ({"ends__kept__id": np.array([2, 2, 4])}, "ends where none"),
        ({"ends__kept__id": np.array([2, 2, 1 << 62])}, "ends where none"),
        ({"ends__kept__id": np.array([1, 2, 3])}, "cut within a character"),
        ({"kept__id": np.array([255, 97, 98], np.uint8)}, "is not UTF-8"),
        ({"kept__id": np.zeros(3, np.float32)}, "holds no text"),
        ({"kept__n": np.zeros(3, np.uint64)}, "does not hold 'kept/n' of 3"),
        ({"kept__n": np.zeros(4)}, "does not hold 'kept/n' of 3"),
        ({"kept__n": None}, "does not hold 'kept/n' of 3"),
    ],
)
def test_what_is_no_documents_table_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CorruptError, match=f"^{KEY}: .*{reason}"):
        decode(changed(**changes), 3, ["id", "n"])


def test_a_table_that_is_not_there_or_names_a_column_twice_is_refused() -> None:
    with pytest.raises(CorruptError, match="is missing"):
        read_documents(MemoryObjects("memory://none"), Shard("documents", KEY, 0, 3, 9, ""), [])
    with pytest.raises(CorruptError, match="twice"):
        decode(changed(), 3, ["id", "id"])
