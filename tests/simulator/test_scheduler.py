"""Simulated time, and what stands in for threads in it."""

import queue
from collections.abc import Callable
from typing import Any

import pytest

from simulator.scheduler import Scheduler
from spile.core.system import system, using
from spile.core.threads import Consumer, Producer, mapped


def simulated(run: Callable[[Scheduler], Any], seed: int = 0) -> Any:
    scheduler, found = Scheduler(seed), []
    with using(scheduler):
        scheduler.start("main", lambda: found.append(run(scheduler)))
        scheduler.run()
        scheduler.close()
    return found[0]


def test_time_passes_by_waiting_alone() -> None:
    def run(scheduler: Scheduler) -> None:
        system().sleep(1e6)
        assert system().monotonic() == 1e6
        event = system().event()
        assert not event.wait(5)
        scheduler.at(3, event.set)
        assert event.wait(5)
        assert system().monotonic() == 1e6 + 8

    simulated(run)


def test_threads_take_turns_in_an_order_that_the_seed_draws() -> None:
    def run(scheduler: Scheduler) -> list[int]:
        order: list[int] = []
        lock = system().lock()

        def each(number: int) -> None:
            for _ in range(3):
                with lock:
                    system().sleep(1)
                    order.append(number)

        threads = [system().thread(lambda n=n: each(n), f"{n}") for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
            assert not thread.is_alive()
        assert scheduler.now == 12, "one at a time"
        return order

    orders = [simulated(run, seed) for seed in (1, 1, 2, 3)]
    assert orders[0] == orders[1]
    assert len({*map(tuple, orders)}) > 1
    assert all(sorted(order) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3] for order in orders)


def test_queues_semaphores_and_pools_wait_for_one_another() -> None:
    def run(scheduler: Scheduler) -> None:
        items = system().queue(1)
        items.put("a")
        with pytest.raises(queue.Full):
            items.put("b", timeout=2)
        assert items.get() == "a"
        with pytest.raises(queue.Empty):
            items.get(timeout=2)
        room = system().semaphore(2)
        assert room.acquire() and room.acquire() and not room.acquire(timeout=1)
        room.release()
        assert room.acquire(blocking=False)

        def slow(number: int) -> int:
            system().sleep(1 if number % 2 else 2)
            if number == 7:
                raise KeyError(number)
            return number

        before = system().monotonic()
        assert list(mapped(slow, range(6), 3)) == [0, 1, 2, 3, 4, 5]
        assert system().monotonic() - before < 9, "beside one another"
        with pytest.raises(KeyError):
            list(mapped(slow, range(9), 2))

    simulated(run)


def test_stages_of_a_run_work_in_simulated_time() -> None:
    def run(scheduler: Scheduler) -> list[int]:
        taken: list[int] = []

        def take(number: int) -> None:
            system().sleep(2)
            taken.append(number)

        consumer = Consumer(take, 2, "take")
        producer = Producer((number for number in range(5)), 1, "make")
        for number in producer:
            consumer.put(number)
        producer.close()
        consumer.close()
        assert scheduler.now >= 10
        return taken

    assert simulated(run) == [0, 1, 2, 3, 4]


def test_a_killed_task_does_nothing_more_and_an_interrupted_one_cleans_up() -> None:
    scheduler, said = Scheduler(0), []

    def life(name: str) -> None:
        try:
            system().sleep(100)
        except KeyboardInterrupt:
            said.append(f"{name} was interrupted")
        finally:
            system().sleep(1)
            said.append(f"{name} tidied up")

    with using(scheduler):
        killed, stopped = (scheduler.start(name, lambda n=name: life(n)) for name in "ab")
        scheduler.at(5, lambda: setattr(killed, "alive", False))
        scheduler.at(5, lambda: scheduler.interrupt(stopped, KeyboardInterrupt()))
        scheduler.run()
        scheduler.close()
    assert said == ["b was interrupted", "b tidied up"]
    assert scheduler.unended == {}


def test_a_paused_process_waits_with_all_its_tasks() -> None:
    scheduler, said = Scheduler(0), []

    def life() -> None:
        system().sleep(1)
        said.append(system().monotonic())

    with using(scheduler):
        process = scheduler.start("a", life)
        process.paused_until = 50
        scheduler.run()
    assert said == [51]


def test_what_nobody_catches_ends_the_simulation() -> None:
    def run(scheduler: Scheduler) -> None:
        raise ValueError("of no use")

    with pytest.raises(ValueError, match="of no use"):
        simulated(run)
