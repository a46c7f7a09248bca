"""A server that speaks what Spile uses of the Hugging Face Hub: repositories, LFS, commits.

Tokens: `writer` may do everything, `reader` may only read, any other is none. Hashes are checked
as the Hub checks them: an upload must be what it says, and a commit may only name what is there.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_PAGE = 20  # files in a listing's page: small, so that there are several
_LARGE = (".safetensors", ".zst")


@dataclass
class File:
    data: bytes
    large: bool

    @property
    def oid(self) -> str:
        """As `preupload` and etags have it."""
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

    def sha(self, branch: str) -> str:
        return hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()


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
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no trouble of the server's."""

    def fail(self, method: str, path: str, status: int, *, late: bool = False) -> None:
        """Once: the request that comes next, or (late) its answer."""
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
        status = self.server.fault(self.command, self._path, late=False)
        if status is not None:
            return self._answer(status, {"error": "not now"})
        self._late = self.server.fault(self.command, self._path, late=True)
        for method, pattern, writes, handle in _ROUTES:
            match = re.fullmatch(pattern, self._path)
            if match and (self.command == method or (self.command, method) == ("HEAD", "GET")):
                if writes is not None:
                    token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
                    if token not in ("writer", "reader"):
                        error = "Invalid credentials in Authorization header"
                        return self._answer(401, {"error": error}, X_Error_Message=error)
                    if writes and token != "writer":
                        return self._answer(403, {"error": "You don't have the rights"})
                return handle(self, *match.groups())
        return self._answer(404, {"error": f"no {self.command} {self._path}"})

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _chunked(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _files(self, repo: str, branch: str) -> dict[str, File] | None:
        """Of a branch, by its name or its commit; None once an answer has been given."""
        found = self.server.repositories.get(repo)
        if found is None:
            self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return None
        for name, files in found.branches.items():
            if branch in (name, found.sha(name)):
                return files
        self._answer(404, {"error": "Invalid rev"}, X_Error_Code="RevisionNotFound")
        return None

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
        files = self._files(repo, branch or "main")
        if files is None:
            return None
        found = self.server.repositories[repo]
        siblings = [{"rfilename": path} for path in sorted(files)]
        return self._answer(200, {
            "id": repo, "private": found.private, "siblings": siblings,
            "sha": next(found.sha(name) for name, here in found.branches.items() if here is files),
        })  # fmt: skip

    def branch(self, repo: str, name: str) -> None:
        found = self.server.repositories[repo]
        if name in found.branches:
            return self._answer(409, {"error": "Reference already exists"})
        found.branches[name] = dict(found.branches["main"])
        return self._answer(200, {})

    def tree(self, repo: str, branch: str) -> None:
        files = self._files(repo, branch)
        if files is None:
            return None
        folders = {path.rpartition("/")[0] for path in files if "/" in path}
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
            here = f"{self.server.url}{urlsplit(self.path).path}?recursive=True"
            headers["Link"] = f'<{here}&cursor={at + _PAGE}>; rel="next"'
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
        files |= added
        found.commits.append((branch, lines[0]["value"]["summary"], sorted(added)))
        url = f"{self.server.url}/datasets/{repo}/commit/{found.sha(branch)}"
        return self._answer(200, {"commitUrl": url, "commitOid": found.sha(branch)})

    def validate(self) -> None:
        content = json.loads(self._body)["content"]
        head = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        errors = [] if head else [{"message": "no metadata"}]
        return self._answer(200 if head else 400, {"errors": errors, "warnings": []})

    def resolve(self, repo: str, branch: str, path: str) -> None:
        files = self._files(repo, branch)
        if files is None:
            return None
        file = files[path]
        sha = next(s for s in [branch] if s)
        return self._answer(200, data=file.data, ETag=f'"{file.oid}"', X_Repo_Commit=sha,
                            X_Linked_Size=str(len(file.data)))  # fmt: skip


_REPO = r"/api/datasets/([^/]+/[^/]+)"
# Whether a route changes anything; None: its address is secret enough.
_ROUTES: tuple[tuple[str, str, bool | None, Callable[..., None]], ...] = (
    ("POST", "/api/repos/create", True, Handler.create),
    ("POST", "/api/validate-yaml", None, Handler.validate),
    ("GET", rf"{_REPO}(?:/revision/(.+))?", False, Handler.info),
    ("POST", rf"{_REPO}/branch/(.+)", True, Handler.branch),
    ("GET", rf"{_REPO}/tree/(.+)", False, Handler.tree),
    ("POST", rf"{_REPO}/preupload/(.+)", True, Handler.preupload),
    ("POST", rf"{_REPO}/commit/(.+)", True, Handler.commit),
    ("POST", r"/datasets/([^/]+/[^/]+)\.git/info/lfs/objects/batch", True, Handler.batch),
    ("PUT", r"/lfs/([0-9a-f]{64})", None, Handler.upload),
    ("GET", r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", False, Handler.resolve),
)
