"""Pooled rows of a packed unit: each has all kept tokens of its span, in the order of parts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.expressions import RowFilter
from spile.core.index import POOLED_INDEX_DTYPE
from spile.core.pool import Pool
from spile.corpus.pack import PackedUnit, pack_unit
from spile.corpus.pooled_spans import PooledSpans
from spile.corpus.tokenize import TextTokenizer
from support import tiny
from support.marks import examples

LENGTHS = st.lists(st.integers(0, 40), max_size=12)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    tiny.write_tokenizer(directory)
    return TextTokenizer(directory, "tokenizer")


def packed(
    tokenizer: TextTokenizer,
    lengths: list[int],
    by: str,
    seq_len: int = 8,
    where: str | None = None,
    spans: list[np.ndarray] | None = None,
) -> PackedUnit:
    documents = [np.arange(length, dtype=np.int32) % 250 + 1 for length in lengths]
    return pack_unit(
        [10 + 3 * n for n in range(len(lengths))], documents, tokenizer,
        seq_len=seq_len, long_docs="split", pack="ffd", rows=RowFilter(where, None),
        pool=Pool(by), spans=spans or (),
    )  # fmt: skip


@given(
    lengths=LENGTHS,
    seq_len=st.integers(1, 12),
    where=st.sampled_from([None, "offset % 3 == 1", "offset > 9"]),
    seed=st.integers(0, 99),
)
@examples(60)
@pytest.mark.parametrize("by", ["mean", "last", "first"])
def test_a_row_has_all_kept_tokens_of_its_span_and_says_which(
    by: str,
    tokenizer: TextTokenizer,
    lengths: list[int],
    seq_len: int,
    where: str | None,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    spans = [rng.integers(-1, 3, length) for length in lengths]
    unit = packed(tokenizer, lengths, by, seq_len, where, spans)
    keeps = {None: lambda o: True, "offset % 3 == 1": lambda o: o % 3 == 1,
             "offset > 9": lambda o: o > 9}[where]  # fmt: skip
    wanted = {
        (10 + 3 * n, span): offsets
        for n, of in enumerate(spans)
        for span in range(3)
        if (offsets := [o for o in np.flatnonzero(of == span).tolist() if keeps(o)])
    }
    found = unit.index
    assert found.dtype == POOLED_INDEX_DTYPE and len(found) == unit.num_rows == len(wanted)
    for entry in found:
        offsets = wanted.pop((int(entry["doc"]), int(entry["span"])))
        shown = offsets[0] if by == "first" else offsets[-1]
        assert (entry["start"], entry["count"]) == (offsets[0], len(offsets))
        assert (entry["offset"], entry["pos"]) == (shown, shown % seq_len)
        assert entry["token_id"] == shown % 250 + 1
    assert not wanted and unit.num_tokens == sum(lengths)
    if by == "mean":
        check_parts(unit)
    else:
        assert unit.sizes is None and unit.counts.sum() == len(found)
        kept = (
            unit.tokens
            if unit.columns is None
            else np.take_along_axis(unit.tokens, unit.columns, axis=1)
        )
        places = np.arange(kept.shape[1]) < unit.counts[:, None]
        assert kept[places].tolist() == found["token_id"].tolist(), "rows are in packed order"


def check_parts(unit: PackedUnit) -> None:
    """Walk the packed rows as the device and the host do."""
    assert unit.slots is not None and unit.sizes is not None and unit.pooled is not None
    members: list[list[int]] = [[] for _ in unit.index]
    part, token = 0, 0
    for slots, sizes, count in zip(unit.slots, unit.sizes, unit.counts, strict=True):
        assert not slots[count:].any() and (slots[:count] > 0).all()
        used = np.count_nonzero(sizes)
        assert sizes[:used].all() and not sizes[used:].any() and 0 < used <= unit.sizes.shape[1]
        assert np.bincount(slots[:count], minlength=used + 1)[1:].tolist() == sizes[:used].tolist()
        for slot in slots[:count].tolist():
            row = int(unit.pooled.parts[part + slot - 1])
            assert unit.pooled.rows[token] == row
            members[row].append(int(unit.entries["offset"][token]))
            token += 1
        part += used
    assert part == len(unit.pooled.parts) and token == len(unit.entries)
    assert [len(each) for each in members] == unit.index["count"].tolist()
    assert unit.pooled.ends.sum() == len(members)
    rows = unit.pooled.parts[unit.pooled.ends]
    assert rows.tolist() == list(range(len(members)))


def test_the_parts_of_these_documents_are_these(tokenizer: TextTokenizer) -> None:
    unit = packed(tokenizer, [12, 4, 3], "mean")  # rows: 0-7 of the first | its rest and 4 | 3
    assert unit.slots is not None and unit.sizes is not None and unit.pooled is not None
    assert unit.slots.tolist() == [[1] * 8, [1] * 4 + [2] * 4, [1] * 3 + [0] * 5]
    assert unit.sizes.tolist() == [[8, 0, 0, 0], [4, 4, 0, 0], [3, 0, 0, 0]]
    assert unit.pooled.parts.tolist() == [0, 0, 1, 2]
    assert unit.pooled.ends.tolist() == [False, True, True, True]
    assert unit.pooled.alone.tolist() == [False, True, True]
    assert unit.index[["doc", "offset", "count"]].tolist() == [(10, 11, 12), (13, 3, 4), (16, 2, 3)]


def test_one_process_has_all_pooled_rows_and_batches_stay_in_order(
    tokenizer: TextTokenizer,
) -> None:
    unit = packed(tokenizer, [12, 4, 3, 30], "mean")
    assert [unit.run_of(part, 2) for part in range(2)] == [(0, 4), (4, 0)]
    batches = list(unit.batches(2, parts=2))
    assert np.concatenate([b.tokens for b in batches])[: len(unit.tokens)].tolist() == (
        unit.tokens.tolist()
    )
    assert {each.sizes.shape[1] for each in batches if each.sizes is not None} == {4}


def test_no_kept_token_makes_no_row() -> None:
    none = np.empty(0, np.int64)
    entries = np.empty(0, [(n, POOLED_INDEX_DTYPE[n]) for n in ("token_id", "doc", "offset")])
    found = PooledSpans.of(entries, none, none, Pool("mean"))
    assert len(found.index) == len(found.parts) == len(found.slots[0]) == 0
