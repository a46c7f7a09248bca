"""An opened file stays the one that was opened, and whoever asks is told when it has changed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spile.core.errors import DataError, InputError
from spile.objects import open_objects
from spile.objects.opened import OpenedFile, opened
from spile.objects.paths import path_of
from support.remote import BUCKETS

DATA, OTHER = bytes(range(200)), bytes(range(200, 0, -1))


@pytest.fixture
def file(tmp_path: Path) -> OpenedFile:
    path = tmp_path / "weights"
    path.write_bytes(DATA)
    os.utime(path, ns=(0, 10**18))
    return OpenedFile(path)


def replace(path: Path) -> None:
    path.with_name("other").write_bytes(OTHER)
    os.replace(path.with_name("other"), path)


@pytest.mark.parametrize("change", [replace, Path.unlink])
def test_it_is_read_whatever_its_path_names(
    change: Callable[[Path], None], file: OpenedFile, caplog: pytest.LogCaptureFixture
) -> None:
    file.check()
    change(file.path)
    assert (file.size(), file.read_bytes(), file.read_range(3, 5)) == (200, DATA, DATA[3:5])
    for _ in range(3):
        file.check()
    (told,) = caplog.messages
    assert told.startswith(f"{file.path}: another file was put in its place; this run continues")
    with pytest.raises(DataError, match="weights: changed while the run read it .another file was"):
        file.check(loading=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(OTHER),
        lambda path: path.write_bytes(DATA + b"x"),
        lambda path: os.truncate(path, 100),
        lambda path: os.utime(path, ns=(0, 10**18 + 1)),
    ],
    ids=["written", "longer", "shorter", "time"],
)
def test_a_write_to_it_is_found(change: Callable[[Path], object], file: OpenedFile) -> None:
    change(file.path)
    with pytest.raises(DataError, match=r"weights: .* \(it was written to\).*same command again"):
        file.check()


def test_new_names_and_rights_are_no_change(
    file: OpenedFile, caplog: pytest.LogCaptureFixture
) -> None:
    os.link(file.path, file.path.with_name("backup"))
    file.path.chmod(0o600)
    file.check(loading=True)
    assert not caplog.messages


def test_streams_have_positions_of_their_own(file: OpenedFile) -> None:
    with file.open() as one, file.open("rb", 0) as two:
        assert one.read(10) == two.read(10) == DATA[:10]
        one.seek(100)
        assert (one.read(5), two.read(5)) == (DATA[100:105], DATA[10:15])


def test_what_is_cut_off_while_it_is_read_ends_the_run(file: OpenedFile) -> None:
    os.truncate(file.path, 100)
    with pytest.raises(DataError, match="weights: changed while the run read it .it became short"):
        file.read_range(90, 110)


def test_its_descriptor_is_closed_with_it(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    before = os.listdir("/proc/self/fd")
    files = [OpenedFile(tmp_path / "weights") for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) == len(before) + 3
    del files
    assert os.listdir("/proc/self/fd") == before


def test_a_file_that_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"weights: cannot be opened \(No such file"):
        OpenedFile(tmp_path / "weights")


@pytest.mark.parametrize("bucket", BUCKETS)
def test_in_a_bucket_its_etag_is_compared(bucket: str) -> None:
    url = BUCKETS[bucket]()
    objects = open_objects(url)
    objects.replace("weights", DATA)
    file = opened(path_of(f"{url}/weights"))
    file.check()
    assert (file.size(), file.read_bytes()) == (200, DATA)
    objects.replace("weights", OTHER)
    with pytest.raises(DataError, match="weights: .*its size or its etag is another"):
        file.check()
    objects.delete("weights")
    with pytest.raises(DataError, match="weights: .*it was removed"):
        file.check()
    with pytest.raises(DataError, match="weights: .*or was removed"):
        file.read_range(0, 5)
