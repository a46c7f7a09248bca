"""`spile encode`: what it prints. The verb itself runs in tests/run/test_encode.py."""

from dataclasses import replace

from spile.cli.encode import encoded_text
from spile.run.encode import MadeLatents

MADE = MadeLatents(
    dest="acts/crossed", tap="resid_post.13", latents=73_728, kept=64, rows=5000, units=1,
    truncated=0, bytes=2_000_000,
)  # fmt: skip


def test_the_sizes_are_told_and_rows_that_had_more_latents() -> None:
    told = (
        "acts/crossed: 5,000 rows of resid_post.13, 64 of 73,728 latents each, in 1 unit, 2.0 MB\n"
        "{}  count   spile features acts/crossed"
    )
    assert encoded_text(MADE) == told.format("")
    cut = "  12 rows had more active latents; --latents keeps more\n"
    assert encoded_text(replace(MADE, truncated=12)) == told.format(cut)
