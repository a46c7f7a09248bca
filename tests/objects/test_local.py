"""Objects as files: durable when reported, whole or absent, and clear errors on a full disk.

What every store must do is in tests/contracts/test_objects.py.
"""

import errno
import itertools
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from spile.core.errors import ConfigError, NotCreatedError, StoreError
from spile.objects import LocalObjects, Objects, open_objects
from spile.objects.local import settle
from support import quick, tiny

MIB = 1 << 20  # a stream makes its bytes durable every 64 of them


@pytest.fixture(autouse=True)
def _synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests do not wait for the disk."""
    for name, sync in quick.SYNCS.items():
        monkeypatch.setattr(os, name, sync)


@pytest.fixture
def local(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "store")


@pytest.fixture(scope="module")
def noise() -> memoryview:
    return memoryview(np.random.default_rng(0).bytes(72 * MIB))


def put(objects: Objects, key: str, *pieces: bytes | memoryview) -> None:
    stream = objects.stream(key)
    for piece in pieces:
        stream.write(piece)
    stream.close()


def equal(found: bytes, wanted: memoryview) -> bool:
    """Compare without pytest, which would spend a minute on how large values differ."""
    return found == wanted


def test_a_large_stream_arrives_without_fdatasync_and_fadvise(
    local: LocalObjects, noise: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = (0, 4096, 32 * MIB + 5, 32 * MIB + 12, 65 * MIB - 6)
    pieces = [noise[start:stop] for start, stop in itertools.pairwise(cuts)]
    for name in ("fdatasync", "posix_fadvise"):
        monkeypatch.delattr(os, name)
    put(local, "a/large", *pieces)
    assert equal(local.get("a/large"), noise[: cuts[-1]])


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
    """Record every sync and link: its kind, its path, and the file's size at that moment."""
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


def test_a_stream_abandoned_during_a_write_closes_its_file_afterwards(
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


@pytest.mark.parametrize(
    ("place", "code", "kind"),
    [
        ("os.link", errno.ENOSPC, NotCreatedError),
        ("os.link", errno.EIO, StoreError),  # it may have been made all the same
        ("spile.objects.local.sync", errno.ENOSPC, StoreError),  # it was made
    ],
)
def test_only_a_record_that_certainly_does_not_exist_is_said_not_to(
    local: LocalObjects,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    code: int,
    kind: type[StoreError],
) -> None:
    def fail(*paths: object) -> None:
        raise OSError(code, os.strerror(code))

    local.create("done/0.json", b"")
    monkeypatch.setattr(place, fail)
    with pytest.raises(StoreError) as caught:
        local.create("done/1.json", b"x")
    assert type(caught.value) is kind


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
    with pytest.raises(NotCreatedError, match="disk full"):
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
    assert equal(middling_disk.get("attempts/2/shard"), noise[: 33 * MIB]), "there is room again"


def test_new_folders_above_the_store_are_durable_and_old_ones_are_made_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr("spile.objects.local.sync", lambda path: synced.append(str(path)))
    LocalObjects(tmp_path / "new" / "er" / "store").create("done/1", b"x")
    above = [tmp_path, tmp_path / "new", tmp_path / "new/er", tmp_path / "new/er/store"]
    assert {str(folder) for folder in above} <= {*synced}
    # Another process may have been killed after it had made them, and before they were durable.
    synced.clear()
    again = LocalObjects(tmp_path / "new" / "er" / "store")
    again.create("done/2", b"x")
    assert {str(folder) for folder in above} <= {*synced}
    synced.clear()
    again.create("done/3", b"x")
    assert synced == [str(tmp_path / "new/er/store/done")]


def test_what_others_have_created_beside_a_key_is_made_durable(
    local: LocalObjects, events: list[tuple[str, str, int]]
) -> None:
    local.create("done/1.json", b"x")
    events.clear()
    settle(local, "done/1.json", "done/2.json", "units.json", "nowhere/1.json")
    synced = sorted(event[:2] for event in events)
    assert synced == [("sync", str(local.root)), ("sync", str(local.root / "done"))]


def test_a_record_that_exists_is_made_durable_whoever_created_it(
    local: LocalObjects, events: list[tuple[str, str, int]]
) -> None:
    local.create("done/1.json", b"x")  # (its creator may have been killed before the sync)
    events.clear()
    assert not local.create("done/1.json", b"y")
    assert ("sync", str(local.root / "done")) in [event[:2] for event in events]


def test_few_of_many_folders_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spile.objects.local._KNOWN_FOLDERS", 8)
    local = LocalObjects(tmp_path)
    for number in range(50):
        local.create(f"done/{number}/x", b"")
        assert local.get(f"done/{number}/x") == b""
        assert max(len(local._inside), len(local._durable)) <= 8 + len(tmp_path.parts) + 2
