"""Conditions on rows and documents mean what plain Python says; each refusal is one line."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spile.core.errors import ConfigError
from spile.core.expressions import DocumentFilter, RowFilter, split_condition
from spile.core.index import BOS, EOS, FIRST, FLAGS, INDEX_DTYPE, SPECIAL, SPECIALS
from support.marks import examples

COLUMNS = {"token_id": 2**31, "doc": 2**40, "offset": 2**31, "pos": 2**31}


def numbers_below(limit: int) -> st.SearchStrategy[int]:
    return st.integers(0, 12) | st.integers(0, limit - 1) | st.just(limit - 1)


ENTRIES = st.tuples(*map(numbers_below, COLUMNS.values()), st.integers(0, 63))
INDEXES = st.lists(ENTRIES, max_size=20).map(lambda rows: np.array(rows, INDEX_DTYPE))

# -- expressions as people write them: any spacing, parentheses where none are needed --------------

SPACE = st.sampled_from(["", " ", "  ", "\n"])
LITERALS = st.integers(0, 20) | st.integers(0, 2**31)


def written(*parts: str | st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Join the parts with odd spaces, sometimes in parentheses."""
    spaced: list[Any] = [SPACE]
    for part in parts:
        spaced += [st.just(part) if isinstance(part, str) else part, SPACE]
    text = st.tuples(*spaced).map("".join)
    return text | text.map(lambda t: f"({t})")


