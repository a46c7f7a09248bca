"""What `spile shuffle` prints."""

from spile.cli.rows import shuffle_text
from spile.dataset.maintain.shuffle import Shuffled


def test_a_shuffle_says_that_every_row_is_there() -> None:
    assert shuffle_text(Shuffled("dest", 5000, 2, 4, 1000, 3)) == (
        "dest: 5,000 rows in random order, 2 units, 4 shards, 1.0 kB, in 3 passes; "
        "every row of the source once"
    )
