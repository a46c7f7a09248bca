"""What a run was expected to give and to take, kept to be held against what came of it.

The first worker writes it, create-only, once its own first steps have shown how fast they are. It
is for people alone: nothing else reads it, and a dataset without one is whole.
"""

import contextlib
import math
from dataclasses import asdict, dataclass
from typing import Any

from spile.core.errors import CorruptError, StoreError
from spile.dataset import format as fmt
from spile.objects import Objects

_MOST = 1e18


@dataclass(frozen=True)
class Prediction:
    """Of the whole dataset."""

    tokens: int
    rows: int
    bytes: int
    seconds: float | None  # that one slice like the first takes; None: its run was too short
    device: str
    mesh: str

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "Prediction":
        try:
            found = cls(**body)
        except TypeError as error:
            raise CorruptError(fmt.PREDICTION, f"is none ({fmt.shown(error)})") from error
        counts = all(map(fmt.is_count, (found.tokens, found.rows, found.bytes)))
        if not counts or not all(map(fmt.is_name, (found.device, found.mesh))):
            raise CorruptError(fmt.PREDICTION, "is none (a count or a name is none)")
        if found.seconds is not None and not is_amount(found.seconds):
            raise CorruptError(fmt.PREDICTION, "is none (its seconds are no number)")
        return found


def is_amount(value: object) -> bool:
    """Whether a value from JSON can be a time, a rate or a sum."""
    number = value if isinstance(value, float | int) and not isinstance(value, bool) else math.nan
    return 0 <= number < _MOST


def read_prediction(objects: Objects) -> Prediction | None:
    """None where there is none, or it is damaged: `verify` tells."""
    with contextlib.suppress(OSError, StoreError):
        data = objects.get(fmt.PREDICTION)
        return Prediction.from_json(fmt.decode_record(fmt.PREDICTION, data, "prediction"))
    return None


def create_prediction(objects: Objects, made: Prediction) -> None:
    """Unless another came first. No run fails for it."""
    with contextlib.suppress(StoreError):
        objects.create(fmt.PREDICTION, fmt.encode_record("prediction", asdict(made)))
