"""Documents that may be added to a dataset, their place, and refusals."""

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spile.core.config import Recipe
from spile.core.errors import ConfigError, DriftError, InputError, SpileError, StoreError
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table
from spile.objects import MemoryObjects
from spile.plan.job import ExtractionJob
from spile.plan.resolve import resolve, store_table
from support import stored

TEXTS = [f"document {n} has words of its own, {'and ' * (n % 5)}ends" for n in range(20)]


def lines(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


class Growing:
    """A dataset that has only its table."""

    def __init__(self, model: Path, corpus: Path) -> None:
        self.ledger = Ledger(MemoryObjects("memory://grown"))
        self._base = {"model": str(model), "taps": "embed", "seq_len": 64, "unit_tokens": 60}
        self._corpus = str(corpus)

    def begin(self, **options: Any) -> Table:
        return self.store(Recipe(corpus=self._corpus, **self._base, **options))

    def more(self, **options: Any) -> Table:
        return self.store(Recipe(**{"more": True, **options}))

    def store(self, recipe: Recipe) -> Table:
        return store_table(self.resolved(recipe), self.ledger).table

    def resolved(self, recipe: Recipe) -> ExtractionJob:
        return resolve(recipe, self.ledger, "cpu")

    def texts(self) -> list[str]:
        """Every document of every unit, in order; skipped ones are empty."""
        job = self.resolved(Recipe())
        reader = job.reader()
        try:
            return [
                "" if document.skipped else document.text
                for unit in job.units
                for document in reader.read(unit.spans, unit.first_doc, unit.skip).every
            ]
        finally:
            reader.close()


@pytest.fixture
def growing(model: Path, tmp_path: Path) -> Growing:
    lines(tmp_path / "corpus" / "b.jsonl", TEXTS[:8])
    return Growing(model, tmp_path / "corpus")


def to_jsonl(path: Path) -> None:
    lines(path.with_suffix(".jsonl"), TEXTS)


def to_gzip(path: Path) -> None:
    data = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(data))


def to_parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS}), path.with_suffix(".parquet"), row_group_size=6)


