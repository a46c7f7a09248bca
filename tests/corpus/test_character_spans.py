"""Spans of characters: what a column may hold, and which tokens each span has."""

from typing import Any

import numpy as np
import pytest

from spile.core.index import ROLES
from spile.corpus.character_spans import NONE, spans_in, spans_of_tokens


@pytest.mark.parametrize(("value", "spans"), [
    ([[0, 3], [5, 9]], ((0, 3, 0), (5, 9, 1))),
    ([[5, 9], [0, 3]], ((0, 3, 1), (5, 9, 0))),
    ([2, 4], ((2, 4, 0),)),
    ({"start": 2, "end": 4, "label": "LAW"}, ((2, 4, 0),)),
    ([{"begin": 0, "stop": 1}, {"start": 1, "stop": 2}], ((0, 1, 0), (1, 2, 1))),
    ("[[0, 3]]", ((0, 3, 0),)),
    ([[1, 1], [1, 2]], ((1, 2, 1),)),
    ([], ()), (None, ()), ("", ()),
])  # fmt: skip
def test_lists_objects_and_json_give_spans(value: Any, spans: Any) -> None:
    assert spans_in(value, 10) == spans


@pytest.mark.parametrize("value", [
    [[0, 11]], [[-1, 2]], [[3, 2]], [[0, 4], [3, 6]], [[0, 1, 2]], [[0.0, 2.0]], ["0-3"], 7,
    "not json", "{", {"start": 1}, [[True, 2]], [None],
])  # fmt: skip
def test_other_values_give_none(value: Any) -> None:
    assert spans_in(value, 10) is None


OFFSETS = np.array([(0, 0), (0, 2), (2, 5), (5, 6), (6, 9), (9, 10), (0, 0)])


def test_a_token_belongs_to_the_first_span_that_it_touches() -> None:
    spans = ((1, 3, 7), (5, 7, 4), (7, 8, 2))
    assert spans_of_tokens(OFFSETS, spans).tolist() == [NONE, 7, 7, 4, 4, NONE, NONE]
    assert spans_of_tokens(OFFSETS, ()).tolist() == [NONE] * 7


def test_the_assistant_has_the_tokens_that_it_shares() -> None:
    spans = ((0, 3, 0), (3, 7, 1), (7, 9, 2))
    said = np.array([0, 0, ROLES["assistant"], ROLES["user"], ROLES["user"], 0, 0], np.uint16)
    assert spans_of_tokens(OFFSETS, spans, said).tolist() == [NONE, 0, 1, 1, 1, NONE, NONE]
