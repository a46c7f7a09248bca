"""The bound of disagreement: on average, with one token that may be unlikely."""

import math

import pytest

from spile.core.disagreement import BOUND, is_within
from spile.core.errors import ConfigError
from spile.corpus.named_columns import parse_keep


def test_one_token_of_a_document_may_be_far_off() -> None:
    assert is_within(0.05, 1, 0.99) and not is_within(0.05, 1, 1.01)
    assert is_within(0.05, 1000, 49) and not is_within(0.05, 1000, 52)


def test_values_that_are_not_finite_are_never_within_it() -> None:
    assert not is_within(BOUND, 5, math.nan) and not is_within(BOUND, 5, math.inf)


def test_a_column_of_the_corpus_cannot_have_the_name() -> None:
    with pytest.raises(ConfigError, match="the documents table has a column of that name"):
        parse_keep("id,disagreement_max")
