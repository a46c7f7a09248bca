"""Heartbeats: claims are seen and dead workers recognised, and nothing depends on either."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from spile.dataset import format as fmt
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.verify import verify
from spile.dataset.records import heartbeat
from spile.dataset.records.heartbeat import (
    HeartbeatObserver,
    Presence,
    process_ended,
    read_workers,
    working,
)
from spile.objects import Entry, LocalObjects, MemoryObjects
from spile.status.status import read_status
from support import stored


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The observer's clock, which a test moves."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def say(objects: LocalObjects, name: str = "far-1", **fields: Any) -> None:
    """A record of a worker on another machine."""
    body = {
        "state": "running", "units": [], "counter": 1, "host": "far", "boot": "b", "pid": 1,
        "started": 5, **fields,
    }  # fmt: skip
    objects.replace(fmt.CURRENT.worker_key(name, 0), fmt.encode_record("worker", body))


def test_claims_of_others_are_seen_and_ones_own_are_not(objects: LocalObjects) -> None:
    first, second = Presence(objects, 30), Presence(objects, 30)
    first.hold(3)
    first.hold(5)
    second.hold(4)
    assert second.held_by_others() == {3, 5}
    assert first.held_by_others() == {4}
    assert Presence(objects, 30).held_by_others() == {3, 4, 5}


def test_a_unit_that_another_holds_is_not_claimed(objects: LocalObjects) -> None:
    first, second = Presence(objects, 30), Presence(objects, 30)
    first.name, second.name = "b", "a"
    assert first.claim(3)
    first.hold(4)  # says that 3 is no longer only wanted
    assert not second.claim(3)
    assert second.claim(5)
    assert first.held_by_others() == {5}
    assert read_workers(objects)["a"]["units"] == [5]


def test_the_first_contender_by_name_waits_for_the_others_to_withdraw(
    objects: LocalObjects,
) -> None:
    """A worker that claimed a unit before the other one looked keeps it, whatever its name."""
    for keeps in (True, False):
        early = Presence(objects, 30)
        early.name = "b" if keeps else "c"
        early.tell(wants=3)
        early.hold(3)
        others: list[bool] = []
        late = Presence(objects, 30)
        late.name = "a"
        thread = threading.Thread(target=lambda p=late, o=others: o.append(p.claim(3)))
        thread.start()
        time.sleep(0.5)
        assert not others, "it must not decide before the other has"
        early.tell(wants=None)
        if not keeps:
            early.release(3)
        early.hold(7)
        thread.join(10)
        assert others == [not keeps]
        early.release(3)
        early.release(7)
        early.hold(9)


def test_a_greater_name_gives_way_to_whoever_only_wants_the_unit(objects: LocalObjects) -> None:
    first, second = Presence(objects, 30), Presence(objects, 30)
    first.name, second.name = "a", "b"
    first.tell(wants=3)
    first.hold(3)
    assert not second.claim(3)


@pytest.mark.parametrize("holds_another", [False, True])
def test_a_rival_that_withdraws_meanwhile_leaves_the_unit_to_the_first(
    holds_another: bool, tmp_path: Path
) -> None:
    class Objects(LocalObjects):
        reads = 0

        def get(self, key: str) -> bytes:
            if "/b" in key:
                self.reads += 1
                if self.reads == 2:  # it was seen to hold the unit: now it gives way
                    rival.release(3)
                    rival.tell(wants=None)
                    if holds_another:
                        rival.hold(7)  # in the same group: its heartbeat stays where it is
                    else:
                        rival.close("done")
            return super().get(key)

    objects = Objects(tmp_path / "store")
    rival, me = Presence(objects, 30), Presence(objects, 30)
    rival.name, me.name = "b", "a"
    rival.start()
    rival.tell(wants=3)
    rival.hold(3)
    assert me.claim(3)
    assert objects.reads >= 2


def test_many_who_claim_the_same_units_at_once_never_share_one(
    objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_SETTLED_SECONDS", 600)  # none gives up on a busy machine
    crowd = [Presence(objects, 30) for _ in range(6)]
    for me in crowd:
        me.start()  # a claim that is settled is told by a beat
    together = threading.Barrier(len(crowd))
    for unit in range(4):
        claimed: list[str] = []

        def claim(me: Presence, unit: int = unit, claimed: list[str] = claimed) -> None:
            together.wait()
            if me.claim(unit):
                claimed.append(me.name)

        threads = [threading.Thread(target=claim, args=(me,)) for me in crowd]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(claimed) == 1
    for me in crowd:
        me.close("done")


def test_a_released_unit_is_free_with_the_next_beat(objects: LocalObjects) -> None:
    worker, observer = Presence(objects, 30), Presence(objects, 30)
    worker.hold(3)
    worker.hold(5)
    worker.release(3)
    worker.hold(7)
    assert observer.held_by_others() == {5, 7}


def test_a_closed_worker_holds_nothing(objects: LocalObjects) -> None:
    worker, observer = Presence(objects, 30), Presence(objects, 30)
    worker.start()
    worker.hold(3)
    assert observer.held_by_others() == {3}
    worker.close("failed", error="DataError: NaN")
    assert observer.held_by_others() == set()
    record = read_workers(objects)[worker.name]
    assert (record["state"], record["error"]) == ("failed", "DataError: NaN")


def test_a_started_worker_beats(objects: LocalObjects) -> None:
    worker = Presence(objects, 30)
    worker.start()
    try:
        before = read_workers(objects)[worker.name]["counter"]
        worker.tell(tokens=7)
        deadline = time.monotonic() + 20
        while read_workers(objects)[worker.name]["counter"] == before:
            assert time.monotonic() < deadline, "no beat"
            time.sleep(0.05)
        assert read_workers(objects)[worker.name]["tokens"] == 7
    finally:
        worker.close("done")
    assert read_workers(objects)[worker.name]["state"] == "done"


def test_a_worker_beats_more_rarely_where_each_write_is_paid_for() -> None:
    memory, bucket = MemoryObjects(), MemoryObjects("s3://bucket/prefix")
    for objects, stale_after, beat in ((memory, 30, 2), (bucket, 30, 10), (bucket, 3, 2)):
        worker = Presence(objects, stale_after)
        worker.hold(3)
        assert read_workers(objects)[worker.name]["beat"] == beat


def test_a_worker_that_beats_rarely_is_given_the_time(
    objects: LocalObjects, clock: Callable[[float], None]
) -> None:
    observer = Presence(objects, 30)
    say(objects, units=[3], beat=20.0)
    assert observer.held_by_others() == {3}
    clock(59)
    assert observer.held_by_others() == {3}
    clock(2)
    assert observer.held_by_others() == set()


class _Etags(MemoryObjects):
    """A store whose listings show whether an object has changed, as those of buckets do."""

    def __init__(self, url: str = "memory://") -> None:
        super().__init__(url)
        self.read: list[str] = []

    def get(self, key: str) -> bytes:
        self.read.append(key)
        return super().get(key)

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        for key in self.list(prefix):
            yield Entry(key, len(self._values[key]), xxhash.xxh3_128_hexdigest(self._values[key]))


def test_a_heartbeat_that_has_not_changed_is_not_read_again() -> None:
    objects = _Etags()
    worker, observer = Presence(objects, 30), Presence(objects, 30)
    worker.hold(3)
    assert observer.held_by_others() == observer.held_by_others() == {3}
    assert len(objects.read) == 1
    worker.hold(4)
    assert observer.held_by_others() == {3, 4}
    assert len(objects.read) == 2


def test_in_a_bucket_a_listing_shows_who_holds_which_unit(clock: Callable[[float], None]) -> None:
    """An idle worker of a large fleet would otherwise read a hundred heartbeats at each look."""
    objects = _Etags("s3://bucket/prefix")
    worker, observer = Presence(objects, 30), Presence(objects, 30)
    worker.name = "far-1"
    for unit in (5, 3, 300):
        worker.hold(unit)
    assert list(objects.list(fmt.WORKERS)) == [
        "workers/000000/far-1@00000003@00000005.json",
        "workers/000001/far-1@00000300.json",
    ]
    assert observer.holders(0) == {"far-1": {3, 5}}
    assert observer.held_by_others() == {3, 5, 300}
    assert read_workers(objects)["far-1"]["units"] == [5, 3, 300]
    objects.read.clear()
    worker.release(3)
    for _ in range(3):
        clock(29)
        worker.tell(tokens=1)
        worker._write()
        assert observer.holders(0) == {"far-1": {5}}
    clock(29)
    assert observer.holders(0) == {"far-1": {5}}
    assert not objects.read, "a changed etag is a sign of life"
    clock(2)
    assert observer.holders(0) == {}
    assert observer.holders(0) == {}
    assert len(objects.read) == 1, "its record says how often it beats"


def test_in_a_bucket_only_rivals_are_read_for_a_claim() -> None:
    objects = _Etags("s3://bucket/prefix")
    mine, rival, other = (Presence(objects, 30) for _ in range(3))
    mine.name, rival.name, other.name = "b", "a", "c"
    rival.tell(wants=3)
    rival.hold(3)
    other.hold(4)
    assert not mine.claim(3)
    assert objects.read == ["workers/000000/a@00000003.json"]
    assert mine.claim(5)


def test_a_claim_is_stale_when_its_counter_stands_still(
    objects: LocalObjects, clock: Callable[[float], None]
) -> None:
    observer = Presence(objects, 30)
    say(objects, units=[3], counter=8)
    assert observer.held_by_others() == {3}
    clock(29.9)
    assert observer.held_by_others() == {3}
    clock(0.2)
    assert observer.held_by_others() == set()


def test_a_moving_counter_keeps_a_claim_and_revives_a_stale_one(
    objects: LocalObjects, clock: Callable[[float], None]
) -> None:
    observer = Presence(objects, 30)
    for counter in range(1, 5):
        say(objects, units=[3], counter=counter)
        assert observer.held_by_others() == {3}
        clock(29)
    clock(29)
    assert observer.held_by_others() == set()
    say(objects, units=[3], counter=5)
    assert observer.held_by_others() == {3}


def test_a_restarted_counter_counts_as_moving(
    objects: LocalObjects, clock: Callable[[float], None]
) -> None:
    observer = Presence(objects, 30)
    say(objects, units=[3], counter=100)
    observer.held_by_others()
    clock(31)
    say(objects, units=[3], counter=1)
    assert observer.held_by_others() == {3}


def test_each_observer_waits_by_its_own_clock(
    objects: LocalObjects, clock: Callable[[float], None]
) -> None:
    say(objects, units=[3])
    early, late = Presence(objects, 30), Presence(objects, 30)
    assert early.held_by_others() == {3}
    clock(31)
    assert late.held_by_others() == {3}, "it has seen the record only now"
    assert early.held_by_others() == set()


def test_one_stale_worker_does_not_hide_another(
    objects: LocalObjects, clock: Callable[[float], None]
) -> None:
    observer = Presence(objects, 30)
    say(objects, "far-1", units=[3])
    say(objects, "far-2", units=[4])
    observer.held_by_others()
    clock(31)
    say(objects, "far-2", units=[4], counter=2)
    assert observer.held_by_others() == {4}


def test_a_killed_process_of_this_machine_is_known_at_once(objects: LocalObjects) -> None:
    observer = Presence(objects, 1e9)
    with stored.worker_process(objects.root, 3) as (name, process):
        assert observer.held_by_others() == {3}
        assert not process_ended(read_workers(objects)[name])
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but not yet reaped
        assert observer.held_by_others() == set()
        process.wait()
        assert observer.held_by_others() == set()
        assert process_ended(read_workers(objects)[name])


def test_another_process_with_a_dead_ones_id_is_not_mistaken_for_it(objects: LocalObjects) -> None:
    me = Presence(objects, 30)
    me.hold(3)
    record = read_workers(objects)[me.name]
    assert not process_ended(record)
    assert process_ended({**record, "started": record["started"] - 1})


def test_a_process_id_says_nothing_about_another_machine_or_boot(
    objects: LocalObjects,
) -> None:
    me = Presence(objects, 30)
    me.hold(3)
    record = {**read_workers(objects)[me.name], "pid": 2**22 + 1}
    assert process_ended(record)
    assert not process_ended({**record, "host": "far"})
    assert not process_ended({**record, "boot": "another"})


def test_torn_and_foreign_records_are_skipped(objects: LocalObjects) -> None:
    say(objects, "whole", units=[3])
    data = objects.get(fmt.CURRENT.worker_key("whole", 0))
    for name, torn in (("empty", b""), ("half", data[: len(data) // 2]), ("edited", data + b" ")):
        objects.create(fmt.CURRENT.worker_key(name, 0), torn)
    objects.create(
        fmt.CURRENT.worker_key("other-kind", 0), fmt.encode_record("done", {"units": [9]})
    )
    objects.create("workers/whole.json.tmp-abc", data)
    assert set(read_workers(objects)) == {"whole"}
    assert Presence(objects, 30).held_by_others() == {3}


def test_an_empty_store_holds_nothing(objects: LocalObjects) -> None:
    assert Presence(objects, 30).held_by_others() == set()
    assert not objects.root.exists()


def test_an_observer_counts_from_when_it_saw_a_counter_move(
    clock: Callable[[float], None],
) -> None:
    observer = HeartbeatObserver(stale_after=30)
    assert observer.silence("a") is None and not observer.is_stale("a")
    observer.note("a", 1)
    clock(29.0)
    observer.note("a", 1)
    assert observer.silence("a") == 29.0 and not observer.is_stale("a")
    clock(1.0)
    assert observer.is_stale("a")
    observer.note("a", 2)
    observer.note("b", 7)
    assert observer.silence("a") == 0.0 and not observer.is_stale("a")
    clock(30.0)
    assert observer.is_stale("b") and not HeartbeatObserver().is_stale("b")


class _Anothers(LocalObjects):
    """A store in which another user's heartbeats may not be read."""

    def get(self, key: str) -> bytes:
        if key.startswith(fmt.WORKERS):
            raise PermissionError(13, "Permission denied")
        return super().get(key)


