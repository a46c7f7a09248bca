"""Ten kills of a lens's fit leave the same bits: the sums are units like any others."""

import random
import signal
import time
from pathlib import Path

import pytest

from chaos.harness import check_same, check_sound, launch, run
from support import tiny

pytestmark = [pytest.mark.chaos, pytest.mark.full]

PLACES = (
    "commit before", "commit after", "done torn", "done written", "done linked", "shard rows",
    "commit after", "commit before", "done linked", "commit after",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["jacobian", "tuned"])
def test_ten_kills_leave_the_same_lens(kind: str, model: Path, tmp_path: Path) -> None:
    corpus = tiny.write_corpus(tmp_path / "corpus.jsonl", 12, seed=3)

    def words(out: Path) -> tuple[object, ...]:
        return (
            "lens", "fit", "--model", model, "--corpus", corpus, "--kind", kind, "--seq-len", "32",
            "--unit-tokens", "60", "--batch-tokens", "64", "--compute-dtype", "float32", "--out",
            out,
        )  # fmt: skip

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(*words(whole)).code == 0
    assert len(list((whole / "sums/done").glob("*/*"))) > 6
    kills = 0
    for place in PLACES:
        process = launch({"kill": place, "nth": 1}, *words(killed))
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        kills += 1
    assert kills == 10
    assert run(*words(killed)).code == 0
    check_same(killed / "sums", whole / "sums")
    check_sound(killed / "sums")
    files = [path.name for path in whole.iterdir() if path.is_file()]
    assert files and all((killed / f).read_bytes() == (whole / f).read_bytes() for f in files)


def test_ten_kills_while_it_is_refined_leave_the_same_lens(model: Path, tmp_path: Path) -> None:
    """Each after another state was stored, a moment later."""
    corpus = tiny.write_corpus(tmp_path / "corpus.jsonl", 12, seed=3)

    def words(out: Path) -> tuple[object, ...]:
        return (
            "lens", "fit", "--model", model, "--corpus", corpus, "--kind", "tuned", "--refine",
            "300", "--seq-len", "32", "--compute-dtype", "float32", "--out", out,
        )  # fmt: skip

    def stored(out: Path) -> int:
        state = out / "refining.pt"
        return state.stat().st_mtime_ns if state.exists() else 0

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(*words(whole)).code == 0
    rng, kills = random.Random(0), 0
    while kills < 10:
        before, process = stored(killed), launch({}, *words(killed))
        while stored(killed) == before and process.poll() is None:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
        kills += 1
    assert run(*words(killed)).code == 0
    files = [path.name for path in whole.iterdir() if path.is_file()]
    assert "params.pt" in files
    assert all((killed / f).read_bytes() == (whole / f).read_bytes() for f in files)
