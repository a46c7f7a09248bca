"""`spile push`, by the Hub's own client, to a real server."""

import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

from chaos.harness import Result, run
from spile.dataset import format as fmt
from spile.dataset.maintain.compact import compact
from spile.dataset.maintain.features import drop_features
from spile.dataset.maintain.verify import verify
from spile.dataset.read.opening import open_dataset
from spile.features.run import FeatureRequest, make_features
from spile.interop.hub import push
from spile.objects import LocalObjects, open_objects
from support import hub_server, servers, stored, tiny, zygote
from support.hub_server import Hub, Repository

REPO = "me/acts"
# Commits of a unit each, and short pauses.
_PUSH = """
import sys
from spile.interop.hub import push
push.COMMIT_FILES, push._FIRST_PAUSE = 1, 0.01
from spile.cli import main
main(["push", *sys.argv[1:]])
"""
# The client's own are not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> stored.Stored:
    out = tmp_path_factory.mktemp("out") / "out"
    made = stored.build(out, taps=stored.SCALED, shard_bytes=300, **stored.WITH_TOKENIZER)
    made.objects.create("attempts/000000/00000001/lost/q.1.00000.safetensors", b"an orphan")
    made.objects.create("workers/w.json", b"a heartbeat")
    return made


@pytest.fixture(autouse=True)
def no_bars() -> Iterator[None]:
    disable_progress_bars()
    yield
    enable_progress_bars()


