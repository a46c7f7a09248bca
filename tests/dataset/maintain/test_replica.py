"""A whole copy: the same bytes elsewhere, or nothing that opens."""

import dataclasses
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from chaos.harness import run
from spile.core.errors import ConfigError, CorruptError, StoreError
from spile.dataset import format as fmt
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.replica import Copied, replicate
from spile.dataset.maintain.signature import sign
from spile.dataset.maintain.verify import verify
from spile.dataset.read.opening import open_dataset
from spile.dataset.records.heartbeat import Presence
from spile.objects import LocalObjects, Objects, exists, open_objects
from support import servers, stored
from support.marks import some


def contents(objects: Objects) -> dict[str, bytes]:
    """All objects of a dataset."""
    keys = [key for key in objects.list() if not key.startswith(fmt.PASSING)]
    return {key: objects.get(key) for key in keys}


def test_a_copy_has_every_byte_and_nothing_else(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.SCALED, **stored.WITH_TOKENIZER)
    wanted = contents(made.objects)
    made.objects.create("notes.txt", b"a stranger's")
    made.attempt(1)  # of an attempt that lost
    Presence(made.objects, 30).hold(1)
    dest = LocalObjects(tmp_path / "dest")
    told = replicate(made.objects, dest)
    assert contents(dest) == wanted
    assert (told.units, told.units_total, told.units_there) == (5, 5, 0)
    assert (told.files, told.bytes) == (len(wanted), sum(map(len, wanted.values())))
    assert verify(dest).ok
    assert not list(dest.list(fmt.SCRATCH))
    again = replicate(made.objects, dest)
    assert (again.units, again.units_there, again.files) == (5, 5, 0)


def test_a_signature_holds_for_the_copy(tmp_path: Path) -> None:
    made, key = stored.copied(tmp_path / "out"), tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    sign(made.objects, key)
    dest = tmp_path / "dest"
    replicate(made.objects, LocalObjects(dest))
    said = run("verify", dest, "--signature", "--signers", f"{key}.pub")
    assert said.code == 0, said.err
    sign(made.objects, key)  # another one, of the same
    replicate(made.objects, LocalObjects(dest))
    assert contents(LocalObjects(dest)) == contents(made.objects)


def test_a_killed_copy_is_unfinished_and_the_same_command_continues(
    tmp_path: Path,
) -> None:
    made = stored.copied(tmp_path / "out", units=((5, 21), (4,)))
    wanted, root = contents(made.objects), tmp_path / "dest"
    stopped = 0
    while True:
        try:
            replicate(made.objects, stored.Stopping(root, 2 + stopped))
            break
        except stored.Stopped:
            stopped += 1
            with pytest.raises(StoreError, match=r"no dataset there|units are done"):
                open_dataset(str(root))
            if (root / fmt.UNITS).exists():
                assert open_dataset(str(root), partial=True).num_tokens in (0, 4, 26, 30)
            for key, data in contents(LocalObjects(root)).items():
                assert data == wanted.get(key, data), "a file under its key is whole"
    assert stopped > 5
    assert contents(LocalObjects(root)) == wanted


class Waiting(LocalObjects):
    """A store that delays its first shard until the other units are copied."""

    def __init__(self, root: Path, shard: str, dest: LocalObjects, records: list[str]) -> None:
        super().__init__(root)
        self.shard, self.dest, self.records = shard, dest, records

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        deadline = time.monotonic() + 10
        while key == self.shard and not all(exists(self.dest, each) for each in self.records):
            assert time.monotonic() < deadline, "the others wait for this one"
            time.sleep(0.01)
        return super().get_range(key, start, stop)