def test_a_heartbeat_that_may_not_be_read_is_unknown_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = stored.build(tmp_path / "out", ((3, 2), (4,)))
    Presence(made.objects, 60).start()
    objects = _Anothers(made.path)
    (worker,) = read_status(objects).workers
    assert worker["state"] == "unknown"
    assert Presence(objects, 60).held_by_others() == set()
    assert verify(objects).ok
    assert collect_garbage(objects) == []
    assert [r.message for r in caplog.records if "Permission denied" in r.message] == [
        f"{objects.url}/{next(made.objects.list(fmt.WORKERS))}: cannot be read (Permission denied);"
        " whether that worker is alive is unknown"
    ]


@pytest.mark.parametrize(
    "key", [fmt.UNITS, fmt.MANIFEST, "done/000000/00000001.json", "workers/a.json"]
)
def test_a_pipe_in_place_of_a_record_is_not_waited_for(tmp_path: Path, key: str) -> None:
    path = stored.build(tmp_path / "out", ((3, 2), (4,))).path
    (path / key).unlink(missing_ok=True)
    (path / key).parent.mkdir(exist_ok=True)
    os.mkfifo(path / key)
    faults = verify(LocalObjects(path)).faults
    assert any(f"{key}: is not a regular file" in fault for fault in faults)


def test_workers_of_other_machines_count_as_working_while_they_beat(
    objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(objects, "beats", counter=4)
    say(objects, "silent", counter=9)
    say(objects, "ended", counter=2, state="stopped")
    say(objects, "same-world", world={"coordinator": "10.0.0.1:99", "process": 1})
    monkeypatch.setattr(time, "sleep", lambda _: say(objects, "beats", counter=5))
    assert working(objects, "10.0.0.1:99") == ["beats (far, process 1)"]


def test_a_worker_of_this_machine_counts_as_working_without_a_wait(
    objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waited"))
    assert working(objects) == []
    presence = Presence(objects, 30)
    presence.hold(3)
    (named,) = working(objects)
    assert named.startswith(f"{presence.name} (")
