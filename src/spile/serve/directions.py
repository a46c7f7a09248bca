"""Directions that are shown: uploaded as .npy or JSON, never as a pickle, or made from labels."""

import io
import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from spile.core.bounded_json import Json, JsonError, parse_json
from spile.core.errors import ConfigError
from spile.core.npy import read_npy_header

MOST_BYTES = 4 << 20  # size of an upload
_MOST = 128  # directions kept: more than the page remembers of those that it makes
_MOST_NAME = 80
_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True)
class ShownDirection:
    """A vector of length 1."""

    name: str
    values: np.ndarray


class Directions:
    """Directions, in memory; the oldest are dropped first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, ShownDirection] = OrderedDict()
        self._lock = threading.Lock()
        self._next = 1

    def add(self, name: str, data: bytes, widths: set[int]) -> int:
        """Add a direction; return its number.

        Raises:
            ConfigError: if it is not a direction of one of these widths.
        """
        values = parse(data)
        if len(values) not in widths:
            known = ", ".join(map(str, sorted(widths)))
            raise ConfigError(f"the direction has {len(values)} values, but the taps have {known}")
        return self.keep(name, values)

    def keep(self, name: str, values: np.ndarray) -> int:
        """Keep a vector of length 1, in float32; return its number."""
        shown = "".join(c if c.isprintable() else " " for c in name).strip()[:_MOST_NAME]
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._kept[number] = ShownDirection(shown or f"direction {number}", values)
            while len(self._kept) > _MOST:
                self._kept.popitem(last=False)
        return number

    def get(self, number: int, width: int) -> np.ndarray:
        with self._lock:
            found = self._kept.get(number)
        if found is None:
            raise ConfigError(f"no direction {number}; add it again")
        if len(found.values) != width:
            raise ConfigError(
                f"{found.name} has {len(found.values)} values, but the tap has {width}"
            )
        return found.values

    def listed(self) -> list[dict[str, Any]]:
        with self._lock:
            return [
                {"id": number, "name": each.name, "width": len(each.values)}
                for number, each in self._kept.items()
            ]


def parse(data: bytes) -> np.ndarray:
    """Parse a vector, normalised to length 1, float32.

    Raises:
        ConfigError: if the bytes are not a vector, or it has no direction.
    """
    if len(data) > MOST_BYTES:
        raise ConfigError(f"the direction has {len(data):,} bytes; the limit is {MOST_BYTES:,}")
    values = _from_npy(data) if data.startswith(_MAGIC) else _from_json(data)
    with np.errstate(over="ignore"):
        values = values.astype(np.float64).reshape(-1)
    largest = float(np.abs(values).max(initial=0))
    if not math.isfinite(largest) or largest == 0:
        raise ConfigError("a direction must be finite and not zero")
    values = values / largest
    return (values / np.linalg.norm(values)).astype(np.float32)


def _from_npy(data: bytes) -> np.ndarray:
    stream = io.BytesIO(data)
    try:
        shape, dtype = read_npy_header(stream)
    except ValueError as error:
        raise ConfigError(f"cannot read the .npy file: {error}") from error
    body = data[stream.tell() :]
    # The header is untrusted: its sizes allocate nothing.
    if sum(size != 1 for size in shape) > 1 or math.prod(shape) * dtype.itemsize != len(body):
        raise ConfigError("the .npy file must hold one whole vector")
    return np.frombuffer(body, dtype)


def _from_json(data: bytes) -> np.ndarray:
    try:
        value: Json = parse_json(data)
    except JsonError as error:
        raise ConfigError("neither a .npy file nor JSON") from error
    if not isinstance(value, list) or not value:
        raise ConfigError("the JSON must be one list of numbers")
    if any(type(each) not in (int, float) for each in value):
        raise ConfigError("the JSON must be one list of numbers")
    try:
        return np.array([float(each) for each in value])
    except OverflowError as error:
        raise ConfigError("a number is too large for float64") from error
