"""Which units an audit has found sound, kept on this machine until it ends: `verify --resume`.

An audit of many terabytes takes hours. One that was interrupted goes on from here; one that came
to its end leaves nothing, and the next reads every byte again.
"""

import hashlib
import json
import os
from pathlib import Path

from spile.core.errors import StoreError
from spile.dataset.format import Done, encode_record


class Journal:
    """A line for each unit, by its record: one that has changed since is unknown."""

    def __init__(self, url: str, folder: Path | None = None, *, resume: bool) -> None:
        folder = folder or _cache()
        name = hashlib.sha256(url.encode()).hexdigest()[:32]
        self._path = folder / f"{name}.jsonl"
        self._known: set[str] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if resume and self._path.exists():
                self._known = _read(self._path)
            else:
                self._path.write_text("")
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror or error}") from error

    def knows(self, done: Done) -> bool:
        return _digest(done) in self._known

    def note(self, done: Done) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"unit": done.unit, "record": _digest(done)}) + "\n")

    def end(self) -> None:
        """The audit is over, whatever it found."""
        self._path.unlink(missing_ok=True)


def _digest(done: Done) -> str:
    return hashlib.sha256(encode_record("done", done.to_json())).hexdigest()


def _read(path: Path) -> set[str]:
    found: set[str] = set()
    for line in path.read_text().splitlines():
        try:
            found.add(str(json.loads(line)["record"]))
        except (ValueError, KeyError, TypeError):
            continue  # the last line of a process that was killed may be torn
    return found


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spile" / "verify"
