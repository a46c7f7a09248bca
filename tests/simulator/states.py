"""Readers that store where they are, and continue from there: in the same place, or elsewhere."""

import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.contents import Content, Op
from simulator.places import HOST, Places, Violation, told
from spile.core.errors import SpileError
from spile.dataset.read.opening import open_dataset


@dataclass
class _State:
    """What a reader said of its iteration, and what was left of it."""

    content: Content
    place: str
    told: str
    options: Mapping[str, Any]
    tap: str
    left: list[bytes]


class States:
    """What readers of a program's places have said of their iterations."""

    def __init__(self, places: Places, outcomes: Counter[tuple[str, str]]) -> None:
        self._places, self._outcomes = places, outcomes
        self._taken: list[_State] = []

    def take(self, op: Op, content: Content | None) -> None:
        """Read some batches, remember the state, and what would follow."""
        if content is None or not content.readable[0]:
            return
        drawn = random.Random(op.seed)
        tap = drawn.choice(sorted(content.readable[1])).name
        options = {
            "batch_size": drawn.choice((3, 8, 20)),
            "shuffle": drawn.choice(("window", "full", None)),
            "seed": drawn.randint(0, 3),
            "window": 16,
            "block": 4,
        }
        with self._places.look():
            batches = _iteration(op.place, tap, options)
            for _ in range(drawn.randint(0, len(batches) - 1)):
                next(batches)
            state = json.dumps(batches.state_dict())
            left = [_bytes_of(batch, tap) for batch in batches]
        self._taken.append(_State(content, op.place, state, options, tap, left))
        self._outcomes["take", "ok"] += 1

    def resume(self, op: Op, content: Content | None) -> None:
        """Continue from a state, here or elsewhere: with exactly what was left, or not at all."""
        if content is None or not content.readable[0]:
            return
        for state in self._taken[-6:]:
            same = state.place == op.place and state.content.readable == content.readable
            with self._places.look():
                try:
                    batches = _iteration(op.place, state.tap, state.options)
                    batches.load_state_dict(json.loads(state.told))
                except SpileError as error:
                    self._outcomes["resume", "refused"] += 1
                    if same:
                        raise Violation(f"state: {op.place} refuses its own: {error}") from error
                    continue
                left = [_bytes_of(batch, state.tap) for batch in batches]
            self._outcomes["resume", "ok"] += 1
            if left != state.left:
                raise Violation(
                    f"state: {op.place} accepts a state of {state.place} and continues with other "
                    f"rows: it contains\n     {told(content)}\n  and the state is of\n"
                    f"     {told(state.content)}"
                )


def _iteration(place: str, tap: str, options: Mapping[str, Any]) -> Any:
    return open_dataset(HOST + place).batches(tap, **options)


def _bytes_of(batch: Mapping[str, Any], tap: str) -> bytes:
    return batch["index"].tobytes() + np.asarray(batch[tap]).tobytes()
