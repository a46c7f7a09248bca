"""The config and split of each file, by the card or by the files' names."""

import pytest

from spile.core.errors import InputError
from spile.corpus.files import find_files
from spile.objects.hub.names import pinned
from spile.objects.hub.repository import HubObjects, Repository
from spile.objects.hub.splits import find_splits
from spile.objects.paths import path_of
from support.hub_server import Hub, sha

CARD = b"""---
configs:
- config_name: large
  data_files:
  - split: train
    path: [all/*.parquet, more/**/*.parquet]
  - split: held
    path: held.jsonl
- config_name: small
  data_dir: few
  default: true
- config_name: plain
  data_files: "few/train-*"
- config_name: gone
  data_files: none/*
---
# Texts
"""
CARD_FILES = ("all/1.parquet", "all/deep/2.parquet", "more/3.parquet", "more/x/y/4.parquet",
              "held.jsonl", "few/train-00000-of-00001.parquet",
              "few/test-00000-of-00001.parquet")  # fmt: skip


def refused(source: str) -> str:
    with pytest.raises(InputError) as caught:
        path_of(pinned(source, "dataset")).is_dir()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def splits_of(hub: Hub, *names: str, card: bytes = b"") -> dict[str, dict[str, list[str]]]:
    hub.publish("me/made", {**dict.fromkeys(names, b"x"), **({"README.md": card} if card else {})})
    table = find_splits(HubObjects(Repository("dataset", "me/made"), sha(hub, "me/made"))).table
    return {config: dict(splits()) for config, splits in table.items()}


def test_a_card_says_which_files_are_which_split(hub: Hub) -> None:
    assert splits_of(hub, *CARD_FILES, card=CARD) == {
        "large": {"train": ["all/1.parquet", "more/3.parquet", "more/x/y/4.parquet"],
                  "held": ["held.jsonl"]},
        "small": {"train": [CARD_FILES[5]], "test": [CARD_FILES[6]]},
        "plain": {"train": [CARD_FILES[5]]},
        "gone": {"train": []},
    }  # fmt: skip
    found = find_files(pinned("me/made:large:train", "dataset"))
    assert [file.path.name for file in found] == ["1.parquet", "3.parquet", "4.parquet"]
    (file,) = find_files(pinned("me/made:large:held", "dataset"))
    assert file.path.name == "held.jsonl"
    assert pinned("me/made::test", "dataset").endswith(":small:test")
    assert "has several splits; choose one; there are: test, train" in refused("me/made")
    assert "has no config 'x'; there are: gone, large, plain, small" in refused("me/made:x")
    assert "has no split 'y'; there are: held, train" in refused("me/made:large:y")
    assert "no file matches README.md's patterns for gone:train" in refused("me/made:gone")


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet",
          "data/test-00000-of-00001.parquet"], {"default": {"train": 2, "test": 1}}),
        (["en/train-00000-of-00001.parquet", "de/validation-00000-of-00001.parquet"],
         {"en": {"train": 1}, "de": {"validation": 1}}),
        (["a.parquet", "b.parquet", "LICENSE.txt", "notes.jsonl"], {"default": {"train": 2}}),
        (["train/a.jsonl", "dev/b.jsonl.gz"], {"default": {"train": 1, "validation": 1}}),
        (["data/train_sft-00000-of-00001.parquet"], {"default": {"train_sft": 1}}),
        (["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"], {"default": {"train": 2}}),
        (["c4-train.00000-of-00002.jsonl", "c4-validation.00000-of-00001.jsonl"],
         {"default": {"train": 1, "validation": 1}}),
        (["x/train/0000.parquet", "x/train-part1/0000.parquet", "x/mine/0000.parquet"],
         {"x": {"train": 2, "mine": 1}}),
        (["train/data-00000-of-00001.arrow", "test/data-00000-of-00001.arrow",
          "train/state.json", "dataset_dict.json"], {"default": {"train": 1, "test": 1}}),
        (["script.py", "data.csv", "requirements.txt"], {}),
    ],
)  # fmt: skip
def test_without_a_card_the_files_names_say_so(
    hub: Hub, names: list[str], table: dict[str, dict[str, int]]
) -> None:
    found = splits_of(hub, *names)
    counts = {c: {s: len(files) for s, files in splits.items()} for c, splits in found.items()}
    assert counts == table


def test_other_formats_are_read_as_the_hub_has_converted_them(hub: Hub) -> None:
    hub.publish("me/csv", {"train.csv": b"text\nx\n", "notes.txt": b"read me"})
    assert pinned("me/csv", "dataset") == f"datasets:me/csv@{sha(hub, 'me/csv')}:default:train"
    hub.publish("me/csv", {"default/train/0000.parquet": b"x"}, "refs/convert/parquet")
    converted = sha(hub, "me/csv", "refs/convert/parquet")
    name = pinned("me/csv", "dataset")
    assert name == f"hf://datasets/me/csv@{converted}:default:train"
    assert [file.path.name for file in find_files(name)] == ["0000.parquet"]
    assert pinned(f"me/csv@{sha(hub, 'me/csv')}", "dataset").startswith("datasets:me/csv@")
    hub.publish("me/large", {"train.csv": b"text\nx\n"})
    hub.publish("me/large", {"default/partial-train/0000.parquet": b"x"}, "refs/convert/parquet")
    assert pinned("me/large", "dataset").startswith("datasets:me/large@"), "only its beginning is"
    for odd in (b"---\nconfigs: [\n---\n", b"---\nconfigs: " + b"[" * 400 + b"\n---\n"):
        hub.publish("me/odd", {"README.md": odd, "a.parquet": b"x"})
        assert "README.md: its metadata is not YAML" in refused("me/odd")
