"""Features beside a dataset: audited, copied, collected and dropped with it."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.core.errors import ConfigError
from spile.dataset import format as fmt
from spile.dataset.maintain.assemble import copy_part
from spile.dataset.maintain.features import copy_features, drop_features
from spile.dataset.maintain.gc import collect_garbage
from spile.dataset.maintain.remove import remove
from spile.dataset.maintain.replica import replicate
from spile.dataset.maintain.verify import verify
from spile.dataset.records.features import FeatureSet
from spile.dataset.records.passes import drop_taps
from spile.features.run import FeatureRequest, make_features
from spile.objects import LocalObjects
from spile.status.status import read_status
from support import stored

REQUEST = FeatureRequest(logits=0, examples=2)
NAME = "mlp_out.1-1"


@pytest.fixture
def made(tmp_path: Path) -> stored.Stored:
    made = stored.copied(tmp_path / "out", taps=stored.LATENTS, **stored.ENCODED)
    make_features(str(made.path), REQUEST)
    return made


def folder(made: stored.Stored) -> list[str]:
    return made.listed(fmt.FEATURES)


def test_they_are_sound_and_their_parts_are_collected(made: stored.Stored) -> None:
    report = verify(made.objects)
    assert (report.faults, report.orphans) == ([], [])
    status = read_status(made.objects)
    assert [(each.name, each.units, each.parts) for each in status.features] == [(NAME, 5, 0)]
    removed = collect_garbage(made.objects)
    assert removed and all(key.startswith((f"features/{NAME}/done/", f"features/{NAME}/parts/"))
                           for key in removed)  # fmt: skip
    assert not [key for key in folder(made) if "/parts/" in key or "/done/" in key]
    assert verify(made.objects).faults == []
    assert len(spile.open(made.path).features("mlp_out.1")) == 40
    assert make_features(str(made.path), REQUEST).counted == 0


@pytest.mark.parametrize("folder_name", ["columns", "summaries"])
def test_a_changed_byte_is_a_fault(made: stored.Stored, folder_name: str) -> None:
    place = made.path / "features" / NAME / folder_name
    file = max(place.iterdir(), key=lambda path: path.stat().st_size)
    stored.flip(file, file.stat().st_size - 3)
    (fault,) = verify(made.objects).faults
    assert fault.startswith(f"features/{NAME}/{folder_name}/{file.name}: ")
    collect_garbage(made.objects)


def test_a_missing_file_is_a_fault_and_another_one_an_orphan(made: stored.Stored) -> None:
    columns = made.path / "features" / NAME / "columns"
    file = next(iter(sorted(columns.iterdir())))
    file.rename(columns / f"{'0' * 32}.safetensors")
    for quick in (False, True):
        report = verify(made.objects, quick=quick)
        assert report.faults == [f"features/{NAME}/columns/{file.name}: is missing"]
        assert report.orphans == [f"features/{NAME}/columns/{'0' * 32}.safetensors"]


def test_rows_that_a_repair_made_anew_are_noticed(made: stored.Stored) -> None:
    assert spile.open(made.path).features("mlp_out.1").follows_from_rows()
    done = made.done(1)
    shards = tuple(replace(shard, digest="0" * 32) for shard in done.shards)
    for key in ("manifest.json", "segments/000000.safetensors"):
        made.objects.delete(key)
    stored.reseal(made, 1, shards=shards)
    assert not spile.open(made.path, partial=True).features("mlp_out.1").follows_from_rows()
    faults = [fault for fault in verify(made.objects).faults if fault.startswith("features/")]
    assert len(faults) == 1 and "was counted from other rows" in faults[0]


def test_a_whole_copy_takes_them_and_a_part_does_not(
    made: stored.Stored, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        replicate(made.objects, LocalObjects(tmp_path / "copy"))
    copy = spile.open(tmp_path / "copy").features("mlp_out.1")
    assert (
        copy.top(3).values.tolist() == spile.open(made.path).features(NAME).top(3).values.tolist()
    )
    assert verify(LocalObjects(tmp_path / "copy")).faults == []
    with caplog.at_level("INFO", "spile.dataset"):
        copy_part(made.objects, LocalObjects(tmp_path / "part"), taps=None, units="0-1")
    assert "features of mlp_out.1 are not taken along" in caplog.text
    assert spile.open(tmp_path / "part").feature_sets == []


def test_a_copy_does_not_replace_other_features(made: stored.Stored, tmp_path: Path) -> None:
    replicate(made.objects, LocalObjects(tmp_path / "copy"))
    drop_features(made.ledger, [NAME])
    make_features(str(made.path), REQUEST)
    FeatureSet(made.objects, NAME).objects.delete(fmt.DROPPED)
    other = FeatureSet(LocalObjects(tmp_path / "copy"), f"{NAME[:-1]}2")
    other.objects.create(fmt.FEATURE_SET, b"{}")
    with pytest.raises(ConfigError, match=r"has other features than .* drop them by `spile drop"):
        replicate(made.objects, LocalObjects(tmp_path / "copy"))


def test_a_copy_of_features_that_grow_meanwhile_is_sound(
    made: stored.Stored, tmp_path: Path
) -> None:
    features = FeatureSet(made.objects, NAME)

    def grow(size: int) -> None:
        if not features.blocks():
            columns = {"raised/ids": np.zeros((1, 1), np.int32)}
            features.create_logits(0, features.store(fmt.FEATURE_COLUMNS, columns))

    shutil.copytree(made.path, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/features")
    copy_features(made.ledger, LocalObjects(tmp_path / "copy"), grow)
    assert features.blocks() == [0], "written while the others were copied"
    report = verify(LocalObjects(tmp_path / "copy"))
    assert report.ok and spile.open(tmp_path / "copy").features("mlp_out.1").units == 5


def test_a_damaged_record_beside_dropped_taps_is_one_fault(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out")
    latents = {tap: info for tap, info in stored.LATENTS.items() if "latent" in tap}
    stored.add_pass(made, latents, **stored.ENCODED)
    make_features(str(made.path), REQUEST)
    drop_taps(made.ledger, ["mlp_out.1"])
    (made.path / "features" / NAME / fmt.FEATURE_SET).write_text("{")
    (fault,) = verify(made.objects).faults
    assert fault.startswith(f"features/{NAME}/{fmt.FEATURE_SET}: ")
    assert fault.endswith(f"`spile drop --features {NAME}` drops them")


def test_dropped_features_are_gone_and_can_be_made_again(made: stored.Stored) -> None:
    assert drop_features(made.ledger, [NAME])[NAME] > 0
    assert spile.open(made.path).feature_sets == []
    assert verify(made.objects).orphans != []
    collect_garbage(made.objects)
    assert folder(made) == [f"features/{NAME}/dropped.json"]
    assert make_features(str(made.path), FeatureRequest(logits=0)).name == "mlp_out.1-2"
    with pytest.raises(ConfigError, match=rf"no features '{NAME}'; there are mlp_out.1-2"):
        drop_features(made.ledger, [NAME])
    assert verify(made.objects).faults == []


def test_dropping_a_tap_drops_its_features(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out")
    latents = {tap: info for tap, info in stored.LATENTS.items() if "latent" in tap}
    stored.add_pass(made, latents, **stored.ENCODED)
    make_features(str(made.path), REQUEST)
    assert spile.open(made.path).features("mlp_out.1").num_latents == 40
    drop_taps(made.ledger, ["mlp_out.1"])
    assert spile.open(made.path).feature_sets == []
    assert read_status(made.objects).features == []
    collect_garbage(made.objects)
    assert folder(made) == [f"features/{NAME}/dropped.json"]
    # The same taps, added again, have features of their own.
    stored.add_pass(made, latents, number=1, **stored.ENCODED)
    assert make_features(str(made.path), REQUEST).name == "mlp_out.1-2"
    assert verify(made.objects).faults == []


def test_removing_a_dataset_removes_them(made: stored.Stored) -> None:
    assert remove(made.objects).left == []
    assert not made.path.exists()
