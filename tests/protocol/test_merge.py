"""Merges keep their promises in every state that several at once can reach, killed at any time."""

import pytest

from protocol.checker import check
from protocol.merge import MergeBugs, MergeProtocol


@pytest.mark.parametrize(
    "protocol",
    [
        pytest.param(MergeProtocol(workers=2, units=2), id="two merges"),
        pytest.param(MergeProtocol(workers=3, units=2), id="three", marks=pytest.mark.full),
    ],
)
def test_every_state_keeps_the_invariants_and_can_still_complete(protocol: MergeProtocol) -> None:
    found = check(protocol, most=1_000_000)
    assert (found.fault, found.trace) == (None, [])
    assert found.states > 500


def test_a_file_written_under_its_key_tears_one_that_a_record_names() -> None:
    found = check(MergeProtocol(bugs=MergeBugs(writes_in_place=True)))
    assert found.fault == "a record implies its files"
    assert found.trace[-2:] == [
        "worker A: creates the record of unit 0",
        "worker B: writes a file under its key",
    ]


def test_a_table_that_comes_first_shows_a_dataset_that_is_not_whole() -> None:
    found = check(MergeProtocol(bugs=MergeBugs(table_first=True)))
    assert (found.fault, len(found.trace)) == ("the table implies the manifest", 1)
