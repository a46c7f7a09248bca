"""The example probe reads a label off rows that hold it, and nothing off rows that do not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import spile
from support import tiny, zygote

PROBE = Path(__file__).parents[2] / "examples" / "probe.py"


def probe(dataset: Path, label: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(PROBE), str(dataset), "--tap", "resid_post.0", "--label", label]
    return zygote.run(command, env=tiny.environment())


def accuracy(dataset: Path, label: str) -> tuple[float, float]:
    result = probe(dataset, label)
    assert result.returncode == 0, result.stderr
    right, usual = re.findall(r"\d\.\d{3}", result.stdout)
    return float(right), float(usual)


def test_what_rows_hold_is_read_from_them(tmp_path: Path) -> None:
    """Documents of two alphabets, and a number drawn for each that has nothing to do with them."""
    rng = np.random.default_rng(0)
    corpus = tmp_path / "docs.jsonl"
    with corpus.open("w") as file:
        for number in range(200):
            letters = "abcdef" if number % 2 else "uvwxyz"
            about = {"kind": "early" if number % 2 else "late", "drawn": int(rng.integers(10))}
            text = "".join(rng.choice(list(letters), 30))
            file.write(json.dumps({"text": text, **about}) + "\n")
    recipe = spile.Recipe(
        model=str(tiny.write_model(tmp_path / "model")), corpus=str(corpus), taps="resid_post:0",
        keep="kind,drawn", seq_len=64,
    )  # fmt: skip
    spile.extract(recipe, str(tmp_path / "out"))
    right, usual = accuracy(tmp_path / "out", "kind == 'early' and drawn >= 0")
    assert right > 0.95 > usual
    right, usual = accuracy(tmp_path / "out", "drawn >= 5")
    assert right < usual + 0.1
    wrong = probe(tmp_path / "out", "kind == early")
    assert wrong.returncode == 1 and wrong.stderr.count("\n") == 1
    assert "no column 'early', which --label names" in wrong.stderr
    assert 'a text needs quotes: "early"' in wrong.stderr
