"""`spile rm` removes a dataset and nothing else; a killed removal is no dataset and continues."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

import spile
from chaos.harness import run
from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.dataset import format as fmt
from spile.dataset.maintain.gc import collect_garbage, discard_empty
from spile.dataset.maintain.remove import check_removable, remove
from spile.dataset.maintain.replica import replicate
from spile.dataset.records.heartbeat import Presence
from spile.objects import LocalObjects, open_objects
from spile.status.status import read_status
from support import servers, stored

STRANGE = ("notes.txt", "attempts/notes.txt", "done/000000/mine.json", "workers/me/notes.txt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    """A dataset with every kind of record and file."""
    out, taps = tmp_path_factory.mktemp("whole") / "out", {"embed": 4}
    options: dict[str, Any] = {"compress": True, **stored.WITH_TOKENIZER}
    whole = stored.build(out, ((3,), (4,)), taps=taps, grown=(1,), shard_bytes=1 << 20, **options)
    stored.add_pass(whole, {"z.0": 4})
    dropped, _ = stored.add_pass(whole, {"v.0": 4}, commit=())
    dropped.drop()
    whole.attempt(1)
    for key in (f"{fmt.DAMAGED}0a1b/{fmt.MANIFEST}", "probes/0a1b", f"{fmt.UNITS}.tmp-2c3d"):
        whole.objects.create(key, b"left")
    return whole


@pytest.fixture
def made(whole: stored.Stored, tmp_path: Path) -> stored.Stored:
    shutil.copytree(whole.path, tmp_path / "out")
    return dataclasses.replace(whole, path=tmp_path / "out")


def test_everything_of_a_dataset_goes_and_the_folder_too(made: stored.Stored) -> None:
    files = {key: made.objects.size(key) for key in made.listed()}
    done = remove(made.objects)
    assert (done.files, done.bytes, done.left) == (len(files), sum(files.values()), [])
    assert not made.path.exists()


def test_what_belongs_to_no_dataset_stays_and_is_named(made: stored.Stored) -> None:
    for key in STRANGE:
        made.objects.create(key, b"a stranger's")
    assert sorted(remove(made.objects).left) == sorted(STRANGE)
    assert made.listed() == sorted(STRANGE)


class Killed(BaseException):
    pass


class KilledObjects(LocalObjects):
    """A disk whose user is killed before one of the deletions."""

    deletions = 0

    def delete(self, key: str) -> None:
        if self.deletions == 0:
            raise Killed
        self.deletions -= 1
        super().delete(key)


@pytest.mark.parametrize("deletions", [0, 1, 12])
def test_a_killed_removal_is_no_dataset_and_continues(
    deletions: int, made: stored.Stored, tmp_path: Path
) -> None:
    objects = KilledObjects(made.path)
    objects.deletions = deletions
    with pytest.raises(Killed):
        remove(objects)
    told = rf"{made.path}: was removed in part; `spile rm {made.path}` removes the rest"
    for read in (read_status, collect_garbage):
        with pytest.raises(StoreError, match=told):
            read(made.objects)
    with pytest.raises(StoreError, match=told):
        spile.open(made.path, partial=True)
    with pytest.raises(ConfigError, match=told):  # no other dataset can begin there
        made.ledger.create_table(made.table)
    assert discard_empty(made.objects) == []
    other = stored.copied(tmp_path / "other", ((3,),), taps={"embed": 4})
    with pytest.raises(ConfigError, match=r"holds removing.json"):
        replicate(other.objects, made.objects)
    assert remove(made.objects).left == []
    assert not made.path.exists()


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"no dataset there \(no units.json\)"):
        remove(LocalObjects(tmp_path))
    (tmp_path / fmt.UNITS).write_text('{"units": "of another program"}')
    with pytest.raises(CorruptError, match=r"units.json"):
        remove(LocalObjects(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", fmt.UNITS}


@pytest.mark.parametrize("of_pass", [False, True])
def test_a_worker_that_is_active_refuses_it(of_pass: bool, tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", ((3,), (4,)))
    place, _ = stored.add_pass(made, {"z.0": 4}, commit=(0,))
    presence = Presence(place.objects if of_pass else made.objects, 30)
    presence.start()
    presence.hold(1)
    with pytest.raises(ConfigError, match=rf"{presence.name} .* is at work on it; stop it first"):
        check_removable(made.objects)
    with pytest.raises(ConfigError, match="is at work on it"):
        remove(made.objects)
    assert read_status(made.objects).units_done == 2
    presence.close("stopped")
    remove(made.objects)
    assert not made.path.exists()


def test_a_bucket_is_emptied_too(made: stored.Stored) -> None:
    dest = open_objects(servers.new_s3_store())
    replicate(made.objects, dest)
    dest.create("notes.txt", b"a stranger's")
    dest.create(fmt.REMOVING, b"from a removal that was killed as it began")
    removed = remove(dest)
    assert removed.left == [*dest.list()] == ["notes.txt"] and removed.files > 20


def test_the_command_asks_and_takes_no_silence_for_a_yes(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", ((3,), (4,)))
    refused = run("rm", made.path)
    assert refused.code == 2
    taps = len(made.table.taps)
    assert f"{made.path}: 7 rows of {taps} taps, 2 documents, " in refused.err
    assert "add --yes to remove it" in refused.err and made.path.exists()
    (made.path / "notes.txt").write_text("mine")
    removed = run("rm", made.path, "--yes")
    assert removed.code == 0, removed.err
    assert removed.out.startswith(f"{made.path}: removed ")
    assert removed.out.endswith("left, since they belong to no dataset: notes.txt\n")
    assert [each.name for each in made.path.iterdir()] == ["notes.txt"]
    assert "no dataset there" in run("rm", made.path, "--yes").err
