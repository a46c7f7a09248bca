"""Flags from declared options: one for each, with its kind."""

import dataclasses
import re

import pytest

from spile import cli
from spile.cli import flags
from spile.cli.flags import Parser, Verbs, add_options, count_of
from spile.core.config import RayOptions, Recipe, Runtime, flag_of
from spile.core.errors import ConfigError
from spile.core.flags import Flags

PARSER = cli.make_parser()


@pytest.mark.parametrize("options", [Recipe, Runtime, RayOptions])
def test_every_option_is_a_flag_that_is_none_until_it_is_given(
    options: type[Recipe | Runtime | RayOptions],
) -> None:
    parser = Parser()
    add_options(Flags(parser), "all", options)
    names = [field.name for field in dataclasses.fields(options)]
    assert vars(parser.parse_args([])) == dict.fromkeys(names), "a file's values must not be hidden"
    for field in dataclasses.fields(options):
        words = [flag_of(field.name)]
        if field.metadata["kind"] != "switch":
            words.append("x")
        value = getattr(parser.parse_args(words), field.name)
        assert value == (True if len(words) == 1 else "x"), "values are parsed with the options"


def test_a_list_may_be_given_in_several_flags() -> None:
    words = ["extract", "--splice", "zero:z.1", "--splice", "zero:z.2,zero:z.3"]
    assert PARSER.parse_args(words).splice == "zero:z.1,zero:z.2,zero:z.3"


def test_a_verb_gets_its_function_and_an_error_its_name() -> None:
    parser = Parser(prog="tool")
    verbs = Verbs(parser)
    sub = verbs.add("look", lambda arguments: 7, "look at it", epilog="more")
    sub.place("out")
    found = parser.parse_args(["look", "here", "--json"])
    assert (found.verb(found), found.out, found.json) == (7, "here", True)
    assert verbs.parser_of("look") is sub.parser and sub.parser.description == "look at it"
    with pytest.raises(ConfigError, match=r"required: OUT \(see `tool look --help`\)"):
        parser.parse_args(["look"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("extract --batch-size 8", "no flag --batch-size: use --batch-tokens N"),
        ("extract --dtype bf16", "use --store-dtype for stored values, --compute-dtype"),
        ("extract --layers 3", "use --taps SITE:LAYERS"),
        ("extract --hook-name x", "use --taps X, e.g. --taps blocks.12.hook_resid_post"),
        ("extract --overwrite", "the same command resumes what --out holds"),
        ("extract --resume", "the same command resumes what --out holds"),
        ("extract --shuffle 3", "use --shuffle-docs SEED for the order of units"),
        ("extract --device cpu", "JAX_PLATFORMS=cpu, cuda or tpu"),
        ("extract --seq_len 64", "write --seq-len"),
        ("extract --corpsu x", "did you mean --corpus?"),
        ("extract --seq-le 64", "did you mean --seq-len?"),
        ("plan --dataset x", "use --corpus X"),
        ("check x --sample 3", "did you mean --samples?"),
        ("extrakt --model x", "no verb 'extrakt': did you mean extract?"),
        ("verify a b", "'b' is one argument too many"),
    ],
)
def test_a_near_miss_names_what_may_be_meant(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PARSER.parse_args(words.split())
    assert said in str(caught.value)
    verb = words.split()[0]
    assert f"(see `spile{'' if verb == 'extrakt' else ' ' + verb} --help`)" in str(caught.value)


@pytest.mark.parametrize("flag", flags._INSTEAD)
def test_a_suggestion_names_only_flags_that_extract_has(flag: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(flags._INSTEAD[flag])):
        PARSER.parse_args(["extract", flag])


@pytest.mark.parametrize(("verb", "meant"), flags._VERBS.items())
def test_a_verb_of_other_tools_names_the_one_here(verb: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"no verb '{verb}': did you mean {meant}\\?"):
        PARSER.parse_args([verb, "acts"])
    with pytest.raises(SystemExit):
        PARSER.parse_args([meant, "--help"])


def test_numbers_may_be_sizes() -> None:
    assert count_of("--memory", "4GiB") == 4 << 30
    assert count_of("--window", "65536") == 65536
    with pytest.raises(ConfigError, match="--memory must be a number, or 1GiB or 500MB, got 'x'"):
        count_of("--memory", "x")
