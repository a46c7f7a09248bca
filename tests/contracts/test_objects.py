"""What every store of objects must do, whatever it is made of."""

import errno
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import servers
import tiny
from spile.core.errors import ConfigError, StoreError
from spile.objects import LocalObjects, MemoryObjects, Objects, open_objects

BACKENDS: dict[str, Callable[[Path], Objects]] = {
    "local": lambda folder: LocalObjects(folder / "store"),
    "memory": lambda folder: MemoryObjects(),
    "s3": lambda folder: open_objects(servers.new_s3_store()),
    "gs": lambda folder: open_objects(servers.new_gcs_store()),
}
OUTSIDE = ("/x", "../x", "..", "a/../../x", "a//b", "", "a/", "/", ".", "./a", "a/./b", "a\0b")
MIB = 1 << 20
# Sizes of the pieces of a large object: a local stream makes them durable every 64 MiB.
PIECES = {
    "one piece": [65 * MIB],
    "exactly as many": [4096, 32 * MIB - 4096, 12 * MIB, 20 * MIB],
    "odd sizes": [4096, 32 * MIB + 1, 7, 0, 4095, 33 * MIB - 13, 1],
    "most of it first": [4097, 63 * MIB, 3, MIB],
    "small ones first": [1000, 0, 3000, 96, 31 * MIB, 32 * MIB + 5, 4096],
}


