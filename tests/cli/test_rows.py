"""`shuffle` and `serve-rows`: numbers as a person writes them, and what was made."""

import pytest

from spile.cli.rows import _count, shuffle_text
from spile.core.errors import ConfigError
from spile.dataset.maintain.shuffle import Shuffled


def test_numbers_may_be_sizes() -> None:
    assert _count("--memory", "4GiB") == 4 << 30
    assert _count("--window", "65536") == 65536
    with pytest.raises(ConfigError, match="--memory must be a number, or 1GiB or 500MB, got 'x'"):
        _count("--memory", "x")


def test_a_shuffle_says_that_every_row_is_there() -> None:
    assert shuffle_text(Shuffled("dest", 5000, 2, 4, 1000, 3)) == (
        "dest: 5,000 rows in random order, 2 units, 4 shards, 1.0 kB, in 3 passes; "
        "every row of the source once"
    )
