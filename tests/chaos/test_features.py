"""Features that were killed at random while they were counted are those of an undisturbed call."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

import spile
from spile.dataset.maintain.verify import verify
from spile.dataset.records.features import FeatureSet
from spile.objects import LocalObjects
from support import stored, tiny

pytestmark = pytest.mark.chaos

COMMAND = ("--logits", "0", "--examples", "1", "--json")
NAME = "mlp_out.1-1"


def summary(path: Path) -> dict[str, bytes]:
    """Everything that readers get."""
    features = FeatureSet(LocalObjects(path), NAME)
    keys = [*features.objects.list("summaries/"), *features.objects.list("columns/")]
    return {key: features.objects.get(key) for key in keys}


def counted(path: Path) -> int:
    """How many files of features there are, those of killed writers included."""
    return sum(each.is_file() for each in path.glob("features/**/*"))


@pytest.mark.full
def test_kills_leave_the_same_bits(tmp_path: Path, full: bool) -> None:
    made = stored.build(
        tmp_path / "out", [[4000]] * 12, taps=stored.LATENTS, seq_len=4096,
        shard_bytes=1 << 20, **stored.ENCODED,
    )  # fmt: skip
    shutil.copytree(made.path, tmp_path / "killed")
    tiny.spile("features", str(made.path), *COMMAND)
    wanted, files = summary(made.path), counted(made.path)
    assert len(FeatureSet(made.objects, NAME).parts()) > 4 and wanted
    rng, kills, rounds = random.Random(5), 0, 20 if full else 2
    for number in range(rounds):
        out = tmp_path / "killed"
        shares = ("0/2", "1/2") if number % 2 else ("0/1",)
        running = [tiny.start("features", str(out), *COMMAND, "--share", share) for share in shares]
        enough = rng.randrange(counted(out), files)
        while counted(out) < enough and any(each.poll() is None for each in running):
            time.sleep(0.002)
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            kills += process.returncode == -signal.SIGKILL
        if counted(out) > files - 4:  # little is left to kill: from the beginning
            shutil.rmtree(out / "features")
    assert kills
    tiny.spile("features", str(tmp_path / "killed"), *COMMAND)
    assert summary(tmp_path / "killed") == wanted
    assert spile.open(tmp_path / "killed").features("mlp_out.1").rows == 48_000
    assert verify(LocalObjects(tmp_path / "killed")).faults == []
