"""Documents and index as Arrow tables, and columns of documents in the order of the corpus."""

from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.core.expressions import RowFilter
from spile.core.index import BOS, FLAGS, INDEX_DTYPE, SPECIAL
from spile.dataset.maintain.assemble import merge
from spile.dataset.read.tables import index_table
from spile.objects import LocalObjects
from support import stored


def test_a_column_has_one_value_for_each_document_in_corpus_order(tmp_path: Path) -> None:
    """Rows, and the documents table, are in the order in which the units were read."""
    made = stored.copied(tmp_path / "out", first_docs=[8, 5, 3, 2, 0], keep=("label", "url"))
    ds = spile.open(made.path)
    assert ds.documents(["doc"])["doc"].to_pylist() != sorted(ds.documents()["doc"].to_pylist())
    docs = sorted({*made.index["doc"].tolist()})
    label = ds.columns("label")
    assert label.tolist() == [f"label-{doc}" for doc in docs]
    both = ds.columns()
    assert [*both] == ["doc", "label", "url"]
    assert both["doc"].tolist() == docs and both["label"].tolist() == label.tolist()
    two = ds.columns("url", "rows")
    assert [*two] == ["url", "rows"] and two["rows"].sum() == len(ds)
    with pytest.raises(ConfigError, match="no column 'topic' of documents; there are doc, .*label"):
        ds.columns("topic")


def test_documents_of_which_no_row_was_kept_have_no_value(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", where="pos >= 2", every=2, keep=("label",))
    ds = spile.open(made.path)
    assert ds.columns("doc").tolist() == sorted({*made.index["doc"].tolist()})
    assert ds.num_documents > len(ds.columns("doc")) == len(ds.pooled("mlp_out.1"))


def test_the_index_is_a_table_whose_flags_are_booleans(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    ds = spile.open(made.path)
    table = ds.index_table()
    assert table.column_names == ["row", "token_id", "doc", "offset", "pos", *FLAGS]
    for name in ("token_id", "doc", "offset", "pos"):
        assert np.array_equal(table[name].to_numpy(), made.index[name])
    for name in ("first", "last", "end", "special"):
        wanted = RowFilter(name, None).mask(made.index)
        assert str(table.schema.field(name).type) == "bool"
        assert table[name].to_pylist() == wanted.tolist()
    part = ds.index_table(20, 30)
    assert part["row"].to_pylist() == [*range(20, 30)]
    assert part["doc"].to_pylist() == made.index["doc"][20:30].tolist()


def test_special_means_in_the_table_what_it_means_in_conditions() -> None:
    entries = np.zeros(3, INDEX_DTYPE)
    entries["flags"] = [0, BOS, SPECIAL]
    assert index_table(entries, 0)["special"].to_pylist() == [False, True, True]


def test_a_document_is_found_by_its_kept_id(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", keep=("id", "label"))
    ds = spile.open(made.path)
    assert ds.document("id-3").index.tobytes() == ds.document(3).index.tobytes()
    assert ds.about("id-3") == ds.about(3) and ds.about("id-3")["label"] == "label-3"
    assert len(ds.document(np.int64(3))) == 40  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="no document has the id 'r9'; kept columns are id, lab"):
        ds.document("r9")
    with pytest.raises(ConfigError, match="given by its ordinal or its id, not by 2.5"):
        ds.document(2.5)  # pyright: ignore[reportArgumentType]
    other = spile.open(stored.copied(tmp_path / "other", keep=("label",)).path)
    with pytest.raises(ConfigError, match=r"'r3': no column 'id' was kept, only label; ds.find\("):
        other.document("r3")


def test_an_id_of_several_documents_lists_their_ordinals(tmp_path: Path) -> None:
    one = stored.copied(tmp_path / "a", ((3,),), keep=("id",))
    other = stored.copied(tmp_path / "b", ((2,),), keep=("id",), corpus=("34-cd",))
    merge([one.objects, other.objects], LocalObjects(tmp_path / "both"))
    ds = spile.open(tmp_path / "both")
    with pytest.raises(ConfigError, match="2 documents have the id 'id-0'; choose .*: 0, 1$"):
        ds.document("id-0")
