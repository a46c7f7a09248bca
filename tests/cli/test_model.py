"""What the command prints about models: their taps, and what was fetched."""

import pytest

from spile.cli.model import fetch_text, taps_text
from spile.plan.fetch import Fetched

ENTRY = {
    "name": "resid_post:0-27",
    "shape": [32, 128],
    "bytes": 8192,
    "meaning": "the residual stream after the block, before any norm of the model is applied",
    "aliases": ["blocks.0.hook_resid_post", "blocks.0.hook_out", "hidden_states[1]"],
}


@pytest.mark.parametrize("width", [60, 80, 200])
def test_taps_fit_the_terminal_and_no_name_is_cut_in_two(width: int) -> None:
    text = taps_text([ENTRY, {**ENTRY, "name": "logprob", "shape": [], "aliases": []}], width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split() == ["tap", "shape", "bytes/token", "meaning"]
    assert lines[1].split()[:3] == ["resid_post:0-27", "32×128", "8,192"]
    assert all(name in text for name in ENTRY["aliases"])
    assert [line.split()[:2] for line in lines if line.startswith("logprob")] == [["logprob", "1"]]


def test_what_was_fetched_is_said_as_flags() -> None:
    made = Fetched("my models/m", None, "c/*.parquet", None, 7, 2, 3_000_000)
    assert fetch_text(made).splitlines() == [
        "7 files (2 were there already), 3.0 MB fetched",
        "  use     --model 'my models/m' --corpus 'c/*.parquet'",
    ]
