"""The index is stored: its bits and types never change."""

from spile.core.index import DOCUMENT_COLUMNS, FLAGS, INDEX_DTYPE, ROLES, index_dtype


def test_flags_are_these_bits() -> None:
    assert FLAGS == {
        "bos": 1, "eos": 2, "special": 4, "first": 8, "last": 16, "end": 32,
        "system": 64, "user": 128, "assistant": 256, "tool": 512, "template": 1024,
        "thinking": 2048, "answer": 4096,
    }  # fmt: skip
    assert FLAGS.items() >= ROLES.items()


def test_columns_are_of_these_types() -> None:
    assert {name: INDEX_DTYPE[name].str for name in INDEX_DTYPE.names or ()} == {
        "token_id": "<i4", "doc": "<i8", "offset": "<i4", "pos": "<i4", "flags": "<u2",
    }  # fmt: skip
    assert max(FLAGS.values()) < 1 << 16
    assert len({*DOCUMENT_COLUMNS}) == len(DOCUMENT_COLUMNS)


def test_a_pooled_index_has_three_columns_more() -> None:
    pooled = index_dtype(pooled=True)
    assert [(name, pooled[name].str) for name in pooled.names or ()] == [
        *((name, INDEX_DTYPE[name].str) for name in INDEX_DTYPE.names or ()),
        ("span", "<i4"), ("start", "<i4"), ("count", "<i4"),
    ]  # fmt: skip
    assert index_dtype(pooled=False) == INDEX_DTYPE
