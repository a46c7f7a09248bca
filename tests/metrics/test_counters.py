"""Counters: sums that several threads add to, and seconds that pass inside a block."""

import threading
import time

import pytest

from spile.metrics import Counters


def test_a_name_never_added_to_is_zero() -> None:
    assert Counters()["rows"] == 0


def test_amounts_are_summed_by_name() -> None:
    counters = Counters()
    counters.add(rows=3, bytes=10)
    counters.add(rows=4, seconds=0.5)
    assert (counters["rows"], counters["bytes"], counters["seconds"]) == (7, 10, 0.5)


def test_a_value_that_is_set_stands_until_it_is_set_again() -> None:
    counters = Counters()
    counters.set(queued=3)
    counters.set(queued=1, memory=7.5)
    assert (counters["queued"], counters["memory"]) == (1, 7.5)


def test_nothing_is_lost_where_threads_add_at_once() -> None:
    counters, barrier = Counters(), threading.Barrier(8)

    def add() -> None:
        barrier.wait()
        for _ in range(2000):
            counters.add(rows=1, bytes=3)

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (counters["rows"], counters["bytes"]) == (16_000, 48_000)


def test_time_inside_is_added_and_time_outside_is_not() -> None:
    counters = Counters()
    begin = time.perf_counter()
    with counters.timed("busy"):
        time.sleep(0.02)
    once, passed = counters["busy"], time.perf_counter() - begin
    assert 0.02 <= once <= passed
    time.sleep(0.05)
    begin = time.perf_counter()
    with counters.timed("busy"):
        time.sleep(0.02)
    assert 0.02 <= counters["busy"] - once <= time.perf_counter() - begin
    assert counters["idle"] == 0


def test_time_counts_though_what_was_timed_fails() -> None:
    counters = Counters()
    with pytest.raises(RuntimeError, match="inside"), counters.timed("busy"):
        time.sleep(0.02)
        raise RuntimeError("inside")
    assert counters["busy"] >= 0.02


def test_a_block_inside_another_counts_for_both() -> None:
    counters = Counters()
    with counters.timed("outer"):
        with counters.timed("inner"):
            time.sleep(0.02)
        time.sleep(0.02)
    assert counters["inner"] >= 0.02
    assert counters["outer"] >= counters["inner"] + 0.02


def test_rates_tell_how_text_and_device_kept_pace() -> None:
    counters = Counters()
    assert counters.rates()["text_rate"] is None and counters.rates()["computed_share"] is None
    counters.add(prepared=600, reading=1.0, preparing=2.0, device_busy=3.0, device_idle=1.0)
    counters.add(waited_for_text=0.5, waited_at_first=9.0)
    assert counters.rates() == {
        "text_rate": 200.0, "device_seconds": 4.0, "computed_share": 0.75,
        "waited_for_text_share": 0.125,
    }  # fmt: skip


def test_the_largest_is_kept_until_it_is_taken() -> None:
    counters = Counters()
    counters.met(a=1.0, b=-5.0)
    counters.met(a=0.5, b=-7.0)
    assert counters.take_largest() == {"a": 1.0, "b": -5.0}
    counters.met(a=0.5)
    assert counters.take_largest() == {"a": 0.5}
    assert counters.take_largest() == {}


def test_a_snapshot_stays_as_it_was() -> None:
    counters = Counters()
    counters.add(rows=1)
    taken = counters.snapshot()
    counters.add(rows=1)
    assert taken == {"rows": 1} and counters["rows"] == 2