@dataclass
class Client:
    """The command, as a user of the server runs it."""

    hub: Hub
    home: Path
    patch: pytest.MonkeyPatch

    def run(self, *arguments: object, endpoint: str = "", **changes: str) -> Result:
        with self.patch.context() as patch:
            more = {"HF_TOKEN": "writer", **changes}
            hub_server.use(endpoint or self.hub.url, self.home, patch, **more)
            patch.setattr(push, "COMMIT_FILES", 1)
            patch.setattr(push, "_FIRST_PAUSE", 0.01)
            return run("push", *arguments)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Run it in a new process."""
        settings = hub_server.settings(self.hub.url, self.home, HF_TOKEN="writer")
        command = [sys.executable, "-c", _PUSH, *map(str, arguments)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return zygote.Popen(command, text=True, env={**tiny.environment(), **settings}, **pipes)

    def push(self, *arguments: object) -> dict[str, Any]:
        result = self.run(*arguments, "--json")
        assert result.code == 0, result.err
        return result.json

    def refused(self, code: int, *arguments: object, **changes: str) -> str:
        result = self.run(*arguments, **changes)
        assert (result.code, result.out) == (code, ""), result.err
        lines = result.err.splitlines()
        (line,) = [line for line in lines if not line.startswith("spile: me/acts: ")]
        assert "writer" not in line
        return line

    def download(self, dest: Path) -> LocalObjects:
        with self.patch.context() as patch:
            hub_server.use(self.hub.url, self.home, patch, HF_TOKEN="writer")
            snapshot_download(REPO, repo_type="dataset", local_dir=str(dest))
        return LocalObjects(dest)


@pytest.fixture
def client(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    return Client(hub, tmp_path / "home", monkeypatch)


def named(made: stored.Stored) -> set[str]:
    """The files of a dataset: only those that a record names."""
    records = [made.done(unit) for unit in range(len(made.table.units))]
    keys = {file.key for done in records for file in done.files()}
    keys |= {fmt.CURRENT.done_key(done.unit) for done in records}
    keys |= {*made.listed(fmt.UNIT_COLUMNS, fmt.TOKENIZER, fmt.SEGMENTS, fmt.MANIFEST_COLUMNS)}
    return keys | {fmt.UNITS, fmt.MODEL, fmt.SCALES, fmt.MANIFEST}


def files(hub: Hub, branch: str = "main") -> dict[str, bytes]:
    found = hub.repositories[REPO].branches[branch]
    return {path: file.data for path, file in found.items() if path != ".gitattributes"}


def check_pushed(hub: Hub, made: stored.Stored, branch: str = "main") -> None:
    there = files(hub, branch)
    assert {*there} == named(made) | {"README.md"}
    for key in named(made):
        assert there[key] == made.objects.get(key)


def test_what_is_pushed_downloads_as_the_same_dataset(
    hub: Hub, client: Client, dataset: stored.Stored, tmp_path: Path
) -> None:
    made = client.push(dataset.path, REPO)
    check_pushed(hub, dataset)
    assert made["url"] == f"{hub.url}/datasets/{REPO}"
    assert made["files"] == len(named(dataset)) + 1
    assert made["files_there"] == 0
    assert not hub.repositories[REPO].private
    *units, last = hub.repositories[REPO].commits
    assert [title for _, title, _ in units] == [f"units {n} to {n}" for n in range(5)]
    for number, (_, _, paths) in enumerate(units):
        assert fmt.CURRENT.done_key(number) in paths
        assert {*paths} == {f.key for f in dataset.done(number).files()} | {
            fmt.CURRENT.done_key(number)
        }
    assert {fmt.UNITS, "README.md"} <= {*last[2]}
    fetched = client.download(tmp_path / "fetched")
    assert verify(fetched).ok
    one, other = open_dataset(str(dataset.path)), open_dataset(fetched.url)
    for tap in one.taps:
        assert one.read(tap, 0, 111).tobytes() == other.read(tap, 0, 111).tobytes()


def test_pushing_again_sends_nothing_and_overwrites_nothing(
    hub: Hub, client: Client, dataset: stored.Stored, tmp_path: Path
) -> None:
    client.push(dataset.path, REPO)
    hub.repositories[REPO].branches["main"]["README.md"].data = b"---\nlicense: mit\n---\nmine\n"
    commits, uploads = len(hub.repositories[REPO].commits), len(hub.uploads)
    again = client.push(dataset.path, REPO)
    assert (again["files"], again["card_written"]) == (0, False)
    assert again["files_there"] == len(named(dataset)) + 1
    assert (len(hub.repositories[REPO].commits), len(hub.uploads)) == (commits, uploads)
    assert files(hub)["README.md"].endswith(b"mine\n")
    compacted = LocalObjects(tmp_path / "compacted")
    compact(dataset.objects, compacted)
    before = files(hub)
    line = client.refused(2, compacted.url, REPO)
    assert "me/acts holds another dataset (done/000000/00000000.json differs)" in line
    assert files(hub) == before


def test_complete_added_taps_are_pushed_and_dropped_ones_removed(
    hub: Hub, client: Client, tmp_path: Path
) -> None:
    made = stored.copied(tmp_path / "out")
    client.push(made.path, REPO)
    before = files(hub)
    added, rows = stored.add_pass(made, {"z.0": 4}, commit=(0, 1))
    assert client.push(made.path, REPO)["files"] == 0
    for unit in (2, 3, 4):
        assert added.ledger.commit(stored.write_added(made, added, unit, rows))
    assert added.ledger.complete(added.ledger.table())
    commits = len(hub.repositories[REPO].commits)
    client.push(made.path, REPO)
    prefix = fmt.pass_prefix(added.name)
    assert files(hub) == before | {key: made.objects.get(key) for key in made.listed(prefix)}
    *units, (_, _, last) = hub.repositories[REPO].commits[commits:]
    assert [title for _, title, _ in units] == [f"units {n} to {n}" for n in range(5)]
    assert prefix + fmt.PASS in last and prefix + fmt.MANIFEST in last
    assert client.push(made.path, REPO)["files"] == 0
    fetched = client.download(tmp_path / "fetched")
    assert verify(fetched).ok
    assert open_dataset(fetched.url).read("z.0", 0, 111).tobytes() == rows["z.0"].tobytes()
    added.drop()
    assert client.push(made.path, REPO)["files"] == 1
    assert "z.0" not in open_dataset(client.download(tmp_path / "again").url).taps


@pytest.mark.full
def test_features_are_pushed_with_their_files(hub: Hub, client: Client, tmp_path: Path) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.LATENTS, **stored.ENCODED)
    client.push(made.path, REPO)
    make_features(str(made.path), FeatureRequest(logits=0))
    before = files(hub)
    prefix = fmt.feature_prefix("mlp_out.1-1")
    needed = [k for k in made.listed(prefix) if "/done/" not in k and "/parts/" not in k]
    assert client.push(made.path, REPO)["files"] == len(needed) > 3
    assert files(hub) == before | {key: made.objects.get(key) for key in needed}
    assert client.push(made.path, REPO)["files"] == 0
    fetched = client.download(tmp_path / "fetched")
    assert verify(fetched).ok
    found = open_dataset(fetched.url).features("mlp_out.1")
    ours = open_dataset(made.objects.url).features("mlp_out.1")
    assert found.top(3).values.tolist() == ours.top(3).values.tolist()
    # A damaged file is not sent; dropped features are dropped there, too.
    make_features(str(made.path), FeatureRequest(logits=0))
    column = next(made.path.joinpath(prefix, "columns").iterdir())
    good = column.read_bytes()
    column.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "checksum does not match" in client.refused(3, made.path, REPO)
    column.write_bytes(good)
    drop_features(made.ledger, ["mlp_out.1-1"])
    assert client.push(made.path, REPO)["files"] == 1
    assert open_dataset(client.download(tmp_path / "again").url).feature_sets == []


def test_each_record_is_read_once_and_few_units_are_held(
    hub: Hub, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stored.copied(tmp_path / "out", ((3,),) * 12)
    added, _ = stored.add_pass(made, {"z.0": 4})
    source, alive, held = stored.CountedObjects(made.path), set[int](), list[int]()
    of = push._Unit.of
    monkeypatch.setattr(push, "open_objects", lambda out: source)

    def counted(part: push.FinishedPart, number: int) -> push._Unit:
        unit = of(part, number)
        alive.add(id(unit))
        weakref.finalize(unit, alive.discard, id(unit))
        held.append(len(alive))
        return unit

    monkeypatch.setattr(push._Unit, "of", counted)
    for _ in range(2):  # the second time, everything is there already
        source.reads.clear()
        client.push(made.path, REPO)
        assert source.reads == dict.fromkeys(stored.record_keys(made, added), 1)
    assert 0 < max(held) <= 12


def test_an_interrupted_push_is_continued(hub: Hub, client: Client, dataset: stored.Stored) -> None:
    reached, killed = threading.Event(), threading.Event()

    def third() -> None:
        if len(hub.repositories[REPO].commits) == 2:
            reached.set()
            killed.wait(60)
            raise ConnectionAbortedError

    hub.before_commit = third
    process = client.start(dataset.path, REPO)
    assert reached.wait(60)
    process.kill()
    process.communicate()
    killed.set()
    hub.before_commit = lambda: None
    before = files(hub)
    assert fmt.UNITS not in before, "what is not whole is no dataset yet"
    assert {key for key in before if key.startswith(fmt.DONE)} == {
        *map(fmt.CURRENT.done_key, (0, 1))
    }
    made = client.push(dataset.path, REPO)
    check_pushed(hub, dataset)
    assert made["files_there"] == len(before)
    assert len(hub.uploads) == len({*hub.uploads}), "not even what was sent but not committed"


@pytest.mark.parametrize(
    ("method", "path", "late"),
    [
        ("POST", "/commit/", True),
        ("GET", "/tree/", False),
        pytest.param("POST", "/commit/", False, marks=pytest.mark.full),
        pytest.param("GET", "/tree/", True, marks=pytest.mark.full),
    ],
)
def test_a_server_that_fails_once_is_asked_again(
    method: str, path: str, late: bool, hub: Hub, client: Client, dataset: stored.Stored
) -> None:
    hub.fail(method, path, 503, late=late)
    client.push(dataset.path, REPO)
    assert (method, 503) in [(m, s) for m, p, s in hub.seen if path in p]
    check_pushed(hub, dataset)
    added = [path for _, _, paths in hub.repositories[REPO].commits for path in paths]
    assert len(added) == len({*added}), "a commit whose answer was lost is not made twice"


def test_a_large_upload_that_fails_once_is_repeated(
    hub: Hub, client: Client, dataset: stored.Stored
) -> None:
    hub.fail("PUT", "/lfs/", 503)
    client.push(dataset.path, REPO)
    check_pushed(hub, dataset)


def test_a_large_upload_that_is_refused_is_one_line(
    hub: Hub, client: Client, dataset: stored.Stored
) -> None:
    hub.fail("PUT", "/lfs/", 403)
    assert "the token may not write there" in client.refused(2, dataset.path, REPO)


def test_a_server_that_keeps_failing_is_one_line(
    hub: Hub, client: Client, dataset: stored.Stored
) -> None:
    for _ in range(4):
        hub.fail("POST", "/commit/", 500)
    line = client.refused(3, dataset.path, REPO)
    assert line == (
        f"spile: {hub.url}/datasets/{REPO}: the Hub answered 500 (not now); "
        "run the same command again"
    )


@pytest.mark.parametrize(
    ("token", "repo", "says"),
    [
        ("wrong", REPO, "no valid token; log in with `hf auth login`, or set HF_TOKEN"),
        ("reader", REPO, "the token may not write there"),
        ("writer", "nobody/acts", "no such repository or owner"),
    ],
)
def test_who_may_not_push_is_told_so_in_one_line(
    token: str, repo: str, says: str, hub: Hub, client: Client, dataset: stored.Stored
) -> None:
    line = client.refused(2, dataset.path, repo, HF_TOKEN=token)
    assert line.startswith(f"spile: {hub.url}/datasets/{repo}: {says}")
    assert token == "reader" or token not in line
    assert hub.repositories == {}


def test_without_a_network_it_is_one_line(client: Client, dataset: stored.Stored) -> None:
    nowhere = f"http://127.0.0.1:{tiny.free_port()}"
    line = client.refused(3, dataset.path, REPO, endpoint=nowhere)
    assert line.startswith(f"spile: {nowhere}/datasets/{REPO}: cannot reach the Hub (")
    line = client.refused(2, dataset.path, REPO, HF_HUB_OFFLINE="1")
    assert line.endswith("HF_HUB_OFFLINE is set; unset it to push")


def test_a_name_that_is_none_is_one_line(client: Client, dataset: stored.Stored) -> None:
    line = client.refused(2, dataset.path, "not/a/name")
    assert line == "spile: 'not/a/name' is not owner/name of a repository"


def test_private_and_a_branch_are_made(
    hub: Hub, client: Client, dataset: stored.Stored, tmp_path: Path
) -> None:
    made = client.push(dataset.path, REPO, "--private", "--revision", "v/1")
    assert hub.repositories[REPO].private
    assert files(hub) == {}
    check_pushed(hub, dataset, "v/1")
    assert made["download"].endswith("--local-dir acts --revision v/1")
    assert client.push(dataset.path, REPO, "--private", "--revision", "v/1")["files"] == 0


def test_a_public_repository_is_refused_where_a_private_one_was_asked_for(
    hub: Hub, client: Client, dataset: stored.Stored
) -> None:
    hub.repositories[REPO] = Repository(private=False)
    line = client.refused(2, dataset.path, REPO, "--private")
    assert "me/acts is public, and --private was given" in line
    assert files(hub) == {}


def test_an_unfinished_dataset_is_refused(hub: Hub, client: Client, tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", commit=(0, 1))
    assert "2 of 5 units are done; finish" in client.refused(3, made.path, REPO)
    assert hub.seen == []


def test_a_damaged_file_is_not_sent(hub: Hub, client: Client, tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out")
    shard = made.done(1).shards[0].key
    stored.flip(made.path / shard, -1 + (made.path / shard).stat().st_size)
    assert client.refused(3, made.path, REPO) == (
        f"spile: {shard}: checksum does not match (damaged, or another file in its place)"
    )
    assert shard not in files(hub)
    assert fmt.CURRENT.done_key(1) not in files(hub)


def test_a_dataset_in_a_bucket_is_pushed_through_a_folder_that_goes_away(
    hub: Hub,
    client: Client,
    dataset: stored.Stored,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = servers.new_s3_store()
    compact(dataset.objects, open_objects(out))
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    client.push(out, REPO)
    assert list(folder.iterdir()) == []
    fetched = client.download(tmp_path / "fetched")
    assert verify(fetched).ok
    for key in fetched.list(fmt.ATTEMPTS):
        assert fetched.get(key) == open_objects(out).get(key)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_a_pushed_signature_verifies_on_the_hub_and_after_a_download(
    hub: Hub, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, key = servers.new_s3_store(), tmp_path / "key"
    compact(stored.copied(tmp_path / "out", units=((5, 9), (3,))).objects, open_objects(out))
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    assert run("sign", out, "--key", key).code == 0
    client.push(out, REPO)
    assert {fmt.SIGNED, fmt.SIGNATURE} <= {*files(hub)}
    asked = ("--signature", "--signers", f"{key}.pub")
    for place in (out, client.download(tmp_path / "fetched").url):
        assert run("verify", place, *asked).code == 0
    hub_server.use(hub.url, client.home, monkeypatch, HF_TOKEN="writer")
    found = run("verify", f"hf://datasets/{REPO}", *asked)
    assert found.code == 0 and "1 of 1 units" in found.out, found.err


def test_without_the_library_it_is_one_line(dataset: stored.Stored) -> None:
    script = "import sys; sys.modules['huggingface_hub'] = None\n" + _PUSH
    command = [sys.executable, "-c", script, str(dataset.path), REPO]
    result = zygote.run(command, env=tiny.environment())
    assert result.returncode == 2
    assert result.stderr.startswith("spile: push needs huggingface_hub (")
    assert result.stderr.endswith("pip install 'spile[hub]'\n")