@pytest.fixture(params=BACKENDS)
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    return BACKENDS[request.param](tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


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


def test_of_eight_racing_creates_exactly_one_wins(objects: Objects) -> None:
    for round_number in range(25):
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
    assert set(objects.list()) == {f"done/{n}.json" for n in range(25)}


def test_an_empty_record_exists(objects: Objects) -> None:
    assert objects.create("empty", b"")
    assert objects.get("empty") == b""
    assert objects.create("empty", b"more") is False


def test_replace_creates_and_overwrites(objects: Objects) -> None:
    objects.replace("workers/a.json", b"a longer first word")
    objects.replace("workers/a.json", b"last")
    assert objects.get("workers/a.json") == b"last"
    assert list(objects.list()) == ["workers/a.json"]


def test_a_reader_sees_the_old_or_the_new_value_of_a_replaced_record(objects: Objects) -> None:
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
        seen = {objects.get("w") for _ in range(300)}
    finally:
        stop.set()
        writer.join()
    assert seen <= values


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
    return memoryview(np.random.default_rng(0).bytes(72 * MIB))


def cut(noise: memoryview, sizes: list[int]) -> tuple[memoryview, list[memoryview]]:
    """The first bytes, whole and in pieces of these sizes."""
    stops = np.cumsum(sizes).tolist()
    pieces = [noise[stop - size : stop] for stop, size in zip(stops, sizes, strict=True)]
    return noise[: stops[-1]], pieces


def check_bytes(found: bytes, wanted: memoryview) -> None:
    """(pytest would spend a minute on how large ones differ)"""
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


def test_a_large_stream_arrives_on_a_system_that_knows_neither_fdatasync_nor_fadvise(
    local: LocalObjects, noise: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, pieces = cut(noise, PIECES["odd sizes"])
    for name in ("fdatasync", "posix_fadvise"):
        monkeypatch.delattr(os, name)
    put(local, "a/large", *pieces)
    check_bytes(local.get("a/large"), whole)


def test_pieces_may_be_changed_once_they_are_written(objects: Objects, noise: memoryview) -> None:
    whole, pieces = cut(noise, PIECES["odd sizes"])
    stream = objects.stream("a/large")
    for piece in pieces:
        lent = bytearray(piece)
        stream.write(memoryview(lent))
        lent[:] = bytes(len(lent))
    stream.close()
    check_bytes(objects.get("a/large"), whole)


@pytest.mark.parametrize("sizes", [[65 * MIB], [33 * MIB, 32 * MIB, 5], [1, 33 * MIB]])
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


def test_creating_beside_deletes_never_fails(objects: Objects) -> None:
    """`gc` empties folders that workers are about to write into."""
    stop = threading.Event()

    def delete() -> None:
        while not stop.wait(0.005):
            objects.delete("a/b/other")

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for number in range(60):
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


# -- the local backend -----------------------------------------------------------------------


def test_a_store_is_opened_by_path_or_file_url_and_nothing_is_created(tmp_path: Path) -> None:
    for url in (str(tmp_path / "out"), f"file://{tmp_path}/out"):
        assert open_objects(url).local_path("k") == tmp_path / "out" / "k"
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="ftp://"):
        open_objects("ftp://host/out")


def test_a_killed_create_leaves_only_a_leftover_that_names_its_record(
    local: LocalObjects,
) -> None:
    script = (
        "import os, pathlib, sys; os.link = lambda *a: os._exit(9);"
        "from spile.objects import LocalObjects;"
        "LocalObjects(pathlib.Path(sys.argv[1])).create('done/1.json', b'half')"
    )
    command = [sys.executable, "-c", script, str(local.root)]
    assert subprocess.run(command, env=tiny.environment()).returncode == 9
    (leftover,) = local.list()
    assert local.leftover_of(leftover) == "done/1.json"
    assert local.create("done/1.json", b"whole")
    assert local.get("done/1.json") == b"whole"


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Every sync and link: what, of which path, and its size at that moment."""
    found: list[tuple[str, str, int]] = []
    fsync, link = os.fsync, os.link

    def record_sync(descriptor: int) -> None:
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        found.append(("sync", path, os.fstat(descriptor).st_size))

    def record_link(source: Path, target: Path) -> None:
        link(source, target)
        found.append(("link", str(target), os.stat(target).st_size))

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "link", record_link)
    return found


def test_a_stream_is_durable_when_closed_and_not_before(
    local: LocalObjects, events: list[tuple[str, str, int]]
) -> None:
    path = str(local.root / "a/b/shard")
    stream = local.stream("a/b/shard")
    stream.write(b"12")
    stream.write(b"345")
    assert path not in [name for _, name, _ in events]
    # the folders' own entries
    assert {str(local.root), str(local.root / "a")} <= {name for _, name, _ in events}
    events.clear()
    stream.close()
    assert events[0] == ("sync", path, 5)
    assert events[1][:2] == ("sync", str(local.root / "a/b"))


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> "queue.Queue[tuple[str, int]]":
    """Every file whose data is made durable before it is closed, and its size at that moment."""
    found: queue.Queue[tuple[str, int]] = queue.Queue()
    fdatasync = os.fdatasync

    def record(descriptor: int) -> None:
        fdatasync(descriptor)
        found.put((os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fdatasync", record)
    return found


def test_a_large_file_goes_to_the_disk_while_it_is_written(
    local: LocalObjects, noise: memoryview, flushed: "queue.Queue[tuple[str, int]]"
) -> None:
    stream = local.stream("shard")
    stream.write(noise[: 40 * MIB])
    assert flushed.empty()
    stream.write(noise[: 25 * MIB])
    assert flushed.get(timeout=30) == (str(local.root / "shard"), 65 * MIB)
    stream.write(noise[:MIB])
    stream.close()
    assert flushed.empty(), "what is left is for the last sync"


def in_memory(path: Path) -> bool:
    """Whether a file's first page is in the page cache."""
    with path.open("rb", buffering=0) as file:
        try:
            return os.preadv(file.fileno(), [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False
        except OSError as error:
            pytest.skip(f"this file system does not say: {error.strerror}")


def test_what_is_on_the_disk_does_not_stay_in_memory(
    local: LocalObjects, noise: memoryview
) -> None:
    put(local, "small", noise[:MIB])
    small = local.root / "small"
    assert in_memory(small)
    with small.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(small):
        pytest.skip("there is no disk behind this file system")
    put(local, "large", noise[: 65 * MIB], noise[:MIB])
    assert not in_memory(local.root / "large")


@pytest.mark.parametrize("moment", ["write", "close"])
def test_what_a_disk_reports_late_is_raised_and_never_forgotten(
    local: LocalObjects, noise: memoryview, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fail)
    stream = local.stream("attempts/1/shard")
    stream.write(noise[: 64 * MIB])
    if moment == "write":
        with pytest.raises(StoreError, match="writing .*attempts/1/shard: Input/output error"):
            stream.write(noise[: 64 * MIB])
    with pytest.raises(StoreError, match="writing .*attempts/1/shard: Input/output error"):
        stream.close()
    stream.abandon()
    assert list(local.list()) == []


def test_a_stream_abandoned_while_it_goes_to_the_disk_closes_its_file_afterwards(
    local: LocalObjects, noise: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    still_open: list[str] = []

    def slow(descriptor: int) -> None:
        time.sleep(0.3)
        still_open.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fdatasync", slow)
    stream = local.stream("shard")
    stream.write(noise[: 64 * MIB])
    stream.abandon()
    assert still_open == [str(local.root / "shard")]


def test_a_record_is_whole_on_disk_before_it_has_its_name(
    local: LocalObjects, events: list[tuple[str, str, int]]
) -> None:
    local.create("done/0", b"")
    events.clear()
    local.create("done/1.json", b"12345")
    written, linked, listed = events
    assert written[0] == "sync" and local.leftover_of(written[1]) == str(local.root / "done/1.json")
    assert written[2] == 5
    assert linked == ("link", str(local.root / "done/1.json"), 5)
    assert listed[:2] == ("sync", str(local.root / "done"))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_refused(
    local: LocalObjects, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match="hard links"):
        local.create("units.json", b"x")
    assert list(local.list()) == []


def test_a_root_that_is_a_file_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    objects = LocalObjects(tmp_path / "file")
    for action in (
        lambda: objects.create("a", b"x"),
        lambda: objects.replace("a", b"x"),
        lambda: objects.stream("a"),
    ):
        with pytest.raises(StoreError, match="file"):
            action()
    assert (tmp_path / "file").read_bytes() == b"mine"


# -- a full disk -----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[LocalObjects]:
    """A store with room for one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "spile-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield LocalObjects(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_record_that_does_not_fit_is_not_created(small_disk: LocalObjects) -> None:
    small_disk.create("before", b"1")
    with pytest.raises(StoreError, match="disk full"):
        small_disk.create("done/1.json", b"x" * (2 << 20))
    assert list(small_disk.list()) == ["before"]
    assert small_disk.create("done/1.json", b"small"), "the room is given back"


def test_a_replacement_that_does_not_fit_leaves_the_old_value(small_disk: LocalObjects) -> None:
    small_disk.replace("w", b"old")
    with pytest.raises(StoreError, match="disk full"):
        small_disk.replace("w", b"x" * (2 << 20))
    assert small_disk.get("w") == b"old"
    assert list(small_disk.list()) == ["w"]


def test_a_stream_that_fills_the_disk_says_so_in_one_line(small_disk: LocalObjects) -> None:
    stream = small_disk.stream("attempts/1/shard")
    with pytest.raises(StoreError, match="disk full") as caught:
        for _ in range(40):
            stream.write(b"x" * 100_000)
    assert "shard" in str(caught.value) and "\n" not in str(caught.value)
    stream.abandon()
    assert list(small_disk.list()) == []


def test_a_large_piece_that_fills_the_disk_says_so_in_one_line(
    small_disk: LocalObjects, noise: memoryview
) -> None:
    stream = small_disk.stream("attempts/1/shard")
    stream.write(noise[:4096])
    with pytest.raises(StoreError, match="disk full while writing") as caught:
        stream.write(noise[: 33 * MIB])
    assert "shard" in str(caught.value) and "\n" not in str(caught.value)
    stream.abandon()
    assert list(small_disk.list()) == []
    assert small_disk.create("done/1.json", b"small"), "the room is given back"


@pytest.fixture
def middling_disk(tmp_path: Path) -> Iterator[LocalObjects]:
    """A store on a real file system with room for 33 MiB, but not for twice as many."""
    folder, image = tmp_path / "middling", tmp_path / "image"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(48 * MIB)
    make = ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)]
    mount = ["mount", "-o", "loop", str(image), str(folder)]
    try:
        failed = any(subprocess.run(command, capture_output=True).returncode
                     for command in (make, mount))  # fmt: skip
    except FileNotFoundError:
        failed = True
    if failed:
        pytest.skip("making and mounting a small disk needs root, mkfs.ext4 and a loop device")
    try:
        yield LocalObjects(folder / "store")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_full_after_the_first_piece_says_so_in_one_line(
    middling_disk: LocalObjects, noise: memoryview
) -> None:
    stream = middling_disk.stream("attempts/1/shard")
    stream.write(noise[: 33 * MIB])
    with pytest.raises(StoreError, match="disk full while writing") as caught:
        stream.write(noise[: 30 * MIB])
        stream.close()
    assert "shard" in str(caught.value) and "\n" not in str(caught.value)
    stream.abandon()
    assert list(middling_disk.list()) == []
    put(middling_disk, "attempts/2/shard", noise[: 33 * MIB])
    check_bytes(middling_disk.get("attempts/2/shard"), noise[: 33 * MIB])  # there is room again
