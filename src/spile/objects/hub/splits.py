"""Map the files of a dataset's repository to configs and splits.

The card defines them (`configs` in the README's metadata), or else the names of the files, in the
usual forms: data/SPLIT-00000-of-00002.parquet, CONFIG/SPLIT-….parquet, SPLIT/….jsonl.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import PurePosixPath
from typing import Any

from spile.core.bounded_json import Json
from spile.core.errors import InputError
from spile.objects.hub.repository import HubObjects
from spile.objects.protocol import matches, plain_depth

# Files that are read directly from a dataset given by name. CSV and other formats are read from the
# Hub's conversion, or by the `datasets` library.
_PARQUET = re.compile(r".*\.parquet", re.IGNORECASE)
_LINES = re.compile(r".*\.(jsonl|ndjson)(\.gz|\.zst)?", re.IGNORECASE)
_ARROW = re.compile(r".*\.arrow", re.IGNORECASE)
_TEXT = re.compile(r".*\.(txt|text)(\.gz|\.zst)?", re.IGNORECASE)
_KEYWORDS = {"train": "train", "training": "train", "validation": "validation",
             "valid": "validation", "val": "validation", "dev": "validation", "test": "test",
             "testing": "test", "eval": "test", "evaluation": "test"}  # fmt: skip
_NUMBERED = re.compile(r"(.+?)[-.]\d{5}-of-\d{5}")
_NAMELESS = ("part", "data", "shard", "chunk", "file")  # common stems of numbered files
_CONVERTED = re.compile(r"([^/]+)/([^/]+?)(?:-part\d+)?/\d{4,}\.parquet")  # by the Hub
_PARTIAL = "partial-"  # a split that the Hub has converted only in part
_CARD_BYTES = 16 << 20
_SHOWN = 20


@dataclass(frozen=True)
class Splits:
    """A dataset's configs, each with its splits and their files, looked up when needed."""

    where: str
    table: Mapping[str, Callable[[], Mapping[str, list[str]]]]
    default: str = "default"  # the config to prefer, if it exists

    def choose(self, config: str, split: str) -> tuple[str, str]:
        """Return the requested config and split, or the only ones."""
        if not config and self.default in self.table:
            config = self.default
        config = one_of(self.where, "config", config, self.table)
        return config, one_of(self.where, "split", split, self.table[config]())

    def files(self, config: str, split: str) -> list[str]:
        """Return the files of the requested config and split."""
        config, split = self.choose(config, split)
        if split.startswith(_PARTIAL):
            raise InputError(
                f"{self.where}: the Hub has converted only the beginning of {config}; load it with "
                "the `datasets` library, save it with `to_parquet`, and give that file"
            )
        files = self.table[config]()[split]
        if not files:
            raise InputError(
                f"{self.where}: no file matches README.md's patterns for {config}:{split}; give "
                "its path, hf://datasets/OWNER/NAME/PATH"
            )
        return files

    def readable(self, config: str, split: str) -> bool:
        """Return whether there are such files, all of a kind that we read."""
        kinds = (_PARQUET, _LINES, _ARROW, _TEXT)
        return bool(self.table) and all(
            any(kind.fullmatch(file) for kind in kinds) for file in self.files(config, split)
        )

    def partial(self, config: str) -> bool:
        """Return whether the Hub has converted only the beginning of some split."""
        given = config or (self.default if self.default in self.table else "")
        chosen = [given] if given or len(self.table) > 1 else [*self.table]
        return any(
            split.startswith(_PARTIAL) for c in chosen for split in self.table.get(c, dict)()
        )


def one_of(where: str, what: str, asked: str, there: Iterable[str]) -> str:
    """Return the requested name, or the only name if none was requested."""
    names = sorted(there)
    if asked in names:
        return asked
    if not asked and len(names) == 1:
        return names[0]
    shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
    fault = f"has no {what} {asked!r}" if asked else f"has several {what}s; choose one"
    raise InputError(f"{where}: {fault}; there are: {shown or 'none'} (OWNER/NAME:CONFIG:SPLIT)")


