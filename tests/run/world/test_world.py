"""Exchanges between processes: two members of a world at one real coordination service."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import pytest
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from spile.core.errors import ConfigError, DataError, Interrupted, SpileError, WorldError
from spile.core.units import Unit
from spile.run.world import world as world_module
from spile.run.world.rank import ABORTED, RESTART, Rank
from spile.run.world.world import JoinedWorld, SingleWorld, World, compare
from support.tiny import free_port


@dataclass
class Pair:
    """A leader and a follower, each with its own flag to stop."""

    leader: World
    follower: World
    stops: list[threading.Event]
    pool: ThreadPoolExecutor

    def both(self, call: Callable[[World], Any]) -> list[Any]:
        """Call a function in both at the same time; return both results."""
        return list(self.pool.map(call, (self.leader, self.follower)))


@pytest.fixture
def pair() -> Iterator[Pair]:
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, 2)
    clients = [_jax.get_distributed_runtime_client(address, n) for n in (0, 1)]
    stops = [threading.Event(), threading.Event()]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda client: client.connect(), clients))
        first, second = (
            JoinedWorld(Rank(address, 2, number), clients[number], stops[number])
            for number in (0, 1)
        )
        yield Pair(first, second, stops, pool)
        for world in (first, second):
            world._left.set()
            world._watcher.join()
        list(pool.map(lambda client: client.shutdown(), clients))
    service.shutdown()


def unit(number: int) -> Unit:
    return Unit(id=number, spans=(), first_doc=0, num_docs=1, tokens=1)


def test_all_get_the_leaders_value_and_the_leader_gets_all_values(pair: Pair) -> None:
    shared = pair.both(lambda world: world.share("colour", {"of": world.process}))
    assert shared == [{"of": 0}, {"of": 0}]
    gathered = pair.both(lambda world: world.gather("numbers", [world.process]))
    assert gathered == [[[0], [1]], None]


def test_followers_do_the_units_that_the_leader_picks_under_its_names(pair: Pair) -> None:
    known = [unit(number) for number in range(9)]
    picked = [known[5], known[2], known[7]]
    told, heard = pair.both(lambda world: list(world.units(iter(picked), known)))
    assert [each.id for each, _ in told] == [5, 2, 7]
    assert told == heard
    assert len({attempt for _, attempt in told}) == 3


def test_a_leader_that_was_told_to_stop_does_not_say_that_all_is_done(pair: Pair) -> None:
    pair.stops[0].set()
    assert list(pair.leader.units(iter([]), [])) == []
    waiting = pair.pool.submit(lambda: list(pair.follower.units(iter([]), [])))
    time.sleep(0.3)
    assert not waiting.done()
    pair.stops[1].set()
    with pytest.raises(Interrupted):
        waiting.result(5)


def test_whoever_waits_hears_why_another_failed(pair: Pair) -> None:
    waiting = pair.pool.submit(pair.leader.gather, "never", None)
    found = pair.follower.failed(DataError("a NaN in unit 3"))
    with pytest.raises(WorldError) as heard:
        waiting.result(5)
    assert pair.stops[0].is_set()  # so that what does not wait ends, too
    first = pair.leader.failed(heard.value)
    for error in (found, first):
        assert isinstance(error, WorldError)
        assert (error.process, error.exit_code) == (1, DataError.exit_code)
        assert str(error).startswith("process 1 (")
        assert str(error).endswith("): a NaN in unit 3")


def test_the_first_cause_stands_whatever_follows_from_it(pair: Pair) -> None:
    follow = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllReduce failed: Connection closed by peer")
    first, second = ConfigError("first"), follow
    said = [pair.follower.failed(first), pair.leader.failed(second)]
    assert [str(error).partition("): ")[2] for error in said] == ["first", "first"]
    assert [error.exit_code for error in said if isinstance(error, SpileError)] == [2, 2]


def test_a_step_that_lost_a_process_asks_for_a_restart(pair: Pair) -> None:
    lost = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllReduce failed: Connection closed by peer")
    error = pair.follower.failed(lost)
    pair.leader.failed(Interrupted())
    assert isinstance(error, WorldError)
    assert error.exit_code == ABORTED
    assert "Connection closed by peer" in str(error)
    assert str(error).endswith(RESTART)


def test_a_fault_of_ours_keeps_its_traceback_where_it_happened(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    error = pair.follower.failed(ValueError("odd"))
    assert "ValueError: odd" in caplog.text
    caplog.clear()
    other = pair.leader.failed(Interrupted())
    assert caplog.text == ""
    for each in (error, other):
        assert isinstance(each, WorldError)
        assert each.exit_code == 1
        assert str(each).endswith("ValueError: odd")


def test_a_leader_that_nobody_hears_ends_with_its_own_cause(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(world_module, "_GRACE", 0.2)
    pair.leader.failed(DataError("mine"))  # which the follower, in a step, cannot hear
    assert codes == [DataError.exit_code]
    assert caplog.messages == [f"process 0 ({socket.gethostname()}): mine"]


def test_what_differs_between_processes_is_named_once(pair: Pair) -> None:
    def told(world: World) -> str | None:
        try:
            compare(world, {"--taps": ("a", "b"), "spile": f"0.{world.process}"})
        except ConfigError as error:
            return str(error)
        return None

    said = pair.both(told)
    assert said[1] is None
    assert "process 1 (" in said[0]
    assert "has spile '0.1', process 0 has '0.0'" in said[0]


def test_one_process_alone_has_nobody_to_ask() -> None:
    alone = SingleWorld()
    assert alone.share("x", 1) == 1
    assert alone.gather("x", 1) == [1]
    assert [each.id for each, _ in alone.units(iter([unit(4)]), [])] == [4]
    error = ValueError()
    assert alone.failed(error) is error
    compare(alone, {"a": 1})
