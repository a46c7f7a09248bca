"""Files on web servers: with or without ranges, and failing now and then."""

import random
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from spile.core import retry
from spile.core.errors import ConfigError, DataError, StoreError
from spile.core.identity import sampled_digest
from spile.objects import http as web
from spile.objects import open_objects
from spile.objects.opened import opened
from spile.objects.paths import RemotePath, files_matching, path_of
from support import servers
from support.hub_network import ranged

DATA = random.Random(0).randbytes(3 << 20)


class Server(ThreadingHTTPServer):
    """A server of files by path; `ways` says how it answers each of the next requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {"/a/data.bin": DATA}
        self.redirects: dict[str, str] = {}
        self.headers: dict[str, str] = {}  # with every file
        self.ways: list[str] = []
        self.knows_ranges = self.knows_head = True
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.connections = 0
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server  # type: ignore[assignment]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.seen.append((self.command, self.path, dict(self.headers.items())))
        way = server.ways.pop(0) if server.ways else ""
        plain = self.path.partition("?")[0]
        if way == "cut":
            self.send_response(206)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 10)
            self.close_connection = True
            return
        if way:
            status, _, wish = way.partition(" ")
            self._answer(int(status), b"", {"Retry-After": wish} if wish else {})
        elif plain in server.redirects:
            self._answer(302, b"moved", {"Location": server.redirects[plain]})
        elif self.command == "HEAD" and not server.knows_head:
            self._answer(405, b"", {})
        elif plain not in server.files:
            self._answer(404, b"", {})
        else:
            data = server.files[plain]
            asked = self.headers["Range"] if server.knows_ranges else None
            status, body, headers = ranged(asked, data)
            self._answer(status, body, {**headers, **server.headers})

    do_HEAD = do_GET

    def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made
        made.shutdown()


def remote(url: str) -> RemotePath:
    path = path_of(url)
    assert isinstance(path, RemotePath)
    return path


def test_a_file_is_read_by_ranges_over_connections_that_are_kept(server: Server) -> None:
    path = remote(f"{server.url}/a/data.bin")
    assert (path.is_file(), path.size(), path.name) == (True, len(DATA), "data.bin")
    assert path.read_range(5, 1000) == DATA[5:1000]
    assert path.read_bytes() == DATA
    with path.open() as stream:
        stream.seek(-10, 2)
        assert stream.read() == DATA[-10:]
    out = bytearray(len(DATA))
    path.read_into(0, memoryview(out))
    assert out == DATA
    assert path.objects.get_range("a/data.bin", len(DATA), len(DATA) + 9) == b""
    assert str(path) == f"{server.url}/a/data.bin"
    assert server.connections <= 2 < len(server.seen)


@pytest.mark.parametrize("name", ["ETag", "Last-Modified"])
@pytest.mark.parametrize("knows_head", [True, False])
def test_a_file_that_changes_on_its_server_is_noticed(
    name: str, knows_head: bool, server: Server
) -> None:
    server.knows_head = knows_head
    server.headers = {name: "one"}
    file = opened(path_of(f"{server.url}/a/data.bin"))
    file.check()
    server.headers = {name: "two"}
    with pytest.raises(DataError, match="data.bin: changed .*its size or its etag is another"):
        file.check()
    server.headers = {name: "one"}
    server.files["/a/data.bin"] += b"x"
    with pytest.raises(DataError, match="data.bin: changed .*its size or its etag is another"):
        file.check()


def test_what_is_absent_is_no_file_and_a_folder_or_a_glob_is_refused(server: Server) -> None:
    assert not remote(f"{server.url}/a/none").is_file()
    with pytest.raises(FileNotFoundError, match="no a/none"):
        remote(f"{server.url}/a/none").open()
    for name in ("a/*.bin", "a/", ""):
        with pytest.raises(ConfigError, match="do not work on a web server; name one file"):
            files_matching(f"{server.url}/{name}")


def test_a_signed_address_is_used_and_not_shown(server: Server) -> None:
    path = remote(f"{server.url}/a/data.bin?signature=secret")
    assert path.suffixes == [".bin"]
    assert path.read_range(0, 4) == DATA[:4]
    assert all(seen.endswith("?signature=secret") for _, seen, _ in server.seen)
    assert "secret" not in str(path)
    server.ways = ["403"]
    with pytest.raises(StoreError, match="access denied") as caught:
        path.read_range(0, 4)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="remove the password from the URL") as refused:
        path_of("https://me:secret@host/x.jsonl")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("way", ["cut", "503", "429", "429 1", "500", "408"])
def test_what_may_pass_is_tried_again(server: Server, way: str) -> None:
    path = remote(f"{server.url}/a/data.bin")
    assert path.size()
    server.ways = [way]
    began = time.monotonic()
    assert path.read_range(100, 2000) == DATA[100:2000]
    assert time.monotonic() - began >= (1.0 if way.endswith(" 1") else 0.0)
    assert len(server.seen) == 3


def test_what_does_not_pass_is_one_line(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PATIENCE_AT_FIRST", 0.3)
    nobody = f"http://127.0.0.1:{servers.tiny.free_port()}"
    with pytest.raises(StoreError, match=f"reading {nobody}/x: .*tried for") as caught:
        remote(f"{nobody}/x").size()
    assert "\n" not in str(caught.value)
    server.ways = ["503"] * 50
    with pytest.raises(StoreError, match="the server answered 503 .tried for"):
        remote(f"{server.url}/a/data.bin").size()
    server.ways = ["400"] * 2
    with pytest.raises(StoreError, match="the server answered 400"):
        remote(f"{server.url}/a/data.bin").size()


def test_a_server_that_asks_for_patience_is_there(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "PATIENCE_AT_FIRST", 0.0)
    server.ways = ["429"] * 2
    assert remote(f"{server.url}/a/data.bin").size() == len(DATA)
    monkeypatch.setattr(retry, "PATIENCE", 0.2)
    server.ways = ["429"] * 100
    with pytest.raises(StoreError, match="the server answered 429"):
        remote(f"{server.url}/a/data.bin").size()


def test_a_server_without_ranges_gives_small_files_and_no_others(server: Server) -> None:
    server.knows_ranges = False
    path = remote(f"{server.url}/a/data.bin")
    assert path.read_range(5, 1000) == DATA[5:1000]
    assert path.read_range(2000, 3000) == DATA[2000:3000]
    assert len(server.seen) == 2, "it is read once"
    server.files["/large"] = bytes(17 << 20)
    with pytest.raises(StoreError, match="ignores ranges.*download it and give its path"):
        remote(f"{server.url}/large").read_range(5, 1000)


def test_a_server_that_knows_no_head_is_asked_for_a_byte(server: Server) -> None:
    server.knows_head = False
    path = remote(f"{server.url}/a/data.bin")
    assert path.size() == len(DATA)
    assert not remote(f"{server.url}/a/none").is_file()
    server.files["/empty"] = b""
    server.knows_head = True
    assert remote(f"{server.url}/empty").read_bytes() == b""


def test_redirects_are_followed_remembered_and_forgotten_when_they_expire(server: Server) -> None:
    with Server() as other:
        server.redirects["/x"] = f"{other.url}/a/data.bin"
        path = remote(f"{server.url}/x")
        assert path.read_range(0, 10) + path.read_range(10, 20) == DATA[:20]
        assert len(server.seen) == 2, "for its size and for the first range"
        other.ways = ["403"]
        assert path.read_range(20, 30) == DATA[20:30]
        assert len(server.seen) == 3
        other.shutdown()
    server.redirects["/round"] = f"{server.url}/round"
    with pytest.raises(StoreError, match="redirected more than"):
        remote(f"{server.url}/round").size()


def test_a_range_that_is_another_one_is_refused(server: Server) -> None:
    path = remote(f"{server.url}/a/data.bin")
    assert path.size()
    server.ways = ["206"]
    with pytest.raises(StoreError, match="did not send the requested range"):
        path.read_range(5, 10)


def test_a_files_identity_is_that_of_its_bytes(server: Server, tmp_path: Any) -> None:
    (tmp_path / "data.bin").write_bytes(DATA)
    assert sampled_digest(remote(f"{server.url}/a/data.bin")) == sampled_digest(
        tmp_path / "data.bin"
    )


def test_without_a_client_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for url in ("https://host/x.jsonl", "hf://datasets/me/texts/x.jsonl"):
        with pytest.raises(
            ConfigError, match=r"needs huggingface_hub .*pip install 'spile\[hub\]'"
        ):
            path_of(url).is_file()


def test_web_servers_are_only_read(server: Server) -> None:
    objects = open_objects(f"{server.url}/a")
    assert objects.get("data.bin") == DATA
    for write in (objects.create, objects.replace):
        with pytest.raises(ConfigError, match="is read-only"):
            write("x", b"")
    with pytest.raises(ConfigError, match="is read-only"):
        objects.stream("x")
    with pytest.raises(ConfigError, match="is read-only"):
        objects.delete("x")
