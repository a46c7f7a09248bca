"""Exactly once: whatever is killed, wherever, the dataset ends up as if nothing had happened.

`make chaos-kills` kills more than a hundred times; the suite kills five times in one dataset, and
once while documents are added.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import spile
from chaos.harness import (
    Witness,
    Work,
    check_same,
    content,
    differences,
    launch,
    run,
    wait_for,
)
from spile.core.errors import StoreError
from support import stored, tiny
from support.marks import some

pytestmark = pytest.mark.chaos

KILLED = -signal.SIGKILL
LAST = -1  # unit, and so the number of them
# Rows by head, by head and key, and single numbers; `where` drops some, `every` half of the rest.
RECIPE = {
    "taps": "q:1,attn_pattern:0,resid_post:2,logprob",
    "where": "not bos and pos % 7 != 3",
    "every": 2,
    "seq_len": 64,
    "unit_tokens": 400,
    "compute_dtype": "float32",
    "batch_tokens": 128,
}


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its work and its output."""

    work: Work
    out: Path
    units: int


@dataclass(frozen=True)
class Pace:
    """Return how many seconds one process takes for the work."""

    duration: float
    at_work: float  # after the model was loaded


@pytest.fixture(scope="session")
def reference(
    model: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    documents = 60 if pytestconfig.getoption("--chaos-full") else 24
    work = Work(model, tiny.write_corpus(folder / "corpus.jsonl", documents, seed=3), RECIPE)
    work.extract(folder / "out")  # compiles, so that no kill ever tears the cache
    units = len(list((folder / "out" / "done").glob("*/*")))
    assert 5 <= units <= 15
    return Reference(work, folder / "out", units)


@pytest.fixture(scope="session")
def pace(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Pace:
    out = tmp_path_factory.mktemp("pace") / "out"
    began = time.monotonic()
    process = start(reference.work, out)
    wait_for(lambda: any(out.glob("workers/**/*.json")), process)
    loaded = time.monotonic()
    _, err = process.communicate()
    assert process.returncode == 0, err
    ended = time.monotonic()
    check_same(out, reference.out)
    return Pace(ended - began, ended - loaded)


@dataclass(frozen=True)
class Growth:
    """A dataset before documents are added to it, and an uninterrupted run that adds them."""

    base: Path
    reference: Reference

    def begun(self, out: Path) -> Witness:
        """Copy the dataset, to add to it; return a witness of its commits."""
        shutil.copytree(self.base, out)
        witness = Witness(out)
        witness.look()
        return witness


@pytest.fixture(scope="session")
def growth(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Growth:
    folder = tmp_path_factory.mktemp("growth")
    reference.work.extract(folder / "base", max_docs=10)
    more = replace(reference.work, options={**RECIPE, "more": True, "max_docs": 1000})
    shutil.copytree(folder / "base", folder / "out")
    more.extract(folder / "out")
    units = len(list((folder / "out" / "done").glob("*/*")))
    assert units >= 5
    return Growth(folder / "base", Reference(more, folder / "out", units))


@pytest.fixture(scope="session")
def adding(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Growth:
    """A dataset that taps are added to."""
    out = tmp_path_factory.mktemp("adding") / "out"
    shutil.copytree(reference.out, out)
    work = replace(reference.work, options={**RECIPE, "taps": None, "add_taps": "mlp_out:0,z:1"})
    work.extract(out)
    return Growth(reference.out, Reference(work, out, reference.units))


def start(work: Work, out: Path, **spec: object) -> subprocess.Popen[str]:
    return launch(spec, "extract", *work.flags(out))


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def killed_until_done(
    reference: Reference, pace: Pace, out: Path, rng: random.Random, limit: int
) -> int:
    """Run, kill, and run again until a run comes to its end; returns the number of kills."""
    witness = Witness(out)
    witness.look()
    kills = 0
    while True:
        workers = len(list(out.glob("**/workers/**/*.json")))
        process = start(reference.work, out)
        if kills < limit and rng.random() < 0.5:
            # Half of the kills fall while units are being written, which is brief.
            wait_for(lambda n=workers: len(list(out.glob("**/workers/**/*.json"))) > n, process)
            moment = rng.uniform(0, pace.at_work)
        else:
            moment = rng.uniform(0, pace.duration)
        try:
            _, err = process.communicate(timeout=moment if kills < limit else 120)
            assert process.returncode == 0, err
            return kills
        except subprocess.TimeoutExpired:
            end(process)
            kills += process.returncode == KILLED
        witness.look()
        witness.check()
        if (out / "units.json").exists():
            assert run("verify", out, "--partial", "--json").json["faults"] == []


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_runs_killed_at_random_moments_end_in_the_same_dataset(
    seed: int, reference: Reference, pace: Pace, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    if seed % 2:  # its blocks come from files, sweep by sweep; its rows are the same
        options = {**reference.work.options, "weights": "disk"}
        reference = replace(reference, work=replace(reference.work, options=options))
    wanted = 28
    kills = dataset = 0
    while kills < wanted:
        out = tmp_path / str(dataset)
        kills += killed_until_done(reference, pace, out, rng, wanted - kills)
        check_same(out, reference.out)
        dataset += 1


@dataclass(frozen=True)
class Kill:
    """Kill a process the `nth` time it comes to a place, after so many commits of its own.

    `torn`: the record of which it leaves a temporary file, or the folder of that record.
    """

    place: str
    nth: int
    commits: int | None
    torn: str | None

    def __str__(self) -> str:
        return f"{self.place} {self.nth}"


PLACES = [
    Kill("columns torn", 1, 0, "units"),
    Kill("columns linked", 1, 0, "units"),
    Kill("units torn", 1, 0, "units.json"),
    Kill("units written", 1, 0, "units.json"),
    Kill("units linked", 1, 0, "units.json"),
    Kill("model torn", 1, 0, "model.json"),
    Kill("model written", 1, 0, "model.json"),
    Kill("model linked", 1, 0, "model.json"),
    Kill("heartbeat", 1, 0, "workers"),
    Kill("heartbeat", 4, None, "workers"),
    Kill("shard header", 1, 0, ""),
    # (another thread may be committing the unit before just then)
    Kill("shard header", 15, None, None),
    Kill("shard rows", 20, None, None),
    Kill("commit before", 1, 0, ""),
    Kill("commit before", LAST, LAST - 1, ""),
    Kill("done torn", 5, 4, "done"),
    Kill("done written", 5, 4, "done"),
    Kill("done linked", 5, 5, "done"),
    Kill("commit after", 5, 5, ""),
    Kill("commit after", LAST, LAST, ""),
    Kill("segment torn", 1, LAST, "segments"),
    Kill("segment written", 1, LAST, "segments"),
    Kill("segment linked", 1, LAST, "segments"),
    Kill("columns torn", 2, LAST, "manifest"),
    Kill("columns linked", 2, LAST, "manifest"),
    Kill("manifest torn", 1, LAST, "manifest.json"),
    Kill("manifest written", 1, LAST, "manifest.json"),
    Kill("manifest linked", 1, LAST, "manifest.json"),
]
# One after the other in one dataset. All records are created in the same way, so each moment of
# creating one is tried with another record.
CHAIN = [
    Kill("units written", 1, 0, "units.json"),
    Kill("done torn", 2, 1, "done"),
    Kill("shard rows", 6, None, None),
    Kill("commit after", LAST, LAST, ""),
    Kill("manifest linked", 1, 0, "manifest.json"),
]


@pytest.mark.full
@pytest.mark.parametrize("kill", PLACES, ids=str)
def test_a_kill_at_an_exact_place_neither_loses_nor_doubles_a_unit(
    kill: Kill, reference: Reference, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    witness = Witness(out)
    killed(kill, reference, out, witness)
    reference.work.extract(out)
    witness.check()
    check_same(out, reference.out)


def test_a_chain_of_kills_in_one_dataset_loses_and_doubles_no_unit(
    reference: Reference, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    witness = Witness(out)
    for kill in CHAIN:
        killed(kill, reference, out, witness)
    reference.work.extract(out)
    witness.check()
    check_same(out, reference.out)


# The record that adds units is made first, like a done record.
GROWING = [
    Kill("columns torn", 1, 0, "generations"),
    Kill("columns linked", 1, 0, "generations"),
    Kill("done torn", 1, 0, "generations"),
    Kill("done written", 1, 0, "generations"),
    Kill("done linked", 1, 0, "generations"),
    Kill("commit before", 1, 0, ""),
    Kill("done torn", 2, 0, "done"),
    Kill("shard rows", 6, None, None),
    Kill("commit after", LAST, LAST, ""),
    Kill("segment torn", 1, LAST, "generations"),
    Kill("segment linked", 1, LAST, "generations"),
    Kill("columns torn", 2, LAST, "generations"),
    Kill("manifest written", 1, LAST, "generations"),
    Kill("manifest linked", 1, LAST, "generations"),
]


@pytest.mark.parametrize("kill", some(GROWING, GROWING[4]), ids=str)
def test_a_kill_while_documents_are_added_loses_and_doubles_no_unit(
    kill: Kill, growth: Growth, tmp_path: Path
) -> None:
    out, rows = tmp_path / "out", spile.open(growth.base).num_tokens
    witness = growth.begun(out)
    killed(kill, growth.reference, out, witness)
    whole = spile.open(growth.reference.out).num_tokens
    assert spile.open(out).num_tokens in ({rows, whole} if "linked" in str(kill) else {rows})
    growth.reference.work.extract(out)
    witness.check()
    check_same(out, growth.reference.out)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
def test_growths_killed_at_random_moments_end_in_the_same_dataset(
    seed: int, growth: Growth, pace: Pace, tmp_path: Path
) -> None:
    rng, wanted = random.Random(100 + seed), 20
    kills = dataset = 0
    while kills < wanted:
        out = tmp_path / str(dataset)
        growth.begun(out)
        kills += killed_until_done(growth.reference, pace, out, rng, wanted - kills)
        check_same(out, growth.reference.out)
        dataset += 1


@pytest.mark.full
def test_two_processes_that_add_the_same_documents_race_for_every_unit(
    growth: Growth, tmp_path: Path
) -> None:
    out, gate = tmp_path / "out", tmp_path / "gate"
    gate.mkdir()
    witness = growth.begun(out)
    spec = {"gate": str(gate), "crowd": 2, "blind": True}
    race = [start(growth.reference.work, out, **spec) for _ in range(2)]
    for process in race:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    witness.check()
    check_same(out, growth.reference.out)


@pytest.mark.full
def test_a_reader_beside_a_growing_dataset_sees_it_as_it_was_or_whole(
    growth: Growth, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    growth.begun(out)
    wanted = {ds.num_tokens: ds for ds in map(spile.open, (growth.base, growth.reference.out))}
    first, seen, looks = spile.open(out), set[int](), 0
    process = start(growth.reference.work, out, slow=0.1)
    while process.poll() is None:
        now = spile.open(out)
        seen.add(now.num_tokens)
        for ds in (first, now):
            same = wanted[ds.num_tokens]
            for tap in ds.taps:
                found = ds.read(tap, 0, ds.num_tokens)
                assert found.tobytes() == same.read(tap, 0, ds.num_tokens).tobytes()
        partial = spile.open(out, partial=True)
        assert partial.num_tokens >= now.num_tokens
        looks += 1
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert looks > 3 and min(wanted) in seen and seen <= {*wanted}
    check_same(out, growth.reference.out)


@dataclass(frozen=True)
class Merge:
    """Two datasets to join, and what an undisturbed merge makes of them."""

    sources: tuple[Path, Path]
    out: Path

    def start(self, dest: Path) -> subprocess.Popen[str]:
        return launch({}, "merge", *self.sources, dest)


@pytest.fixture(scope="module")
def merge(tmp_path_factory: pytest.TempPathFactory) -> Merge:
    folder = tmp_path_factory.mktemp("merge")
    units = [(5, 21), (4,), (30, 2)] * 4
    one = stored.build(folder / "one", units).path
    two = stored.build(folder / "two", units, seed=5, corpus=("34-cd",)).path
    assert run("merge", one, two, folder / "out").code == 0
    return Merge((one, two), folder / "out")


def num_files(folder: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(folder))


@pytest.mark.full
def test_a_killed_merge_cannot_be_opened_and_its_rerun_makes_the_same(
    merge: Merge, tmp_path: Path
) -> None:
    """A moment is a number of files, so that the speed of the machine does not matter."""
    rng, kills, whole = random.Random(0), 0, num_files(merge.out)
    for number in range(5):
        out = tmp_path / str(number)
        witness = Witness(out)
        for moment in sorted(rng.sample(range(whole), 4)):
            process = merge.start(out)
            while process.poll() is None and num_files(out) < moment:
                time.sleep(0.001)
            end(process)
            kills += process.returncode == KILLED
            witness.check()
            witness.look()
            if (out / "units.json").exists():
                assert not differences(content(out), content(merge.out))
            else:
                with pytest.raises(StoreError, match="no dataset there"):
                    spile.open(out, partial=True)
        process = merge.start(out)
        _, err = process.communicate()
        assert process.returncode == 0, err
        witness.check()
        check_same(out, merge.out)
    assert kills


@pytest.mark.full
def test_two_merges_at_once_make_one_dataset(merge: Merge, tmp_path: Path) -> None:
    """The slower merge may find that the other one removed its files; it then reports that."""
    out = tmp_path / "out"
    race = [merge.start(out) for _ in range(2)]
    for process in race:
        _, err = process.communicate()
        assert process.returncode == 0 or "run the same command again" in err, err
    again = merge.start(out)
    _, err = again.communicate()
    assert again.returncode == 0, err
    check_same(out, merge.out)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
def test_taps_added_by_processes_killed_at_random_moments_are_the_same(
    seed: int, adding: Growth, pace: Pace, tmp_path: Path
) -> None:
    rng, wanted = random.Random(200 + seed), 20
    kills = dataset = 0
    while kills < wanted:
        out = tmp_path / str(dataset)
        adding.begun(out)
        kills += killed_until_done(adding.reference, pace, out, rng, wanted - kills)
        check_same(out, adding.reference.out)
        dataset += 1


@pytest.mark.full
def test_two_processes_that_add_the_same_taps_make_one_pass(adding: Growth, tmp_path: Path) -> None:
    out, gate = tmp_path / "out", tmp_path / "gate"
    gate.mkdir()
    witness = adding.begun(out)
    spec = {"gate": str(gate), "crowd": 2, "blind": True}
    race = [start(adding.reference.work, out, **spec) for _ in range(2)]
    for process in race:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert len(list((out / "passes").iterdir())) == 1
    witness.look()
    witness.check()
    check_same(out, adding.reference.out)


@pytest.mark.full
def test_a_reader_beside_taps_that_are_added_sees_none_of_them_or_all(
    adding: Growth, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    adding.begun(out)
    whole = spile.open(adding.reference.out)
    before, seen = {*spile.open(out).taps}, set[frozenset[str]]()
    process = start(adding.reference.work, out, slow=0.1)
    while process.poll() is None:
        now = spile.open(out)
        seen.add(frozenset(now.taps))
        partial = spile.open(out, partial=True)
        for tap in now.taps:
            rows = whole.read(tap, 0, whole.num_tokens)
            assert now.read(tap, 0, now.num_tokens).tobytes() == rows.tobytes()
        for unit in partial.units:
            (first, stop), (start_of, _) = partial.rows_of_unit(unit), whole.rows_of_unit(unit)  # type: ignore[misc]
            for tap in partial.taps:
                rows = whole.read(tap, start_of, start_of + stop - first)
                assert partial.read(tap, first, stop).tobytes() == rows.tobytes()
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert seen <= {frozenset(before), frozenset(whole.taps)} and frozenset(before) in seen
    check_same(out, adding.reference.out)


def killed(kill: Kill, reference: Reference, out: Path, witness: Witness) -> None:
    """Run until the kill; check that commits stand and that the dataset is sound."""
    before, temporary = len(witness.seen), {*out.rglob("*.tmp-*")}

    def from_end(count: int) -> int:
        return count if count >= 0 else reference.units - before + 1 + count

    process = start(reference.work, out, kill=kill.place, nth=from_end(kill.nth))
    _, err = process.communicate(timeout=120)
    assert process.returncode == KILLED, f"{kill}: {err}"
    witness.look()
    # It died at the right place: so many commits stand, and the record that it was making has a
    # temporary file. (A prediction or a heartbeat may be made at any time.)
    if kill.commits is not None:
        assert len(witness.seen) - before == from_end(kill.commits), kill
    made = {path.relative_to(out).parts[0] for path in {*out.rglob("*.tmp-*")} - temporary}
    left = {name.partition(".tmp-")[0] for name in made}
    if kill.torn is not None:
        anytime = {"workers", "prediction.json"} - {kill.torn}
        if kill.commits is None:  # another thread may be committing a unit just then
            anytime.add("done")
        assert left - anytime == ({kill.torn} if kill.torn else set()), kill
    witness.check()
    if (out / "units.json").exists():
        assert run("verify", out, "--partial", "--json").json["faults"] == []
        assert len(spile.open(str(out), partial=True).taps) == 4


@pytest.mark.full
def test_two_processes_that_share_the_units_make_one_dataset(
    reference: Reference, tmp_path: Path
) -> None:
    out, gate = tmp_path / "out", tmp_path / "gate"
    gate.mkdir()
    race = [start(reference.work, out, gate=str(gate), crowd=2) for _ in range(2)]
    for process in race:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    workers = [json.loads(path.read_bytes()) for path in out.glob("workers/**/*.json")]
    assert len(workers) == 2
    assert all(worker["units_done"] for worker in workers)  # neither did it all alone
    check_same(out, reference.out)


def test_two_processes_racing_for_every_unit_commit_each_once(
    reference: Reference, tmp_path: Path
) -> None:
    out, gate = tmp_path / "out", tmp_path / "gate"
    gate.mkdir()
    race = [start(reference.work, out, gate=str(gate), crowd=2, blind=True) for _ in range(2)]
    lost = 0
    for process in race:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        lost += err.count("was done by another worker first")
    assert lost > 0  # they did meet
    check_same(out, reference.out)


@pytest.mark.full
def test_a_worker_that_slept_through_the_end_wakes_up_harmless(
    reference: Reference, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asleep = start(reference.work, out)
    wait_for(lambda: len(list(out.glob("done/*/*.json"))) >= 2, asleep)
    asleep.send_signal(signal.SIGSTOP)
    assert len(list(out.glob("done/*/*.json"))) < reference.units
    reference.work.extract(out, stale_after=1)  # takes over what the other holds
    witness = Witness(out)
    witness.look()
    check_same(out, reference.out)
    asleep.send_signal(signal.SIGCONT)
    _, err = asleep.communicate(timeout=60)
    assert asleep.returncode == 0, err
    witness.check()
    check_same(out, reference.out)


@pytest.mark.full
def test_gc_in_a_loop_beside_killed_racing_writers_loses_no_commit(
    reference: Reference, pace: Pace, tmp_path: Path
) -> None:
    rng = random.Random(7)
    wanted = 40
    kills = dataset = 0
    while kills < wanted:
        out, stop = tmp_path / str(dataset), tmp_path / f"stop{dataset}"
        collector = launch({"until": str(stop)}, "gc", out, "--json")
        witness = Witness(out)
        kills += race_until_done(reference, pace, out, rng, wanted - kills, witness)
        stop.touch()
        printed, err = collector.communicate(timeout=60)
        assert collector.returncode == 0, err
        codes = json.loads(printed)
        # Before there is a dataset it is refused; from then on it always works.
        assert 0 in codes
        assert set(codes[codes.index(0) :]) == {0}
        witness.look()
        witness.check()
        check_same(out, reference.out)
        witness.check()
        dataset += 1


def race_until_done(
    reference: Reference, pace: Pace, out: Path, rng: random.Random, limit: int, witness: Witness
) -> int:
    """Two writers that do not see each other, killed and replaced until both finish."""
    kills = 0

    def another() -> tuple[subprocess.Popen[str], float]:
        process = start(reference.work, out, blind=True)
        return process, time.monotonic() + rng.uniform(0.3, 1.2) * pace.duration

    racing = [another(), another()]
    while racing:
        witness.look()
        for entry in list(racing):
            process, deadline = entry
            if process.poll() is not None:
                _, err = process.communicate()
                assert process.returncode == 0, err
                racing.remove(entry)
            elif kills < limit and time.monotonic() > deadline:
                end(process)
                kills += process.returncode == KILLED
                racing.remove(entry)
                racing.append(another())
        time.sleep(0.005)
    return kills
