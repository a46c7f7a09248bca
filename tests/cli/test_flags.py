"""Flags from declared options: one for each, with its kind."""

import argparse
import dataclasses

import pytest

from spile.cli.flags import Parser, Verbs, add_options
from spile.core.config import RayOptions, Recipe, Runtime, flag_of
from spile.core.errors import ConfigError


@pytest.mark.parametrize("options", [Recipe, Runtime, RayOptions])
def test_every_option_is_a_flag_that_is_none_until_it_is_given(
    options: type[Recipe | Runtime | RayOptions],
) -> None:
    parser = Parser()
    add_options(parser, "all", options)
    names = [field.name for field in dataclasses.fields(options)]
    assert vars(parser.parse_args([])) == dict.fromkeys(names), "a file's values must not be hidden"
    for field in dataclasses.fields(options):
        words = [flag_of(field.name)]
        if field.metadata["kind"] != "switch":
            words.append("x")
        value = getattr(parser.parse_args(words), field.name)
        assert value == (True if len(words) == 1 else "x"), "values are parsed with the options"


def test_a_verb_gets_its_function_and_an_error_its_name() -> None:
    parser = Parser(prog="tool")
    verbs = Verbs(parser)
    sub = verbs.add("look", lambda arguments: 7, "look at it", epilog="more")
    sub.add_argument("out")
    found = parser.parse_args(["look", "here", "--json"])
    assert (found.verb(found), found.out, found.json) == (7, "here", True)
    assert verbs.parser_of("look") is sub
    assert isinstance(sub, argparse.ArgumentParser) and sub.description == "look at it"
    with pytest.raises(ConfigError, match=r"required: out \(see `tool look --help`\)"):
        parser.parse_args(["look"])
