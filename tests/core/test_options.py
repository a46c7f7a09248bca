"""Options by their declaration: numbers with suffixes, shares, switches, choices."""

from dataclasses import dataclass
from typing import Any

import pytest

from spile.core.config import RayOptions, Recipe, Runtime
from spile.core.errors import ConfigError
from spile.core.options import Options, flag_of, listed, option, parse_count, shown


@dataclass(frozen=True, kw_only=True)
class Given(Options):
    some_count: int | None = option("", kind="count", minimum=2, auto=True)
    size: int = option("", default=1024, kind="size")
    part: float = option("", default=1.0, kind="share")
    loud: bool = option("", default=False, kind="switch")
    mood: str = option("", default="calm", choices=("calm", "wild"))


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("some_count", "2k", 2000),
        ("some_count", "auto", None),
        ("size", "1GiB", 1 << 30),
        ("part", "0.25", 0.25),
        ("part", 1, 1.0),
        ("loud", True, True),
        ("mood", "wild", "wild"),
    ],
)
def test_a_value_is_checked_and_converted_by_its_kind(name: str, given: Any, value: Any) -> None:
    assert getattr(Given(**{name: given}), name) == value


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("some_count", 1, "--some-count must be at least 2, got 1"),
        ("some_count", 2.0, "--some-count must be a whole number such as 4096, 64k or 4M, got 2.0"),
        ("some_count", 1 << 63, "--some-count must be a whole number"),
        ("size", "huge", "--size must be 1GiB or 500MB, got 'huge'"),
        ("size", "auto", "--size must be 1GiB or 500MB, got 'auto'"),
        ("part", 0, "--part must be a share above 0, at most 1, got 0"),
        ("part", "1.01", "--part must be a share"),
        ("part", "nan", "--part must be a share"),
        ("part", True, "--part must be a share"),
        ("loud", 1, "--loud must be true or false, got 1"),
        ("mood", "", "--mood must be a non-empty text, got ''"),
        ("mood", "sad", "--mood must be one of calm, wild; got 'sad'"),
    ],
)
def test_what_does_not_fit_is_refused_with_flag_and_value(name: str, given: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Given(**{name: given})
    assert str(caught.value).startswith(said)


def test_flags_are_names_with_dashes() -> None:
    assert Given.names() == ("some_count", "size", "part", "loud", "mood")
    assert flag_of("some_count") == "--some-count"


def test_options_are_grouped_by_topic() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Grouped(Options):
        a: str | None = option("", topic="one")
        b: str | None = option("")
        c: str | None = option("", topic="two")
        d: str | None = option("", topic="one")

    topics = Grouped.topics()
    assert {topic: [f.name for f in fields] for topic, fields in topics.items()} == {
        "one": ["a", "b", "d"],
        "two": ["c"],
    }
    assert all("" not in kind.topics() for kind in (Recipe, Runtime, RayOptions))


def test_a_value_of_any_size_takes_a_part_of_a_line() -> None:
    assert shown("x") == "'x'"
    assert len(shown("x" * 1000)) == 200
    assert shown(10**5000) == "a int too large to show"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("64k", 64_000),
        ("64K", 64_000),
        ("4M", 4_000_000),
        ("1.5M", 1_500_000),
        ("1.001M", 1_001_000),
        ("2.3G", 2_300_000_000),
        ("1_000", 1000),
        ("1GiB", 1 << 30),
        ("500MB", 500_000_000),
        ("0.5KiB", 512),
        (" 2 TiB ", 1 << 41),
    ],
)
def test_counts_and_sizes_are_exact(text: str, value: int) -> None:
    assert parse_count(text) == value
    assert Recipe(max_tokens=text).max_tokens == value  # type: ignore[arg-type]
    if value >= 4096:
        assert Runtime(shard_bytes=text).shard_bytes == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "k", "-1", "+1", "1e6", "0x10", "1,000", "1..5k", "12 parsecs", "1k5", "٣", "inf"]
)
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-docs"):
        Recipe(max_docs=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1.5", "9.99", "1.0005k"])
def test_a_count_that_is_not_whole_is_refused_rather_than_cut(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-docs must be a whole number"):
        Recipe(max_docs=text)  # type: ignore[arg-type]


def test_names_that_a_stranger_chose_fit_in_a_line() -> None:
    assert listed(["id", "two\nlines"]) == "id, 'two\\nlines'"
    assert listed([]) == "none" and listed([], "nothing") == "nothing"
    assert len(listed(["x" * 9999] * 9999)) < 20_000


@pytest.mark.parametrize("name", ["taps", "add_taps", "encode", "splice", "keep"])
def test_an_option_of_several_texts_may_be_a_list(name: str) -> None:
    assert getattr(Recipe(**{name: ["a:1", "b"]}), name) == "a:1,b"
    assert Recipe(**{name: ("a:1", "b")}) == Recipe(**{name: "a:1,b"})
    for wrong in ([], ["a", 1], ["a", ""]):
        with pytest.raises(ConfigError, match=f"{flag_of(name)} must be a text or a list of texts"):
            Recipe(**{name: wrong})


def test_options_show_what_was_given_and_read_back_as_themselves() -> None:
    chosen = Recipe(model="demo", taps=["embed", "resid_post:9"], max_docs=3)
    assert repr(chosen) == "Recipe(model='demo', taps='embed,resid_post:9', max_docs=3)"
    assert eval(repr(chosen)) == chosen
    assert (repr(Runtime()), repr(Runtime(write_threads=2))) == (
        "Runtime()", "Runtime(write_threads=2)",
    )  # fmt: skip