def to_arrow(path: Path) -> None:
    table = pa.table({"text": TEXTS})
    with (
        pa.OSFile(str(path.with_suffix(".arrow")), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table, 6)


def to_json(path: Path) -> None:
    path.with_suffix(".json").write_text(json.dumps([{"text": text} for text in TEXTS]))


def to_csv(path: Path) -> None:
    path.with_suffix(".csv").write_text("".join(f'"{text}"\n' for text in ["text", *TEXTS]))


def to_text(path: Path) -> None:
    path.with_suffix(".txt").write_text("\n".join(TEXTS))


KINDS = [to_jsonl, to_gzip, to_parquet, to_arrow, to_json, to_csv, to_text]


@pytest.mark.parametrize("write", KINDS)
def test_a_larger_limit_goes_on_within_a_file_of_any_kind(
    write: Callable[[Path], None], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    write(tmp_path / "corpus" / "a")
    growing = Growing(model, tmp_path / "corpus")
    base = growing.begin(max_docs=5)
    for count in (8, 9, 1000):
        table = growing.more(max_docs=count)
        assert table.at(0) == base
        assert growing.texts() == TEXTS[:count]
    assert table.units.first_doc.tolist()[len(base.units)] == 5
    assert growing.more(max_docs=1000) == table


def test_tokens_are_counted_over_all_generations(growing: Growing) -> None:
    base = growing.begin(max_tokens=50)
    assert growing.more(max_tokens=50) == base
    table = growing.more(max_tokens=150)
    assert len(table.units) > len(base.units)
    assert growing.texts() == TEXTS[: len(growing.texts())]
    tokens = table.units.tokens
    assert tokens.sum() >= 150 > tokens[:-1].sum()


def test_new_files_follow_whatever_their_names(growing: Growing, tmp_path: Path) -> None:
    base = growing.begin()
    lines(tmp_path / "corpus" / "a.jsonl", TEXTS[8:10])
    lines(tmp_path / "corpus" / "c.jsonl", TEXTS[10:12])
    (tmp_path / "corpus" / "b.jsonl").rename(tmp_path / "corpus" / "z.jsonl")  # names are not files
    table = growing.more()
    assert growing.texts() == TEXTS[:12]
    assert table.at(0) == base and table.recipe == base.recipe
    assert [Path(file["path"]).name for file in table.files] == ["b.jsonl", "a.jsonl", "c.jsonl"]
    lines(tmp_path / "corpus" / "0.jsonl", TEXTS[12:])
    growing.more()
    assert growing.texts() == TEXTS


def test_files_that_the_dataset_has_are_not_added(
    growing: Growing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = growing.begin()
    other = tmp_path / "other"
    lines(other / "a.jsonl", TEXTS[:8])  # b.jsonl by another name
    lines(other / "c.jsonl", TEXTS[8:12])
    (other / "d.jsonl").symlink_to(tmp_path / "corpus" / "b.jsonl")
    lines(other / "e.jsonl", TEXTS[8:12])
    lines(other / "f.jsonl", TEXTS[12:])
    with caplog.at_level("INFO"):
        table = growing.more(add_corpus=str(other))
    assert "--add-corpus: 3 of 5 files are in the dataset already; 2 added" in caplog.text
    assert growing.texts() == TEXTS
    assert [Path(file["path"]).name for file in table.files] == ["b.jsonl", "c.jsonl", "f.jsonl"]
    # Sources that overlap, as those of merged datasets may: nothing is new, and nothing differs.
    caplog.clear()
    with caplog.at_level("INFO"):
        assert growing.more(add_corpus=str(other / "*.jsonl")) == table
    assert "3 of 3 files are in the dataset already; 0 added" in caplog.text
    assert "nothing new" in caplog.text
    (tmp_path / "corpus" / "copy.jsonl").symlink_to(other / "f.jsonl")
    assert growing.more() == growing.store(Recipe()) == table
    assert table.at(0) == base


def test_a_generation_names_only_the_sources_that_it_adds(growing: Growing, tmp_path: Path) -> None:
    growing.begin()
    places = [str(tmp_path / name) for name in ("corpus", "one", "two")]
    for number, place in enumerate(places[1:], 1):
        lines(Path(place) / "a.jsonl", TEXTS[4 + 4 * number : 8 + 4 * number])
        growing.more(add_corpus=place)
    lines(Path(places[1]) / "b.jsonl", TEXTS[16:])
    table = growing.more()
    assert [each.sources for each in table.generations] == [
        (places[0], places[1]), (places[0], places[2]), (places[0],)
    ]  # fmt: skip
    assert table.sources == tuple(places) and growing.texts() == TEXTS
    assert table.at(1).sources == tuple(places[:2])


def test_equal_files_of_the_first_corpus_are_both_read(growing: Growing, tmp_path: Path) -> None:
    lines(tmp_path / "corpus" / "again.jsonl", TEXTS[:8])
    base = growing.begin()
    assert growing.texts() == [*TEXTS[:8], *TEXTS[:8]]
    lines(tmp_path / "corpus" / "third.jsonl", TEXTS[:8])
    assert growing.more() == base
    (tmp_path / "corpus" / "again.jsonl").unlink()
    assert growing.more() == base  # (known by content, it is still there twice)
    (tmp_path / "corpus" / "third.jsonl").unlink()
    with pytest.raises(DriftError, match=r"corpus"):
        growing.more()


def test_files_of_several_sources_may_have_moved_to_one_place(
    growing: Growing, tmp_path: Path
) -> None:
    growing.begin()
    lines(tmp_path / "other" / "c.jsonl", TEXTS[8:12])
    table = growing.more(add_corpus=str(tmp_path / "other"))
    moved = (tmp_path / "corpus").rename(tmp_path / "moved")
    (tmp_path / "other").rename(moved / "other")
    with pytest.raises(InputError, match=r"--corpus \S+/corpus: no such file"):
        growing.store(Recipe())
    assert growing.store(Recipe(corpus=str(moved / "**"))) == table
    lines(moved / "d.jsonl", TEXTS[12:])
    assert growing.more(corpus=str(moved / "**")).at(1) == table and growing.texts() == TEXTS
    (moved / "other" / "c.jsonl").unlink()
    with pytest.raises(InputError, match=r"--corpus \S+/other: no such file"):
        growing.store(Recipe())


def test_a_program_among_the_stored_sources_is_not_run(growing: Growing, tmp_path: Path) -> None:
    base = growing.begin()
    (tmp_path / "theirs.py").write_text("raise SystemExit('this must not run')")
    source = f"{tmp_path / 'theirs.py'}:documents"
    stored.replace_table(growing.ledger.objects, dataclasses.replace(base, more_sources=(source,)))
    with pytest.raises(ConfigError, match="not run only because a store names it"):
        growing.resolved(Recipe())


def test_what_occurred_before_is_left_out(growing: Growing, tmp_path: Path) -> None:
    growing.begin(dedupe=True)
    lines(tmp_path / "corpus" / "c.jsonl", [TEXTS[0], TEXTS[9], TEXTS[9], TEXTS[3]])
    growing.more()
    assert growing.texts() == [*TEXTS[:8], "", TEXTS[9], "", ""]


def test_shuffled_units_are_permuted_among_themselves(growing: Growing, tmp_path: Path) -> None:
    base = growing.begin(shuffle_docs=3)
    lines(tmp_path / "corpus" / "c.jsonl", TEXTS[8:])
    table = growing.more()
    assert table.at(0) == base
    assert sorted(growing.texts()) == sorted(TEXTS)
    first = table.units.first_doc.tolist()[len(base.units) :]
    assert min(first) == 8 and first != sorted(first)


def test_files_without_documents_add_nothing(
    growing: Growing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = growing.begin()
    lines(tmp_path / "corpus" / "c.jsonl", [])
    with caplog.at_level("INFO"):
        assert growing.more() == base
    assert "nothing new" in caplog.text


@pytest.mark.parametrize(("begun", "asked", "reason"), [
    ({"max_docs": 5}, {"max_docs": 4}, "--max-docs 4 is less than the 5 documents"),
    ({}, {"max_docs": 4}, "--max-docs 4 is less than the 8 documents"),
    ({"max_tokens": 90}, {"max_tokens": 80}, "--max-tokens 80 is less than the 90"),
    ({"shuffle_docs": 1, "max_docs": 5}, {"max_docs": 7}, "a sample of its whole corpus"),
    ({"shuffle_docs": 1}, {"max_docs": 70}, "a sample of its whole corpus"),
    ({}, {"add_corpus": "x.py:documents"}, "is a program"),
    ({}, {"seq_len": 32}, "seq_len: stored 64, now 32"),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused(
    begun: dict[str, Any], asked: dict[str, Any], reason: str, growing: Growing
) -> None:
    base = growing.begin(**begun)
    with pytest.raises(SpileError, match=reason):
        growing.more(**asked)
    assert growing.ledger.table() == base


def test_without_a_dataset_there_is_nothing_to_add_to(growing: Growing) -> None:
    with pytest.raises(ConfigError, match="--more: no dataset at memory://grown yet"):
        growing.begin(more=True)


def test_old_files_must_be_there_and_unchanged(growing: Growing, tmp_path: Path) -> None:
    growing.begin()
    old = tmp_path / "corpus" / "b.jsonl"
    lines(tmp_path / "corpus" / "c.jsonl", TEXTS[8:10])
    with old.open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(DriftError, match=r"corpus file .*b\.jsonl: stored '\d+-\w+', now '\d+-"):
        growing.more()
    old.unlink()
    with pytest.raises(DriftError, match=r"corpus file .*(b|c)\.jsonl: stored"):
        growing.more()


@pytest.mark.parametrize("asked", [{"max_docs": 7}, {"max_tokens": 10**6}])
def test_a_larger_limit_alone_says_what_adds_it(asked: dict[str, Any], growing: Growing) -> None:
    growing.begin(max_docs=5, max_tokens=1000)
    with pytest.raises(DriftError, match="add documents with --more"):
        growing.store(Recipe(**asked))


def test_who_comes_second_continues_with_the_same_or_says_what_differs(
    growing: Growing, tmp_path: Path
) -> None:
    base = growing.begin()
    old = growing.resolved(Recipe())
    lines(tmp_path / "corpus" / "c.jsonl", TEXTS[8:10])
    one, same = growing.resolved(Recipe(more=True)), growing.resolved(Recipe(more=True))
    lines(tmp_path / "corpus" / "d.jsonl", TEXTS[10:12])
    other = growing.resolved(Recipe(more=True))
    table = store_table(one, growing.ledger).table
    assert store_table(same, growing.ledger).table == table
    with pytest.raises(StoreError, match="another process has added other documents meanwhile"):
        store_table(other, growing.ledger)
    # A worker that does not know the new files continues with the old ones.
    assert store_table(old, growing.ledger).table == base


def test_a_pair_is_made_of_a_grown_dataset(model: Path, tmp_path: Path) -> None:
    growing = Growing(model, lines(tmp_path / "a.jsonl", TEXTS[:8]))
    growing.begin()
    other = lines(tmp_path / "other.jsonl", TEXTS[8:])
    table = growing.more(add_corpus=str(other))
    objects = growing.ledger.objects

    def opened(url: str) -> Any:
        return objects

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spile.plan.resolve.open_objects", opened)
        pair = Growing(model, tmp_path)
        made = pair.store(Recipe(like="memory://grown", taps="resid_post:0"))
    assert made.units == table.units and not made.generations
    assert made.sources == table.sources
    assert made.recipe.corpus == table.whole_recipe.corpus
    assert pair.texts() == TEXTS
