"""Stages in threads: order, bounds, errors in the caller, and no call that waits forever."""

import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest

from spile.core.errors import Interrupted
from spile.core.threads import Consumer, Producer, cancellation, cancelled_by, mapped

Source = Generator[int, None, None]
PATIENCE = 3.0  # seconds after which a call is taken to hang


def within_patience(call: Callable[[], Any]) -> Any:
    """Return the call's result or error; a call that hangs fails the test at once."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert outcome, "the call hangs"
    fine, value = outcome[0]
    if not fine:
        raise value
    return value


def settles_at(read: Callable[[], int], wanted: int) -> bool:
    """Return whether a number reaches `wanted` and then stays there."""
    deadline = time.monotonic() + PATIENCE
    while read() < wanted and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.25)  # longer than the module's polling
    return read() == wanted


def counting(made: list[int], stop: int | None = None) -> Source:
    number = 0
    while stop is None or number < stop:
        made.append(number)
        yield number
        number += 1


@pytest.mark.parametrize("depth", [1, 3])
def test_a_producer_gives_every_item_in_order(depth: int) -> None:
    producer = Producer(counting([], 500), depth, "test")
    assert within_patience(lambda: list(producer)) == list(range(500))
    within_patience(producer.close)


def test_a_producers_error_comes_after_the_items_made_before_it() -> None:
    class OutOfPaperError(Exception):
        pass

    def source() -> Source:
        yield 1
        yield 2
        raise OutOfPaperError("tray 2")

    producer = Producer(source(), 1, "test")
    taken: list[int] = []

    def consume() -> None:
        for item in producer:
            taken.append(item)

    with pytest.raises(OutOfPaperError, match="tray 2"):
        within_patience(consume)
    assert taken == [1, 2]
    within_patience(producer.close)


def test_a_keyboard_interrupt_inside_a_producer_reaches_the_caller() -> None:
    def source() -> Source:
        raise KeyboardInterrupt
        yield 1

    producer = Producer(source(), 1, "test")
    with pytest.raises(KeyboardInterrupt):
        within_patience(lambda: list(producer))


@pytest.mark.parametrize("depth", [1, 4])
def test_a_producer_runs_no_further_ahead_than_its_depth_and_one_in_hand(depth: int) -> None:
    made: list[int] = []
    producer = Producer(counting(made), depth, "test")
    assert settles_at(lambda: len(made), depth + 1)
    items = iter(producer)
    assert [next(items), next(items)] == [0, 1]
    assert settles_at(lambda: len(made), depth + 3)
    within_patience(producer.close)


def test_closing_stops_an_endless_producer_and_ends_its_source() -> None:
    ended = threading.Event()

    def source() -> Source:
        try:
            while True:
                yield 0
        finally:
            ended.set()

    producer = Producer(source(), 2, "test")
    assert next(iter(producer)) == 0
    within_patience(producer.close)
    assert ended.wait(PATIENCE), "what the source holds open must be let go"


def test_closing_a_producer_whose_error_nobody_took_is_quiet() -> None:
    def source() -> Source:
        yield 1
        raise RuntimeError("unseen")

    producer = Producer(source(), 1, "test")
    within_patience(producer.close)
    within_patience(producer.close)


def test_iterating_a_closed_producer_ends() -> None:
    producer = Producer(counting([]), 1, "test")
    assert next(iter(producer)) == 0
    within_patience(producer.close)
    assert len(within_patience(lambda: list(producer))) <= 1


def test_a_consumer_that_waits_is_woken_when_its_producer_is_closed() -> None:
    gate = threading.Event()

    def source() -> Source:
        gate.wait(PATIENCE)
        yield 1

    producer = Producer(source(), 1, "test")
    closer = threading.Timer(0.2, producer.close)
    closer.start()
    threading.Timer(0.4, gate.set).start()
    assert within_patience(lambda: list(producer)) in ([], [1])
    closer.join(PATIENCE)


def test_iterating_an_exhausted_producer_again_gives_nothing() -> None:
    producer = Producer(counting([], 3), 1, "test")
    assert within_patience(lambda: list(producer)) == [0, 1, 2]
    assert within_patience(lambda: list(producer)) == []


@pytest.mark.parametrize("depth", [1, 3])
def test_a_consumer_handles_every_item_in_order_before_close_returns(depth: int) -> None:
    handled: list[int] = []
    consumer = Consumer(handled.append, depth, "test")

    def feed() -> None:
        for number in range(300):
            consumer.put(number)
        consumer.close()

    within_patience(feed)
    assert handled == list(range(300))


@pytest.mark.parametrize("depth", [1, 3])
def test_put_blocks_when_depth_items_wait(depth: int) -> None:
    gate = threading.Event()
    accepted: list[int] = []

    def handle(number: int) -> None:
        gate.wait(PATIENCE)

    consumer = Consumer(handle, depth, "test")

    def feed() -> None:
        for number in range(depth + 5):
            consumer.put(number)
            accepted.append(number)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    assert settles_at(lambda: len(accepted), depth + 1)  # one is being handled
    gate.set()
    feeder.join(PATIENCE)
    assert len(accepted) == depth + 5
    within_patience(consumer.close)


def failing_at(bad: int, handled: list[int]) -> Callable[[int], None]:
    def handle(number: int) -> None:
        if number == bad:
            raise OSError("disk full")
        handled.append(number)

    return handle


@pytest.mark.parametrize("depth", [1, 3])
def test_a_later_put_raises_the_handlers_error_and_handling_ends(
    depth: int,
) -> None:
    handled: list[int] = []
    consumer = Consumer(failing_at(4, handled), depth, "test")

    def feed() -> None:
        for number in range(10_000):
            consumer.put(number)
            time.sleep(0.001)

    with pytest.raises(OSError, match="disk full"):
        within_patience(feed)
    for call in (lambda: consumer.put(0), consumer.check, consumer.close):
        with pytest.raises(OSError, match="disk full"):
            within_patience(call)
    assert handled == [0, 1, 2, 3]


def test_the_error_of_the_last_item_is_raised_by_close() -> None:
    consumer = Consumer(failing_at(0, []), 4, "test")
    consumer.put(0)
    with pytest.raises(OSError, match="disk full"):
        within_patience(consumer.close)


def test_a_put_that_waits_is_freed_when_the_handler_fails() -> None:
    gate = threading.Event()

    def handle(number: int) -> None:
        gate.wait(PATIENCE)
        raise OSError("disk full")

    consumer = Consumer(handle, 1, "test")
    consumer.put(0)
    consumer.put(1)
    threading.Timer(0.2, gate.set).start()
    within_patience(lambda: consumer.put(2))
    with pytest.raises(OSError, match="disk full"):
        within_patience(consumer.close)


def test_abandoning_drops_what_waits() -> None:
    gate, started = threading.Event(), threading.Event()
    handled: list[int] = []

    def handle(number: int) -> None:
        started.set()
        gate.wait(PATIENCE)
        handled.append(number)

    consumer = Consumer(handle, 3, "test")
    for number in range(4):
        consumer.put(number)
    assert started.wait(PATIENCE)
    threading.Timer(0.2, gate.set).start()
    within_patience(consumer.abandon)
    assert handled == [0]


def test_abandoning_does_not_raise_the_handlers_error() -> None:
    consumer = Consumer(failing_at(0, []), 1, "test")
    consumer.put(0)
    within_patience(consumer.abandon)


def test_abandoning_after_a_close_that_raised_returns() -> None:
    consumer = Consumer(failing_at(0, []), 1, "test")
    consumer.put(0)
    with pytest.raises(OSError, match="disk full"):
        within_patience(consumer.close)
    within_patience(consumer.abandon)


def test_a_consumer_may_be_closed_any_number_of_times() -> None:
    consumer: Consumer[int] = Consumer(lambda _: None, 1, "test")
    for _ in range(4):
        within_patience(consumer.close)
        within_patience(consumer.abandon)


def test_an_interrupted_close_can_still_be_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def handle(item: int) -> None:
        gate.wait(10)

    consumer = Consumer(handle, 1, "slow")
    consumer.put(1)
    consumer.put(2)  # the queue is full: `close` would block

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(queue.Queue, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consumer.close()
    gate.set()
    ended = threading.Thread(target=consumer.abandon, daemon=True)
    ended.start()
    ended.join(10)
    assert not ended.is_alive()


# -- mapped ----------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_results_come_in_order_whichever_is_ready_first(threads: int) -> None:
    def slow(number: int) -> int:
        time.sleep(0.02 * (number % 3))
        return number * number

    assert list(mapped(slow, range(20), threads)) == [n * n for n in range(20)]
    assert list(mapped(slow, [], threads)) == []


def test_no_more_threads_are_at_work_and_few_results_wait() -> None:
    began: list[int] = []
    at_work, most = 0, 0
    lock = threading.Lock()

    def note(number: int) -> int:
        nonlocal at_work, most
        with lock:
            began.append(number)
            at_work += 1
            most = max(most, at_work)
        time.sleep(0.05)
        with lock:
            at_work -= 1
        return number

    results = mapped(note, range(1000), 3)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    time.sleep(0.3)
    assert most == 3 and len(began) <= 10
    results.close()  # type: ignore[attr-defined]
    assert len(began) <= 12


def test_an_item_that_takes_long_does_not_keep_later_ones_waiting() -> None:
    others = threading.Semaphore(0)

    def work(number: int) -> bool:
        if number:
            others.release()
            return True
        return all(others.acquire(timeout=PATIENCE) for _ in range(8))

    assert all(within_patience(lambda: list(mapped(work, range(9), 2, ahead=8))))


def test_the_first_error_in_order_is_raised() -> None:
    def failing(number: int) -> int:
        if number >= 3:
            raise ValueError(str(number))
        return number

    seen: list[int] = []
    with pytest.raises(ValueError, match="3"):
        for number in mapped(failing, range(10), 4):
            seen.append(number)
    assert seen == [0, 1, 2]


def looking(looks: list[bool]) -> Source:
    """Waits until its work is cancelled; notes that it was."""
    yield 0
    while not cancellation().is_set():
        time.sleep(0.005)
    looks.append(True)
    cancellation().check()


def test_work_stops_once_any_of_its_flags_is_set() -> None:
    outer, inner = threading.Event(), threading.Event()
    with cancelled_by(outer):
        with cancelled_by(inner):
            cancellation().check()
            inner.set()
            with pytest.raises(Interrupted):
                cancellation().check()
        cancellation().check()  # the inner flag stops the inner work alone
        outer.set()
        with pytest.raises(Interrupted):
            cancellation().check()
    cancellation().check()


def test_a_producer_stops_with_the_work_that_made_it() -> None:
    stop = threading.Event()
    with cancelled_by(stop):
        items = iter(Producer(looking([]), 1, "test"))
    assert next(items) == 0
    stop.set()
    with pytest.raises(Interrupted):
        within_patience(lambda: next(items))


def test_closing_a_producer_cancels_its_work_alone() -> None:
    looks: list[bool] = []
    stop = threading.Event()
    with cancelled_by(stop):
        first, second = Producer(looking(looks), 1, "a"), Producer(looking([]), 1, "b")
        within_patience(first.close)
        assert looks == [True]
        assert not cancellation().is_set()
        assert second._thread.is_alive()
        within_patience(second.close)
