"""Packing: each token has one place, contexts are whole and separate, rows are well filled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.expressions import RowFilter
from spile.core.index import END, FIRST, LAST
from spile.corpus.pack import PackedUnit, bucket, first_fit_decreasing, pack_unit
from spile.corpus.tokenize import TextTokenizer
from support import tiny
from support.marks import examples

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
    """Ordinals with gaps, as skipped documents leave them."""
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
    assert done == len(unit.index) == unit.num_rows == unit.num_tokens == unit.lengths.sum()
    assert unit.columns is None and np.array_equal(unit.counts, unit.lengths)
    return found


@given(documents=DOCUMENTS, seq_len=SEQ_LEN)
@examples(150)
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


@given(
    documents=DOCUMENTS,
    seq_len=SEQ_LEN,
    rows=st.integers(1, 9),
    where=st.sampled_from([None, "pos % 3 == 1"]),
)
@examples(100)
def test_batches_cover_the_rows_in_order_and_pad_the_last(
    tokenizer: TextTokenizer,
    documents: list[np.ndarray],
    seq_len: int,
    rows: int,
    where: str | None,
) -> None:
    unit = pack_unit(
        ordinals_of(documents), documents, tokenizer,
        seq_len=seq_len, long_docs="split", pack="ffd", rows=RowFilter(where, None),
    )  # fmt: skip
    batches = list(unit.batches(rows))
    count = len(unit.lengths)
    assert (len(batches) - 1) * rows < count <= len(batches) * rows or not batches
    names = ["tokens", "positions", "segments", "lengths", "counts"]
    if unit.columns is None:
        assert all(batch.columns is None for batch in batches)
    else:
        names.append("columns")
    for name in names:
        whole = getattr(unit, name)
        parts = [getattr(batch, name) for batch in batches]
        assert all(part.shape == (rows, *whole.shape[1:]) for part in parts)
        assert all(part.dtype == np.int32 for part in parts)
        joined = np.concatenate([*parts, whole[:0]])
        assert np.array_equal(joined[:count], whole)
        assert not joined[count:].any(), "rows beyond the last are empty"


@given(
    documents=DOCUMENTS,
    seq_len=SEQ_LEN,
    rows=st.integers(1, 40),
    fewest=st.integers(1, 12),
    where=st.sampled_from([None, "pos % 3 == 1"]),
)
@examples(150)
def test_the_last_batch_is_the_smallest_halving_that_holds_what_is_left(
    tokenizer: TextTokenizer,
    documents: list[np.ndarray],
    seq_len: int,
    rows: int,
    fewest: int,
    where: str | None,
) -> None:
    unit = pack_unit(
        ordinals_of(documents), documents, tokenizer,
        seq_len=seq_len, long_docs="split", pack="ffd", rows=RowFilter(where, None),
    )  # fmt: skip
    batches, count = list(unit.batches(rows, fewest)), len(unit.lengths)
    sizes = [len(batch.lengths) for batch in batches]
    assert sizes[:-1] == [rows] * ((count - 1) // rows if count else 0)
    if count:
        left = count - sum(sizes[:-1])
        halvings = [rows]
        while halvings[-1] > 1:
            halvings.append(halvings[-1] // 2)
        allowed = [n for n in halvings if n == rows or n >= fewest]
        assert sizes[-1] == min(n for n in allowed if n >= left)
    names = ["tokens", "positions", "segments", "lengths", "counts"]
    for name in names if unit.columns is None else [*names, "columns"]:
        whole = getattr(unit, name)
        joined = np.concatenate([*(getattr(batch, name) for batch in batches), whole[:0]])
        assert np.array_equal(joined[:count], whole), "nothing is lost"
        assert not joined[count:].any(), "rows beyond the last are empty"


@pytest.mark.parametrize(
    ("left", "fewest", "last"),
    [(16, 1, 16), (9, 1, 16), (8, 1, 8), (5, 1, 8), (4, 1, 4), (1, 1, 1), (1, 2, 2), (3, 3, 4),
     (1, 3, 4), (1, 16, 16), (1, 40, 16), (1, None, 16)],
)  # fmt: skip
def test_the_last_of_batches_of_sixteen_has_this_many_rows(
    tokenizer: TextTokenizer, left: int, fewest: int | None, last: int
) -> None:
    documents = [np.ones(4, np.int32)] * (32 + left)
    unit = pack_unit(
        ordinals_of(documents), documents, tokenizer, seq_len=4, long_docs="split", pack="none"
    )
    assert [len(batch.lengths) for batch in unit.batches(16, fewest)] == [16, 16, last]


@pytest.mark.parametrize(
    ("most", "contexts"),
    [(1, 16), (2, 16), (15, 16), (16, 16), (17, 64), (63, 64), (64, 64), (65, 256), (256, 256),
     (257, 1024), (1024, 1024), (1025, 4096)],
)  # fmt: skip
def test_a_batch_is_made_for_16_or_64_or_256_contexts_a_row(
    tokenizer: TextTokenizer, most: int, contexts: int
) -> None:
    documents = [np.ones(2048, np.int32)] * 2 + [np.ones(1, np.int32)] * most
    unit = pack_unit(
        ordinals_of(documents), documents, tokenizer, seq_len=2048, long_docs="split", pack="ffd"
    )
    assert unit.segments.max() == most
    # by batch: the full rows hold one context each, the last holds all the short ones
    assert [batch.contexts for batch in unit.batches(1)] == [16, 16, contexts]
    assert [batch.contexts for batch in unit.batches(4)] == [contexts]


@given(
    documents=DOCUMENTS,
    seq_len=SEQ_LEN,
    rows=st.integers(0, 40),
    where=st.sampled_from([None, "pos % 3 == 1", "end"]),
)
@examples(150)
def test_the_first_rows_are_a_unit_of_their_own(
    tokenizer: TextTokenizer,
    documents: list[np.ndarray],
    seq_len: int,
    rows: int,
    where: str | None,
) -> None:
    unit = pack_unit(
        ordinals_of(documents), documents, tokenizer,
        seq_len=seq_len, long_docs="split", pack="ffd", rows=RowFilter(where, None),
    )  # fmt: skip
    cut = unit.first(rows)
    for name in ("tokens", "positions", "segments", "lengths", "counts"):
        assert np.array_equal(getattr(cut, name), getattr(unit, name)[:rows])
    assert (cut.columns is None) is (unit.columns is None)
    assert len(cut.lengths) == min(rows, len(unit.lengths))
    assert np.array_equal(cut.index, unit.index[: len(cut.index)])
    if cut.columns is None:
        kept = cut.tokens[cut.segments > 0]
    else:
        gathered = np.take_along_axis(cut.tokens, cut.columns, axis=1)
        kept = gathered[np.arange(cut.columns.shape[1]) < cut.counts[:, None]]
    assert cut.index["token_id"].tolist() == kept.tolist(), "its index is of its rows alone"
    assert cut.num_rows == cut.counts.sum()


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
        (5, 4, 1, 1, LAST | END),
        (tiny.EOS, 6, 3, 0, 2 | FIRST | LAST | END),
        (3, 9, 0, 0, FIRST | LAST | END),
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
    for name in ("tokens", "positions", "segments", "lengths", "counts", "index"):
        assert np.array_equal(getattr(units[0], name), getattr(units[1], name))


def test_a_unit_without_tokens_has_no_rows(tokenizer: TextTokenizer) -> None:
    for documents in ([], [np.zeros(0, np.int32)] * 3):
        unit = pack_unit(
            ordinals_of(documents), documents, tokenizer, seq_len=8, long_docs="split", pack="ffd"
        )
        assert unit.tokens.shape == (0, 8)
        assert (unit.num_tokens, unit.num_docs, unit.num_contexts) == (0, 0, 0)
        assert unit.num_rows == 0
        assert list(unit.batches(4)) == []


@given(documents=DOCUMENTS, seq_len=SEQ_LEN)
@examples(100)
@pytest.mark.parametrize("long_docs", ["split", "truncate"])
def test_each_document_ends_once_at_the_last_token_kept(
    long_docs: str, tokenizer: TextTokenizer, documents: list[np.ndarray], seq_len: int
) -> None:
    ordinals = ordinals_of(documents)
    unit = pack_unit(
        ordinals, documents, tokenizer, seq_len=seq_len, long_docs=long_docs, pack="ffd"
    )
    ends = unit.index[unit.index["flags"] & END != 0]
    assert (ends["flags"] & LAST != 0).all(), "an end is the last of a context, too"
    lengths = [min(len(d), seq_len if long_docs == "truncate" else len(d)) for d in documents]
    wanted = [(o, length - 1) for o, length in zip(ordinals, lengths, strict=True) if length]
    assert sorted(zip(ends["doc"].tolist(), ends["offset"].tolist(), strict=True)) == wanted


FILTERS = st.builds(
    RowFilter,
    st.sampled_from(
        [None, "pos >= 0", "pos < 0", "not bos and pos >= 1", "end", "first or token_id % 5 == 0",
         "doc % 2 == 0", "offset >= 20", "doc == 13 and pos == 2"]
    ),
    st.sampled_from([None, 1, 2, 3, 50]),
)  # fmt: skip


@given(documents=DOCUMENTS, seq_len=SEQ_LEN, rows=FILTERS, pack=st.sampled_from(["ffd", "none"]))
@examples(300)
def test_a_filter_drops_entries_and_rows_but_moves_nothing(
    tokenizer: TextTokenizer,
    documents: list[np.ndarray],
    seq_len: int,
    rows: RowFilter,
    pack: str,
) -> None:
    def packed(rows: RowFilter | None) -> PackedUnit:
        return pack_unit(
            ordinals_of(documents), documents, tokenizer,
            seq_len=seq_len, long_docs="split", pack=pack, rows=rows,
        )  # fmt: skip

    whole, unit = packed(None), packed(rows)
    mask = rows.mask(whole.index)
    assert np.array_equal(unit.index, whole.index[mask])
    assert unit.num_rows == unit.counts.sum() == mask.sum()
    for name in ("num_docs", "num_contexts", "num_tokens"):
        assert getattr(unit, name) == getattr(whole, name), "what was read, kept or not"

    stops = np.cumsum(whole.lengths)
    kept_in = [mask[stop - n : stop] for stop, n in zip(stops, whole.lengths, strict=True)]
    if mask.all():
        assert unit.columns is None and np.array_equal(unit.counts, unit.lengths)
        chosen = list(range(len(whole.lengths)))
    else:
        chosen = [row for row, kept in enumerate(kept_in) if kept.any()]
    for name in ("tokens", "positions", "segments", "lengths"):
        assert np.array_equal(getattr(unit, name), getattr(whole, name)[chosen])
    assert unit.counts.tolist() == [kept_in[row].sum() for row in chosen]

    if unit.columns is None:
        return
    assert unit.columns.dtype == unit.counts.dtype == np.int32
    assert unit.columns.shape == (
        len(chosen),
        bucket(max(unit.counts.tolist(), default=0), seq_len),
    )
    for row, count, columns in zip(chosen, unit.counts, unit.columns, strict=True):
        assert columns[:count].tolist() == np.nonzero(kept_in[row])[0].tolist()
        assert not columns[count:].any()
    gathered = np.take_along_axis(unit.tokens, unit.columns, axis=1)
    kept = np.arange(unit.columns.shape[1]) < unit.counts[:, None]
    assert gathered[kept].tolist() == unit.index["token_id"].tolist()


def test_kept_tokens_have_these_places(tokenizer: TextTokenizer) -> None:
    documents = [np.array(t, np.int32) for t in ([tiny.BOS, 5], [7, 8, 9, tiny.EOS], [3])]
    unit = pack_unit(
        [4, 6, 9], documents, tokenizer,
        seq_len=3, long_docs="split", pack="ffd", rows=RowFilter("doc < 9 and not bos", 2),
    )  # fmt: skip
    # rows: 7 8 9, BOS 5 | EOS, and 3; the last of them has nothing to keep
    assert unit.tokens.tolist() == [[7, 8, 9], [tiny.BOS, 5, tiny.EOS]]
    assert unit.columns is not None and unit.columns.tolist() == [[0, 2], [1, 2]]
    assert unit.counts.tolist() == [2, 2] and unit.lengths.tolist() == [3, 3]
    assert unit.index["token_id"].tolist() == [7, 9, 5, tiny.EOS]
    assert (unit.num_rows, unit.num_tokens, unit.num_docs, unit.num_contexts) == (4, 7, 3, 4)


def test_a_filter_that_nothing_passes_leaves_no_rows(tokenizer: TextTokenizer) -> None:
    documents = [np.arange(1, 6, dtype=np.int32)]
    unit = pack_unit(
        [0], documents, tokenizer,
        seq_len=8, long_docs="split", pack="ffd", rows=RowFilter("pos > 100", None),
    )  # fmt: skip
    assert unit.tokens.shape == (0, 8)
    assert unit.columns is not None and unit.columns.shape == (0, 1)
    assert (unit.num_rows, unit.num_tokens, unit.num_docs) == (0, 5, 1)
    assert list(unit.batches(4)) == []


def test_buckets_are_few_and_waste_less_than_a_quarter() -> None:
    assert [bucket(n, 100) for n in (0, 1, 7, 8, 9, 15, 17, 33, 65, 99)] == [
        1, 1, 7, 8, 10, 16, 20, 40, 80, 100
    ]  # fmt: skip
    sizes = [bucket(n, 2048) for n in range(1, 2049)]
    assert all(n <= size < 1.25 * n for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and sizes[-1] == 2048
    assert len(set(sizes)) <= 40


def plain_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """First-fit-decreasing as in a textbook, without regard for speed."""
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
@examples(200)
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
    """Lengths of median 600 and mean 1,001; without packing, rows of 2,048 would be 40% full."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(np.log(600), 1.01, 1500)).astype(int)
    documents = [np.ones(n, np.int32) for n in lengths]
    unit = pack_unit(
        ordinals_of(documents), documents, tokenizer, seq_len=2048, long_docs=long_docs, pack="ffd"
    )
    assert unit.num_tokens / unit.tokens.size >= 0.98


