"""`spile extract`: options from a file and from flags, and the summary at the end."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from spile import cli
from spile.cli.extract import extract_summary, given
from spile.core.config import RayOptions, Recipe, Runtime, flag_of
from spile.core.errors import ConfigError
from spile.metrics import Counters
from spile.run.extract import Outcome

NO_ESTIMATE: Any = None  # the lines are not made of it


def parsed(*words: str) -> argparse.Namespace:
    return cli.make_parser().parse_args(["extract", *words])


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "a"\nout = "there"\nseq-len = 64\n'.replace("seq-len", "seq_len"))
    options = given(parsed("--config", str(file), "--model", "b"))
    assert options == {"model": "b", "out": "there", "seq_len": 64}


def test_an_empty_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="--out must be a non-empty text, got ''"):
        given(parsed("--out", ""))


def test_help_explains_a_dozen_flags_and_names_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    told, _, rest = capsys.readouterr().out.partition("more flags (`spile extract --help-all`")
    assert "spile extract --model demo --corpus demo" in told, "an example"
    explained = re.findall(r"^  (--[a-z-]+)", told, re.MULTILINE)
    assert len(explained) == 12 and {"--model", "--corpus", "--taps", "--out"} < {*explained}
    assert "end, a document's last token" in " ".join(told.split())
    named = {*re.findall(r"--[a-z-]+", rest)}
    every = {flag_of(name) for kind in (Recipe, Runtime, RayOptions) for name in kind.names()}
    assert every <= named | {*explained} and named.isdisjoint(explained)
    with pytest.raises(SystemExit):
        parsed("--help-all")
    whole = capsys.readouterr().out
    assert all(re.search(rf"^  {flag}\b", whole, re.MULTILINE) for flag in every)
    assert "\nrecipe: chats:\n" in whole and "\nsites:" in whole


def outcome(**changes: Any) -> Outcome:
    values: dict[str, Any] = {"out": "acts", "rows": 90, "tokens": 100, "documents": 5}
    values |= {"bytes": 2000}
    values |= {"units": 2, "units_total": 2, "skipped": {}, "estimate": NO_ESTIMATE}
    return Outcome(**{**values, **changes})


def test_the_summary_says_what_was_made_and_what_to_do_next() -> None:
    lines = extract_summary("my acts", outcome(), Counters()).splitlines()
    assert lines[0] == "my acts: 5 documents, 90 rows per tap (of 100 tokens), 2.0 kB in 2 units"
    assert [line.split()[0] for line in lines[1:]] == ["see", "verify", "read"]
    assert lines[1].endswith("serve 'my acts'") and lines[2].endswith("verify 'my acts'")
    one = outcome(documents=1, rows=1, tokens=1, units=1, units_total=1)
    told = extract_summary("acts", one, Counters()).splitlines()[0]
    assert told == "acts: 1 document, 1 row per tap, 2.0 kB in 1 unit"


def test_the_device_never_waits_while_it_computes() -> None:
    counters = Counters()
    counters.add(device_busy=10.0, device_idle=0.0, waited_for_text=5.4, reading=1.0, prepared=9)
    line = extract_summary("acts", outcome(), counters).splitlines()[1]
    assert "computed for 100.0% of 10.0 s and waited for text for 0.0%" in line


def test_what_is_missing_is_said_with_the_reason() -> None:
    made = outcome(units=1, skipped={"no tokens": 3}, truncated={"resid_post_latents.0": 4})
    lines = extract_summary("acts", made, Counters()).splitlines()
    assert lines[1].startswith("--max-bytes ended it after 1 of 2 units")
    assert lines[2] == "left out: 3 no tokens"
    assert lines[3].startswith("resid_post_latents.0: in 4 rows more latents were active")
    assert lines[-2].endswith("verify acts --partial") and "partial=True" in lines[-1]


def test_an_outcome_is_short_when_printed() -> None:
    assert repr(outcome()) == (
        "<acts: 90 rows per tap of 5 documents, 2.0 kB in 2 units; spile.open('acts') reads it>"
    )
