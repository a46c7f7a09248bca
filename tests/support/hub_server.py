"""A server that speaks what Spile uses of the Hugging Face Hub: repositories, LFS, commits.

Tokens: `writer` may do everything, `reader` may only read, any other is none. Hashes are checked
as the Hub checks them: an upload must be what it says, and a commit may only name what is there.
Large files may be kept on a server of their own, to which readers are redirected by addresses
that are signed, and expire.
"""

import base64
import hashlib
import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import pytest
from huggingface_hub import constants

from support.hub_network import Network, ranged

_PAGE = 20  # files in a listing's page: small, so that there are several
_LARGE = (".safetensors", ".zst", ".parquet")
# A dataset of many files.
BYTES = random.Random(0).randbytes(100_000)
FILES = {f"data/train-{n:05d}-of-00030.parquet": BYTES[n:] for n in range(30)}


@dataclass
class File:
    data: bytes
    large: bool

    @property
    def oid(self) -> str:
        """The hash that `preupload` and etags use."""
        return hashlib.sha256(self.data).hexdigest() if self.large else self.blob

    @property
    def blob(self) -> str:
        data = self.data
        if self.large:
            data = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (
                hashlib.sha256(data).hexdigest().encode(), len(data)
            )  # fmt: skip
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    private: bool
    branches: dict[str, dict[str, File]] = field(default_factory=lambda: {"main": {}})
    commits: list[tuple[str, str, list[str]]] = field(default_factory=list)  # branch, title, paths
    before: dict[str, dict[str, File]] = field(default_factory=dict)  # of earlier commits
    public: bool = False  # whether it can be read without a token
    gated: bool = False  # whether even `reader` may not

    def sha(self, branch: str) -> str:
        return hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()

    def commit(self, branch: str, title: str, added: Mapping[str, File]) -> None:
        for name, files in self.branches.items():
            self.before[self.sha(name)] = dict(files)
        self.branches.setdefault(branch, {}).update(added)
        self.commits.append((branch, title, sorted(added)))

    def at(self, revision: str) -> tuple[str, dict[str, File]] | None:
        """The commit and the files of a branch, by its name, or of a commit."""
        for name, files in self.branches.items():
            if revision in (name, self.sha(name)):
                return self.sha(name), files
        return (revision, self.before[revision]) if revision in self.before else None


def settings(endpoint: str, home: Path, **more: str) -> dict[str, str]:
    """Environment variables: the server that clients of the Hub use, and where they cache."""
    return {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"), "HF_TOKEN": "", "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "", **more,
    }  # fmt: skip


def use(endpoint: str, home: Path, patch: pytest.MonkeyPatch, **more: str) -> None:
    """Use a server in this process, whose client has read its environment, and in its children."""
    for name, value in settings(endpoint, home, **more).items():
        patch.setenv(name, value)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    now = {"ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template,
           "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"),
           "HF_TOKEN_PATH": str(home / "token"), "HF_HUB_DISABLE_XET": True,
           "HF_HUB_OFFLINE": bool(more.get("HF_HUB_OFFLINE"))}  # fmt: skip
    for name, value in now.items():
        patch.setattr(constants, name, value)
    if "datasets" in sys.modules:
        for name, value in {
            "HF_ENDPOINT": endpoint,
            "HF_HUB_OFFLINE": now["HF_HUB_OFFLINE"],
        }.items():
            patch.setattr(f"datasets.config.{name}", value)