def larger_integers(smaller: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    divisor = st.integers(1, 40).map(str) | st.integers(1, 40).map(lambda n: f"-{n}")
    return (
        written(smaller, st.sampled_from("+-*"), smaller)
        | written("(", smaller, ")", st.sampled_from(["%", "//"]), divisor)
        | written(smaller, st.sampled_from(["%", "//"]), "(pos + 1)")
        | written(st.sampled_from("+-"), smaller)
    )


INTEGERS = st.recursive(
    st.sampled_from(list(COLUMNS))
    | st.sampled_from(list(COLUMNS))
    | LITERALS.map(str)
    | LITERALS.map(hex),
    larger_integers,
    max_leaves=5,
)
COMPARISON = st.sampled_from(["<", "<=", ">", ">=", "==", "!="])
MEMBERS = st.lists(st.integers(-3, 20).map(str), min_size=1, max_size=5).flatmap(
    lambda m: st.sampled_from([f"({','.join(m)},)", f"[ {','.join(m)}]", f"{{{', '.join(m)}}}"])
)
BOOLEANS = st.recursive(
    st.sampled_from(list(FLAGS))
    | written(INTEGERS, COMPARISON, INTEGERS)
    | written(INTEGERS, COMPARISON, INTEGERS, COMPARISON, INTEGERS)
    | written(INTEGERS, st.sampled_from([" in ", " not in "]), MEMBERS),
    lambda smaller: (
        written(smaller, st.sampled_from([" and ", " or "]), smaller) | written("not ", smaller)
    ),
    max_leaves=6,
)
WORDS = [
    *FLAGS, *COLUMNS, *"017+-*/%&|~<>=!()[]{},:.#\\'é\n",
    "99999999999999999999", "1.5", "0x", "0777", "and", "or", "not", "in", "//", "**", "<=", "==",
    "if", "else", "lambda", "None", "True", "pos > 1", "x",
]  # fmt: skip


def plainly(where: str, entry: Any) -> bool:
    """Evaluate by Python itself for one entry, with integers of any size."""
    names: dict[str, int | bool] = {column: int(entry[column]) for column in COLUMNS}
    names |= {flag: bool(int(entry["flags"]) & bit) for flag, bit in FLAGS.items()}
    names["special"] |= names["bos"] or names["eos"]
    return bool(eval(" ".join(where.split()), {"__builtins__": {}}, names))


def parsed(where: str) -> RowFilter:
    """Reject drawn expressions that are too large; another test covers those."""
    try:
        return RowFilter(where, None)
    except ConfigError as error:
        assume("2**62" not in str(error) and "nested" not in str(error))
        raise


@given(where=BOOLEANS, index=INDEXES)
@examples(250)
def test_the_mask_is_what_python_says_of_each_row(where: str, index: np.ndarray) -> None:
    mask = parsed(where).mask(index)
    assert mask.dtype == np.bool_ and mask.shape == index.shape
    assert mask.tolist() == [plainly(where, entry) for entry in index]


def test_special_means_every_special_token() -> None:
    index = np.zeros(6, INDEX_DTYPE)
    index["flags"] = [0, BOS, EOS, SPECIAL, BOS | EOS | FIRST, FIRST]
    assert RowFilter("special", None).mask(index).tolist() == [False, True, True, True, True, False]
    assert RowFilter("not special", None).mask(index).tolist() == [True, *[False] * 4, True]
    assert RowFilter("special and not (bos or eos)", None).mask(index).tolist() == [
        False, False, False, True, False, False,
    ]  # fmt: skip


def test_the_identity_names_the_flags_of_special_where_it_is_used() -> None:
    assert RowFilter("not special", None).identity == {"where": "not special", "special": SPECIALS}
    assert RowFilter("not bos", None).identity == {"where": "not bos"}


@given(where=BOOLEANS, index=INDEXES)
@examples(150)
def test_the_canonical_text_reads_back_as_itself_and_means_the_same(
    where: str, index: np.ndarray
) -> None:
    rows = parsed(where)
    assert rows.where is not None
    again = RowFilter(rows.where, None)
    assert again == rows and again.where == rows.where and hash(again) == hash(rows)
    assert [plainly(rows.where, e) for e in index] == [plainly(where, e) for e in index]


@given(
    where=st.text(max_size=60) | st.lists(st.sampled_from(WORDS), max_size=25).map(" ".join),
    every=st.none() | st.integers(),
    index=INDEXES,
)
@examples(500)
def test_any_text_makes_a_filter_or_an_error_of_one_line(
    where: str, every: int | None, index: np.ndarray
) -> None:
    try:
        rows = RowFilter(where, every)
    except ConfigError as error:
        assert str(error).isprintable() and len(str(error)) < 250
    else:
        assert len(rows.mask(index)) == len(index)


@pytest.mark.parametrize(
    ("where", "canonical"),
    [
        ("not bos and pos>=1", "not bos and pos >= 1"),
        ("  ( not(bos) )and ((pos) >= 0x1)\n", "not bos and pos >= 1"),
        ("0<pos<=+8", "0 < pos <= 8"),
        ("pos in [3, 1, 3, -1]", "pos in (-1, 1, 3)"),
        ("pos not  in {1_000}", "pos not in (1000,)"),
        ("bos and (eos and last) and (first or (end or special))",
         "bos and eos and last and (first or end or special)"),
        ("(pos*2)+1 == - ( pos%3 )", "pos * 2 + 1 == -(pos % 3)"),
        ("pos - (offset - 1) > 0", "pos - (offset - 1) > 0"),
    ],
)  # fmt: skip
def test_spellings_of_one_expression_have_one_canonical_text(where: str, canonical: str) -> None:
    assert RowFilter(where, None).where == canonical


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("pos > 1 and poss < 3", "--where, character 13, 'poss': no such name (known: bos, eos, "
         "special, first, last, end, system, user, assistant, tool, template, thinking, answer, "
         "token_id, doc, offset, pos); did you mean 'pos'?"),
        ("BOS", "did you mean 'bos'?"),
        ("label == 1", "'label': no such name (known: bos, "),
        ("pos >= 1 and lang == 'en'", "understood; to choose documents by a column, use"),
        ("pos", "'pos': is an integer where true or false is needed; compare it, as in pos > 0"),
        ("not pos", "character 5, 'pos': is an integer where"),
        ("bos or 1", "character 8, '1': is an integer where"),
        ("bos == 1", "'bos': is true or false where an integer is needed"),
        ("(pos > 1) + 1 > 1", "character 2, 'pos > 1': is true or false where an integer"),
        ("bos in (1, 2)", "'bos': is true or false where an integer"),
        ("bos & eos", "write 'and' instead of '&'"),
        ("bos | eos", "write 'or' instead of '|'"),
        ("~bos", "write 'not' instead of '~'"),
        ("pos / 2 > 1", "write '//' instead of '/'"),
        ("pos is 1", "write '==' instead of 'is'"),
        ("pos is not 1", "write '!=' instead of 'is not'"),
        ("pos ** 2 > 1", "'pos ** 2': only names, integers, and, or, not"),
        ("print(pos) > 1", "'print(pos)': only names"),
        ("pos.real > 1", "'pos.real': only names"),
        ("[pos for pos in (1,)]", "only names"),
        ("pos > 1.5", "character 7, '1.5': only names, integers"),
        ("True", "'True': only names, integers"),
        ("pos > '1'", "only names, integers"),
        ("pos in 3", "'3': 'in' needs a list of integers"),
        ("pos in ()", "'()': 'in' needs a list of integers"),
        ("pos in (1, doc)", "'doc': is not an integer literal"),
        ("pos in (1, True)", "'True': is not an integer literal"),
        ("pos in (1, 2) == 3", "a list cannot be compared"),
        ("pos % 0 == 1", "character 7, '0': division by zero"),
        ("pos // (1 - 1) == 1", "division by zero"),
        ("pos % offset == 1", "'offset': the divisor could be zero"),
        ("pos % (token_id % 5 - 2) == 1", "'token_id % 5 - 2': the divisor could be zero"),
        ("pos % (token_id % -5 + 2) == 1", "the divisor could be zero"),
        ("pos % (token_id // -1000000000 + 2) == 1", "the divisor could be zero"),
        ("pos % (-token_id % 5 - 2) == 1", "the divisor could be zero"),
        ("pos % (2 - token_id) == 1", "the divisor could be zero"),
        (f"pos < {2**62}", "integers must be less than 2**62"),
        (f"pos in ({-(2**62)},)", "integers must be less than 2**62"),
        ("doc * token_id > 1", "'doc * token_id': could reach 2**62"),
        (f"pos + {2**62 - 1} > 1", "could reach 2**62"),
        ("pos = 1", "--where, character 5, '= 1': write '==' instead of '='"),
        ("pos >= 1 && !bos", "character 10, '&& !bos': write 'and' instead of '&&', 'not' instead "
         "of '!'"),
        ("bos || eos", "write 'or' instead of '||'"),
        ("bos AND pos <> 1", "write 'and' instead of 'AND', '!=' instead of '<>'"),
        ("(pos > 1", "'(' was never closed"),
        ("pos >", "at its end: invalid syntax"),
        ("pos ≥ 1", "character 5: '≥' is not understood"),
        ("bos # and eos", "character 5: '#' is not understood"),
        (" \n", "is empty; leave it out"),
        ("not " * 40 + "bos", "nested too deeply"),
        ("-" * 950 + "pos > 1", "nested too deeply"),
        ("bos or " * 200 + "bos", "1000 characters at most; this has 1403"),
        ("pos<1or " * 120 + "bos", "with the usual spaces"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_where(where: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RowFilter(where, None)
    assert said in str(caught.value)


def test_products_of_large_columns_are_allowed_if_bounds_keep_them_small() -> None:
    index = np.zeros(1, INDEX_DTYPE)
    index["token_id"], index["doc"], index["pos"] = 2**31 - 1, 2**40 - 1, 2**31 - 1
    for where in (
        "doc % 1000 * token_id > 2_000_000_000_000",
        "token_id * pos == 4611686014132420609",
        "doc // -1000000 * pos < -2_000_000_000_000_000",
    ):
        assert RowFilter(where, None).mask(index).all() == plainly(where, index[0])


@pytest.mark.parametrize("every", [0, -3, 2**62, True, 2.0, "2"])
def test_every_must_be_a_whole_number_of_at_least_one(every: Any) -> None:
    with pytest.raises(ConfigError, match="--every must be a whole number, 1 or more; got "):
        RowFilter(None, every)


def test_only_a_filter_that_asks_for_nothing_keeps_all() -> None:
    assert RowFilter(None, None).keeps_all
    assert RowFilter(None, 1) == RowFilter(None, None)
    assert not RowFilter(None, 2).keeps_all
    assert not RowFilter("pos >= 0", None).keeps_all


@given(
    lengths=st.lists(st.integers(1, 9), max_size=6),
    where=st.sampled_from([None, "pos >= 1", "pos % 2 == 1", "pos < 0", "token_id < 3 or last"]),
    every=st.integers(1, 5),
    data=st.data(),
)
@examples(200)
def test_every_nth_of_the_rows_left_is_counted_anew_in_each_context(
    lengths: list[int], where: str | None, every: int, data: st.DataObject
) -> None:
    index = np.zeros(sum(lengths), INDEX_DTYPE)
    index["token_id"] = data.draw(
        st.lists(st.integers(0, 6), min_size=len(index), max_size=len(index))
    )
    wanted: list[bool] = []
    done = 0
    for length in lengths:
        context = index[done : done + length]
        context["pos"] = np.arange(length)
        context["flags"][0] = FIRST
        context["flags"][-1] |= FLAGS["last"]
        left = 0
        for entry in context:
            passes = where is None or plainly(where, entry)
            wanted.append(passes and left % every == 0)
            left += passes
        done += length
    assert RowFilter(where, every).mask(index).tolist() == wanted


def test_a_filter_survives_pickling() -> None:
    rows = RowFilter("pos >= 1", 2)
    again = pickle.loads(pickle.dumps(rows))
    index = np.array([(5, 0, p, p, FIRST * (p == 0)) for p in range(6)], INDEX_DTYPE)
    assert again == rows
    assert again.mask(index).tolist() == [False, True, False, True, False, True]


# -- documents -------------------------------------------------------------------------------------

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
    assert DocumentFilter(condition).matches(ROW) is holds


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
        DocumentFilter(condition)


def test_a_filter_names_its_columns_once() -> None:
    assert DocumentFilter("b > 1 and (a == 'x' or b < 0) and not c").columns == ("b", "a", "c")


@examples(300)
@given(
    st.lists(st.integers(-5, 5), min_size=1, max_size=6),
    st.sampled_from(["==", "<", "<=", ">", ">=", "!="]),
    st.integers(-6, 6),
    st.sampled_from(["n {} {}", "n {} {} and m == 0", "n {} {} or m == 1", "not n {} {}"]),
)
def test_bounds_never_exclude_a_row_that_matches(
    values: list[int], operator: str, limit: int, form: str
) -> None:
    condition = DocumentFilter(form.format(operator, limit))
    if any(condition.matches({"n": value, "m": 0}) for value in values):
        assert condition.may_match({"n": (min(values), max(values)), "m": (0, 0)})


def test_bounds_exclude_what_cannot_match() -> None:
    assert not DocumentFilter("n > 5").may_match({"n": (0, 5)})
    assert not DocumentFilter("n == 6 and m == 1").may_match({"n": (0, 5)})
    assert not DocumentFilter("n == 6 or n < 0").may_match({"n": (0, 5)})
    assert DocumentFilter("n == 6 or m == 1").may_match({"n": (0, 5)})
    assert DocumentFilter("n > 'x'").may_match({"n": (0, 5)})


def test_bounds_are_looked_at_in_chains_and_below_and() -> None:
    assert not DocumentFilter("0 < n < 3").may_match({"n": (5, 9)})
    assert DocumentFilter("0 < n < 30").may_match({"n": (5, 9)})
    assert DocumentFilter("not (n > 5)").may_match({"n": (0, 5)}), "what is negated is left open"


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("n >", "--filter 'n >': invalid syntax; columns, numbers, texts,"),
        ("n + 1", "'n + 1' is not a condition; columns"),
        ("n == f(1)", "'f(1)' is neither a column nor a literal; columns"),
        ("n in {[1]}", "'{[1]}' is neither a column nor a literal; columns"),
        ("n is 3", "only None may follow `is`; columns"),
        ("n > 1 && ok", "--filter 'n > 1 && ok': write 'and' instead of '&&'; columns"),
        ("n = 1 || !ok", "write '==' instead of '=', 'or' instead of '||', 'not' instead of '!'"),
        ("n !== 1", "write '!=' instead of '!=='"),
        ("n == 1 & m == 2", "write 'and' instead of '&'; columns"),
        ("~ok", "write 'not' instead of '~'; columns"),
        (
            "language == 'a=b' and n >< 3",
            "invalid syntax; columns",
        ),  # (quoted)
        ("n > 1 and " * 120 + "n", "it is too long; columns"),
        ("1 == 1", "--filter '1 == 1': names no column"),
    ],
)
def test_why_a_condition_is_refused(condition: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DocumentFilter(condition)
    assert said in str(caught.value)


def test_a_missing_column_is_said_with_the_nearest_or_what_was_meant() -> None:
    condition = DocumentFilter("langage == en and ok == true", "--label")
    langage, en, true = [
        condition.missing("a.jsonl", name, ["language", "ok"])
        for name in condition.columns
        if name != "ok"
    ]
    assert langage == (
        "a.jsonl: no column 'langage', which --label names; there are language, ok; "
        "did you mean 'language'?"
    )
    assert en.endswith('a text needs quotes: "en"')
    assert true.endswith("write True")


def test_a_document_filter_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(DocumentFilter("language in ('de', 'en') and n > 3")))
    assert again.matches(ROW) and not again.matches({**ROW, "n": 3})


@pytest.mark.parametrize(
    ("text", "rows", "documents"),
    [
        ("pos >= 1", "pos >= 1", None),
        ("topic == 'law'", None, "topic == 'law'"),
        ("pos >= 1 and topic == 'law' and not bos", "pos >= 1 and (not bos)", "topic == 'law'"),
        ("topic in ['a', 'b'] or score > 3", None, "topic in ['a', 'b'] or score > 3"),
        ("pos >= and topic", "pos >= and topic", None),
        ("unknown == 3", "unknown == 3", None),
    ],
)
def test_a_condition_is_split_into_what_is_about_rows_and_about_documents(
    text: str, rows: str | None, documents: str | None
) -> None:
    assert split_condition(text, ["doc", "topic", "score"]) == (rows, documents)
