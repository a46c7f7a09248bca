"""Operations that are each right, together: growth, copies, merges, added taps, drops, repairs."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spile
from chaos.harness import run
from e2e.test_growth import RECIPE, by_name, check_same, documents, extract, sound
from spile.core.errors import ConfigError, CorruptError
from spile.dataset import format as fmt
from spile.dataset.maintain.assemble import copy_part, merge
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.replica import replicate
from spile.dataset.maintain.verify import verify
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import drop_taps
from spile.objects import LocalObjects
from spile.run.extract import Extraction
from support import stored
from support.marks import some

ADDED: dict[str, Any] = {"taps": None, "add_taps": "resid_post:1"}


@pytest.fixture(scope="module")
def halves(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two datasets of one recipe over different files."""
    folder = tmp_path_factory.mktemp("halves")
    for name, ids, seed in (("one", "abcdefgh", 1), ("two", "ijklmnop", 2)):
        corpus = documents(folder / f"{name}.jsonl", ids, seed)
        extract(model, folder / name, corpus=str(corpus))
    return folder / "one", folder / "two"


@pytest.mark.parametrize("changes", some([8, 20, 27], 20))
def test_what_a_killed_copy_left_is_known_when_the_copy_grows(
    model: Path, tmp_path: Path, changes: int
) -> None:
    corpus, out, dest = tmp_path / "corpus", tmp_path / "out", tmp_path / "dest"
    documents(corpus / "a.jsonl", "abcd", 1)
    extract(model, out, corpus=str(corpus))
    documents(corpus / "b.jsonl", "efgh", 2)
    extract(model, out, more=True)
    with pytest.raises(stored.Stopped):
        replicate(LocalObjects(out), stored.Stopping(dest, changes))
    other = documents(tmp_path / "c.jsonl", "ijkl", 3)
    extract(model, dest, add_corpus=str(other), more=None)
    table = Ledger(LocalObjects(dest)).table()
    files = {Path(file["path"]).stem for file in table.files}
    wanted = "".join({"a": "abcd", "b": "efgh", "c": "ijkl"}[name] for name in sorted(files))
    assert "c" in files and sorted(by_name(dest)) == sorted(wanted)
    assert verify(LocalObjects(dest)).ok


