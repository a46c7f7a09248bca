"""Token ids: the ends of documents, valid ids, refusals, and the choice of columns."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.config import Recipe
from spile.core.errors import ConfigError, DataError, InputError
from spile.core.index import ROLES
from spile.corpus.files import find_files
from spile.corpus.formats.contract import ReadOptions
from spile.corpus.formats.token_ids import FlatArray, TokenIds, settle_ids
from spile.corpus.reader import CorpusReader
from spile.corpus.select import TOO_LARGE
from support import tiny
from support.texts import units_of

U2, U4 = np.dtype("<u2"), np.dtype("<u4")
END = 9


def flat(dtype: np.dtype[Any] = U2, separator: int | None = END, **options: Any) -> FlatArray:
    return FlatArray(dtype, separator, **{"leads": False, "window": 4, **options})


def split(ids: list[int], array: FlatArray) -> list[list[int]]:
    """The definition."""
    found: list[list[int]] = [[]]
    for place, token in enumerate(ids):
        if array.separator is None:
            begins, ends = place % array.window == 0, False
        else:
            begins = array.leads and token == array.separator
            ends = not array.leads and token == array.separator
        if begins:
            found.append([])
        found[-1].append(token)
        if ends:
            found.append([])
    return [document for document in found if document]


ARRAYS = st.builds(
    FlatArray,
    st.sampled_from([U2, U4]),
    st.sampled_from([None, END]),
    st.booleans(),
    st.integers(1, 6),
)


@given(st.lists(st.integers(0, END), max_size=40), ARRAYS, st.lists(st.integers(1, 9), max_size=40))
def test_documents_end_where_they_do_however_they_are_read(
    ids: list[int], array: FlatArray, sizes: list[int]
) -> None:
    data, pieces = np.array(ids, array.dtype).tobytes(), list[bytes]()
    for size in [*sizes, len(data)]:
        pieces.append(data[: size * array.dtype.itemsize])
        data = data[len(pieces[-1]) :]
    found = array.documents([piece for piece in pieces if piece], 0, 1 << 20)
    assert [[] if each is None else each.tolist() for each in found] == split(ids, array)


@pytest.mark.parametrize("separator", [None, END])
@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("size", [1, 20, 1000])
def test_units_of_an_array_hold_every_document_once(
    size: int, leads: bool, separator: int | None, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    array = flat(separator=separator, leads=leads, window=6)
    wanted: list[list[int]] = []
    for name in ("a", "b", "empty"):
        # One that begins with a separator, and one that ends with one.
        ids = [END, *rng.integers(0, END + 1, 150).tolist(), END] if name != "empty" else []
        wanted += split(ids, array)
        (tmp_path / f"{name}.bin").write_bytes(np.array(ids, U2).tobytes())
    files = find_files(str(tmp_path))
    ids = TokenIds(10, flat=array)
    reader = CorpusReader(files, reading=ids)
    for most in (None, 7):
        found: dict[int, list[int]] = {}
        for unit in units_of(files, size, reading=ids, max_docs=most):
            part = reader.read(unit.spans, unit.first_doc)
            assert len(part.ids) == unit.num_docs
            found.update({o: i.tolist() for o, i in zip(part.ordinals, part.ids, strict=True)})
        assert found == dict(enumerate(wanted[:most]))
    reader.close()


def test_a_changed_array_is_refused_and_a_too_large_document_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    ids = np.array([1, 2, END, *([3] * 500), END, 4, END], U2)
    path.write_bytes(ids.tobytes())
    files, reading = find_files(str(path)), TokenIds(10, flat=flat())
    (unit,) = units_of(files, reading=reading)
    reader = CorpusReader(files, ReadOptions(max_doc_bytes=800), reading=reading)
    found = reader.read(unit.spans, 0)
    assert ([i.tolist() for i in found.ids], found.ordinals) == ([[1, 2, END], [4, END]], [0, 2])
    assert found.skipped == {TOO_LARGE: 1}
    ids[0] = 2
    path.write_bytes(ids.tobytes())
    with pytest.raises(DataError, match="changed since"):
        reader.read(unit.spans, 0)
    reader.close()


@pytest.mark.parametrize(
    ("value", "said"),
    [("text", "no list"), (3, "no list"), ([[1]], "no list"),
     ([1.0], "no list"), ([True], "no list"), ([None, 1], "no list"), ([1 << 70], "no list"),
     ([1, -1], "token 1 is -1"), ([10], "token 0 is 10"), ([1 << 40], "is 1099511627776")],
)  # fmt: skip
def test_what_is_no_list_of_the_models_ids_is_said(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TokenIds(10, "ids").document({"ids": value})


@pytest.mark.parametrize(("value", "reason"), [(None, "null"), ([], "empty")])
def test_nothing_is_left_out_and_counted(value: Any, reason: str) -> None:
    assert TokenIds(10, "ids").document({"ids": value}).skipped == reason


def test_ids_keep_their_values_and_order() -> None:
    ids = TokenIds(70_000, "ids").document({"ids": [0, 69_999, 5]}).ids
    assert ids is not None and ids.tolist() == [0, 69_999, 5] and ids.dtype == np.dtype("<i4")


LISTS = pa.array([[1, 2]], pa.list_(pa.int32()))
STRINGS = pa.array(["x"])


@pytest.mark.parametrize(
    ("columns", "chosen"),
    [({"input_ids": LISTS, "n": pa.array([1])}, "input_ids"), ({"tokens": LISTS}, "tokens"),
     ({"text": STRINGS, "input_ids": LISTS}, None), ({"text": STRINGS}, None),
     ({"labels": LISTS}, None), ({"tokens": pa.array([3])}, None),
     ({"input_ids": LISTS, "tokens": LISTS}, InputError),
     ({"tokens": LISTS, "id": STRINGS}, InputError)],
)  # fmt: skip
def test_a_column_of_ids_is_taken_where_it_can_be_nothing_else(
    columns: dict[str, pa.Array], chosen: Any, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    files = find_files(str(path))
    if chosen is InputError:
        with pytest.raises(InputError, match="which column is the corpus"):
            settle_ids(Recipe(), files, 100)
        return
    settled = settle_ids(Recipe(), files, 100)
    assert settled.tokens_column == chosen
    assert settled.special_tokens == ("none" if chosen else None)


@pytest.mark.parametrize(
    ("vocabulary", "given", "dtype"),
    [(tiny.VOCAB, None, "uint16"), (1 << 16, None, "uint16"), ((1 << 16) + 1, None, "uint32"),
     (tiny.VOCAB, "uint32", "uint32")],
)  # fmt: skip
def test_the_width_of_ids_is_the_one_given_or_follows_from_the_vocabulary(
    vocabulary: int, given: str | None, dtype: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(np.arange(64, dtype=np.uint16).tobytes())
    settled = settle_ids(Recipe(tokens_dtype=given), find_files(str(path)), vocabulary)
    assert (settled.tokens_dtype, settled.doc_separator) == (dtype, "eos")
    path.write_bytes(np.arange(64, dtype=np.uint32).tobytes())
    if not given and dtype == "uint16":
        with pytest.raises(InputError, match="every other number is 0"):
            settle_ids(Recipe(), find_files(str(path)), vocabulary)


def test_arrays_beside_other_files_of_a_folder_are_left_aside(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(b"\1\0")
    assert [file.path.name for file in find_files(str(tmp_path))] == ["a.bin", "b.bin"]
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n')
    assert [file.path.name for file in find_files(str(tmp_path))] == ["c.jsonl"]
    with pytest.raises(InputError, match="of one kind"):
        settle_ids(Recipe(), find_files(f"{tmp_path}/*"), 100)
    with pytest.raises(ConfigError, match="--doc-separator is for .bin"):
        settle_ids(Recipe(doc_separator="eos"), find_files(str(tmp_path)), 100)


def test_a_large_array_that_no_separator_cuts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(np.array([1, 2, 3], U2).tobytes() * 100)
    files = find_files(str(path))
    assert len(units_of(files, reading=TokenIds(10, flat=flat()))) == 1
    monkeypatch.setattr("spile.corpus.formats.token_ids.MAX_DOC_BYTES", 500)
    with pytest.raises(InputError, match="token 9 is not in it.*--doc-separator"):
        units_of(files, reading=TokenIds(10, flat=flat()))
    assert units_of(files, reading=TokenIds(10, flat=flat(separator=None)))[0].num_docs == 75


U, A = ROLES["user"], ROLES["assistant"]


@pytest.mark.parametrize(
    ("said", "flags"),
    [
        (["user", "assistant", None], [U, A, 0]),
        ([0, 1, 1], [0, A, A]),
        ([False, True, False], [0, A, 0]),
        (np.array([0.0, 1.0, 0.0]), [0, A, 0]),
        ([U, A, 0], [U, A, 0]),
    ],
)
def test_speakers_are_names_flags_or_a_loss_mask(said: Any, flags: list[int]) -> None:
    row = {"ids": [3, 4, 5], "who": said}
    assert TokenIds(10, "ids", "who").document(row).said.tolist() == flags  # type: ignore[union-attr]


@pytest.mark.parametrize("said", [["user"], None, ["user", "me", "me"], [3, 4, 5], [2.5, 0, 0]])
def test_speakers_that_fit_no_spelling_are_refused(said: Any) -> None:
    with pytest.raises(ValueError, match="'who'"):
        TokenIds(10, "ids", "who").document({"ids": [3, 4, 5], "who": said})


def test_log_probabilities_may_be_of_the_last_tokens_alone() -> None:
    ids = TokenIds(10, "ids", logprobs="logs")
    for logs, wanted in (
        ([-1.0, -2.0], [np.nan, -1, -2]), ([None, -1, -2], [np.nan, -1, -2]),
        ([-1e30, 1e-6, -2], [-1e4, 0, -2]), (None, [np.nan] * 3),
    ):  # fmt: skip
        found = ids.document({"ids": [3, 4, 5], "logs": logs}).logprobs
        assert np.array_equal(found, np.array(wanted, np.float32), equal_nan=True)  # type: ignore[arg-type]
    for logs in ([-1] * 4, [0.5, -1, -1], ["x", -1, -1]):
        with pytest.raises(ValueError, match="'logs'"):
            ids.document({"ids": [3, 4, 5], "logs": logs})


def test_ids_of_prompts_and_completions_are_joined() -> None:
    found = TokenIds(10, "p+c").document({"p": [3, 4], "c": [5]})
    assert found.ids is not None and found.ids.tolist() == [3, 4, 5]
    assert found.said is not None and found.said.tolist() == [U, U, A]
    assert TokenIds(10, "p+c").document({"p": [3, 4], "c": None}).skipped == "null"
