"""Files of a repository on the Hugging Face Hub, at one commit: hf://.

A revision is resolved to its commit once, and everything is read at that commit. Listings come from
the Hub itself. Bytes come from its `resolve` addresses, which redirect to a content network that
never gets the token, or from the Hub's local cache if it holds the file of that commit.
"""

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spile.core.errors import InputError, StoreError
from spile.objects.http import Answer, Client, WebObjects, library
from spile.objects.protocol import Entry, check_key

_PAGE_BYTES = 64 << 20  # largest page of a listing
_OFFLINE = "HF_HUB_OFFLINE is set"


@dataclass(frozen=True)
class Repository:
    """A model or a dataset on the Hub."""

    kind: str  # "model" or "dataset"
    name: str  # OWNER/NAME

    @property
    def path(self) -> str:
        return f"datasets/{self.name}" if self.kind == "dataset" else self.name

    @property
    def url(self) -> str:
        return f"hf://{self.path}"

    def api(self, *parts: str) -> str:
        """Return an address of the Hub's API."""
        return "/".join([f"{endpoint()}/api/{self.kind}s/{self.name}", *parts])


def endpoint() -> str:
    return str(library(".constants").ENDPOINT)


def offline() -> bool:
    return bool(library(".constants").HF_HUB_OFFLINE)