class Hub(ThreadingHTTPServer):
    """Repositories in memory, and what goes wrong on demand."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, Repository] = {}
        self.large: dict[str, bytes] = {}  # LFS objects by sha256
        self.uploads: list[str] = []  # of them, each time one came
        self.seen: list[tuple[str, str, int]] = []  # method, path, status
        self.faults: list[tuple[str, str, int, bool]] = []  # method, in the path, status, too late?
        self.before_commit: Callable[[], None] = lambda: None
        self.latency = 0.0  # seconds
        self.retry_after: str | None = None  # that a 429 says
        self.links = ""  # the host that a listing's next page is at
        self.authorized: list[str] = []  # hosts that were sent a token
        self.network: Network | None = None  # where large files are kept
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a killed client is not an error of the server."""

    def publish(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> Repository:
        """Make a public repository (`models/` before its name: of a model), or commit to it."""
        found = self.repositories.setdefault(repo, Repository(False, public=True))
        added = {path: File(data, path.endswith(_LARGE)) for path, data in files.items()}
        self.large |= {file.oid: file.data for file in added.values() if file.large}
        found.commit(branch, "published", added)
        return found

    def fail(self, method: str, path: str, status: int, *, late: bool = False) -> None:
        """Fail the next request once, before it is served or (late) after."""
        self.faults.append((method, path, status, late))

    def fault(self, method: str, path: str, *, late: bool) -> int | None:
        with self.lock:
            for item in self.faults:
                if item[0] == method and item[1] in path and item[3] is late:
                    self.faults.remove(item)
                    return item[2]
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one piece, or each answer waits 40 ms for an ACK
    server: Hub  # type: ignore[assignment]

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, status: int, body: Any = None, data: bytes = b"", **headers: str) -> None:
        if self._late is not None and status < 400:
            status, body, data, headers = self._late, {"error": "lost"}, b"", {}
        self.server.seen.append((self.command, self._path, status))
        data = data if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        self._path = unquote(parts.path)
        self._query = {k: v[0] for k, v in parse_qs(parts.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        self._body = self._chunked() if self.headers.get("Transfer-Encoding") else b""
        self._body = self._body or self.rfile.read(length)
        self._late = None
        if self.headers.get("Authorization"):
            self.server.authorized.append(self.headers["Host"])
        time.sleep(self.server.latency)
        status = self.server.fault(self.command, self._path, late=False)
        if status is not None:
            wish = self.server.retry_after
            headers: dict[str, Any] = {"Retry_After": wish} if wish and status == 429 else {}
            return self._answer(status, {"error": "not now"}, **headers)
        self._late = self.server.fault(self.command, self._path, late=True)
        for method, pattern, writes, handle in _ROUTES:
            match = re.fullmatch(pattern, parts.path)  # a quoted slash is one of a branch's name
            if match and (self.command == method or (self.command, method) == ("HEAD", "GET")):
                if writes is not None:
                    token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
                    found = self._asked_for(match.groups())
                    if found and found.gated and token != "writer":
                        code = 403 if token == "reader" else 401
                        return self._answer(code, {"error": "gated"}, X_Error_Code="GatedRepo")
                    if not writes and not token and not found:
                        error = "Invalid username or password."
                        return self._answer(401, {"error": error}, X_Error_Code="RepoNotFound")
                    open_to_all = not writes and not token and found and found.public
                    if token not in ("writer", "reader") and not open_to_all:
                        error = "Invalid credentials in Authorization header"
                        return self._answer(401, {"error": error}, X_Error_Message=error)
                    if writes and token != "writer":
                        return self._answer(403, {"error": "You don't have the rights"})
                return handle(self, *(group and unquote(group) for group in match.groups()))
        return self._answer(404, {"error": f"no {self.command} {self._path}"})

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _chunked(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _asked_for(self, groups: tuple[str, ...]) -> Repository | None:
        known = self.server.repositories
        return next((known[n] for g in groups[:1] for n in (g, f"models/{g}") if n in known), None)

    def _found(self, repo: str, branch: str) -> tuple[str, dict[str, File]] | None:
        """Commit and files of a branch, by its name or its commit; None: an answer was given."""
        found = self.server.repositories.get(repo)
        if found is None:
            self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        there = found.at(branch)
        if there is None:
            self._answer(404, {"error": "Invalid rev"}, X_Error_Code="RevisionNotFound")
        return there

    def _files(self, repo: str, branch: str) -> dict[str, File] | None:
        there = self._found(repo, branch)
        return there[1] if there else None

    # -- what the Hub does -------------------------------------------------------------------

    def create(self) -> None:
        asked = json.loads(self._body)
        repo = f"{asked['organization']}/{asked['name']}"
        answer = {"url": f"{self.server.url}/datasets/{repo}", "name": repo}
        if asked["organization"] != "me":
            return self._answer(404, {"error": "no such owner"})
        if repo in self.server.repositories:
            return self._answer(409, {**answer, "error": "You already created this repo"})
        made = Repository(asked.get("visibility") == "private")
        made.branches["main"][".gitattributes"] = File(b"*.safetensors filter=lfs\n", False)
        self.server.repositories[repo] = made
        return self._answer(200, answer)

    def info(self, repo: str, branch: str | None) -> None:
        there = self._found(repo, branch or "main")
        if there is None:
            return None
        found = self.server.repositories[repo]
        siblings = [{"rfilename": path} for path in sorted(there[1])]
        return self._answer(200, {
            "id": repo, "private": found.private, "siblings": siblings, "sha": there[0]
        })  # fmt: skip

    def branch(self, repo: str, name: str) -> None:
        found = self.server.repositories[repo]
        if name in found.branches:
            return self._answer(409, {"error": "Reference already exists"})
        found.branches[name] = dict(found.branches["main"])
        return self._answer(200, {})

    def tree(self, repo: str, branch: str, folder: str | None) -> None:
        files = self._files(repo, branch)
        if files is None:
            return None
        top = f"{folder}/" if folder else ""
        files = {path: file for path, file in files.items() if path.startswith(top)}
        if folder and not files:
            return self._answer(404, {"error": "no such path"}, X_Error_Code="EntryNotFound")
        folders = {path.rpartition("/")[0] for path in files if "/" in path} - {folder}
        if self._query.get("recursive", "").lower() != "true":
            files = {path: file for path, file in files.items() if "/" not in path[len(top) :]}
            folders = {top + path[len(top) :].partition("/")[0] for path in folders}
        entries: list[dict[str, Any]] = [
            {"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders
        ]
        for path, file in files.items():
            entry = {"type": "file", "path": path, "oid": file.blob, "size": len(file.data)}
            if file.large:
                entry["lfs"] = {"oid": file.oid, "size": len(file.data), "pointerSize": 130}
            entries.append(entry)
        entries.sort(key=lambda entry: entry["path"])
        at = int(self._query.get("cursor", 0))
        headers = {}
        if at + _PAGE < len(entries):
            here = f"http://{self.server.links or self.headers['Host']}{urlsplit(self.path).path}"
            query = {**self._query, "cursor": str(at + _PAGE)}
            headers["Link"] = f'<{here}?{urlencode(query)}>; rel="next"'
        return self._answer(200, entries[at : at + _PAGE], **headers)

    def preupload(self, repo: str, branch: str) -> None:
        files = self._files(repo, branch)
        if files is None:
            return None
        answer = []
        for asked in json.loads(self._body)["files"]:
            present = files.get(asked["path"])
            mode = "lfs" if asked["path"].endswith(_LARGE) else "regular"
            answer.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False,
                           "oid": present.oid if present else None})  # fmt: skip
        return self._answer(200, {"files": answer})

    def batch(self, repo: str) -> None:
        objects = []
        for asked in json.loads(self._body)["objects"]:
            item = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.server.large:
                item["actions"] = {"upload": {"href": f"{self.server.url}/lfs/{asked['oid']}"}}
            objects.append(item)
        return self._answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> None:
        if hashlib.sha256(self._body).hexdigest() != oid:
            return self._answer(400, {"error": "the content is not what it is said to be"})
        self.server.uploads.append(oid)
        self.server.large[oid] = self._body
        return self._answer(200)

    def commit(self, repo: str, branch: str) -> None:
        self.server.before_commit()
        files = self._files(repo, branch)
        if files is None:
            return None
        lines = [json.loads(line) for line in self._body.splitlines()]
        added: dict[str, File] = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                data = self.server.large.get(value["oid"])
                if data is None or len(data) != value["size"]:
                    return self._answer(422, {"error": f"no LFS object of {value['path']}"})
                added[value["path"]] = File(data, True)
            else:
                added[value["path"]] = File(base64.b64decode(value["content"]), False)
        found = self.server.repositories[repo]
        found.commit(branch, lines[0]["value"]["summary"], added)
        url = f"{self.server.url}/datasets/{repo}/commit/{found.sha(branch)}"
        return self._answer(200, {"commitUrl": url, "commitOid": found.sha(branch)})

    def validate(self) -> None:
        content = json.loads(self._body)["content"]
        head = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        errors = [] if head else [{"message": "no metadata"}]
        return self._answer(200 if head else 400, {"errors": errors, "warnings": []})

    def resolve(self, repo: str, branch: str, path: str) -> None:
        there = self._found(repo, branch)
        if there is None:
            return None
        commit, files = there
        if path not in files:
            return self._answer(404, {"error": "no such file"}, X_Error_Code="EntryNotFound")
        file, network = files[path], self.server.network
        about: dict[str, Any] = {"ETag": f'"{file.oid}"', "X_Repo_Commit": commit}
        if file.large and network:
            where = f"{network.url}/{file.oid}?signature={network.signature}"
            return self._answer(302, {}, Location=where, X_Linked_Size=str(len(file.data)),
                                X_Linked_ETag=f'"{file.oid}"', **about)  # fmt: skip
        status, data, headers = ranged(self.headers["Range"], file.data)
        return self._answer(status, data=data, X_Linked_Size=str(len(file.data)), **about,
                            **headers)  # fmt: skip

    def resolve_model(self, repo: str, branch: str, path: str) -> None:
        self.resolve(f"models/{repo}", branch, path)


# A model's repository is known as models/OWNER/NAME.
_REPO = r"/api/(?:datasets/|(?=models/))((?:models/)?[^/]+/[^/]+)"
# Whether a route changes anything; None: it needs no token, as its URL is secret.
_ROUTES: tuple[tuple[str, str, bool | None, Callable[..., None]], ...] = (
    ("POST", "/api/repos/create", True, Handler.create),
    ("POST", "/api/validate-yaml", None, Handler.validate),
    ("GET", rf"{_REPO}(?:/revision/(.+))?", False, Handler.info),
    ("POST", rf"{_REPO}/branch/(.+)", True, Handler.branch),
    ("GET", rf"{_REPO}/tree/([^/]+)(?:/(.+))?", False, Handler.tree),
    ("POST", rf"{_REPO}/preupload/(.+)", True, Handler.preupload),
    ("POST", rf"{_REPO}/commit/(.+)", True, Handler.commit),
    ("POST", r"/datasets/([^/]+/[^/]+)\.git/info/lfs/objects/batch", True, Handler.batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", None, Handler.upload),
    ("GET", r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", False, Handler.resolve),
    ("GET", r"/(?!datasets/)([^/]+/[^/]+)/resolve/([^/]+)/(.+)", False, Handler.resolve_model),
)


def sha(hub: Hub, repo: str = "me/texts", branch: str = "main") -> str:
    return hub.repositories[repo].sha(branch)


def requests(hub: Hub) -> list[str]:
    """The requests since the last call."""
    paths = [path for _, path, _ in hub.seen]
    hub.seen.clear()
    return paths
