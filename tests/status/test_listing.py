"""The files of a dataset, from its records alone."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from spile.core.errors import ConfigError
from spile.dataset import format as fmt
from spile.status.listing import json_pieces, list_files
from support import stored


@pytest.fixture
def unfinished(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out", commit=(0, 2))


def test_every_file_of_a_unit_that_is_done_is_listed(unfinished: stored.Stored) -> None:
    files = list_files(unfinished.objects)
    assert {file.unit for file in files} == {0, 2}
    assert all(unfinished.objects.size(file.key) == file.bytes for file in files)
    told = json.loads("".join(json_pieces(files)))
    assert told["units"] == 2 and told["files"] == len(told["shards"]) == len([*files])
    assert told["bytes"] == sum(file.bytes for file in files)
    assert told["shards"] == [asdict(file) for file in files]
    for tap, total in told["taps"].items():
        of_tap = [file for file in files if file.tap == tap]
        assert (total["files"], total["dtype"]) == (len(of_tap), of_tap[0].dtype)
        assert total["rows"] == sum(file.rows for file in of_tap)
        assert total["bytes"] == sum(file.bytes for file in of_tap)


def test_one_unit_or_tap_alone(unfinished: stored.Stored) -> None:
    (tap, *_) = unfinished.table.taps
    assert {file.tap for file in list_files(unfinished.objects, tap=tap)} == {tap}
    assert {file.unit for file in list_files(unfinished.objects, unit=2)} == {2}
    assert all(file.dtype is None for file in list_files(unfinished.objects, tap="index"))


def test_the_files_of_added_taps_are_listed_by_their_place(unfinished: stored.Stored) -> None:
    own = [*list_files(unfinished.objects)]
    place, _ = stored.add_pass(unfinished, {"z.0": 4}, commit=(0,))
    added = [file for file in list_files(unfinished.objects) if file not in own]
    assert {file.unit for file in added} == {0}
    assert {file.tap for file in added} == {"z.0", "index", "statistics", "documents"}
    assert all(file.key.startswith(f"passes/{place.name}/") for file in added)
    assert all(unfinished.objects.size(file.key) == file.bytes for file in added)
    told = json.loads("".join(json_pieces(list_files(unfinished.objects))))
    assert (told["units"], told["files"]) == (2, len(own) + len(added)) and "z.0" in told["taps"]
    of_tap = [*list_files(unfinished.objects, tap="z.0")]
    assert of_tap == [file for file in added if file.dtype == "float32"] and of_tap
    assert {file.tap for file in list_files(unfinished.objects, unit=2)} == {
        "index", "statistics", "documents",
    }  # fmt: skip
    place.drop()
    assert [*list_files(unfinished.objects)] == own


def test_files_are_listed_by_the_layer_of_their_tap(tmp_path: Path) -> None:
    taps: stored.Taps = {"resid_post.10": 4, "resid_post.9": 4, "mlp_out.10": 4, "logprob": 1}
    made = stored.build(tmp_path / "out", taps=taps)
    stored.add_pass(made, {"embed": 4}, commit=(0,))
    by_layer = ["embed", "resid_post.9", "mlp_out.10", "resid_post.10", "logprob"]
    files = list_files(made.objects)
    assert [*files.taps] == [*by_layer, *fmt.BESIDE_TAPS]
    listed = dict.fromkeys(file.tap for file in files if file.unit == 1)
    assert [*listed] == [*by_layer[1:], *fmt.BESIDE_TAPS]


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"unit": 1}, "--unit 1: is not done yet"),
        ({"unit": 5}, "--unit 5: the units are 0 to 4"),
        ({"tap": "nothing"}, "--tap nothing: not in .*; it has .*documents"),
    ],
)
def test_what_is_not_there_is_refused(
    asked: dict[str, int], complaint: str, unfinished: stored.Stored
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        list_files(unfinished.objects, **asked)  # type: ignore[arg-type]