def is_commit(revision: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None


def commit_of(repository: Repository, revision: str = "main") -> str:
    """Return the current commit of a branch or a tag."""
    if is_commit(revision):
        return revision
    if offline():
        return _commit_before(repository, revision)
    answer = _asked(repository, repository.api("revision", quote(revision, safe="")))
    _refuse(repository, answer, revision)
    with _understanding(repository):
        return str(json.loads(answer.body or b"")["sha"])


def open_hub(repository: Repository, commit: str) -> "HubObjects":
    """Open the files of a commit; callers share one object, so that nothing is listed twice."""
    return _opened(repository, commit, endpoint())


@functools.cache
def _opened(repository: Repository, commit: str, endpoint: str) -> "HubObjects":
    return HubObjects(repository, commit)


class HubObjects(WebObjects):
    """The files of a repository at a commit.

    Args:
        only: the files that a listing shows; by default all.
    """

    def __init__(
        self, repository: Repository, commit: str, only: Sequence[str] | None = None
    ) -> None:
        super().__init__(f"{repository.url}@{commit}")
        self.repository, self.commit, self._only = repository, commit, only
        self._trees: dict[tuple[str, bool], dict[str, Entry]] = {}
        self._local: dict[str, Path | None] = {}

    def restricted(self, only: Sequence[str]) -> "HubObjects":
        """Return the same files, with only some of them in listings."""
        view = HubObjects(self.repository, self.commit, only)
        view._trees, view._local, view._client = self._trees, self._local, self._client
        return view

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        local = self.local_path(key)
        if local is None:
            if offline():
                raise InputError(
                    f"{self.url}/{key}: {_OFFLINE}, and the file is not in the local cache; run "
                    "`spile fetch` while there is a network"
                )
            return super().get_range(key, start, stop)
        with local.open("rb") as file:
            file.seek(start)
            return file.read(max(0, stop - start))

    def size(self, key: str) -> int:
        return self.entry(key).size

    def entry(self, key: str) -> Entry:
        """Return the Hub's entry of a file. Raises FileNotFoundError if there is none."""
        check_key(self.url, key)
        found = self._tree(key.rpartition("/")[0], whole=False).get(key)
        if found is None:
            raise FileNotFoundError(f"{self.url}: no {key}")
        return found

    def entries(self, prefix: str = "") -> Iterator[Entry]:
        if self._only is None:
            found = list(self._tree(prefix.removesuffix("/"), whole=True).values())
        else:
            found = [self.entry(key) for key in self._only]
        yield from (entry for entry in found if entry.key.startswith(prefix))

    def local_path(self, key: str) -> Path | None:
        """Return the file's path in the shared cache of the Hub's programs, if it is complete."""
        if key not in self._local:
            where = {"revision": self.commit, "repo_type": self.repository.kind}
            found = library().try_to_load_from_cache(self.repository.name, key, **where)
            path = Path(found) if isinstance(found, str) else None
            whole = path and (offline() or path.stat().st_size == self.size(key))
            self._local[key] = path if whole else None
        return self._local[key]

    def forget_local(self) -> None:
        """Look into the cache again after it has changed."""
        self._local.clear()

    def _tree(self, folder: str, *, whole: bool) -> dict[str, Entry]:
        """Return the files of a folder by key; with `whole`, also those of its subfolders."""
        for known in ((folder, whole), (folder, True), ("", True)):
            if known in self._trees:
                return self._trees[known]
        listed = _files_before(self.repository, self.commit) if offline() else None
        if listed is not None:
            self._trees["", True] = listed
            return self._tree(folder, whole=whole)
        found: dict[str, Entry] = {}
        url = self.repository.api("tree", self.commit, quote(folder)).rstrip("/")
        url += "?recursive=True" if whole else ""
        while url:
            answer = _asked(self.repository, url)
            if answer.status == 404 and _code(answer) == "EntryNotFound":
                break
            _refuse(self.repository, answer, self.commit)
            with _understanding(self.repository):
                for item in json.loads(answer.body or b""):
                    if item["type"] == "file":
                        large: Mapping[str, Any] = item.get("lfs") or {}
                        digest = large.get("oid") or item["oid"]
                        found[item["path"]] = Entry(item["path"], int(item["size"]), digest)
            following = re.search(r'<([^>]+)>;\s*rel="next"', answer.headers.get("link") or "")
            url = following[1] if following else ""
        self._trees[folder, whole] = found
        return found

    def _address(self, key: str) -> str:
        return f"{endpoint()}/{self.repository.path}/resolve/{self.commit}/{quote(key)}"

    def _secret(self) -> Mapping[str, str]:
        return _headers()

    def _refuse(self, key: str, answer: Answer) -> None:
        if answer.status == 404 and _code(answer) in ("", "EntryNotFound"):
            raise FileNotFoundError(f"{self.url}: no {key}")
        _refuse(self.repository, answer, self.commit)
        super()._refuse(key, answer)


# -- asking ----------------------------------------------------------------------------------

_client = Client()


def _headers() -> dict[str, str]:
    """Return the user agent, and the token, wherever huggingface_hub finds one.

    (Its own headers are not used: to make them, it asks the Hub about the running program.)
    """
    hidden = library(".constants").HF_HUB_DISABLE_IMPLICIT_TOKEN
    token = None if hidden else library().get_token()
    return {"User-Agent": "spile", **({"Authorization": f"Bearer {token}"} if token else {})}


def _asked(repository: Repository, url: str) -> Answer:
    what = f"asking {endpoint()} about {repository.url}"
    # A page of a listing links to the next one; the token goes only to the Hub.
    secret = _headers() if url.startswith(f"{endpoint()}/") else {}
    return _client.ask("GET", url, what, {}, secret=secret, most=_PAGE_BYTES)


@contextlib.contextmanager
def _understanding(repository: Repository) -> Generator[None, None, None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{repository.url}: {endpoint()} does not answer as the Hub does; check HF_ENDPOINT"
        ) from error


def _code(answer: Answer) -> str:
    return answer.headers.get("x-error-code") or ""


def _refuse(repository: Repository, answer: Answer, revision: str) -> None:
    """Raise the error that an answer of the Hub stands for."""
    if answer.status < 400 or answer.status == 416:
        return
    where, code = f"{repository.url}", _code(answer)
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    if code == "GatedRepo":
        raise InputError(
            f"{where}: is gated; ask for access at {endpoint()}/{repository.path}, then "
            f"{log_in} ({answer.status})"
        )
    if code == "RevisionNotFound":
        raise InputError(f"{where}: has no revision {revision!r}; give a branch, tag or commit")
    said = answer.headers.get("x-error-message") or ""
    if answer.status == 401 and said.startswith("Invalid credentials"):
        raise InputError(f"{where}: the Hub refuses the token; {log_in} (401)")
    if code == "RepoNotFound" or answer.status in (401, 404):
        raise InputError(
            f"{where}: no such {repository.kind} on {endpoint()}, or it is private; if so, "
            f"{log_in} ({answer.status})"
        )
    if answer.status == 403:
        raise InputError(f"{where}: the Hub denies access: {said or 'no reason given'} (403)")
    raise InputError(f"{where}: the Hub answered {answer.status} {said}".rstrip())


# -- without a network -----------------------------------------------------------------------


def note_files(repository: Repository, revision: str, commit: str) -> None:
    """Record the files of a commit, for later use without a network."""
    entries = open_hub(repository, commit).entries()
    note = {"commit": commit, "files": [[e.key, e.size, e.etag] for e in entries]}
    for name in {revision, commit}:
        path = _note(repository, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(note))
        temporary.replace(path)


def _note(repository: Repository, revision: str) -> Path:
    name = quote(f"{repository.path}@{revision}.json", safe="@")
    return Path(library(".constants").HF_HOME) / "spile" / name


def _read_note(repository: Repository, revision: str) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(_note(repository, revision).read_bytes())
    return None


def _commit_before(repository: Repository, revision: str) -> str:
    """Return the commit of a revision when it was last fetched, by us or another program."""
    note = _read_note(repository, revision)
    if note:
        return str(note["commit"])
    load: Callable[..., Any] = library().try_to_load_from_cache
    found = load(repository.name, "config.json", revision=revision, repo_type=repository.kind)
    if isinstance(found, str):
        return Path(found).parent.name
    raise InputError(
        f"{repository.url}: {_OFFLINE}, and it has not been fetched; run `spile fetch` while there "
        "is a network"
    )


def _files_before(repository: Repository, commit: str) -> dict[str, Entry]:
    """Return the files of a commit; for a model that others fetched, the files they fetched."""
    note = _read_note(repository, commit)
    if note:
        return {key: Entry(key, size, etag) for key, size, etag in note["files"]}
    load: Callable[..., Any] = library().try_to_load_from_cache
    found = load(repository.name, "config.json", revision=commit, repo_type=repository.kind)
    if repository.kind == "dataset" or not isinstance(found, str):
        raise InputError(
            f"{repository.url}@{commit}: {_OFFLINE}, and its list of files is not cached; run "
            "`spile fetch` while there is a network"
        )
    folder = Path(found).parent
    paths = (path for path in folder.rglob("*") if path.is_file())
    keys = {path.relative_to(folder).as_posix(): path for path in paths}
    return {key: Entry(key, path.stat().st_size, "") for key, path in keys.items()}
