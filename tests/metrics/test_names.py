"""The table of the documentation and the names that are reported are the same."""

import re
from pathlib import Path

from spile.metrics.names import NAMES, OF_TAPS, described

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_has_every_name_with_its_unit_and_meaning() -> None:
    _, _, values = PAGE.read_text("utf-8").partition("## Values")
    rows = re.findall(r"^\| `(\S+)` \| (.*?) \| (.*?) \|$", values, re.M)
    shown = {name.removesuffix("/TAP"): (unit, meaning) for name, unit, meaning in rows}
    assert shown == {
        name: (about.unit + " (total)" * about.total, about.meaning)
        for name, about in NAMES.items()
    }


def test_a_tap_is_told_from_what_is_said_of_it() -> None:
    assert described("tap/mean_norm/resid_post.20") == ("tap/mean_norm", "resid_post.20")
    assert described("rate/tokens") == ("rate/tokens", "")
    assert {"tap/mean_norm", "tap/max_abs", "tap/nonfinite"} == OF_TAPS
