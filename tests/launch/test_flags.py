"""The flags of `spile launch`: every target, and every action with every target."""

import argparse

import pytest

from spile.launch.flags import ACTIONS, TARGETS, add_launch

NEEDED = {"ssh": ["--hosts", "hosts"]}


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_launch(parser)
    return parser.parse_args([*words])


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_a_verb_that_takes_what_extract_takes(target: str) -> None:
    found = parse(target, *NEEDED.get(target, []), "--env", "A=1", "--", "--model", "M")
    assert (found.target, found.action, found.name) == (target, "submit", "spile")
    assert found.extract == ["--model", "M"]
    assert found.env == ["A=1"] and not found.dry_run


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_has_every_target(action: str, target: str) -> None:
    found = parse(action, target, *NEEDED.get(target, []), "--name", "run1", "--dry-run")
    assert (found.target, found.action, found.name) == (target, action, "run1")
    assert found.dry_run
    assert getattr(found, "lines", None) == (20 if action == "logs" else None)


def test_lists_do_not_grow_from_one_call_to_the_next() -> None:
    words = ("gcloud", "--zone", "a", "--zone", "b")
    assert parse(*words).zones == parse(*words).zones == ["a", "b"]