def test_a_file_that_takes_long_does_not_keep_other_units_waiting(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", units=((5,), (4,), (3,)), taps={"resid_post.0": 4})
    dest = LocalObjects(tmp_path / "dest")
    others = [made.ledger.layout.done_key(unit) for unit in (1, 2)]
    source = Waiting(made.path, made.done(0).shards[0].key, dest, others)
    seen: list[int] = []
    replicate(source, dest, progress=lambda done, _: seen.append(done))
    assert contents(dest) == contents(made.objects)
    assert seen == [1, 2, 3]


def test_units_that_are_done_since_are_added(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", commit=[0, 3])
    dest = LocalObjects(tmp_path / "dest")
    told = replicate(made.objects, dest)
    assert (told.units, told.units_total) == (2, 5)
    assert open_dataset(dest.url, partial=True).num_tokens == 29 + 9
    for unit in (1, 2, 4):
        made.ledger.commit(made.attempt(unit))
    made.ledger.complete(made.table)
    told = replicate(made.objects, dest)
    assert (told.units, told.units_there) == (5, 2)
    assert contents(dest) == contents(made.objects)
    assert verify(dest).ok


def test_added_taps_and_added_documents_are_carried(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", grown=(3,))
    stored.add_pass(made, {"q.0": 4})
    dropped, _ = stored.add_pass(made, {"v.0": 2})
    dropped.drop()
    dest = LocalObjects(tmp_path / "dest")
    replicate(made.objects, dest)
    gone = fmt.pass_prefix(dropped.name)
    assert contents(dest) == {
        key: data
        for key, data in contents(made.objects).items()
        if not key.startswith(gone) or key == gone + fmt.DROPPED
    }
    assert verify(dest).ok
    assert open_dataset(dest.url).taps == open_dataset(made.path).taps


@pytest.mark.varied
def test_damage_is_not_copied(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    full = pytestconfig.getoption("--chaos-full")
    made = stored.copied(tmp_path / "out", taps=stored.SCALED, **stored.WITH_TOKENIZER)
    sound = contents(made.objects)
    keys = [key for key in sound if key != fmt.PREDICTION]
    for number, key in enumerate(sorted(keys)[:: 1 if full else 3]):
        dest = LocalObjects(tmp_path / f"dest-{number}")
        stored.flip(made.path / key, (made.path / key).stat().st_size // 2)
        with pytest.raises(StoreError):
            replicate(made.objects, dest)
        stored.flip(made.path / key, (made.path / key).stat().st_size // 2)
        assert contents(dest).items() <= sound.items()


@pytest.mark.parametrize("change", [{"segments": [1]}, {"segments": 1}, {"units": "all"}])
def test_a_record_that_is_no_manifest_is_refused_in_one_line(
    change: dict[str, Any], tmp_path: Path
) -> None:
    made = stored.copied(tmp_path / "out", ((5,),))
    body = fmt.decode_record(fmt.MANIFEST, made.objects.get(fmt.MANIFEST), "manifest")
    made.objects.replace(fmt.MANIFEST, fmt.encode_record("manifest", {**body, **change}))
    with pytest.raises(CorruptError, match=r"manifest\.json: is not a manifest"):
        replicate(made.objects, LocalObjects(tmp_path / "dest"))


def test_another_dataset_is_not_overwritten(tmp_path: Path) -> None:
    made, other = stored.copied(tmp_path / "out"), stored.build(tmp_path / "other", seed=4)
    dest = LocalObjects(tmp_path / "dest")
    replicate(made.objects, dest)
    before = contents(dest)
    with pytest.raises(ConfigError, match=r"holds another dataset, or an older state .* differs"):
        replicate(other.objects, dest)
    assert contents(dest) == before
    (dest.root / fmt.UNITS).unlink()
    (dest.root / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds notes.txt, which belongs to no dataset"):
        replicate(made.objects, dest)
    with pytest.raises(ConfigError, match="must not contain one another"):
        replicate(made.objects, LocalObjects(made.path / "inside"))
    with pytest.raises(StoreError, match="no dataset there"):
        replicate(LocalObjects(tmp_path / "none"), LocalObjects(tmp_path / "new"))


@pytest.mark.parametrize("made_alike", [True, False])
def test_a_copy_that_is_refused_changes_nothing(made_alike: bool, tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", grown=(3,))
    old, _ = stored.add_pass(made, {"v.0": 2})
    if made_alike:  # by the same recipe from the same corpus, and yet no copy
        other = stored.build(tmp_path / "other", grown=(3,))
        stored.add_pass(other, {"v.0": 2})
    else:  # a copy, to which another tap was added than to its source
        replicate(made.objects, LocalObjects(tmp_path / "other"))
        other = dataclasses.replace(made, path=tmp_path / "other")
        stored.add_pass(other, {"q.0": 4}, dtype="float16")
    old.drop()
    stored.add_pass(made, {"q.0": 4})
    before = contents(other.objects)
    with pytest.raises(ConfigError, match=r"holds another dataset|has q\.0 from another pass"):
        replicate(made.objects, other.objects)
    assert contents(other.objects) == before


def test_a_pass_that_its_source_has_only_begun_gets_no_taps_twice(tmp_path: Path) -> None:
    """A refused copy leaves a pass begun; the other copy has it whole."""
    made, other = stored.build(tmp_path / "out"), LocalObjects(tmp_path / "other")
    replicate(made.objects, other)
    whole, _ = stored.add_pass(made, {"q.0": 4})
    begun = dataclasses.replace(made, path=tmp_path / "other")
    stored.add_pass(begun, {"q.0": 4}, dtype="float16")
    for key in (whole.prefix + fmt.PASS, whole.prefix + fmt.MODEL):
        other.create(key, made.objects.get(key))
    before = contents(made.objects)
    with pytest.raises(ConfigError, match=r"has q\.0 from another pass"):
        replicate(other, made.objects)
    assert contents(made.objects) == before


class Growing(LocalObjects):
    """A store that gets the rest of a dataset once the record of a pass is created there."""

    def __init__(self, root: Path, more: Objects) -> None:
        super().__init__(root)
        self._more = [more]

    def create(self, key: str, data: bytes) -> bool:
        if key.endswith(fmt.PASS) and self._more:
            replicate(self._more.pop(), LocalObjects(self.root))
        return super().create(key, data)


@pytest.mark.parametrize("beside", [False, True], ids=["before", "beside"])
def test_taps_that_lack_documents_of_the_copy_hide_none(beside: bool, tmp_path: Path) -> None:
    made, more = stored.build(tmp_path / "out", grown=(3,)), LocalObjects(tmp_path / "more")
    replicate(made.objects, more)
    later = [made.ledger.layout.done_key(unit) for unit in (3, 4)]
    for key in (*made.listed(fmt.GENERATIONS), *later):
        made.objects.delete(key)
    dest = LocalObjects(tmp_path / "dest")
    replicate(made.objects if beside else more, dest)
    stored.add_pass(dataclasses.replace(made, table=made.table.at(0)), {"q.0": 4})
    with pytest.raises(ConfigError, match=r"has documents that q\.0 of .* lack"):
        replicate(made.objects, Growing(dest.root, more) if beside else dest)
    assert open_dataset(dest.url).num_tokens == len(made.index)
    assert beside or contents(dest) == contents(more)


def test_taps_are_not_copied_beside_growth_that_they_lack(tmp_path: Path) -> None:
    """Growth may end between the last look at the copy and the manifest of the taps."""
    grown = stored.build(tmp_path / "dest", grown=(3,), commit=range(3))
    made = dataclasses.replace(grown, path=tmp_path / "out", table=grown.table.at(0))
    replicate(grown.objects, made.objects)
    for key in made.listed(fmt.GENERATIONS):
        made.objects.delete(key)
    stored.add_pass(made, {"q.0": 4})
    before = contents(grown.objects)
    with pytest.raises(ConfigError, match=r"has documents that q\.0 of .* lack"):
        replicate(made.objects, grown.objects)
    assert contents(grown.objects) == before


class GrowingOtherwise(LocalObjects):
    """A store where another process creates a generation just before a copy would."""

    def create(self, key: str, data: bytes) -> bool:
        if key == fmt.generation_key(1):
            super().create(key, b"of other documents")
        return super().create(key, data)


def test_a_copy_that_another_growth_overtakes_drops_no_taps(tmp_path: Path) -> None:
    grown = stored.build(tmp_path / "out", grown=(3,))
    made = dataclasses.replace(grown, path=tmp_path / "dest", table=grown.table.at(0))
    replicate(grown.objects, made.objects)
    later = [made.ledger.layout.done_key(unit) for unit in (3, 4)]
    for key in (*made.listed(fmt.GENERATIONS), *later):
        made.objects.delete(key)
    added, _ = stored.add_pass(made, {"q.0": 4})
    grown.objects.create(added.prefix + fmt.DROPPED, fmt.encode_record("dropped", {}))
    with pytest.raises(ConfigError, match="holds another dataset, or an older state of this one"):
        replicate(grown.objects, GrowingOtherwise(made.path))
    assert not added.is_dropped


class Beginning(LocalObjects):
    """A dataset whose first unit is done just after its weights' hashes were looked for."""

    def __init__(self, made: stored.Stored) -> None:
        super().__init__(made.path)
        self._begin = [made]
        self._hashes = super().get(fmt.MODEL)
        self.delete(fmt.MODEL)

    def get(self, key: str) -> bytes:
        try:
            return super().get(key)
        finally:
            if key == fmt.MODEL and self._begin:
                self.create(fmt.MODEL, self._hashes)
                made = self._begin.pop()
                assert made.ledger.commit(made.attempt(0))


def test_units_are_copied_with_the_hashes_of_their_weights(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", commit=())
    dest = LocalObjects(tmp_path / "dest")
    assert replicate(Beginning(made), dest).units == 0
    assert verify(dest, partial=True).ok
    assert replicate(made.objects, dest).units == 1
    assert contents(dest) == contents(made.objects)


class Manifests(LocalObjects):
    """A store that notes which manifests are created, in their order."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.created: list[str] = []

    def create(self, key: str, data: bytes) -> bool:
        self.created += [key] if key.endswith(fmt.MANIFEST) else []
        return super().create(key, data)


def test_copied_taps_hide_no_documents_while_their_manifests_come(tmp_path: Path) -> None:
    units = ((5,), (4,), (3, 2), (6,), (2,), (3,))
    made = stored.build(tmp_path / "out", units, grown=(2, 4))
    added, _ = stored.add_pass(made, {"q.0": 4})
    dest = Manifests(tmp_path / "dest")
    replicate(made.objects, dest)
    numbers = [fmt.manifest_key(number) for number in range(3)]
    assert dest.created == [*(added.prefix + numbers[n] for n in (2, 0, 1)), *numbers]
    assert verify(dest).ok


class Completing(LocalObjects):
    """A dataset whose last unit is committed when its manifest is asked for."""

    def __init__(self, made: stored.Stored) -> None:
        super().__init__(made.path)
        self._made = made

    def get(self, key: str) -> bytes:
        if key == fmt.MANIFEST and not exists(self, key):
            self._made.ledger.commit(self._made.attempt(4))
            assert self._made.ledger.complete(self._made.table)
        return super().get(key)


def test_a_manifest_that_appears_meanwhile_is_copied_whole(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", commit=range(4))
    dest = LocalObjects(tmp_path / "dest")
    replicate(Completing(made), dest)
    assert contents(dest) == contents(made.objects)
    assert verify(dest).ok


def test_a_copy_that_has_lost_a_file_is_not_taken_for_whole(tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out")
    dest = LocalObjects(tmp_path / "dest")
    replicate(made.objects, dest)
    dest.delete(made.done(1).shards[0].key)
    with pytest.raises(CorruptError, match="is missing in .* though its unit was copied"):
        replicate(made.objects, dest)


def accounts(kind: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give source and dest credentials of their own; return a URL that is empty in both.

    On S3 they are two servers, whose keys do not open the other. The usual variables lead nowhere.
    """
    if kind == "s3":
        sides = {"SPILE_SOURCE_": servers.s3_account("source"),
                 "SPILE_DEST_": servers.s3_account("dest"),
                 "": servers.s3_environment("http://127.0.0.1:9")}  # fmt: skip
        url = servers.s3_url()
    else:
        url = servers.new_gcs_store()
        own = servers.gcs_environment(servers.gcs_endpoint())
        sides = {"SPILE_SOURCE_": own, "SPILE_DEST_": own,
                 "": servers.gcs_environment("http://127.0.0.1:9")}  # fmt: skip
    for prefix, variables in sides.items():
        for name, value in variables.items():
            monkeypatch.setenv(prefix + name, value)
    return url


@pytest.mark.parametrize("kind", some(["s3", "gs"], "s3"))
def test_buckets_are_copied_each_with_credentials_of_its_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.SCALED)
    bucket = accounts(kind, monkeypatch)
    replicate(made.objects, open_objects(bucket, prefix="SPILE_SOURCE_"))
    # (Two servers may have buckets of the same name.)
    second = bucket if kind == "s3" else f"{bucket}-copied"
    said = run("copy", bucket, second, "--json")
    assert said.code == 0, said.err
    assert Copied(**said.json).units == 5
    dest = LocalObjects(tmp_path / "dest")
    replicate(open_objects(second, prefix="SPILE_DEST_"), dest)
    assert contents(dest) == contents(made.objects)


@pytest.mark.parametrize("side", ["SOURCE", "DEST"])
def test_keys_of_the_other_account_are_refused(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stored.copied(tmp_path / "out", units=((5,),))
    bucket = accounts("s3", monkeypatch)
    replicate(made.objects, open_objects(bucket, prefix="SPILE_SOURCE_"))
    other = servers.s3_account({"SOURCE": "dest", "DEST": "source"}[side])
    wrong = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    with monkeypatch.context() as patched:
        for name in wrong:
            patched.setenv(f"SPILE_{side}_{name}", other[name])
        said = run("copy", bucket, f"{bucket}-copied")
    assert said.code == 3
    assert "check the credentials and their rights" in said.err
    assert all(other[name] not in said.err for name in wrong)
    assert not list(open_objects(f"{bucket}-copied", prefix="SPILE_DEST_").list())


def test_the_command_says_what_was_copied_and_gc_finds_nothing(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", commit=[0, 1])
    dest = tmp_path / "dest"
    said = run("copy", made.path, dest)
    assert said.out.startswith(f"{dest}: 2 of 5 units; ")
    assert "the same command copies them" in said.out
    assert "2 of them were there already" in run("copy", made.path, dest).out
    assert collect_garbage(LocalObjects(dest)) == []
