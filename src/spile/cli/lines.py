"""Lines of the log: plain, or each a JSON object."""

import json
import logging
import os
import socket
from typing import Any

from spile.core.errors import printable

FIELDS = "fields"  # the attribute of a log record that holds what else a JSON line says


class JsonLines(logging.Formatter):
    """`{"time": 1794784561.1, "level": "info", "worker": "host-123", "message": ...}`."""

    def __init__(self, who: str = "") -> None:
        super().__init__()
        self._worker = f"{socket.gethostname()}-{os.getpid()}"
        self._who = who  # its share, or its place in a world

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
    """`who`: what this process is called among others."""
    if as_json:
        return JsonLines(who)
    return logging.Formatter(f"spile [{who}]: %(message)s" if who else "spile: %(message)s")
