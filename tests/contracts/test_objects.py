"""What every store of objects must do, whatever its backend."""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spile.core.errors import StoreError
from spile.objects import LocalObjects, MemoryObjects, Objects, bucket, local, open_objects
from spile.objects.rooted import RootedObjects
from support import servers

BACKENDS: dict[str, Callable[[Path], Objects]] = {
    "local": lambda folder: LocalObjects(folder / "store"),
    "memory": lambda folder: MemoryObjects(),
    "rooted": lambda folder: RootedObjects(LocalObjects(folder / "store"), "passes/one/"),
    "s3": lambda folder: open_objects(servers.new_s3_store()),
    "gs": lambda folder: open_objects(servers.new_gcs_store()),
}
OUTSIDE = ("/x", "../x", "..", "a/../../x", "a//b", "", "a/", "/", ".", "./a", "a/./b", "a\0b")
MIB = 1 << 20
LARGE = 4 * MIB
# Sizes of the pieces of a large object: a local stream makes them durable every `LARGE` bytes here,
# and what a bucket is to get has room for as many.
PIECES = {
    "one piece": [LARGE + MIB],
    "exactly as many": [4096, LARGE // 2 - 4096, MIB, MIB],
    "odd sizes": [4096, LARGE // 2 + 1, 7, 0, 4095, LARGE // 2 + MIB - 13, 1],
    "most of it first": [4097, LARGE - MIB, 3, MIB],
    "small ones first": [1000, 0, 3000, 96, LARGE // 2 - MIB, LARGE // 2 + MIB + 5, 4096],
}


@pytest.fixture(params=BACKENDS)
def objects(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Objects:
    monkeypatch.setattr(local, "_SYNC_BYTES", LARGE)
    monkeypatch.setattr(bucket, "_ROOM", LARGE + 4096)
    return BACKENDS[request.param](tmp_path)


@pytest.fixture
def rounds(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> int:
    """How often threads race: less often through a server, where each race takes longer."""
    remote = request.node.callspec.params["objects"] in ("s3", "gs")
    return 5 if remote and not pytestconfig.getoption("--chaos-full") else 25


def put(objects: Objects, key: str, *pieces: bytes | memoryview) -> None:
    stream = objects.stream(key)
    for piece in pieces:
        stream.write(piece)
    stream.close()


# -- records ---------------------------------------------------------------------------------


def test_a_created_record_reads_back(objects: Objects) -> None:
    assert objects.create("done/1.json", b"one")
    assert objects.get("done/1.json") == b"one"
    assert objects.size("done/1.json") == 3


def test_the_second_create_loses_and_changes_nothing(objects: Objects) -> None:
    assert objects.create("done/1.json", b"first")
    assert objects.create("done/1.json", b"second") is False
    assert objects.create("done/1.json", b"first") is False
    assert objects.get("done/1.json") == b"first"
    assert list(objects.list()) == ["done/1.json"]


@pytest.mark.varied
def test_of_eight_racing_creates_exactly_one_wins(objects: Objects, rounds: int) -> None:
    for round_number in range(rounds):
        key = f"done/{round_number}.json"
        barrier = threading.Barrier(8)
        won: dict[int, bool] = {}

        def race(
            number: int, key: str = key, barrier: threading.Barrier = barrier,
            won: dict[int, bool] = won,
        ) -> None:  # fmt: skip
            barrier.wait()
            won[number] = objects.create(key, b"%d" % number * 1000)

        threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won.values()) == [False] * 7 + [True]
        (winner,) = (number for number, first in won.items() if first)
        assert objects.get(key) == b"%d" % winner * 1000
    assert set(objects.list()) == {f"done/{n}.json" for n in range(rounds)}


def test_an_entry_is_what_a_listing_says(objects: Objects) -> None:
    objects.create("done/1.json", b"one")
    assert [objects.entry("done/1.json")] == list(objects.entries("done/"))
    with pytest.raises(FileNotFoundError):
        objects.entry("done/2.json")


def test_an_empty_record_exists(objects: Objects) -> None:
    assert objects.create("empty", b"")
    assert objects.get("empty") == b""
    assert objects.create("empty", b"more") is False


def test_replace_creates_and_overwrites(objects: Objects) -> None:
    objects.replace("workers/a.json", b"a longer first word")
    objects.replace("workers/a.json", b"last")
    assert objects.get("workers/a.json") == b"last"
    assert list(objects.list()) == ["workers/a.json"]


@pytest.mark.varied
def test_a_reader_sees_the_old_or_the_new_value_of_a_replaced_record(
    objects: Objects, rounds: int
) -> None:
    values = {b"a" * 200_000, b"b" * 300_000}
    objects.replace("w", b"a" * 200_000)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for value in values:
                objects.replace("w", value)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {objects.get("w") for _ in range(12 * rounds)}
    finally:
        stop.set()
        writer.join()
    assert seen <= values


def test_a_moved_record_has_its_new_key_and_the_old_one_is_free(objects: Objects) -> None:
    objects.create("done/1.json", b"first")
    objects.move("done/1.json", "damaged/ab/done/1.json")
    assert objects.get("damaged/ab/done/1.json") == b"first"
    assert objects.create("done/1.json", b"second")
    assert objects.get("done/1.json") == b"second"
    assert sorted(objects.list()) == ["damaged/ab/done/1.json", "done/1.json"]
    with pytest.raises(FileNotFoundError):
        objects.move("done/2.json", "damaged/ab/done/2.json")
    assert sorted(objects.list()) == ["damaged/ab/done/1.json", "done/1.json"]


# -- streams ---------------------------------------------------------------------------------


def test_a_closed_stream_holds_its_pieces_in_order(objects: Objects) -> None:
    put(objects, "a/b/c", b"one", b"", memoryview(b"two"), b"three")
    assert objects.get("a/b/c") == b"onetwothree"
    assert objects.size("a/b/c") == 11


def test_a_stream_never_overwrites(objects: Objects) -> None:
    put(objects, "a/b", b"first")
    with pytest.raises(StoreError, match="a/b"):
        put(objects, "a/b", b"second")
    assert objects.get("a/b") == b"first"


def test_an_abandoned_stream_is_gone(objects: Objects) -> None:
    put(objects, "a/kept", b"1")
    stream = objects.stream("a/dropped")
    stream.write(b"something")
    stream.abandon()
    assert list(objects.list()) == ["a/kept"]
    with pytest.raises(FileNotFoundError):
        objects.get("a/dropped")


@pytest.fixture(scope="module")
def noise() -> memoryview:
    return memoryview(np.random.default_rng(0).bytes(LARGE + 2 * MIB))


def cut(noise: memoryview, sizes: list[int]) -> tuple[memoryview, list[memoryview]]:
    """The first bytes, as a whole and in pieces of these sizes."""
    stops = np.cumsum(sizes).tolist()
    pieces = [noise[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]
    return noise[: stops[-1]], pieces


def check_bytes(found: bytes, wanted: memoryview) -> None:
    """Compare without pytest, which would spend a minute on how large values differ."""
    assert len(found) == len(wanted)
    different = np.flatnonzero(np.frombuffer(found, np.uint8) != np.frombuffer(wanted, np.uint8))
    assert not len(different), f"{len(different)} bytes differ, the first is {different[0]}"


@pytest.mark.parametrize("sizes", PIECES)
def test_a_large_stream_arrives_byte_for_byte(
    objects: Objects, noise: memoryview, sizes: str
) -> None:
    whole, pieces = cut(noise, PIECES[sizes])
    put(objects, "a/large", *pieces)
    assert objects.size("a/large") == len(whole)
    check_bytes(objects.get("a/large"), whole)


def test_pieces_may_be_changed_once_they_are_written(objects: Objects, noise: memoryview) -> None:
    whole, pieces = cut(noise, PIECES["odd sizes"])
    stream = objects.stream("a/large")
    for piece in pieces:
        lent = bytearray(piece)
        stream.write(memoryview(lent))
        lent[:] = bytes(len(lent))
    stream.close()
    check_bytes(objects.get("a/large"), whole)


@pytest.mark.parametrize(
    "sizes", [[LARGE + MIB], [LARGE // 2 + MIB, LARGE // 2, 5], [1, LARGE // 2 + MIB]]
)
def test_an_abandoned_large_stream_is_gone(
    objects: Objects, noise: memoryview, sizes: list[int]
) -> None:
    put(objects, "a/kept", b"1")
    stream = objects.stream("a/dropped")
    for piece in cut(noise, sizes)[1]:
        stream.write(piece)
    stream.abandon()
    assert list(objects.list()) == ["a/kept"]
    put(objects, "a/dropped", b"again")
    assert objects.get("a/dropped") == b"again"


# -- reading, listing, deleting --------------------------------------------------------------


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (0, 1), (9, 10), (3, 7), (5, 5), (10, 10)])
def test_a_range_is_a_slice(objects: Objects, start: int, stop: int) -> None:
    put(objects, "digits", b"0123456789")
    assert objects.get_range("digits", start, stop) == b"0123456789"[start:stop]


@pytest.mark.parametrize("key", ["nothing", "no/folder/either", "there/below"])
def test_what_is_not_there_is_not_found(objects: Objects, key: str) -> None:
    objects.create("there", b"1")
    objects.create("beside/it", b"1")
    for read in (objects.get, objects.size, lambda k: objects.get_range(k, 0, 1)):
        with pytest.raises(FileNotFoundError):
            read(key)


def test_list_gives_every_key_under_a_prefix(objects: Objects) -> None:
    keys = {"a", "done/1", "done/2", "donex/1", "attempts/1/x/y", "attempts/1/z"}
    for key in keys:
        objects.create(key, b"")
    assert set(objects.list()) == keys
    assert {*objects.folders("attempts/1/")} == {"x"}
    assert {*objects.folders("attempts/")} == {"1"}
    assert [*objects.folders("done/")] == [*objects.folders("nowhere/")] == []
    assert set(objects.list("done/")) == {"done/1", "done/2"}
    assert set(objects.list("attempts/1/")) == {"attempts/1/x/y", "attempts/1/z"}
    assert list(objects.list("absent/")) == []


def test_an_empty_store_lists_nothing(objects: Objects) -> None:
    assert list(objects.list()) == []


def test_deleting_takes_one_key_and_may_be_repeated(objects: Objects) -> None:
    for key in ("a/b/1", "a/b/2", "a/c"):
        objects.create(key, b"")
    objects.delete("a/b/1")
    objects.delete("a/b/1")
    objects.delete("a/b/2")
    objects.delete("never/was/here")
    assert list(objects.list()) == ["a/c"]
    assert objects.create("a/b/1", b"again")


@pytest.mark.varied
def test_creating_beside_deletes_never_fails(objects: Objects, rounds: int) -> None:
    """`gc` empties folders that workers are about to write into."""
    stop = threading.Event()

    def delete() -> None:
        while not stop.wait(0.005):
            objects.delete("a/b/other")

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for number in range(2 * rounds):
            assert objects.create("a/b/record", b"%d" % number)
            put(objects, "a/b/stream", b"x")
            objects.delete("a/b/record")
            objects.delete("a/b/stream")
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("key", OUTSIDE)
def test_keys_cannot_leave_the_store(objects: Objects, key: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"outside")
    objects.create("a/inside", b"")
    actions: list[Callable[[], object]] = [
        lambda: objects.get(key),
        lambda: objects.get_range(key, 0, 1),
        lambda: objects.size(key),
        lambda: objects.create(key, b"!"),
        lambda: objects.replace(key, b"!"),
        lambda: objects.stream(key),
        lambda: objects.delete(key),
        lambda: objects.local_path(key),
    ]
    for action in actions:
        with pytest.raises(StoreError, match="not a key"):
            action()
    assert (tmp_path / "x").read_bytes() == b"outside"
    assert list(objects.list()) == ["a/inside"]


@pytest.mark.parametrize("prefix", ["../", "a/../../", "/"])
def test_listings_cannot_leave_the_store(objects: Objects, prefix: str, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"")
    objects.create("a/inside", b"")
    with pytest.raises(StoreError):
        list(objects.list(prefix))


@pytest.mark.parametrize(
    "key", ["units.json", "done/00000001.json", "a.tmp/b", "a/tmp-1", ".tmp-1", "workers/.tmp-1"]
)
def test_an_ordinary_key_is_nobodys_leftover(objects: Objects, key: str) -> None:
    assert objects.leftover_of(key) is None


def test_room_is_counted_before_anything_exists(objects: Objects) -> None:
    free = objects.free_bytes()
    assert free is None or free > 0
    assert list(objects.list()) == []
