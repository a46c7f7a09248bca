"""The example adapter is trained: the loss on its texts falls, and Spile reads it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from support import tiny

SMALL = ["--length", "48", "--steps", "20", "--rate", "1e-2"]  # one piece of each document


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of two alphabets."""
    folder, rng = tmp_path_factory.mktemp("lora"), np.random.default_rng(0)
    with (folder / "docs.jsonl").open("w") as file:
        for number in range(40):
            early = number % 3 > 0
            text = "".join(rng.choice(list("abcdef" if early else "uvwxyz"), 50))
            file.write(json.dumps({"text": text, "kind": "early" if early else "late"}) + "\n")
    recipe = spile.Recipe(
        model=str(tiny.write_model(folder / "model")), corpus=str(folder / "docs.jsonl"),
        taps="resid_post:1,logprob", keep="kind", seq_len=64,
    )  # fmt: skip
    spile.extract(recipe, str(folder / "base"))
    return folder / "base"


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # of torch and PEFT
def test_the_loss_of_its_kind_of_text_falls_and_extract_reads_the_adapter(
    base: Path,
    imported: Callable[[str], Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = imported("train_lora").main
    main([str(base), "--label", "kind == 'early'", "--out", str(tmp_path / "lora"), *SMALL])
    printed = capsys.readouterr().out
    (before, after), (_, others) = [
        [float(number) for number in found]
        for found in re.findall(r": (\S+) nats a token before, (\S+) after", printed)
    ]
    assert after < before - 1 and after < others - 1, printed
    spile.extract(spile.Recipe(like=str(base), lora=str(tmp_path / "lora")), str(tmp_path / "out"))
    pair = spile.align(base=base, tuned=tmp_path / "out")
    held = [d for d in range(0, 40, 5) if d % 3 > 0]
    one, two = (np.mean([ds.document(d)["logprob"][:47].mean() for d in held])
                for ds in pair.sides.values())  # fmt: skip
    assert two - one == pytest.approx(before - after, abs=0.05)
    with pytest.raises(SystemExit, match="no document has 48 tokens; see --label, --length"):
        main([str(base), "--label", "kind == 'none'", "--out", str(tmp_path / "none"), *SMALL])
