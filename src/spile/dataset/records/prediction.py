"""The expected size and duration of a run, which its first worker writes."""

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

from spile.core.errors import CorruptError, StoreError
from spile.dataset import format as fmt
from spile.objects import Objects


@dataclass(frozen=True)
class Prediction:
    """The expected size and duration of a run, to compare with the actual ones.

    The first worker writes it, create-only, once its first steps have shown their speed. It is for
    people only: nothing else reads it, and a dataset without one is complete.
    """

    tokens: int
    rows: int
    bytes: int
    seconds: float | None  # for one slice like the first; None if its run was too short
    device: str
    mesh: str

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "Prediction":
        try:
            found = cls(**body)
        except TypeError as error:
            raise CorruptError(
                fmt.PREDICTION, f"is not a prediction ({fmt.shown(error)})"
            ) from error
        counts = all(map(fmt.is_count, (found.tokens, found.rows, found.bytes)))
        if not counts or not all(map(fmt.is_name, (found.device, found.mesh))):
            raise CorruptError(fmt.PREDICTION, "is not a prediction (a count or a name is invalid)")
        if found.seconds is not None and not fmt.is_amount(found.seconds):
            raise CorruptError(fmt.PREDICTION, "is not a prediction (its seconds are not a number)")
        return found


def read_prediction(objects: Objects) -> Prediction | None:
    """Return the prediction; None if there is none or it is damaged (`verify` reports that)."""
    with contextlib.suppress(OSError, StoreError):
        data = objects.get(fmt.PREDICTION)
        return Prediction.from_json(fmt.decode_record(fmt.PREDICTION, data, "prediction"))
    return None


def create_prediction(objects: Objects, made: Prediction) -> None:
    """Store the prediction unless another came first. Errors are ignored."""
    with contextlib.suppress(StoreError):
        objects.create(fmt.PREDICTION, fmt.encode_record("prediction", asdict(made)))