def find_splits(objects: HubObjects) -> Splits:
    """Return the configs and splits of a repository."""
    configs: Json = _card(objects).get("configs")
    if not isinstance(configs, list):
        found = _by_names(list(objects.list()))
        return Splits(
            objects.url, {config: partial(dict[str, list[str]], found[config]) for config in found}
        )
    listed: list[Json] = configs
    named = [c for c in listed if isinstance(c, dict) and isinstance(c.get("config_name"), str)]
    table = {c["config_name"]: cache(partial(_of_config, objects, c)) for c in named}
    defaults = [c["config_name"] for c in named if c.get("default") is True]
    return Splits(objects.url, table, *defaults[:1])


def _card(objects: HubObjects) -> dict[str, Any]:
    """Return the metadata at the head of the README."""
    try:
        text = objects.get_range("README.md", 0, _CARD_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return {}
    yaml = importlib.import_module("yaml")  # (only when needed: a slow import)
    head = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
    try:
        found: Json = yaml.safe_load(head[1]) if head else {}
    # (Python's own errors surface for a date in month 99, or a number without digits.)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{objects.url}/README.md: its metadata is not YAML ({line})") from error
    return found if isinstance(found, dict) else {}


def _of_config(objects: HubObjects, config: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the splits of a config in the card; `data_files` has several forms."""
    folder = _word(objects, config.get("data_dir") or "").strip("/")
    given: Json = config.get("data_files")
    if given is None:
        return _by_split(_data(objects.list(f"{folder}/" if folder else "")))
    parts: list[Json] = given if isinstance(given, list) else [given]
    if isinstance(given, dict):
        parts = [{"split": split, "path": path} for split, path in given.items()]
    splits: dict[str, list[str]] = {}
    for part in parts:
        named: dict[str, Any] = part if isinstance(part, dict) else {"split": "train", "path": part}
        paths: Json = named.get("path")
        found = splits.setdefault(_word(objects, named.get("split", "train")), [])
        for pattern in paths if isinstance(paths, list) else [paths]:
            new = _matching(objects, f"{folder}/{_word(objects, pattern)}".lstrip("/"))
            found += [key for key in new if key not in found]
    return splits


def _word(objects: HubObjects, value: Any) -> str:
    """Return a name or a pattern; refuse a list, which YAML aliases could make enormous."""
    if isinstance(value, list | dict | set | tuple):
        raise InputError(
            f"{objects.url}/README.md: its metadata has a list or an object where the name of a "
            "split or folder, or a pattern, belongs"
        )
    return str(value)


def _matching(objects: HubObjects, pattern: str) -> list[str]:
    parts = PurePosixPath(pattern.removeprefix("./")).parts
    top = "".join(f"{part}/" for part in parts[: plain_depth(parts)])
    return sorted(key for key in objects.list(top) if matches(PurePosixPath(key).parts, parts))


# -- by file names -----------------------------------------------------------------------------


def _data(keys: Iterable[str]) -> list[str]:
    """Return the data files of a repository, without notes, scripts and licences."""
    shown = [key for key in keys if not any(part[0] in "._" for part in key.split("/"))]
    for kind in (_PARQUET, _LINES, _ARROW):
        if found := [key for key in shown if kind.fullmatch(key)]:
            return found
    return []


def _by_names(keys: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """Return configs by folder, if the card does not define them."""
    configs: dict[str, list[str]] = {}
    for key in _data(keys):
        top, inside, _ = key.partition("/")
        plain = not inside or top == "data" or top.lower() in _KEYWORDS
        configs.setdefault("default" if plain else top, []).append(key)
    return {config: _by_split(files) for config, files in configs.items()}


def _by_split(keys: Iterable[str]) -> dict[str, list[str]]:
    splits: dict[str, list[str]] = {}
    for key in sorted(keys):
        splits.setdefault(_split_of(key), []).append(key)
    return splits


def _split_of(key: str) -> str:
    if converted := _CONVERTED.fullmatch(key):
        return converted[2]
    *folders, name = key.split("/")
    numbered = _NUMBERED.match(name)
    if numbered and numbered[1].lower() not in _NAMELESS:
        words = re.split(r"[-._]", numbered[1].lower())
        return numbered[1] if len(words) == 1 or "_" in numbered[1] else _keyword(words) or "train"
    for part in (name, *reversed(folders)):
        if found := _keyword(re.split(r"[-._ \d]+", part.lower())):
            return found
    return "train"


def _keyword(words: Iterable[str]) -> str:
    return next((_KEYWORDS[word] for word in words if word in _KEYWORDS), "")
