"""Check that Arrow can read a Parquet footer without crashing.

For some invalid footers (say, a histogram of levels that does not fit its column) Arrow's Python
calls do not raise, but abort the process. So each footer is first walked in another process, which
may crash. That process exits by itself after a while without requests.
"""

# Strict, but for values that pyarrow, which has no types, leaves unknown.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import atexit
import os
import select
import struct
import threading
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from spile.core.errors import DataError, InputError
from spile.core.limited_process import (
    Allowance,
    LimitedProcess,
    ProcessEnded,
    ProcessLimits,
    received,
    run_limited,
    send,
)
from spile.objects.paths import AnyPath

_MAGIC = b"PAR1"
_END = struct.Struct("<I4s")
_TAIL = 1 << 16  # bytes of the first read, as in Arrow
_IDLE_SECONDS = 5
_MOST_KNOWN = 1 << 20  # digests
_LIMITS = ProcessLimits()


class _Checker:
    """The process, started when needed, and the footers it has accepted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: LimitedProcess | None = None
        self._owner = 0  # a forked child has no process of its own
        self._known: set[bytes] = set()

    def check(self, path: AnyPath, footer: bytes) -> None:
        digest = xxhash.xxh3_128_digest(footer)
        with self._lock:
            if digest in self._known:
                return
            for last in (False, True):
                process = self._started()
                try:
                    process.send(footer)
                    process.received()
                    break
                except ProcessEnded as ended:
                    self._close()
                    if ended.limit:
                        raise InputError(
                            f"{path}: cannot read Parquet (its footer takes {ended.limit}); is it "
                            "whole?"
                        ) from None
                    if last:  # the first may have exited just now, for lack of requests
                        raise DataError(
                            f"{path}: the process that reads footers of Parquet has ended "
                            f"({ended}); run the same command again"
                        ) from None
                except BaseException:
                    self._close()
                    raise
            if len(self._known) < _MOST_KNOWN:
                self._known.add(digest)

    def _started(self) -> LimitedProcess:
        if self._process is None or self._owner != os.getpid():
            self._process = LimitedProcess(__name__, _LIMITS, quiet=True)
            self._owner = os.getpid()
        return self._process

    def _close(self) -> None:
        if self._process and self._owner == os.getpid():
            self._process.close()
        self._process = None

    def close(self) -> None:
        with self._lock:
            self._close()


_checker = _Checker()
atexit.register(_checker.close)


def checked_metadata(path: AnyPath) -> Any:
    """Return the metadata of the footer; None if there is no footer, which Arrow then reports.

    Raises:
        InputError: if the footer would crash Arrow.
    """
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _TAIL))
        tail = stream.read(_TAIL)
        if len(tail) < _END.size:
            return None
        length, magic = _END.unpack_from(tail, len(tail) - _END.size)
        if magic != _MAGIC or length > size - _END.size:
            return None
        if length > len(tail) - _END.size:
            stream.seek(size - _END.size - length)
            tail = stream.read(length + _END.size)
    footer = tail[len(tail) - _END.size - length : len(tail) - _END.size]
    _checker.check(path, footer)
    return _metadata(footer)


def _metadata(footer: bytes) -> Any:
    whole = _MAGIC + footer + _END.pack(len(footer), _MAGIC)
    return pq.read_metadata(pa.BufferReader(whole))


# -- within the process --------------------------------------------------------------------------


def _walk(footer: bytes) -> None:
    """Access everything that is ever used of a footer; exceptions are left to the caller."""
    try:
        metadata = _metadata(footer)
        for g in range(metadata.num_row_groups):
            group = metadata.row_group(g)
            for c in range(group.num_columns):
                _column(group.column(c))
    except Exception:
        return


def _column(chunk: Any) -> None:
    try:
        _ = chunk.path_in_schema, chunk.total_uncompressed_size
        if chunk.statistics and chunk.statistics.has_min_max:
            _ = chunk.statistics.min, chunk.statistics.max
    except Exception:
        return


def serve(asked: IO[bytes], answers: IO[bytes]) -> None:
    """Walk footers until no request comes for a while."""
    allowance = Allowance(_LIMITS)
    ready = select.poll()
    ready.register(asked, select.POLLIN)
    while ready.poll(_IDLE_SECONDS * 1000) and (footer := received(asked)) is not None:
        allowance.allow_memory(len(footer))
        allowance.allow_time(len(footer))
        _walk(footer)
        send(answers, b"")


if __name__ == "__main__":
    run_limited(serve)
