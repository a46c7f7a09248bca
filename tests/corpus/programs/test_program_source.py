"""Documents of a program: cut once, read in any order, and refused if they have changed."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import DataError, InputError, Interrupted
from spile.core.threads import cancelled_by
from spile.corpus.programs.program import ProgramDocument, ProgramSource
from support.marks import examples
from support.stops import StopAtLook


def made(count: int) -> Iterator[dict[str, Any]]:
    return ({"text": f"{i} " + "word " * (i % 7), "n": i} for i in range(count))


FORMS: dict[str, Callable[[Any], Any]] = {"in order": iter, "by number": list}


def source_of(call: Callable[[], Any], **columns: Any) -> ProgramSource:
    given = {"text_column": None, "messages_column": None, **columns}
    return ProgramSource("the program", call, {"program": "p", "source": "s"}, **given)


def numbers(documents: list[ProgramDocument]) -> list[int]:
    return [document.metadata["n"] for document in documents]


@given(
    st.integers(0, 60), st.integers(1, 300), st.none() | st.integers(1, 70),
    st.sampled_from(sorted(FORMS)), st.randoms(use_true_random=False),
)  # fmt: skip
@examples(80)
def test_ranges_hold_every_document_once_and_are_read_in_any_order(
    count: int, size: int, most: int | None, form: str, order: random.Random
) -> None:
    one, other = (source_of(lambda: FORMS[form](made(count))) for _ in range(2))
    ranges = list(one.spans(size, most))
    assert list(other.spans(size, most)) == ranges
    wanted = count if most is None else min(count, most)
    reached = 0
    for each in ranges:
        assert each.first == reached
        assert each.count > 0
        assert each.stop > 0
        reached += each.count
    assert reached == wanted
    if form == "in order":
        read_so_far = itertools.islice(one.documents(0), wanted)
        assert sum(each.stop for each in ranges) == sum(len(d.canonical()) for d in read_so_far)
    order.shuffle(ranges)
    found = {each.first: numbers(other.read(each)) for each in ranges}
    assert [n for first in sorted(found) for n in found[first]] == list(range(wanted))


@pytest.mark.parametrize("form", FORMS)
def test_ranges_are_about_as_large_as_asked_for(form: str) -> None:
    ranges = list(source_of(lambda: FORMS[form](made(500))).spans(1000))
    assert len(ranges) > 10
    assert all(1000 <= each.stop < 1200 for each in ranges[:-1])


def test_what_is_only_read_in_order_goes_on_where_it_stands() -> None:
    calls: list[int] = []

    def call() -> Any:
        calls.append(0)
        return made(30)

    source = source_of(call)
    for first, expected in ((0, 1), (7, 1), (8, 1), (8, 2), (20, 2), (3, 3)):
        assert next(source.documents(first)).metadata["n"] == first
        assert len(calls) == expected
    source.close()
    assert next(source.documents(20)).metadata["n"] == 20
    assert len(calls) == 4


def differing(form: str) -> Callable[[], Any]:
    """A program whose second pass differs from its first."""
    calls: list[int] = []
    shared = iter("abcdefghi")

    def call() -> Any:
        calls.append(0)
        return {
            "fewer": lambda: ("x" for _ in range(9 // len(calls))),
            "none": lambda: shared,
            "in its metadata": lambda: ({"text": "x", "m": len(calls)} for _ in range(9)),
            "in its last": lambda: ("x" if i < 8 else str(len(calls)) for i in range(9)),
            "in its order": lambda: iter("abcdefghi"[:: 1 if len(calls) == 1 else -1]),
        }[form]()

    return call


@pytest.mark.parametrize(
    "form", ["fewer", "none", "in its metadata", "in its last", "in its order"]
)
def test_a_second_pass_that_differs_is_refused(form: str) -> None:
    source = source_of(differing(form))
    (whole,) = source.spans(1 << 20)
    assert (whole.first, whole.count) == (0, 9)
    with pytest.raises(DataError) as caught:
        source.read(whole)
    assert str(caught.value).startswith("the program: documents 0 to 8 are not those")
    assert "\n" not in str(caught.value)


def test_random_documents_by_number_are_refused() -> None:
    noise = random.Random(0)
    call: Callable[[], list[str]] = lambda: [str(noise.random()) for _ in range(9)]  # noqa: E731
    (whole,) = source_of(call).spans(1 << 20)
    with pytest.raises(DataError, match="seed within the function"):
        source_of(call).read(whole)


class Texts:
    """A source like those of TFDS and Grain."""

    def __init__(self, third: Callable[[], Any]) -> None:
        self._third = third

    def __len__(self) -> int:
        return 9

    def __getitem__(self, record_key: int) -> Any:
        assert type(record_key) is int
        if record_key == 3:
            return self._third()
        return {
            "text": f"é {record_key}".encode(),
            "label": np.int64(record_key),
            "ids": np.arange(2),
        }


def fail(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("form", ["in order", "by number"])
@pytest.mark.parametrize(
    ("third", "said"),
    [
        (lambda: 1 // 0, "ZeroDivisionError: integer division or modulo by zero"),
        (lambda: fail(ValueError("bad\nthing")), "ValueError: bad"),
        (lambda: fail(KeyError()), "KeyError"),
        (lambda: fail(SystemExit("out")), "SystemExit: out"),
        (lambda: 5, "is int; a document is a text"),
        (lambda: {"text": "x", "when": object()}, "'when': holds object"),
    ],
)
def test_a_document_that_fails_is_named_by_its_number(
    third: Callable[[], Any], said: str, form: str
) -> None:
    texts = Texts(third)
    source = source_of(lambda: texts if form == "by number" else (texts[i] for i in range(9)))
    with pytest.raises(InputError) as caught:
        list(source.documents(0))
    assert str(caught.value).startswith(f"the program: document 3: {said}")
    assert "\n" not in str(caught.value)


def test_sources_as_tfds_and_grain_have_them_are_read() -> None:
    source = source_of(lambda: Texts(lambda: "plain"))
    assert source.length == 9
    (whole,) = source.spans(1 << 20)
    documents = source.read(whole)
    assert [document.text for document in documents[1:5]] == ["é 1", "é 2", "plain", "é 4"]
    assert documents[2].metadata == {"label": 2, "ids": [0, 1]}


def test_our_own_errors_and_a_users_stop_pass_as_they_are() -> None:
    for error in (InputError("ours"), Interrupted(), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            next(source_of(lambda e=error: Texts(lambda: fail(e))).documents(3))
        assert caught.value is error


def test_a_pass_can_be_stopped() -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "on and on"

    with cancelled_by(StopAtLook(5)), pytest.raises(Interrupted):
        list(source_of(endless).spans(1 << 20))
    assert sum(each.count for each in source_of(endless).spans(50, max_docs=20)) == 20


@pytest.mark.parametrize("form", FORMS)
def test_nothing_has_no_ranges(form: str) -> None:
    source = source_of(lambda: FORMS[form](made(0)))
    assert list(source.spans(100)) == []
    assert source.sample() == ([], 0)


def test_a_sample_is_of_the_head_or_spread_evenly() -> None:
    head, size = source_of(lambda: made(1000)).sample()
    assert numbers(head) == list(range(256))
    assert size == sum(len(document.canonical()) for document in head)
    spread, _ = source_of(lambda: list(made(1000))).sample()
    assert len(spread) == 256
    assert numbers(spread)[:2] + numbers(spread)[-1:] == [0, 3, 996]
    large, size = source_of(lambda: ("x" * (1 << 20) for _ in range(100))).sample()
    assert len(large) == 4
    assert size > 4 << 20


def test_columns_are_chosen_as_for_files() -> None:
    rows = [{"text": "t", "body": "b"}]
    (document,) = source_of(lambda: rows, text_column="body").documents(0)
    assert (document.text, document.metadata) == ("b", {"text": "t"})


@pytest.mark.parametrize("given", [5, None, "abc", b"abc", {"a": 1}, object()])
def test_what_holds_no_documents_is_refused(given: Any) -> None:
    with pytest.raises(InputError, match=f"returned {type(given).__name__}; it must return"):
        source_of(lambda: given)


def test_a_source_may_say_itself_what_it_is() -> None:
    class Named(list[str]):
        def __init__(self, said: Callable[[], Any]) -> None:
            super().__init__(["a"])
            self.identity = said

    assert source_of(lambda: ["a"]).identity() == ('program "p"', 'source "s"')
    own = source_of(lambda: Named(lambda: {"b": (1,), "a": "x"}))
    assert own.identity() == ('a "x"', "b [1]", 'program "p"')
    for said, reason in ((lambda: 5, "must return a mapping"), (lambda: 1 // 0, "ZeroDivision")):
        with pytest.raises(InputError, match=reason):
            source_of(lambda said=said: Named(said)).identity()