@pytest.mark.parametrize("kind", ["part", "merge"])
def test_what_a_killed_part_or_merge_left_is_not_continued_by_extract(
    kind: str, model: Path, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = halves
    dest = tmp_path / "dest"

    def made(objects: LocalObjects) -> None:
        if kind == "part":
            copy_part(LocalObjects(one), objects, units=[1])
        else:
            merge([LocalObjects(one), LocalObjects(two)], objects)

    with pytest.raises(stored.Stopped):
        made(stored.Stopping(dest, 12 if kind == "part" else 24))
    assert 0 in Ledger(LocalObjects(dest)).done_units()
    corpus = f"{one}.jsonl" if kind == "part" else f"{one.parent}/*.jsonl"
    before = sorted(LocalObjects(dest).list())
    with pytest.raises(ConfigError, match="a unit that no table names.*same command"):
        extract(model, dest, corpus=corpus)
    assert sorted(LocalObjects(dest).list()) == before
    made(LocalObjects(dest))
    sound(dest)
    if kind == "merge":  # the corpus of the refused command was that of the merge
        assert extract(model, dest, corpus=corpus).complete


class Growing(LocalObjects):
    """A dataset to which documents are added when its first shard is read."""

    def __init__(self, root: Path, grow: Any) -> None:
        super().__init__(root)
        self._grow = [grow]

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if self._grow:
            self._grow.pop()()
        return super().get_range(key, start, stop)


def test_a_copy_beside_growth_is_the_dataset_that_was_read(model: Path, tmp_path: Path) -> None:
    corpus, out, dest = tmp_path / "corpus", tmp_path / "out", tmp_path / "dest"
    documents(corpus / "a.jsonl", "abcdefgh", 1)
    extract(model, out, corpus=str(corpus))
    before = by_name(out)

    def grow() -> None:
        documents(corpus / "b.jsonl", "ijkl", 2)
        extract(model, out, more=True)

    told = replicate(Growing(out, grow), LocalObjects(dest))
    assert told.units == told.units_total == len(Ledger(LocalObjects(dest)).done_units())
    check_same(by_name(dest), before)
    sound(dest)
    replicate(LocalObjects(out), LocalObjects(dest))
    check_same(by_name(dest), by_name(out))
    sound(dest)


def test_a_copy_has_the_taps_that_live_in_its_source(model: Path, tmp_path: Path) -> None:
    out, dest = tmp_path / "out", tmp_path / "dest"
    extract(model, out, corpus=str(documents(tmp_path / "a.jsonl", "abcd", 1)))
    extract(model, out, **ADDED)
    replicate(LocalObjects(out), LocalObjects(dest))
    assert "resid_post.1" in spile.open(dest).taps
    drop_taps(Ledger(LocalObjects(out)), ["resid_post.1"])
    replicate(LocalObjects(out), LocalObjects(dest))
    assert "resid_post.1" not in spile.open(dest).taps
    assert verify(LocalObjects(dest)).ok
    extract(model, out, **ADDED, store_dtype="bfloat16")
    replicate(LocalObjects(out), LocalObjects(dest))
    assert spile.open(dest).stored_dtype("resid_post.1") == "bfloat16"
    check_same(by_name(dest), by_name(out))


def assembled(kind: str, halves: tuple[Path, Path], dest: Path) -> Path:
    """One dataset of both halves: merged, or merged and then compacted to one unit."""
    merged = dest if kind == "merge" else dest.with_name("merged")
    merge([LocalObjects(each) for each in halves], LocalObjects(merged))
    if kind == "compact":
        compact(LocalObjects(merged), LocalObjects(dest))
        assert len(Ledger(LocalObjects(dest)).table().units) == 1
    return dest


@pytest.mark.parametrize("kind", some(["merge", "compact"], "compact"))
def test_taps_are_added_to_what_was_assembled(
    kind: str, model: Path, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    dest = assembled(kind, halves, tmp_path / "dest")
    before = spile.open(dest).index(0, spile.open(dest).num_tokens).tobytes()
    extract(model, dest, **ADDED)
    ds = spile.open(dest)
    assert ds.index(0, ds.num_tokens).tobytes() == before and "resid_post.1" in ds.taps
    sound(dest)
    wanted: dict[str, Any] = {}
    for number, half in enumerate(halves):
        whole = tmp_path / f"whole-{number}"
        both = {**RECIPE, "taps": "resid_post:0,mlp_out:1,resid_post:1"}
        extract(model, whole, corpus=f"{half}.jsonl", **both)
        wanted |= by_name(whole)
    check_same(by_name(dest), wanted)


@pytest.mark.parametrize("kind", ["merge", "compact"])
def test_a_unit_of_what_was_assembled_is_made_again(
    kind: str, halves: tuple[Path, Path], tmp_path: Path
) -> None:
    dest = assembled(kind, halves, tmp_path / "dest")
    before = by_name(dest)
    ledger = Ledger(LocalObjects(dest))
    done = ledger.read_done(max(ledger.done_units()))
    assert done is not None
    stored.flip(dest / done.shards[0].key, done.shards[0].bytes - 1)
    assert run("verify", dest).code == 3
    said = run("verify", dest, "--repair")
    assert said.code == 0, said.err
    check_same(by_name(dest), before)
    assert verify(LocalObjects(dest)).ok


def test_taps_are_added_to_documents_that_come_meanwhile(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    extract(model, out, corpus=str(documents(tmp_path / "a.jsonl", "abcd", 1)))
    more = documents(tmp_path / "b.jsonl", "efgh", 2)
    work, grow = Extraction.work, iter([lambda: extract(model, out, add_corpus=str(more))])

    def work_beside(self: Extraction, parts: Any) -> None:
        if self.ledger.of_pass:
            next(grow, lambda: None)()
        work(self, parts)

    monkeypatch.setattr(Extraction, "work", work_beside)
    extract(model, out, **ADDED)
    ds = spile.open(out)
    assert ds.num_documents == 8 and "resid_post.1" in ds.taps
    sound(out)


# -- without a model -----------------------------------------------------------------------------


def test_a_damaged_pass_is_dropped_repaired_and_left_by_gc(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    added, _ = stored.add_pass(made, {"z.0": 4})
    record = made.path / fmt.pass_prefix(added.name) / fmt.PASS
    record.write_bytes(b"torn")
    assert run("gc", made.path).code == 0
    assert verify(made.objects).units_done == len(made.table.units)
    with pytest.raises(CorruptError, match=f"{fmt.PASS}: "):  # what is made from it is whole
        copy_part(made.objects, LocalObjects(tmp_path / "part"))
    repaired = run("verify", made.path, "--repair")
    assert repaired.code == 0, repaired.err
    assert verify(made.objects).ok and "z.0" not in spile.open(made.path).taps
    again, _ = stored.add_pass(made, {"z.0": 4}, number=1)
    (made.path / fmt.pass_prefix(again.name) / fmt.PASS).unlink()
    (fault,) = verify(made.objects).faults
    assert "is missing; add its taps again" in fault
    assert run("drop", made.path, "--taps", again.name).code == 0
    assert verify(made.objects).ok


def test_two_live_passes_with_one_tap_are_named(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "acts")
    one, _ = stored.add_pass(made, {"z.0": 4})
    two = one.name.replace("-0", "-1")
    shutil.copytree(made.path / fmt.pass_prefix(one.name), made.path / fmt.pass_prefix(two))
    faults = verify(made.objects).faults
    assert len(faults) == 1 and f"passes/{two}/{fmt.PASS}: holds z.0, as" in faults[0]
    assert run("drop", made.path, "--taps", two).code == 0
    assert verify(made.objects).ok and "z.0" in spile.open(made.path).taps


def test_a_key_of_a_merge_never_gets_other_content(tmp_path: Path) -> None:
    """So a cache of a bucket cannot return the bytes of another merge at the same place."""
    two = stored.build(tmp_path / "two", ((7, 0), (9, 2)), seed=5, corpus=("34-cd",))
    contents: dict[str, bytes] = {}
    for number, units in enumerate((((3,), (4,)), ((3, 1), (4,)))):
        one = stored.build(tmp_path / f"one-{number}", units, corpus=(f"{number}-ab",))
        dest = LocalObjects(tmp_path / f"dest-{number}")
        merge([one.objects, two.objects], dest)
        for key in dest.list(fmt.ATTEMPTS):
            data = dest.get(key)
            assert contents.setdefault(key, data) == data


def test_a_state_is_of_one_growth_alone(tmp_path: Path) -> None:
    one = stored.build(tmp_path / "one", ((5,), (4,), (3, 2)), grown=(2,))
    other = stored.build(tmp_path / "other", ((5,), (4,), (2, 2)), grown=(2,))
    state = spile.open(one.path).batches(["resid_post.0"], 4, seed=1).state_dict()
    spile.open(one.path).batches(["resid_post.0"], 4, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="dataset"):
        spile.open(other.path).batches(["resid_post.0"], 4, seed=1).load_state_dict(state)


class Listing(LocalObjects):
    """A dataset that grows while it is listed."""

    def __init__(self, made: stored.Stored, more: stored.Stored) -> None:
        super().__init__(made.path)
        self._more = [more]

    def list(self, prefix: str = "") -> Iterator[str]:
        if not prefix and self._more:
            more = self._more.pop()
            for key in more.listed():
                self.create(key, more.objects.get(key))
        return super().list(prefix)


def test_verify_beside_growth_reads_one_state(tmp_path: Path) -> None:
    more = stored.build(tmp_path / "more", grown=(3,))
    made = stored.copied(tmp_path / "made")
    earlier = [key for key in more.listed() if not fmt.parse_generation(key)]
    units = {unit for key in earlier if (unit := fmt.parse_done_key(key)) is not None}
    for key in made.listed():
        made.objects.delete(key)
    for key in earlier:
        attempt = fmt.parse_attempt_key(key)
        unit = fmt.parse_done_key(key) if attempt is None else attempt[0]
        if unit is None or unit < 3:
            made.objects.create(key, more.objects.get(key))
    assert units == {*range(5)}
    report = verify(Listing(made, more))
    assert report.ok and not report.orphans, (report.faults, report.orphans)
    assert report.units == 3 and verify(made.objects).units == 5


def test_a_record_of_a_unit_that_does_not_exist_is_set_aside(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "made")
    key = fmt.CURRENT.done_key(9)
    made.objects.create(key, b"{}")
    assert verify(made.objects).faults == [f"{key}: is the record of a unit that does not exist"]
    assert run("verify", made.path, "--repair").code == 0
    assert verify(made.objects).ok
