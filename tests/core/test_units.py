"""Units of work: the runs of documents that they hold."""

import pytest

from spile.core.units import Span, Unit


@pytest.mark.parametrize(
    ("parts", "runs"),
    [([], [(7, 9)]), ([(4, None), (5, None)], [(7, 9)]), ([(4, None), (5, 90)], [(7, 4), (90, 5)]),
     ([(4, None), (2, 90), (3, None)], [(7, 4), (90, 5)]), ([(4, 90), (5, 20)], [(90, 4), (20, 5)]),
     ([(0, 3)], [(7, 0)])],
)  # fmt: skip
def test_documents_follow_one_another_unless_a_span_says_otherwise(
    parts: list[tuple[int, int | None]], runs: list[tuple[int, int]]
) -> None:
    spans = tuple(Span(0, 0, count, doc=doc) for count, doc in parts)
    assert Unit(0, 7, 9, 1, spans).doc_runs == runs


def test_a_part_of_a_span_counts_the_rows_before_it() -> None:
    span = Span(2, 10, 6, 3, 9, "ab", before=1)
    assert span.part(2, 3) == Span(2, 12, 3, 3, 9, "ab", before=3)
