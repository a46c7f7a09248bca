"""The simulated bucket does what one may do, and the shipped client copes with each of it."""

from collections.abc import Callable
from typing import Any

import pytest

from simulator.scheduler import Scheduler
from simulator.store import PAGE, Bucket, Faults, Store
from spile.core.errors import StoreError
from spile.core.system import using
from spile.objects import check_creates_once
from spile.objects.bucket import BucketObjects


def simulated(run: Callable[[BucketObjects, Bucket, Faults], Any], seed: int = 0) -> Any:
    """What a function gives that uses a simulated bucket."""
    scheduler, bucket, faults, found = Scheduler(seed), Bucket(), Faults(), []
    objects = BucketObjects("s3://simulated/x", Store(scheduler, bucket, faults))
    with using(scheduler):
        scheduler.start("client", lambda: found.append(run(objects, bucket, faults)))
        scheduler.run()
        scheduler.close()
    return found[0]


def test_objects_are_stored_listed_and_removed() -> None:
    def run(objects: BucketObjects, bucket: Bucket, faults: Faults) -> None:
        keys = [f"a/{number:03d}" for number in range(2 * PAGE + 3)]
        for key in [*keys, "b/c"]:
            assert objects.create(key, key.encode())
        assert not objects.create("b/c", b"other")
        assert list(objects.list("a/")) == keys
        assert [entry.size for entry in objects.entries("b/")] == [3]
        assert objects.get("b/c") == b"b/c"
        assert objects.get_range("a/000", 1, 3) == b"/0"
        assert objects.size("a/000") == 5
        objects.replace("b/c", b"other")
        objects.delete("b/c")
        objects.delete("b/c")
        with pytest.raises(FileNotFoundError):
            objects.get("b/c")

    simulated(run)


@pytest.mark.parametrize("fault", ["refused", "lost", "late", "twice", "echoed"])
def test_a_record_is_created_once_whatever_becomes_of_its_answers(fault: str) -> None:
    """`create` may answer False of one's own record only where nothing told of a lost answer."""

    def run(objects: BucketObjects, bucket: Bucket, faults: Faults) -> None:
        objects.create("first", b"")  # it is there: patience is long
        for number in range(10):
            setattr(faults, fault, 0.2 if fault == "late" else 0.6)  # a late one takes a minute
            mine = objects.create(f"r{number}", b"mine")
            assert mine or fault == "echoed"
            stream = objects.stream(f"s{number}")
            stream.write(b"rows")
            stream.close()
            check_creates_once(objects)
            setattr(faults, fault, 0.0)
            assert not objects.create(f"r{number}", b"other")
            assert objects.get(f"r{number}") == b"mine"
            assert objects.get(f"s{number}") == b"rows"

    simulated(run)


def test_expired_credentials_end_at_once_and_outages_when_patience_ends() -> None:
    def run(objects: BucketObjects, bucket: Bucket, faults: Faults) -> list[float]:
        now = objects._store._scheduler.monotonic
        objects.create("first", b"")
        ended = []
        for broken in ({"denied": 1.0}, {"denied": 0.0, "outage": (0.0, 1e9)}):
            for name, value in broken.items():
                setattr(faults, name, value)
            began = now()
            with pytest.raises(StoreError):
                objects.create("second", b"")
            ended.append(now() - began)
        return ended

    denied, outage = simulated(run)
    assert denied < 1
    assert 300 < outage < 330


def test_a_request_takes_effect_whatever_has_become_of_whoever_sent_it() -> None:
    scheduler, bucket = Scheduler(0), Bucket()
    objects = BucketObjects("s3://simulated/x", Store(scheduler, bucket, Faults(latency=1.0)))
    with using(scheduler):
        process = scheduler.start("client", lambda: objects.replace("a", b"mine"))
        scheduler.at(0.0001, lambda: setattr(process, "alive", False))
        scheduler.run()
        assert process.main and not process.main.ended
        scheduler.close()
    assert bucket.objects["a"][0] == b"mine"


def test_a_file_that_gc_removes_while_it_is_read_back_is_written_again() -> None:
    """Its answer was lost, and meanwhile another attempt was committed."""

    def run(objects: BucketObjects, bucket: Bucket, faults: Faults) -> None:
        stream = objects.stream("attempts/a")
        stream.write(b"rows")
        bucket.put("attempts/a", b"rows", create=True)
        real = bucket.get

        def vanishing(key: str) -> tuple[bytes, str]:
            found = real(key)
            bucket.delete(key)  # after `head`, before `get`
            return found

        bucket.get = vanishing  # type: ignore[method-assign]
        stream.close()
        bucket.get = real  # type: ignore[method-assign]
        assert objects.get("attempts/a") == b"rows"

    simulated(run)
