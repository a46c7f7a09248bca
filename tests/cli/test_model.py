"""What is said of models: their taps in a table, and what was fetched."""

import pytest

from spile.cli.model import fetch_text, taps_table
from spile.plan.fetch import Fetched


def test_no_name_is_cut_off_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    entry = {
        "name": "resid_post.0-27",
        "shape": [32, 128],
        "bytes": 8192,
        "meaning": "the residual stream after the block",
        "aliases": ["blocks.0.hook_resid_post", "hidden_states[1]"],
    }
    taps_table([entry, {**entry, "name": "logprob", "shape": [], "aliases": []}])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["tap", "shape", "bytes/token", "meaning", "also", "known", "as"]
    assert "32×128" in lines[1] and "8,192" in lines[1] and "blocks.0.hook_resid_post" in lines[1]
    assert lines[2].strip() == "hidden_states[1]", "each name has a line of its own"
    assert lines[3].split()[:2] == ["logprob", "1"]


def test_what_was_fetched_is_said_as_flags() -> None:
    made = Fetched("my models/m", None, "c/*.parquet", None, 7, 2, 3_000_000)
    assert fetch_text(made).splitlines() == [
        "7 files (2 were there already), 3.0 MB fetched",
        "  use     --model 'my models/m' --corpus 'c/*.parquet'",
    ]
