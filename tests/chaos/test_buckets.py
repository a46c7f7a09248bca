"""Exactly once over a network that fails, processes that are killed, and workers that race.

`make chaos-buckets` runs all of it; the suite kills one run while it uploads to S3.
"""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos.harness import Witness, Work, check_same, launch, run, said, wait_for
from spile.objects import bucket, open_objects
from support import servers, tiny

pytestmark = [pytest.mark.chaos, pytest.mark.full]

STORES: dict[str, Callable[[], str]] = {"s3": servers.new_s3_store, "gs": servers.new_gcs_store}
SHARE = 0.2  # of the requests fail
OPTIONS = {
    "taps": "embed,resid_post:1",
    "seq_len": 64,
    "compute_dtype": "float32",
    "batch_tokens": 128,
    "shard_bytes": 8192,  # several of each tap and unit
}


@dataclass(frozen=True)
class Reference:
    work: Work
    out: Path
    units: int


def made(model: Path, folder: Path, documents: int, unit_tokens: int) -> Reference:
    """An uninterrupted run to a disk."""
    corpus = tiny.write_corpus(folder / "corpus.jsonl", documents, seed=5)
    work = Work(model, corpus, {**OPTIONS, "unit_tokens": unit_tokens})
    work.extract(folder / "out")
    return Reference(work, folder / "out", len(list((folder / "out" / "done").glob("*/*"))))


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return made(model, tmp_path_factory.mktemp("bucket"), 60, 400)


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("spooled", [False, True], ids=["memory", "spool"])
def test_a_network_that_fails_loses_and_doubles_nothing(
    kind: str,
    spooled: bool,
    model: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    reference = made(model, tmp_path, 1200, 300)
    assert reference.units >= 200
    out, spool = STORES[kind](), tmp_path / "spool"
    with servers.failing(kind, SHARE, seed=7) as proxy:
        began = time.monotonic()
        reference.work.extract(out, **({"spool": str(spool)} if spooled else {}))
        seconds = time.monotonic() - began
        counts = servers.counts(proxy)
    failed = sum(counts.values()) - counts["requests"]
    assert 0.1 * counts["requests"] < failed < 0.3 * counts["requests"]
    assert set(counts) == {"requests", "503", "429", "before", "after", "cut", "stall"}
    check_same(out, reference.out)
    assert not any(path.is_file() and path.name != "lock" for path in spool.rglob("*"))
    record_property("units per second", reference.units / seconds)
    print(f"{kind}: {reference.units} units in {seconds:.1f} s, {counts}")  # noqa: T201


class Grown:
    """Return whether a bucket has at least so many more shards than at first."""

    def __init__(self, out: str, more: int) -> None:
        self._objects = open_objects(out)
        self._wanted = self._count() + more

    def _count(self) -> int:
        return len(list(self._objects.list("attempts/")))

    def __call__(self) -> bool:
        return self._count() >= self._wanted


@pytest.mark.parametrize(
    ("kind", "where"),
    [(kind, where) for kind in STORES for where in ("memory", "spool")],
)
def test_runs_killed_while_they_upload_end_in_the_same_dataset(
    kind: str, where: str, reference: Reference, tmp_path: Path
) -> None:
    rng, spooled = random.Random(f"{kind} {where}"), where == "spool"
    wanted = 13
    kills = 0
    options = {"spool": tmp_path / "spool"} if spooled else {}
    while kills < wanted:
        out = STORES[kind]()
        witness = Witness(out)
        while True:
            process = launch({}, "extract", *reference.work.flags(out, **options))
            if kills < wanted:
                wait_for(Grown(out, rng.randint(1, 20)), process)
                time.sleep(rng.uniform(0, 0.02))
                process.kill()
            _, err = process.communicate(timeout=120)
            kills += process.returncode == -signal.SIGKILL
            assert process.returncode in (0, -signal.SIGKILL), err
            if process.returncode == 0:
                break
            witness.look()
            witness.check()
            assert run("verify", out, "--partial", "--json").json["faults"] == []
        witness.check()
        check_same(out, reference.out)
    assert "<Upload>" not in servers.unfinished_uploads()
    if spooled:
        reference.work.extract(STORES[kind](), **{"spool": str(tmp_path / "spool")})
        left = [p for p in (tmp_path / "spool").rglob("*") if p.is_file() and p.name != "lock"]
        assert left == [], "the next process removes what those that were killed left"


@pytest.mark.parametrize("kind", STORES)
def test_of_ten_workers_that_race_for_every_unit_one_commits_it(
    kind: str, reference: Reference, tmp_path: Path
) -> None:
    """The workers see nobody else at work, and begin together."""
    workers = 10
    out, gate = STORES[kind](), tmp_path / "gate"
    gate.mkdir()
    spec = {"gate": str(gate), "crowd": workers, "blind": True}
    racing = [launch(spec, "extract", *reference.work.flags(out)) for _ in range(workers)]
    ended = [process.communicate(timeout=240) for process in racing]
    assert [process.returncode for process in racing] == [0] * workers, ended
    beaten = sum(err.count("was done by another worker first") for _, err in ended)
    assert beaten > 0, "they did not race"
    check_same(out, reference.out)


def test_a_service_that_is_gone_for_good_ends_the_run_in_one_line(
    model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "PATIENCE_AT_FIRST", 0.5)
    for name, value in servers.s3_environment(f"http://127.0.0.1:{tiny.free_port()}").items():
        monkeypatch.setenv(name, value)
    result = run("extract", *Work(model, corpus, OPTIONS).flags("s3://nowhere/x"))
    assert result.code == 3 and len(said(result.err)) == 1, result.err
    assert "s3://nowhere/x" in result.err
