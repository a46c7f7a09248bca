"""Corpora of the `datasets` library: converted to Parquet once, equally everywhere, or refused."""

import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest

from e2e.test_disk import small_disk
from spile.core.errors import ConfigError, DataError, Interrupted, SpileError, StoreError
from spile.core.threads import cancelled_by
from spile.corpus.files import find_files
from spile.corpus.formats import datasets_library as built
from spile.corpus.formats.datasets_library import build
from spile.corpus.programs.program import is_program
from spile.objects.hub.names import continued, pinned
from support import hub_server, tiny
from support.hub_network import Network
from support.hub_server import Hub
from support.stops import StopAtLook
from support.texts import read

__all__ = ["small_disk"]  # a fixture

TEXTS = [f"text number {n}, with a comma" for n in range(700)]
CSV = "n,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(TEXTS))
CARD = b"""---
configs:
- {config_name: a, data_files: [{split: train, path: a.csv}, {split: test, path: b.csv}]}
- {config_name: b, data_files: b.csv}
---
"""
BUILDING = """
import sys
from spile.corpus.formats.datasets_library import build
print(build(*sys.argv[1:]).identity)
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    server.network = Network(server.large)
    hub_server.use(server.url, tmp_path / "home", monkeypatch)
    monkeypatch.setenv("SPILE_CACHE", str(tmp_path / "spile"))
    server.publish("me/csv", {"train.csv": CSV.encode(), "notes.md": b"about it"})
    yield server
    for each in (server, server.network):
        each.shutdown()
        each.server_close()


def name_of(hub: Hub, repo: str = "me/csv", rest: str = "default:train") -> str:
    return f"datasets:{repo}@{hub.repositories[repo].sha('main')}:{rest}"


def refused(corpus: str, kind: type[SpileError] = SpileError) -> str:
    with pytest.raises(kind) as caught:
        find_files(pinned(corpus, "dataset"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_spile_does_not_read_come_through_the_library(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "spile")
    name = pinned("me/csv", "dataset")
    assert name == pinned("datasets:me/csv", "dataset") == name_of(hub)
    assert "me/csv: the `datasets` library converts it to Parquet" in caplog.text
    (file,) = find_files(name)
    assert isinstance(file.path, Path)
    assert file.path.is_relative_to(tmp_path / "spile" / "datasets")
    assert read(name).texts == TEXTS
    asked = len(hub.seen)
    assert find_files(name) == [file] and len(hub.seen) == asked, "once it is there it is there"
    assert not list(file.path.parents[1].glob(".*.tmp-*"))


def test_what_is_made_is_the_same_in_every_cache(hub: Hub, tmp_path: Path) -> None:
    name = name_of(hub)
    first, second = (build(name, str(tmp_path / cache)) for cache in "ab")
    assert first.path != second.path and first.identity == second.identity
    assert first.path.read_bytes() == second.path.read_bytes()
    assert re.fullmatch(rf"{re.escape(name)} 700 rows [0-9a-f]{{32}}", first.identity)
    hub.publish("me/csv", {"train.csv": CSV.replace("number 3,", "number 4,").encode()})
    third = build(name_of(hub), str(tmp_path / "a"))
    assert third.identity.split()[-1] != first.identity.split()[-1]


def test_row_groups_are_cut_by_rows_and_by_bytes(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(cache: str) -> tuple[list[int], str]:
        made = build(name_of(hub), str(tmp_path / cache))
        footer = pq.ParquetFile(made.path).metadata
        groups = [footer.row_group(g).num_rows for g in range(footer.num_row_groups)]
        return groups, made.identity

    whole, identity = rows("a")
    assert whole == [700]
    monkeypatch.setattr(built, "_ROWS", 300)
    assert sum(rows("b")[0]) == 700 and max(rows("b")[0]) < 300 + 256
    monkeypatch.setattr(built, "_BYTES", 2000)
    small, same = rows("c")
    assert sum(small) == 700 and max(small) < 80
    assert same == identity, "what is in it is the same"


def test_configs_and_splits_are_chosen_as_ever(hub: Hub) -> None:
    hub.publish("me/two", {"README.md": CARD, "a.csv": b"text\nx\n", "b.csv": b"text\ny\n"})
    assert "has several configs; choose one; there are: a, b" in refused("datasets:me/two")
    assert "has several splits; choose one" in refused("me/two:a")
    assert "has no split 'dev'" in refused("datasets:me/two:b:dev")
    assert read(pinned("me/two:a:test", "dataset")).texts == ["y"]
    stored = name_of(hub, "me/two", "a:test")
    for given in ("me/two:a:test", "datasets:me/two:a:test", "datasets:me/two"):
        assert continued(given, stored, "dataset") == stored
    assert continued("me/two:b", stored, "dataset") == "me/two:b"


def test_what_cannot_be_read_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.publish("me/script", {"script.py": b"raise SystemExit('run!')"})
    assert "needs a script, script.py, which neither" in refused("me/script")
    assert "`to_parquet`" in refused("datasets:me/script:default:train")
    hub.publish("me/odd", {"train.xyz": b"?"})
    assert "me/odd: the `datasets` library cannot read it" in refused("me/odd")
    hub.publish("me/torn", {"train.csv": b'a,b\n1,2\n1,2,3,4\n"'})
    assert "me/torn@" in refused("me/torn:default:train")
    assert "no such dataset" in refused("datasets:me/none")
    assert "neither OWNER/NAME on the Hub nor a folder" in refused("datasets:nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'spile[datasets]'" in refused("datasets:me/csv", ConfigError)


def test_what_was_saved_to_a_disk(hub: Hub, tmp_path: Path) -> None:
    some = datasets.Dataset.from_dict({"text": ["a", None, "c"], "x": [[1], [], [2, 3]]})
    some.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": some, "test": some.select([0])}).save_to_disk(tmp_path / "two")
    assert read(f"datasets:{tmp_path}/one").texts == ["a", "c"]
    assert read(f"datasets:{tmp_path}/two:test").texts == ["a"]
    same = [build(f"datasets:{tmp_path}/{name}").identity for name in ("one", "two:train")]
    assert same[0] == same[1] and str(tmp_path) not in same[0], "paths are not identity"
    assert "there are: test, train" in refused(f"datasets:{tmp_path}/two")
    assert not is_program("datasets:one")


def test_a_corpus_that_was_changed_or_is_not_whole_is_not_read(hub: Hub, tmp_path: Path) -> None:
    path = build(name_of(hub)).path
    path.write_bytes(path.read_bytes()[:-8] + b"otherwis")
    assert f"{path}: was changed since it was made; remove" in refused(name_of(hub), DataError)
    (path.parent / "source.json").write_text("{")
    assert "is not a complete corpus" in refused(name_of(hub), DataError)


@pytest.mark.parametrize("text", [b"word " * 1_000_000, b"\0" * 5_000_000])
def test_a_full_disk_is_one_line(hub: Hub, text: bytes, small_disk: Path) -> None:
    hub.publish("me/csv", {"train.csv": b"text\n" + text + b"\n"})
    with pytest.raises(StoreError, match="^disk full while making Parquet of hf://datasets/me/csv"):
        build(name_of(hub), str(small_disk / "cache"))
    assert not [path for path in (small_disk / "cache").iterdir() if path.is_dir()]


def test_making_it_can_be_stopped(hub: Hub, tmp_path: Path) -> None:
    with cancelled_by(StopAtLook(4)), pytest.raises(Interrupted):
        build(name_of(hub), str(tmp_path / "cache"))
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def start(name: str, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDING, name, str(cache)],
        stdout=subprocess.PIPE, text=True, env=tiny.environment(),
    )  # fmt: skip


@pytest.mark.full
def test_one_process_of_several_makes_it_and_a_killed_one_leaves_nothing(
    hub: Hub, tmp_path: Path
) -> None:
    cache, name = tmp_path / "cache", name_of(hub)
    held = threading.Event()
    hub.latency = 1.0
    killed = start(name, cache)
    try:
        until = time.monotonic() + 60
        while not list(cache.glob(".*.tmp-*")) and time.monotonic() < until:
            held.wait(0.02)
    finally:
        killed.kill()
        killed.communicate()
    assert list(cache.glob(".*.tmp-*")), "it was killed while it made it"
    hub.latency = 0.0
    hub.seen.clear()
    both = [start(name, cache) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1] == build(name, str(cache)).identity + "\n"
    asked = [path for method, path, _ in hub.seen if "/resolve/" in path and method == "GET"]
    assert len(asked) <= 1, "the second found it made"
    made = build(name, str(cache)).path.parent
    assert [path for path in cache.iterdir() if path.is_dir()] == [made]
