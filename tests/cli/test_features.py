"""`spile features`: its flags, and what it prints."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spile.cli.features import features_text
from spile.cli.parser import run
from spile.features.run import MadeFeatures
from support import stored

MADE = MadeFeatures(
    dataset="acts/latents", tap="resid_post.9", name="resid_post.9-1", latents=1024,
    parts=(3, 3), counted=3, rows=5000, units=12, bytes=2_000_000, note=None,
)  # fmt: skip


def test_the_summary_is_told_and_what_is_left_to_count() -> None:
    assert features_text(MADE) == (
        "acts/latents: 1,024 features of resid_post.9 over 5,000 rows, 2.0 MB (resid_post.9-1)\n"
        "  look    spile serve acts/latents"
    )
    begun = replace(MADE, units=None, parts=(1, 3), note="no logits: z.1 has 8 values, not 32")
    assert features_text(begun) == (
        "acts/latents: 1,024 features of resid_post.9, 1 of 3 parts counted; run the same command "
        "again once the other units are done\n  no logits: z.1 has 8 values, not 32"
    )


def test_the_command_counts_shows_and_drops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = stored.copied(tmp_path / "out", taps=stored.LATENTS, **stored.ENCODED)
    out = str(made.path)
    assert run(["features", out, "--logits", "0", "--share", "0/2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["latents"] == 40
    assert run(["status", out]) == 0
    assert "  features   mlp_out.1-1: 40 latents, 5 of 5 units, " in capsys.readouterr().out
    assert run(["drop", out, "--features", "mlp_out.1-1"]) == 0
    assert "dropped mlp_out.1-1; `spile gc " in capsys.readouterr().out
    assert run(["drop", out]) == 2
    assert "drop: name --taps or --features" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["2/2", "1", "a/b"])
def test_a_share_that_is_none_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["features", "out", "--share", share]) == 2
    assert "--share is I/N, with I from 0 to N - 1" in capsys.readouterr().err
