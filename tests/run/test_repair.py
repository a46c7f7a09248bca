"""Repair makes only damaged and missing units again, by their own recipe."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import spile
from chaos.harness import Result, Work, check_refused, check_same, content, files, launch, run
from spile.dataset import format as fmt
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import live_passes
from spile.objects import LocalObjects
from spile.run.pipeline.sink import Sink
from support import stored, tiny

OPTIONS = {"taps": "embed,resid_post:0", "seq_len": 64, "unit_tokens": 400,
           "compute_dtype": "float32", "batch_tokens": 128}  # fmt: skip
KILLS = ["shard rows", "commit before", "done torn", "done written", "done linked", "commit after",
         "manifest written"]  # fmt: skip


@pytest.fixture(scope="module")
def work(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Work:
    folder = tmp_path_factory.mktemp("repair")
    return Work(model, tiny.write_corpus(folder / "c.jsonl", 20), OPTIONS)


@pytest.fixture(scope="module")
def whole(work: Work, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    work.extract(out)
    assert len(Ledger(LocalObjects(out)).done_units()) >= 4
    return out


@pytest.fixture
def out(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "out"))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the units that are computed in this process."""
    units: list[int] = []
    begin = Sink.begin

    def counted(self: Sink, prepared: Any) -> None:
        units.append(prepared.unit)
        begin(self, prepared)

    monkeypatch.setattr(Sink, "begin", counted)
    return units


def flip(out: Path, unit: int) -> None:
    done = Ledger(LocalObjects(out)).read_done(unit)
    assert done is not None
    path = out / done.shards[0].key
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def damage_two(out: Path) -> None:
    flip(out, 1)
    (out / fmt.CURRENT.done_key(3)).unlink()


def repaired(out: Path, *more: object) -> Result:
    return run("verify", out, "--repair", "--json", *more)


def test_two_damaged_units_are_made_again_and_no_other(
    whole: Path, out: Path, begun: list[int]
) -> None:
    damage_two(out)
    assert run("verify", out).code == 3
    found = repaired(out)
    assert found.code == 0, found.out
    assert begun == [1, 3]
    told = found.json["repaired"]
    assert told["units"] == told["identical"] == [1, 3] and told["records"] == [fmt.MANIFEST]
    assert len(found.json["faults_before"]) == 3 and found.json["faults"] == []
    check_same(out, whole)
    records = {unit: (out / fmt.CURRENT.done_key(unit)).read_bytes() for unit in (0, 1, 2)}
    assert records[0] == (whole / fmt.CURRENT.done_key(0)).read_bytes()
    assert records[1] != (whole / fmt.CURRENT.done_key(1)).read_bytes()
    assert run("gc", out).code == 0
    assert run("verify", out, "--json").json["orphans"] == []
    check_same(out, whole)


def test_the_command_says_what_it_found_and_what_it_made(whole: Path, out: Path) -> None:
    damage_two(out)
    said = run("verify", out, "--repair").out
    assert "found: attempts/000000/00000001/" in said
    assert "made again: units 1, 3 (2 with the same rows, bit for bit)" in said
    assert "whole and sound" in said
    assert run("verify", out, "--repair").out.startswith("nothing was repaired")
    check_same(out, whole)


@pytest.mark.parametrize(
    "place", [pytest.param(p, marks=pytest.mark.full) for p in KILLS]
)  # fmt: skip
def test_a_killed_repair_is_repeated(whole: Path, out: Path, begun: list[int], place: str) -> None:
    damage_two(out)
    process = launch({"kill": place, "nth": 1}, "verify", out, "--repair")
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err
    there = run("verify", out, "--partial", "--json").json
    assert set(there["damaged"]) <= {1} and set(there["missing"]) <= {1, 3}
    assert repaired(out).code == 0
    assert set(begun) <= {1, 3}
    check_same(out, whole)
    assert run("gc", out, "--abandoned").code == 0
    assert run("verify", out, "--json").json["orphans"] == []


def test_with_partial_the_next_extraction_makes_it(
    work: Work, whole: Path, out: Path, begun: list[int]
) -> None:
    flip(out, 2)
    found = repaired(out, "--partial")
    assert found.code == 0 and found.json["repaired"]["units"] == [2] and not begun
    work.extract(out)
    assert begun == [2]
    check_same(out, whole)


def test_a_model_that_has_moved_is_named(
    work: Work, whole: Path, tmp_path: Path, model: Path
) -> None:
    moved = shutil.copytree(model, tmp_path / "model")
    out = tmp_path / "made"
    Work(moved, work.corpus, OPTIONS).extract(out)
    flip(out, 0)
    moved = moved.rename(tmp_path / "elsewhere")
    check_refused(repaired(out), 2, str(tmp_path / "model"))
    assert Ledger(LocalObjects(out)).read_done(0) is not None  # nothing was touched
    assert repaired(out, "--model", moved).code == 0
    check_same(out, whole)


def test_the_tokenizer_is_restored_from_the_model_and_from_no_other(
    whole: Path, out: Path, begun: list[int], tmp_path: Path
) -> None:
    files = [file.key for file in Ledger(LocalObjects(out)).table().tokenizer.values()]
    assert len(files) == 2
    stored.flip(out / files[0], 1, 4)
    (out / files[1]).unlink()
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes(b"{}")
    check_refused(repaired(out, "--model", other), 3, "does not have the same tokenizer.json")
    found = repaired(out)
    assert found.code == 0 and found.json["faults"] == []
    assert found.json["repaired"]["restored"] == files and begun == []
    check_same(out, whole)
    (out / files[1]).unlink()
    assert run("verify", out, "--repair").out.splitlines()[1] == f"restored: {files[1]}"


