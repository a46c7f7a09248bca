"""Declared arguments: their kinds, defaults and groups, as argparse then parses them."""

import argparse

import pytest

from spile.core.flags import Flags


def parser_with_flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tool", exit_on_error=False)
    flags = Flags(parser)
    flags.place("out", "where it lies")
    flags.add("--tap", "one of them", "T", default="embed")
    flags.number("--count", "how many", 3)
    flags.number("--wait", "how long", unit="SECONDS")
    flags.many("--env", "NAME=VALUE", "set for the run", "variables")
    how = flags.group("how").either()
    how.switch("--fast", "at once")
    how.switch("--slow", "later")
    return parser


def test_each_kind_of_argument_has_its_type_and_its_default() -> None:
    parser = parser_with_flags()
    assert vars(parser.parse_args(["acts"])) == {
        "out": "acts", "tap": "embed", "count": 3, "wait": None, "variables": [],
        "fast": False, "slow": False,
    }  # fmt: skip
    words = ["acts", "--count", "7", "--wait", "1.5", "--env", "A=1", "--env", "B=2", "--fast"]
    found = parser.parse_args(words)
    assert (found.count, found.wait, found.variables) == (7, 1.5, ["A=1", "B=2"]) and found.fast
    with pytest.raises(argparse.ArgumentError, match="not allowed with argument --fast"):
        parser.parse_args(["acts", "--fast", "--slow"])


def test_the_help_names_values_and_groups() -> None:
    told = " ".join(parser_with_flags().format_help().split())
    for part in ("OUT where it lies", "--tap T one of them", "--wait SECONDS how long", "how: "):
        assert part in told
