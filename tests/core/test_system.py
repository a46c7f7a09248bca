"""The machine's time, random numbers and threads, and that a test can replace them."""

import time

from spile.core.retry import Retrying, backoff
from spile.core.system import System, system, using


class Still(System):
    """A system whose time passes only by sleeping, and whose random numbers are the least."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def uniform(self, low: float, high: float) -> float:
        return low


def test_the_machine_is_what_is_used() -> None:
    real = system()
    before = time.monotonic()
    real.sleep(0.01)
    assert before + 0.01 <= real.monotonic() <= time.monotonic()
    assert abs(real.time() - time.time()) < 5
    assert 3 <= real.uniform(3, 4) <= 4
    assert len({real.token(8) for _ in range(50)}) == 50
    assert len(real.token(8)) == 16
    with real.lock():
        assert real.semaphore(1).acquire()
    items = real.queue(1)
    thread = real.thread(lambda: items.put("said"), "a name")
    assert (thread.name, thread.daemon) == ("a name", True)
    thread.start()
    assert items.get(timeout=5) == "said"
    with real.pool(2) as pool:
        assert pool.submit(pow, 2, 5).result() == 32
    assert not real.event().is_set()


def test_retries_use_the_system_that_is_put_in_place() -> None:
    still = Still()
    with using(still):
        assert system() is still
        assert backoff(1, 4.0, 10.0, jitter=0.5) == 2.0
        began = time.monotonic()
        trying = Retrying("reading x", 1000.0, lambda: None)
        for _ in range(20):
            trying.again("no answer")
        assert time.monotonic() - began < 5
        assert still.now > 200
    assert system() is not still