def test_another_corpus_is_refused(work: Work, tmp_path: Path) -> None:
    out, corpus = tmp_path / "out", Path(shutil.copy(work.corpus, tmp_path / "c.jsonl"))
    Work(work.model, corpus, OPTIONS).extract(out)
    flip(out, 0)
    corpus.write_text(corpus.read_text().replace("e", "i"))
    check_refused(repaired(out), 2, "corpus")


def test_a_damaged_table_is_not_repaired(out: Path) -> None:
    (out / fmt.UNITS).write_bytes(b"{}")
    check_refused(repaired(out), 3, fmt.UNITS)


# -- copies ----------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return stored.copied(tmp_path / "source").path


def test_a_compacted_dataset_is_copied_again_from_its_source(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("compact", source, out, "--unit-bytes", "12kB", "--compress").code == 0
    units = sorted(Ledger(LocalObjects(out)).done_units())
    assert len(units) > 1
    wanted = content(out)
    flip(out, 0)
    (out / fmt.MODEL).unlink()
    other = stored.build(tmp_path / "other", seed=1).path
    check_refused(repaired(out, "--from", other), 2, "is not the dataset that")
    found = repaired(out, "--from", source)
    assert found.code == 0, found.err
    assert found.json["repaired"]["units"] == found.json["repaired"]["identical"] == [0]
    assert content(out) == wanted


def test_a_damaged_source_repairs_nothing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("compact", source, out).code == 0
    flip(out, 0)
    before = (out / fmt.CURRENT.done_key(0)).read_bytes()
    flip(source, 0)
    check_refused(repaired(out, "--from", source), 3, "checksum does not match")
    assert (out / fmt.CURRENT.done_key(0)).read_bytes() == before


def test_a_shuffled_dataset_is_shuffled_anew(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("shuffle", source, out, "--seed", "5").code == 0
    (out / fmt.MANIFEST).unlink()
    assert repaired(out).code == 0
    flip(out, 0)
    check_refused(
        repaired(out), 2, "`spile shuffle SOURCE DEST --seed 5` makes the whole dataset again"
    )
    assert json.loads((out / fmt.CURRENT.done_key(0)).read_text())["unit"] == 0


def test_units_of_taps_added_to_a_compacted_dataset_come_from_the_model(
    whole: Path, tmp_path: Path, begun: list[int]
) -> None:
    out = tmp_path / "out"
    assert run("compact", whole, out).code == 0
    assert run("extract", "--out", out, "--add-taps", "mlp_out:0").code == 0
    ((folder, ledger),) = [(p.prefix, p.ledger) for p in live_passes(Ledger(LocalObjects(out)))]
    assert ledger.done_units() == {0}
    begun.clear()
    flip(out, 0)
    (out / folder / fmt.CURRENT.done_key(0)).unlink()
    found = repaired(out, "--from", whole)
    assert (found.code, begun) == (0, [0]), found.err
    assert found.json["repaired"]["units"] == [0]


def test_a_repair_of_a_pass_that_was_killed_is_missed_and_ended(
    out: Path, begun: list[int]
) -> None:
    assert run("extract", "--out", out, "--add-taps", "mlp_out:0").code == 0
    (each,) = live_passes(Ledger(LocalObjects(out)))
    for key in (fmt.MANIFEST, each.ledger.layout.done_key(1)):
        each.objects.move(key, f"{fmt.DAMAGED}0123456789ab/{key}")
    assert "mlp_out.0" not in spile.open(out).taps
    found = run("verify", out)
    assert (found.code, found.out.count("was moved aside by a repair")) == (3, 2), found.out
    begun.clear()
    assert (repaired(out).code, begun) == (0, [1])
    assert "mlp_out.0" in spile.open(out).taps


def test_damaged_units_of_a_pass_are_made_again_in_its_folder(out: Path, begun: list[int]) -> None:
    said = run("extract", "--out", out, "--add-taps", "mlp_out:0", "--batch-tokens", 128)
    assert said.code == 0, said.out
    ((name, ledger),) = [
        (each.name, each.ledger) for each in live_passes(Ledger(LocalObjects(out)))
    ]
    before, rows = files(out), stored.unit_files(out / fmt.pass_prefix(name))
    begun.clear()
    damage_two(out / fmt.pass_prefix(name))
    found = repaired(out)
    assert (found.code, begun) == (0, [1, 3]), found.out
    assert found.json["repaired"]["units"] == []
    assert found.json["repaired"]["passes"][name]["identical"] == [1, 3]
    assert run("gc", out).code == 0
    assert stored.unit_files(out / fmt.pass_prefix(name)) == rows
    own = {key: data for key, data in before.items() if not str(key).startswith(fmt.PASSES)}
    assert own == {k: d for k, d in files(out).items() if not str(k).startswith(fmt.PASSES)}
    assert ledger.derived.read_manifest(ledger.layout) is not None
    # The verb drops the pass, and `gc` removes its files.
    said = run("drop", out, "--taps", "mlp_out.0")
    assert said.code == 0 and "dropped mlp_out.0; `spile gc" in said.out
    assert len(run("gc", out, "--json").json["removed"]) > 8
    assert own.keys() == {k for k in files(out) if not str(k).startswith(fmt.PASSES)}
    check_refused(run("drop", out, "--taps", "embed"), 2, "was made with embed")
