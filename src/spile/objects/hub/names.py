"""Names of models, datasets and files on the Hub.

    OWNER/NAME[@REVISION]                          a model
    OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]         a dataset's files of one config and split
    hf://OWNER/NAME[@REVISION][/PATH]              files of a model's repository
    hf://datasets/OWNER/NAME[@REVISION][/PATH]     files of a dataset's repository
    hf://datasets/OWNER/NAME[@REVISION]:CONFIG:SPLIT
    datasets:OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]   the same, read by the `datasets` library

Before it is used, a name is pinned to the form with hf:// and a commit. A stored dataset keeps that
form, so that it continues from the same bytes after the branch has moved.
"""

import dataclasses
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from spile.core.errors import ConfigError, InputError
from spile.objects.hub import datasets_library as hub_built
from spile.objects.hub.repository import HubObjects, Repository, commit_of, is_commit, open_hub
from spile.objects.hub.splits import find_splits

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([^:]+))?(?::([^:]*)(?::([^:]*))?)?")
_URL = re.compile(
    rf"hf://(datasets/)?(?!datasets/|spaces/)({_PART}/{_PART})(?:@(refs/(?:convert|pr)/[^/:]+|[^/:]+))?"
    r"(?:/(.*)|:([^:]*)(?::([^:]*))?)?"
)
_FILES = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".text", ".gz", ".zst",
          ".py", ".toml")  # fmt: skip
BUILT = "datasets:"
_CONVERTED = "refs/convert/parquet"  # where the Hub keeps its own Parquet of other formats

_log = logging.getLogger("spile.objects")


@dataclass(frozen=True)
class HubName:
    """Files on the Hub, as they were requested."""

    repository: Repository
    revision: str | None = None
    path: str = ""
    by_split: bool = False  # the files of a config and a split, instead of a path
    config: str = ""  # empty: the only or the default one
    split: str = ""
    built: bool = False  # by the `datasets` library, from files of any kind

    def __str__(self) -> str:
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        rest = f":{self.config}:{self.split}" if self.by_split else f"/{self.path}"
        where = f"{BUILT}{self.repository.name}" if self.built else self.repository.url
        return f"{where}{revision}{rest.removesuffix('/')}"


def hub_name(source: str, kind: str) -> HubName | None:
    """Parse a name on the Hub; None for other sources, and for names of local files and folders.

    Args:
        kind: "model" or "dataset", for a name without hf://.
    """
    if source.startswith("hf://"):
        return _parse_url(source)
    if kind == "dataset" and source.startswith(BUILT):
        return _parse_built(source)
    found = _NAME.fullmatch(source)
    if not found or found[1].endswith(_FILES):
        return None
    if Path(source).exists() or Path(found[1]).exists():
        _log.info("%s: reading the local path, not the Hub's repository of that name", source)
        return None
    name, revision, config, split = found.groups()
    if kind == "model":
        return None if config is not None else HubName(Repository(kind, name), revision)
    return HubName(
        Repository(kind, name), revision, by_split=True, config=config or "", split=split or ""
    )


def _parse_url(url: str) -> HubName:
    found = _URL.fullmatch(url)
    if not found or (found[5] is not None and not found[1]):
        raise ConfigError(
            f"{url}: not an address on the Hub; write hf://OWNER/NAME[@REVISION][/PATH] or "
            "hf://datasets/OWNER/NAME[@REVISION][/PATH]"
        )
    folder, name, revision, path, config, split = found.groups()
    return HubName(
        Repository("dataset" if folder else "model", name),
        unquote(revision) if revision else None,
        (path or "").strip("/"),
        config is not None,
        config or "",
        split or "",
    )


def _parse_built(source: str) -> HubName | None:
    """Parse a `datasets:` name; None for a folder on a disk."""
    found = _NAME.fullmatch(source.removeprefix(BUILT))
    if not found or (not found[2] and Path(found[1]).exists()):
        return None
    name, revision, config, split = found.groups()
    return HubName(
        Repository("dataset", name), unquote(revision) if revision else None, by_split=True,
        config=config or "", split=split or "", built=True,
    )  # fmt: skip


def pinned(source: str, kind: str) -> str:
    """Pin a source of the Hub to a commit, so that it stays the same; return others unchanged."""
    name = hub_name(source, kind)
    if name is None:
        return source
    if kind == "model" and name.repository.kind != kind:
        raise InputError(f"{source}: is a dataset, not a model")
    name = _at_commit(name)
    if source != str(name):
        _log.info("%s: %s", source, name)
    return str(name)


def continued(given: str, stored: str, kind: str) -> str:
    """Return the stored source if the given one names it without a commit."""
    now, before = hub_name(given, kind), hub_name(stored, kind)
    if before is None or now is None or now.revision:
        return given
    same = dataclasses.replace(
        before,
        revision=None,
        built=now.built,
        config=before.config if now.config else "",
        split=before.split if now.split else "",
    )
    return stored if now == same else given


def newest(source: str, kind: str) -> str:
    """Return a source of the Hub without its commit, so that `pinned` takes the newest one."""
    name = hub_name(source, kind)
    if name is None or not name.revision or not is_commit(name.revision):
        return source
    return str(dataclasses.replace(name, revision=None))


def open_named(url: str) -> tuple[HubObjects, str]:
    """Open the files of an hf:// address; also return the path among them."""
    name = _at_commit(_parse_url(url))
    assert name.revision
    objects = open_hub(name.repository, name.revision)
    if not name.by_split:
        return objects, name.path
    return objects.restricted(find_splits(objects).files(name.config, name.split)), ""


def _at_commit(name: HubName) -> HubName:
    """Resolve the revision to a commit, and choose config and split if they were left open."""
    repository, asked = name.repository, name.revision
    settled = bool(name.revision and is_commit(name.revision) and name.config and name.split)
    name = dataclasses.replace(name, revision=commit_of(repository, name.revision or "main"))
    if not name.by_split or settled:
        return name
    assert name.revision
    if name.built:
        config, split = hub_built.choose(repository, name.revision, name.config, name.split)
        return dataclasses.replace(name, config=config, split=split)
    splits = find_splits(open_hub(repository, name.revision))
    if not splits.readable(name.config, name.split):
        commit = _converted(repository, asked)
        splits = find_splits(open_hub(repository, commit)) if commit else None
        if not commit or not splits or splits.partial(name.config):
            _log.info("%s: the `datasets` library converts it to Parquet", repository.url)
            return _at_commit(dataclasses.replace(name, built=True))
        name = dataclasses.replace(name, revision=commit)
        _log.info("%s: reading the Hub's own conversion to Parquet", repository.url)
    config, split = splits.choose(name.config, name.split)
    return dataclasses.replace(name, config=config, split=split)


def _converted(repository: Repository, asked: str | None) -> str | None:
    """Return the commit of the Hub's own conversion to Parquet of the main branch."""
    try:
        return commit_of(repository, _CONVERTED) if asked in (None, "main") else None
    except InputError as error:
        _log.debug("%s", error)
        return None
