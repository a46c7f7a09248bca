"""Formatting of skip reasons, program names and log lines."""

import json
import logging
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spile.core.errors import printable
from spile.core.humanize import FIELDS


def skipped(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))


def program(name: str, path: str) -> str:
    """Return a program's name, or its path if the shell would not find the name."""
    here = Path(path)
    found = shutil.which(name)
    if not here.is_file() or (found and Path(found).samefile(here)):
        return name
    return os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here)


class JsonLines(logging.Formatter):
    """`{"time": 1794784561.1, "level": "info", "worker": "host-123", "message": ...}`."""

    def __init__(self, who: str = "") -> None:
        super().__init__()
        self._worker = f"{socket.gethostname()}-{os.getpid()}"
        self._who = who  # share, or rank in a world

    def format(self, record: logging.LogRecord) -> str:
        more: dict[str, Any] = getattr(record, FIELDS, {})
        return json.dumps(
            {
                "time": round(record.created, 3),
                "level": record.levelname.lower(),
                "worker": self._worker,
                **({"place": self._who} if self._who else {}),
                "message": printable(record.getMessage()),
                **more,
            }
        )


def formatter(*, as_json: bool, who: str = "") -> logging.Formatter:
    """Return a formatter of log lines; `who` names this process's share or rank."""
    if as_json:
        return JsonLines(who)
    return logging.Formatter(f"spile [{who}]: %(message)s" if who else "spile: %(message)s")
