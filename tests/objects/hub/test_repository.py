"""Files on the Hub: found by names, pinned to a commit, read by ranges, refused in one line."""

from pathlib import Path

import huggingface_hub
import pytest

from spile.core.errors import ConfigError, InputError, StoreError
from spile.corpus.files import find_files
from spile.objects import http as web
from spile.objects import open_objects
from spile.objects.hub.names import pinned
from spile.objects.hub.repository import HubObjects, Repository, commit_of, note_files
from spile.objects.paths import RemotePath, files_below, files_matching, path_of
from support import hub_server
from support.hub_network import Network
from support.hub_server import BYTES, FILES, Hub, requests, sha

REPO = Repository("dataset", "me/texts")


def download(hub: Hub, key: str) -> None:
    """Download into the cache, as other programs do."""
    huggingface_hub.hf_hub_download(
        "me/texts", key, repo_type="dataset", endpoint=hub.url, revision=sha(hub)
    )


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("hub.repository._opened", "hub.repository.open_hub", "hub.names.open_hub"):
        monkeypatch.setattr(f"spile.objects.{name}", HubObjects)  # nothing is remembered


# -- files -----------------------------------------------------------------------------------


def test_a_repository_is_a_folder_of_a_commit(hub: Hub) -> None:
    folder = path_of("hf://datasets/me/texts")
    assert str(folder) == f"hf://datasets/me/texts@{sha(hub)}"
    names = ["/".join(path.parts) for path in files_below(folder)]
    assert names == ["README.md", "a b+c.txt", *FILES]
    found = files_matching("hf://datasets/me/texts@main/data/train-0000[12]-*.parquet")
    assert [path.read_bytes() for path in found] == [BYTES[1:], BYTES[2:]]
    file = path_of("hf://datasets/me/texts/a b+c.txt")
    assert (file.is_file(), file.is_dir(), file.read_bytes()) == (True, False, b"x")
    assert path_of("hf://datasets/me/texts/data").is_dir()
    for absent in ("none", "data/none", "none/none", "data/train"):
        path = path_of(f"hf://datasets/me/texts/{absent}")
        assert (path.is_file(), path.is_dir()) == (False, False)


def test_little_is_asked_of_the_hub(hub: Hub) -> None:
    requests(hub)
    path = path_of("hf://datasets/me/texts/data/train-00003-of-00030.parquet")
    assert isinstance(path, RemotePath)
    assert path.is_file() and path.size() == len(BYTES) - 3
    assert path.read_range(5, 10) == BYTES[8:13]
    asked = requests(hub)
    assert len(asked) == 4, asked  # the commit, two pages of the folder, the range
    assert path_of(f"hf://datasets/me/texts@{sha(hub)}/data").is_dir()
    assert len(requests(hub)) == 2, "two pages of the folder"


