"""Read what metric backends wrote: TensorBoard event files, offline Weights & Biases runs."""

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7  # of a log in LevelDB's format, which `.wandb` files are
_WHOLE, _LAST = 1, 4

Report = tuple[int, dict[str, float]]


def tensorboard_reports(folder: Path) -> list[Report]:
    """Values by step, of the only event file in a folder."""
    (path,) = folder.glob("events.out.tfevents.*")
    protocol: Any = importlib.import_module("tensorboardX.proto.event_pb2")
    found: dict[int, dict[str, float]] = {}
    data, at = path.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        event = protocol.Event.FromString(data[at + 12 : at + 12 + size])
        at += size + 16  # with its length and both checksums
        for value in event.summary.value:
            found.setdefault(event.step, {})[value.tag] = value.simple_value
    return list(found.items())


def wandb_run(folder: Path) -> tuple[Any, list[Report]]:
    """The description of the only offline run in a folder, and its history."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    run, history = None, []
    for data in _records(path.read_bytes()):
        record = protocol.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        elif kind == "history":
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            history.append((record.history.step.num, values))
    return run, history


def _records(data: bytes) -> Iterator[bytes]:
    at, parts = _HEADER, b""  # (the file's own header is as long as a piece's)
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + _HEADER : at + _HEADER + size]
        at += _HEADER + size
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
