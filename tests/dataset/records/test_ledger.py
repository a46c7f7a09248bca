"""The ledger: one record per unit, whoever comes first."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spile.core.errors import (
    CorruptError,
    DriftError,
    NotCreatedError,
    StoreError,
)
from spile.dataset import format as fmt
from spile.dataset.format import Done, TapInfo
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table
from spile.dataset.write.unit_writer import Attempt, UnitWriter
from spile.objects import LocalObjects
from support import stored

UNITS = ((5, 3), (9,), (0, 4))


@pytest.fixture
def unfinished(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out", UNITS, commit=())


def empty(tmp_path: Path, name: str = "new") -> Ledger:
    return Ledger(LocalObjects(tmp_path / name))


# -- weights ---------------------------------------------------------------------------------


def test_weights_are_recorded_once_and_compared_after(tmp_path: Path) -> None:
    ledger = empty(tmp_path)
    ledger.check_weights({"embed": "aa", "block": "bb"})
    stored_bytes = ledger.objects.get(fmt.MODEL)
    ledger.check_weights({"block": "bb", "embed": "aa"})
    assert ledger.objects.get(fmt.MODEL) == stored_bytes


@pytest.mark.parametrize(
    ("now", "difference"),
    [
        ({"embed": "aa", "block": "b0"}, {"weights of block": ("bb", "b0")}),
        ({"embed": "aa"}, {"weights of block": ("bb", None)}),
        ({"embed": "aa", "block": "bb", "head": "cc"}, {"weights of head": (None, "cc")}),
    ],
)
def test_other_weights_are_drift(
    tmp_path: Path, now: dict[str, str], difference: dict[str, tuple[str | None, str | None]]
) -> None:
    ledger = empty(tmp_path)
    ledger.check_weights({"embed": "aa", "block": "bb"})
    with pytest.raises(DriftError) as caught:
        ledger.check_weights(now)
    assert caught.value.differences == difference


# -- scales ----------------------------------------------------------------------------------


def int8_table() -> Table:
    return stored.make_table(taps={"q.1": TapInfo((2, 3), "int8"), "embed": 4})


def test_the_first_scales_are_everyones(tmp_path: Path) -> None:
    ledger, table = empty(tmp_path), int8_table()
    assert ledger.read_scales(table) is None
    first = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    ledger.create_scales(table, {"q.1": first})
    ledger.create_scales(table, {"q.1": 2 * first})
    read = ledger.read_scales(table)
    assert read is not None and read.keys() == {"q.1"}
    assert read["q.1"].dtype == np.float32
    assert np.array_equal(read["q.1"], first)


def test_where_no_tap_is_scaled_by_channel_there_are_no_scales_to_miss(tmp_path: Path) -> None:
    ledger = empty(tmp_path)
    for dtype in ("float32", "float8_e4m3"):
        assert ledger.read_scales(stored.make_table(dtype=dtype)) == {}


@pytest.mark.parametrize(
    "scales",
    [{}, {"embed": np.ones(4)}, {"q.1": np.ones((2, 2))},
     {"q.1": np.zeros((2, 3))}, {"q.1": np.full((2, 3), 1e-60)}, {"q.1": np.full((2, 3), np.nan)}],
    ids=["none", "of another tap", "too few", "zero", "zero in float32", "no numbers"],
)  # fmt: skip
def test_scales_that_could_not_be_read_are_not_stored(
    tmp_path: Path, scales: dict[str, np.ndarray]
) -> None:
    ledger, table = empty(tmp_path), int8_table()
    with pytest.raises(CorruptError, match="^scales.json: holds"):
        ledger.create_scales(table, scales)
    assert list(ledger.objects.list()) == []


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data + b" ", lambda _: b""]
)
def test_damaged_scales_are_not_read(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    ledger, table = empty(tmp_path), int8_table()
    ledger.create_scales(table, {"q.1": np.ones((2, 3), np.float32)})
    (tmp_path / "new" / fmt.SCALES).write_bytes(change(ledger.objects.get(fmt.SCALES)))
    with pytest.raises(CorruptError, match="^scales.json: "):
        ledger.read_scales(table)


# -- commits ---------------------------------------------------------------------------------


def test_the_first_attempt_wins_and_the_second_knows_it_lost(unfinished: stored.Stored) -> None:
    ledger = unfinished.ledger
    first, second = unfinished.attempt(1), unfinished.attempt(1)
    assert ledger.read_done(1) is None
    assert ledger.commit(first) is True
    assert ledger.commit(second) is False
    assert ledger.read_done(1) == first
    assert ledger.done_units() == {1}


def test_an_attempt_whose_answer_was_lost_has_won(unfinished: stored.Stored) -> None:
    done = unfinished.attempt(0)
    assert unfinished.ledger.commit(done)
    # the same request again, as after a lost answer, from a new process
    assert Ledger(LocalObjects(unfinished.path)).commit(done)


def test_of_eight_racing_attempts_exactly_one_wins(unfinished: stored.Stored) -> None:
    attempts = [unfinished.attempt(0) for _ in range(8)]
    barrier = threading.Barrier(8)
    won: list[Done] = []

    def commit(done: Done) -> None:
        barrier.wait()
        if unfinished.ledger.commit(done):
            won.append(done)

    threads = [threading.Thread(target=commit, args=(done,)) for done in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert unfinished.ledger.read_done(0) == won[0]


def test_a_record_under_another_units_key_is_refused(unfinished: stored.Stored) -> None:
    unfinished.ledger.commit(unfinished.attempt(0))
    objects = unfinished.objects
    objects.create(fmt.CURRENT.done_key(1), objects.get(fmt.CURRENT.done_key(0)))
    with pytest.raises(CorruptError, match="done/000000/00000001.json: is the record of unit 0"):
        unfinished.ledger.read_done(1)


def test_losing_to_a_damaged_record_is_an_error_and_not_a_loss(unfinished: stored.Stored) -> None:
    unfinished.objects.create(fmt.CURRENT.done_key(0), b"{}")
    with pytest.raises(CorruptError, match="done/000000/00000000.json"):
        unfinished.ledger.commit(unfinished.attempt(0))


def test_leftovers_and_strangers_are_no_done_units(unfinished: stored.Stored) -> None:
    for key in ("done/000000/00000001.json.tmp-abc", "done/readme", "done/1.json"):
        unfinished.objects.create(key, b"")
    assert unfinished.ledger.done_units() == set()


def test_a_record_is_never_created_for_files_that_are_gone(tmp_path: Path) -> None:
    dataset = stored.build(tmp_path / "out", ((5, 9), (9, 5)), commit=(0,))
    ledger = Ledger(dataset.objects)
    attempt = dataset.attempt(1)
    dataset.objects.delete(attempt.shards[0].key)
    with pytest.raises(StoreError, match="vanished before unit 1"):
        ledger.commit(attempt)
    assert ledger.done_units() == {0}
    assert ledger.commit(dataset.attempt(1))
    assert ledger.commit(attempt) is False  # another has won meanwhile: a lost race, no error


@pytest.mark.parametrize(("error", "kept"), [(NotCreatedError, False), (StoreError, True)])
def test_files_of_a_failed_commit_go_only_if_there_is_certainly_no_record(
    unfinished: stored.Stored, monkeypatch: pytest.MonkeyPatch, error: type[StoreError], kept: bool
) -> None:
    index = unfinished.read[0]
    writer = UnitWriter(unfinished.objects, 0, index[:0], {}, 60)
    done = writer.finish(
        table=stored.describe_documents(unfinished.table, 0, index[:0]),
        fingerprint="", made_from="", tokens=0, documents=0, contexts=0, skipped={}, text_digest="",
        made_by={},
    )  # fmt: skip

    def fail(*_: object) -> bool:
        raise error("the disk")

    monkeypatch.setattr(LocalObjects, "create", fail)
    with (
        pytest.raises(StoreError, match="the disk"),
        Attempt(unfinished.ledger, writer) as attempt,
    ):
        attempt.commit(done)
    assert bool(unfinished.listed("attempts/")) is kept