@examples(60)
@given(DOCUMENTS, SEQ_LEN, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_parts_take_every_row_once_and_store_one_run_each(
    tokenizer: TextTokenizer,
    documents: list[np.ndarray],
    seq_len: int,
    parts: int,
    each: int,
    filtered: bool,
) -> None:
    unit = pack_unit(
        ordinals_of(documents), documents, tokenizer, seq_len=seq_len, long_docs="split",
        pack="ffd", rows=RowFilter("pos % 2 == 0" if filtered else None, None),
    )  # fmt: skip
    batches = list(unit.batches(parts * each, parts, parts=parts, quantum=parts))
    found: list[list[int]] = [[] for _ in range(parts)]
    for batch in batches:
        assert len(batch.tokens) % parts == 0
        width = len(batch.tokens) // parts
        for row in range(len(batch.tokens)):
            columns = slice(None) if batch.columns is None else batch.columns[row]
            kept = batch.tokens[row][columns][: batch.counts[row]]
            found[row // width] += kept.tolist()
    stored = [unit.run_of(part, parts) for part in range(parts)]
    assert [count for _, count in stored] == [len(tokens) for tokens in found]
    assert [first for first, _ in stored] == [
        sum(count for _, count in stored[:part]) for part in range(parts)
    ]
    assert [t for tokens in found for t in tokens] == unit.index["token_id"].tolist()
    assert sum(int(batch.lengths.sum()) for batch in batches) == int(unit.lengths.sum())


@given(
    documents=DOCUMENTS,
    seq_len=SEQ_LEN,
    where=st.sampled_from([None, "pos % 3 == 1"]),
    seed=st.integers(0, 9),
)
@examples(80)
def test_log_probabilities_stand_before_their_tokens_in_first_contexts(
    tokenizer: TextTokenizer,
    documents: list[np.ndarray],
    seq_len: int,
    where: str | None,
    seed: int,
) -> None:
    rng, ordinals = np.random.default_rng(seed), ordinals_of(documents)
    logs: list[np.ndarray | None] = []
    for document in documents:
        told = -rng.random(len(document), np.float32)
        told[rng.random(len(document)) < 0.4] = np.nan
        logs.append(told if rng.random() < 0.8 else None)
    unit = pack_unit(
        ordinals, documents, tokenizer, seq_len=seq_len, long_docs="split", pack="ffd",
        rows=RowFilter(where, None), logprobs=logs,
    )  # fmt: skip
    assert unit.scored is not None and unit.claimed is not None and unit.scored_docs is not None
    assert unit.scored.shape == unit.claimed.shape == unit.scored_docs.shape
    by_doc = dict(zip(ordinals, zip(documents, logs, strict=True), strict=True))
    found: set[tuple[int, int]] = set()
    for row, place in np.argwhere(unit.scored_docs > 0).tolist():
        doc, column = int(unit.scored_docs[row, place]) - 1, int(unit.scored[row, place])
        assert unit.segments[row, column] == unit.segments[row, column + 1] > 0
        offset = int(unit.positions[row, column]) + 1  # of the token that it says
        document, told = by_doc[doc]
        assert told is not None and unit.claimed[row, place] == told[offset]
        assert unit.tokens[row, column : column + 2].tolist() == document[offset - 1 :][:2].tolist()
        assert (doc, offset) not in found
        found.add((doc, offset))
    if where is None:
        assert found == {
            (doc, offset)
            for doc, (document, told) in by_doc.items()
            if told is not None
            for offset in range(1, min(len(document), seq_len))
            if not np.isnan(told[offset])
        }
