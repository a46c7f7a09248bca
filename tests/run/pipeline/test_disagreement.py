"""Gaps of documents are added up, and those beyond the bound are told."""

import logging

import numpy as np
import pytest

from spile.run.pipeline.disagreement import DisagreementWatch, DocumentGaps


def gaps_of(docs: list[int], of_tokens: list[int], gaps: list[float]) -> DocumentGaps:
    found = DocumentGaps(np.array(docs))
    for doc, gap in zip(of_tokens, gaps, strict=True):  # in steps of one token
        found.add(np.array([doc]), np.array([gap], np.float32))
    return found


def test_gaps_are_added_up_by_document_in_any_order() -> None:
    found = gaps_of([9, 4, 7], [7, 9, 7, 7], [0.5, 0.25, 1.0, 0.0])
    assert found.columns() == {
        "disagreement": [0.25, None, 0.5],
        "disagreement_max": [0.25, None, 1.0],
        "disagreement_tokens": [1, None, 3],
    }


def test_documents_beyond_the_bound_are_named_also_of_nan() -> None:
    found = gaps_of([0, 1, 2], [0, 1, 2], [0.9, 1.1, np.nan])
    assert found.beyond(0.05) == [1, 2]


def test_the_first_is_told_at_once_and_all_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "spile.run")
    watch = DisagreementWatch(0.05)
    watch.add(gaps_of([0], [0], [0.0]))
    assert not caplog.records
    watch.add(gaps_of([1], [1, 1], [3.0, 1.0]))
    watch.add(gaps_of([2, 3], [2, 3], [3.0, 0.0]))
    (first,) = caplog.messages
    assert (
        "document 1: " in first
        and "2 tokens are 2 from the model's on average, and up to 3" in first
    )
    watch.tell()
    watch.tell()
    (_, last) = caplog.messages
    assert "2 of 4 documents beyond 0.05" in last and "1.4 from the model's on average" in last


def test_documents_that_are_each_within_it_can_be_beyond_it_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = DisagreementWatch(0.05)
    watch.add(gaps_of([*range(40)], [*range(40)], [0.2] * 40))
    assert not caplog.records
    watch.tell()
    assert "0 of 40 documents beyond 0.05" in caplog.messages[0]
