"""Packing: every token in exactly one place, contexts whole and apart, rows well filled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from spile.data.pack import PackedUnit, first_fit_decreasing, pack_unit
from spile.data.tokens import TextTokenizer
from spile.index import FIRST, LAST

DOCUMENTS = st.lists(
    st.lists(st.integers(1, tiny.VOCAB - 1), max_size=45).map(lambda t: np.array(t, np.int32)),
    max_size=14,
)
SEQ_LEN = st.integers(1, 20)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(directory)
    return TextTokenizer(directory, "tokenizer")


def ordinals_of(documents: list[np.ndarray]) -> list[int]:
    """With gaps, as skipped documents leave them."""
    return [10 + 3 * i for i in range(len(documents))]


def pieces(document: np.ndarray, seq_len: int, long_docs: str) -> list[np.ndarray]:
    whole = [document[i : i + seq_len] for i in range(0, len(document), seq_len)]
    return whole[:1] if long_docs == "truncate" else whole


def contexts_of(unit: PackedUnit) -> list[tuple[int, int, list[int]]]:
    """(document, offset, tokens) of each context, found by walking the rows."""
    found: list[tuple[int, int, list[int]]] = []
    done = 0
    for row in range(len(unit.lengths)):
        length = int(unit.lengths[row])
        segments = unit.segments[row]
        assert length > 0, "no row is empty"
        assert (segments[:length] > 0).all() and not segments[length:].any()
        assert not unit.tokens[row, length:].any()
        assert not unit.positions[row, length:].any()
        steps = np.diff(segments[:length])
        assert segments[0] == 1 and set(steps.tolist()) <= {0, 1}, "segments are 1, 2, 3 …"
        for segment in range(1, int(segments.max()) + 1):
            (place,) = np.nonzero(segments == segment)
            count = len(place)
            entries = unit.index[done : done + count]
            assert unit.positions[row, place].tolist() == list(range(count)), "positions restart"
            assert entries["pos"].tolist() == list(range(count))
            assert entries["token_id"].tolist() == unit.tokens[row, place].tolist()
            assert len(set(entries["doc"].tolist())) == 1, "one document"
            offset = int(entries["offset"][0])
            assert entries["offset"].tolist() == list(range(offset, offset + count))
            assert ((entries["flags"] & FIRST) > 0).tolist() == [True] + [False] * (count - 1)
            assert ((entries["flags"] & LAST) > 0).tolist() == [False] * (count - 1) + [True]
            found.append((int(entries["doc"][0]), offset, unit.tokens[row, place].tolist()))
            done += count
    assert done == len(unit.index) == unit.num_tokens == unit.lengths.sum()
    return found


@given(documents=DOCUMENTS, seq_len=SEQ_LEN)
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("pack", ["ffd", "none"])
@pytest.mark.parametrize("long_docs", ["split", "truncate"])
def test_every_token_is_placed_once_and_contexts_are_whole_and_apart(
    pack: str,
    long_docs: str,
    tokenizer: TextTokenizer,
    documents: list[np.ndarray],
    seq_len: int,
) -> None:
    ordinals = ordinals_of(documents)
    unit = pack_unit(
        ordinals, documents, tokenizer, seq_len=seq_len, long_docs=long_docs, pack=pack
    )
    assert unit.tokens.shape == unit.positions.shape == unit.segments.shape
    assert unit.tokens.shape == (len(unit.lengths), seq_len)
    found = contexts_of(unit)
    wanted = [
        (ordinal, number * seq_len, piece.tolist())
        for ordinal, document in zip(ordinals, documents, strict=True)
        for number, piece in enumerate(pieces(document, seq_len, long_docs))
    ]
    assert sorted(found) == wanted
    assert unit.num_contexts == len(wanted)
    assert unit.num_docs == sum(len(document) > 0 for document in documents)
    if pack == "none":
        assert found == wanted, "in reading order"
        assert len(unit.lengths) == len(wanted), "one context a row"


@given(documents=DOCUMENTS, seq_len=SEQ_LEN, rows=st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_batches_cover_the_rows_in_order_and_pad_the_last(
    tokenizer: TextTokenizer, documents: list[np.ndarray], seq_len: int, rows: int
) -> None:
    unit = pack_unit(
        ordinals_of(documents), documents, tokenizer, seq_len=seq_len, long_docs="split", pack="ffd"
    )
    batches = list(unit.batches(rows))
    count = len(unit.lengths)
    assert (len(batches) - 1) * rows < count <= len(batches) * rows or not batches
    for name in ("tokens", "positions", "segments", "lengths"):
        whole = getattr(unit, name)
        parts = [getattr(batch, name) for batch in batches]
        assert all(part.shape == (rows, *whole.shape[1:]) for part in parts)
        assert all(part.dtype == np.int32 for part in parts)
        joined = np.concatenate([*parts, whole[:0]])
        assert np.array_equal(joined[:count], whole)
        assert not joined[count:].any(), "rows beyond the last are empty"


def test_the_index_follows_the_rows_in_these_values(tokenizer: TextTokenizer) -> None:
    documents = [np.array(t, np.int32) for t in ([tiny.BOS, 5], [7, 8, 9, tiny.EOS], [3])]
    unit = pack_unit(
        [4, 6, 9], documents, tokenizer, seq_len=3, long_docs="split", pack="ffd"
    )  # fmt: skip
    # contexts of 3, 2, 1, 1 tokens: the longest has a row of its own, the rest share one
    assert unit.tokens.tolist() == [[7, 8, 9], [tiny.BOS, 5, tiny.EOS], [3, 0, 0]]
    assert unit.segments.tolist() == [[1, 1, 1], [1, 1, 2], [1, 0, 0]]
    assert unit.positions.tolist() == [[0, 1, 2], [0, 1, 0], [0, 0, 0]]
    assert unit.lengths.tolist() == [3, 3, 1]
    assert unit.index.tolist() == [
        (7, 6, 0, 0, FIRST),
        (8, 6, 1, 1, 0),
        (9, 6, 2, 2, LAST),
        (tiny.BOS, 4, 0, 0, 1 | FIRST),
        (5, 4, 1, 1, LAST),
        (tiny.EOS, 6, 3, 0, 2 | FIRST | LAST),
        (3, 9, 0, 0, FIRST | LAST),
    ]
    assert (unit.num_docs, unit.num_contexts) == (3, 4)


def test_packing_does_not_depend_on_anything_but_its_arguments(tokenizer: TextTokenizer) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 255, n).astype(np.int32) for n in rng.integers(0, 90, 60)]
    units = [
        pack_unit(
            ordinals_of(documents), [d.copy() for d in documents], tokenizer,
            seq_len=64, long_docs="split", pack="ffd",
        )
        for _ in range(2)
    ]  # fmt: skip
    for name in ("tokens", "positions", "segments", "lengths", "index"):
        assert np.array_equal(getattr(units[0], name), getattr(units[1], name))


def test_a_unit_without_tokens_has_no_rows(tokenizer: TextTokenizer) -> None:
    for documents in ([], [np.zeros(0, np.int32)] * 3):
        unit = pack_unit(
            ordinals_of(documents), documents, tokenizer, seq_len=8, long_docs="split", pack="ffd"
        )
        assert unit.tokens.shape == (0, 8)
        assert (unit.num_tokens, unit.num_docs, unit.num_contexts) == (0, 0, 0)
        assert list(unit.batches(4)) == []


def plain_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """The textbook's words, without a thought for speed."""
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for chosen in bins:
            if sum(lengths[i] for i in chosen) + lengths[item] <= capacity:
                chosen.append(item)
                break
        else:
            bins.append([item])
    return bins


@given(st.integers(1, 30), st.data())
@settings(max_examples=200, deadline=None)
def test_bins_are_those_of_the_textbook(capacity: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=40))
    bins = first_fit_decreasing(np.array(lengths, np.int64), capacity)
    assert bins == plain_first_fit_decreasing(lengths, capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in items) <= capacity for items in bins)


@pytest.mark.parametrize("long_docs", ["split", "truncate"])
def test_rows_are_filled_to_98_percent_on_log_normal_lengths(
    long_docs: str, tokenizer: TextTokenizer
) -> None:
    """FACTS section 6: median 600, mean 1,001, rows of 2,048; padding alone would fill 40%."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(np.log(600), 1.01, 1500)).astype(int)
    documents = [np.ones(n, np.int32) for n in lengths]
    unit = pack_unit(
        ordinals_of(documents), documents, tokenizer, seq_len=2048, long_docs=long_docs, pack="ffd"
    )
    assert unit.num_tokens / unit.tokens.size >= 0.98
