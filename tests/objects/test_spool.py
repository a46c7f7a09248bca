"""A spool holds only objects that wait for their upload, however processes end."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

from spile.core.errors import ConfigError, StoreError
from spile.objects import Spool, open_objects
from spile.objects.spool import SpooledFile
from support import servers

Usage = namedtuple("Usage", "total used free")


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


def test_a_file_waits_in_the_spool_until_it_is_uploaded(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    url = servers.new_s3_store()
    objects = open_objects(url, spool)
    stream = objects.stream("a/b")
    stream.write(b"one ")
    stream.write(memoryview(b"two"))
    assert [path.read_bytes() for path in files(tmp_path)] == [b"one two"]
    assert list(objects.list()) == []
    assert len(stream.close()) == 32
    assert files(tmp_path) == []
    assert objects.get("a/b") == b"one two"
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_and_what_is_given_up_leave_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    objects = open_objects(servers.new_gcs_store(), spool)
    objects.stream("empty").close()
    given_up = objects.stream("given-up")
    given_up.write(b"rows")
    given_up.abandon()
    assert list(objects.list()) == ["empty"] and objects.get("empty") == b""
    assert files(tmp_path) == []
    spool.close()


def test_what_a_killed_process_left_is_removed_and_a_living_ones_is_not(tmp_path: Path) -> None:
    code = f"""
        import time
        from pathlib import Path
        from spile.objects import Spool
        file = Spool(Path({str(tmp_path)!r})).file()
        file.write(b"rows")
        print("ready", flush=True)
        time.sleep(60)
    """

    def started() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout and process.stdout.readline() == "ready\n"
        return process

    killed, living = started(), started()
    assert len(files(tmp_path)) == 2
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    spool = Spool(tmp_path)
    assert len(files(tmp_path)) == 1
    living.kill()
    living.communicate()
    spool.close()
    Spool(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_holds_the_writer_up_until_an_upload_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    first = spool.file()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 0))
    opened: list[SpooledFile] = []
    waiting = threading.Thread(target=lambda: opened.append(spool.file()))
    waiting.start()
    time.sleep(0.5)
    assert not opened, "there is no room"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 0, 1 << 40))
    waiting.join(5)
    assert len(opened) == 1
    first.release()
    opened[0].release()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10, 10, 0))
    with pytest.raises(StoreError, match="no pending upload will free more"):
        spool.file()
    spool.close()


def test_a_spool_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--spool .*file"):
        Spool(tmp_path / "file")


def test_a_disk_needs_no_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    with pytest.raises(ConfigError, match="--spool is for buckets"):
        open_objects(str(tmp_path / "out"), spool)
    spool.close()
