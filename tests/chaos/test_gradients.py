"""Kills leave the same bits of attributions, integrated gradients and edges, with two workers."""

import signal
from pathlib import Path

import pytest

from chaos.harness import check_same, check_sound, launch, run
from support import tiny

pytestmark = [pytest.mark.chaos, pytest.mark.full]

PLACES = ("commit before", "commit after", "done torn", "done linked", "shard rows")
CASES = {
    "patching": ("--taps", "z_attr:0-1", "--baseline"),
    "integrated": ("--taps", "mlp_out_attr:0,resid_post_grad:1", "--steps", "2"),
    "edges": ("--taps", "resid_post_edge:1", "--writers", "attn_out:0-1", "--reduce", "mean"),
}


@pytest.mark.parametrize("case", CASES)
def test_kills_and_a_second_worker_leave_the_same_rows(
    case: str, model: Path, tmp_path: Path
) -> None:
    corpus = tiny.write_corpus(tmp_path / "corpus.jsonl", 12, seed=3)
    options = ("--model", model, "--corpus", corpus, "--seq-len", "32", "--unit-tokens", "60",
               "--compute-dtype", "float32", "--batch-tokens", "64")  # fmt: skip
    given = CASES[case]
    if case == "patching":  # the values under another change of the same texts
        values = tmp_path / "values"
        spliced = ("--taps", "z:0-1", "--splice", "zero:mlp_out.0", "--out", values)
        assert run("extract", *options, *spliced).code == 0
        given = (*given, values)

    def words(out: Path) -> tuple[object, ...]:
        return ("extract", *options, *given, "--out", out)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(*words(whole)).code == 0
    assert len(list((whole / "done").glob("*/*"))) > 6
    for place in PLACES:
        process = launch({"kill": place, "nth": 1}, *words(killed))
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err
    both = [launch({}, *words(killed), "--share", f"{n}/2") for n in range(2)]
    for process in both:
        _, err = process.communicate()
        assert process.returncode == 0, err
    check_same(killed, whole)
    check_sound(killed)