def test_large_files_come_from_elsewhere_and_the_token_does_not_go_there(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.network = Network(hub.large)
    hub.repositories["me/texts"].public = False
    monkeypatch.setenv("HF_TOKEN", "reader")
    (path,) = files_matching("hf://datasets/me/texts/data/train-00001-*")
    assert isinstance(path, RemotePath)
    requests(hub)
    for start in range(9):
        assert path.read_range(start, start + 9) == BYTES[start + 1 : start + 10]
    assert len(requests(hub)) == 1, "where it led is remembered"
    hub.network.signature += 1
    assert path.read_bytes() == BYTES[1:]
    assert len(requests(hub)) == 1, "and asked again when it has expired"
    assert [status for status, _ in hub.network.seen] == [206] * 9 + [403, 206]
    for _, headers in hub.network.seen:
        assert "authorization" not in {name.lower() for name in headers}
    hub.network.shutdown()
    hub.network.server_close()


def test_a_page_of_a_listing_at_another_host_is_not_sent_the_token(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "reader")
    hub.links = f"localhost:{hub.server_port}"
    assert len(list(open_objects("hf://datasets/me/texts").list())) == len(FILES) + 2
    assert set(hub.authorized) == {f"127.0.0.1:{hub.server_port}"}


def test_what_is_in_the_hubs_cache_is_read_from_there(hub: Hub) -> None:
    key = next(iter(FILES))
    download(hub, key)
    path = path_of(f"hf://datasets/me/texts/{key}")
    assert isinstance(path, RemotePath)
    path.size()
    requests(hub)
    assert path.read_bytes() == BYTES
    assert requests(hub) == []
    local = path.objects.local_path(key)
    assert local
    local.write_bytes(b"cut")
    again = HubObjects(REPO, sha(hub))
    assert again.get(key) == BYTES, "one of another length is not it"


def test_a_commit_stays_when_the_branch_moves(hub: Hub) -> None:
    before = pinned("hf://datasets/me/texts/a b+c.txt", "dataset")
    hub.publish("me/texts", {"a b+c.txt": b"new"})
    assert path_of(before).read_bytes() == b"x"
    assert path_of("hf://datasets/me/texts/a b+c.txt").read_bytes() == b"new"


def test_the_hub_may_be_slow_and_say_so(hub: Hub) -> None:
    hub.latency, hub.retry_after = 0.02, "1"
    hub.fail("GET", "/revision/main", 429)
    hub.fail("GET", "/tree/", 503)
    hub.fail("GET", "/resolve/", 500)
    assert path_of("hf://datasets/me/texts/a b+c.txt").read_bytes() == b"x"
    assert [status for _, _, status in hub.seen if status >= 400] == [429, 503, 500]


def test_a_dataset_of_ours_can_be_opened_there_and_not_written(hub: Hub) -> None:
    objects = open_objects("hf://datasets/me/texts")
    assert objects.get("README.md").startswith(b"---")
    assert sorted(objects.list("data/")) == list(FILES)
    with pytest.raises(ConfigError, match="is read-only"):
        objects.create("x", b"")
    with pytest.raises(ConfigError, match="give the whole repository"):
        open_objects("hf://datasets/me/texts/data")


# -- what is refused -------------------------------------------------------------------------


def refused(source: str, kind: str = "dataset") -> str:
    with pytest.raises(InputError) as caught:
        path_of(pinned(source, kind)).is_dir()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_not_there_is_one_line(hub: Hub) -> None:
    assert "hf://datasets/me/none: no such dataset on" in refused("me/none")
    assert "or it is private" in refused("me/texts", "model")
    assert "has no revision 'v9'" in refused("me/texts@v9")
    assert "hf://datasets/me/texts: has no revision" in refused(f"me/texts@{'0' * 40}")
    assert "is a dataset, not a model" in refused("hf://datasets/me/texts", "model")
    for odd in ("hf://me", "hf://datasets/me", "hf://me/x:config:split", "hf://"):
        with pytest.raises(ConfigError, match="not an address on the Hub"):
            path_of(odd)


def test_gated_repositories_say_where_to_ask(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories["me/texts"].gated = True
    for token, status in (("", 401), ("reader", 403)):
        monkeypatch.setenv("HF_TOKEN", token)
        line = refused("me/texts")
        assert f"ask for access at {hub.url}/datasets/me/texts" in line
        assert f"({status})" in line
        assert not token or token not in line
    monkeypatch.setenv("HF_TOKEN", "writer")
    assert path_of(pinned("me/texts", "dataset")).is_dir()


def test_a_token_that_is_refused_is_not_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "sesame")
    line = refused("me/texts")
    assert "the Hub refuses the token; log in with `hf auth login`, or set HF_TOKEN" in line
    assert "sesame" not in line


def test_a_hub_that_is_away_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PATIENCE_AT_FIRST", 0.2)
    monkeypatch.setattr("spile.objects.hub.repository._client", web.Client())
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="asking http://127.0.0.1:9 about hf://datasets/me/texts"):
        pinned("me/texts", "dataset")


def test_a_server_that_is_no_hub_is_one_line(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like networks that answer every request with a page of their own."""

    def greet(self: hub_server.Handler) -> None:
        self._path = self.path
        self._late = None
        self._answer(200, data=b"<html>Welcome</html>")

    monkeypatch.setattr(hub_server.Handler, "do_GET", greet)
    for source in ("me/texts", f"hf://datasets/me/texts@{'2' * 40}"):
        with pytest.raises(StoreError, match="does not answer as the Hub does; check HF_ENDPOINT"):
            path_of(pinned(source, "dataset")).is_dir()


def test_without_a_network_what_was_fetched_is_there_and_nothing_else(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_, last = FILES
    commit = sha(hub)
    note_files(REPO, "main", commit)
    for key in (first, "README.md"):
        download(hub, key)
    go_offline(monkeypatch)
    requests(hub)
    assert pinned("me/texts", "dataset") == f"hf://datasets/me/texts@{commit}:default:train"
    assert len(find_files(pinned("me/texts", "dataset"))) == 30, "all there are, not all here"
    assert path_of(f"hf://datasets/me/texts/{first}").read_bytes() == BYTES
    with pytest.raises(InputError, match="HF_HUB_OFFLINE is set, and the file is not in the local"):
        path_of(f"hf://datasets/me/texts/{last}").read_bytes()
    assert "HF_HUB_OFFLINE is set, and it has not been fetched" in refused("me/other")
    assert "its list of files is not cached" in refused(f"hf://datasets/me/texts@{'1' * 40}")
    assert requests(hub) == []


def test_without_a_network_a_model_that_another_program_fetched_is_there(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.publish("models/me/llama", {"config.json": b"{}", "x.safetensors": BYTES})
    for name in ("config.json", "x.safetensors"):
        huggingface_hub.hf_hub_download("me/llama", name, endpoint=hub.url)
    go_offline(monkeypatch)
    requests(hub)
    folder = path_of(pinned("me/llama", "model"))
    assert str(folder) == f"hf://me/llama@{sha(hub, 'models/me/llama')}"
    assert (folder / "x.safetensors").read_bytes() == BYTES
    assert not (folder / "tokenizer.json").is_file()
    assert requests(hub) == []


def test_commits_are_taken_as_they_are(hub: Hub) -> None:
    requests(hub)
    assert commit_of(REPO, "c" * 40) == "c" * 40
    assert requests(hub) == []
    assert commit_of(REPO) == commit_of(REPO, "main") == sha(hub)
