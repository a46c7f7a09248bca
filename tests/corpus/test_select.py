"""Which documents are chosen: by columns, by hash, by length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spile.core.errors import ConfigError
from spile.corpus.select import ColumnFilter, Selection

ROW = {"language": "en", "score": 3.5, "n": 7, "ok": True, "none": None, "tags": ["a"]}


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("language == 'en'", True),
        ("language != 'en'", False),
        ("language in ('de', 'en') and score >= 3", True),
        ("language not in ['de']", True),
        ("3 < score < 4", True),
        ("3 < score < 3.2", False),
        ("not (n > 7 or n < 7)", True),
        ("ok", True),
        ("not ok", False),
        ("n", False),  # no boolean
        ("none is None", True),
        ("language is not None", True),
        ("absent is None", True),
        ("none == 1 or none != 1", False),  # a missing value is neither
        ("score >= 'x'", False),
        ("'a' in tags", True),
        ("n > score", True),
        ("n == -7 or n == +7", True),
    ],
)
def test_a_filter_is_what_python_would_say_of_values_that_are_there(
    condition: str, holds: bool
) -> None:
    assert ColumnFilter(condition).matches(ROW) is holds


@pytest.mark.parametrize(
    "condition",
    [
        "", "n >", "f(n)", "n.real > 1", "n[0] == 1", "1 == 1", "n + 1 == 2", "n is 3",
        "__import__('os')", "lambda: 1", "n == x.y", "(n := 3)", "n" * 2000, "'text'",
        "n == [m for m in (1,)]", "not " * 400 + "n",
    ],
)  # fmt: skip
def test_what_is_no_condition_is_refused(condition: str) -> None:
    with pytest.raises(ConfigError, match="--filter"):
        ColumnFilter(condition)


def test_a_filter_names_its_columns_once() -> None:
    assert ColumnFilter("b > 1 and (a == 'x' or b < 0) and not c").columns == ("b", "a", "c")


@settings(derandomize=True, database=None, max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-5, 5), min_size=1, max_size=6),
    st.sampled_from(["==", "<", "<=", ">", ">=", "!="]),
    st.integers(-6, 6),
    st.sampled_from(["n {} {}", "n {} {} and m == 0", "n {} {} or m == 1", "not n {} {}"]),
)
def test_bounds_never_exclude_a_row_that_matches(
    values: list[int], operator: str, limit: int, form: str
) -> None:
    condition = ColumnFilter(form.format(operator, limit))
    if any(condition.matches({"n": value, "m": 0}) for value in values):
        assert condition.may_match({"n": (min(values), max(values)), "m": (0, 0)})


def test_bounds_exclude_what_cannot_match() -> None:
    assert not ColumnFilter("n > 5").may_match({"n": (0, 5)})
    assert not ColumnFilter("n == 6 and m == 1").may_match({"n": (0, 5)})
    assert not ColumnFilter("n == 6 or n < 0").may_match({"n": (0, 5)})
    assert ColumnFilter("n == 6 or m == 1").may_match({"n": (0, 5)})
    assert ColumnFilter("n > 'x'").may_match({"n": (0, 5)})


def test_a_fraction_is_that_share_and_the_same_every_time() -> None:
    texts = [b"document %d" % number for number in range(4000)]
    for share in (0.1, 0.5, 1.0):
        chosen = Selection(fraction=share)
        kept = [text for text in texts if not chosen.refuses_content(text)]
        assert len(kept) == pytest.approx(4000 * share, rel=0.15)
        assert kept == [text for text in texts if not chosen.refuses_content(text)]


def test_smaller_fractions_lie_within_larger_ones() -> None:
    texts = [b"document %d" % number for number in range(2000)]
    kept = [
        {text for text in texts if not Selection(fraction=share).refuses_content(text)}
        for share in (0.1, 0.3, 0.9)
    ]
    assert kept[0] < kept[1] < kept[2]


def test_holdout_and_rest_are_the_whole_and_share_nothing() -> None:
    texts = [b"document %d" % number for number in range(3000)]
    parts = {
        part: {t for t in texts if not Selection(holdout=0.1, part=part).refuses_content(t)}
        for part in ("rest", "holdout")
    }
    assert parts["rest"] | parts["holdout"] == {*texts}
    assert not parts["rest"] & parts["holdout"]
    assert len(parts["holdout"]) == pytest.approx(300, rel=0.25)


def test_a_fraction_of_the_held_out_is_no_less_than_its_share() -> None:
    """The two hashes know nothing of each other."""
    texts = [b"document %d" % number for number in range(6000)]
    both = Selection(fraction=0.5, holdout=0.5, part="holdout")
    assert sum(not both.refuses_content(t) for t in texts) == pytest.approx(1500, rel=0.15)


def test_lengths_are_bounded_and_reasons_said() -> None:
    bounds = Selection(min_tokens=3, max_doc_tokens=5)
    assert [bounds.refuses_length(n) for n in (0, 2, 3, 5, 6)] == [
        "no tokens", "under --min-tokens", "", "", "over --max-doc-tokens",
    ]  # fmt: skip
