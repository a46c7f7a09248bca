"""What a bucket costs: dollars for stored bytes and for requests. No jax."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spile.core.errors import ConfigError
from spile.dataset.codec.columns import Ints
from spile.dataset.format import BESIDE, TapInfo

_READ_IN = "2025"


@dataclass(frozen=True)
class Price:
    """The prices of a bucket, in dollars. Traffic out of the cloud is not part of them."""

    storage: float  # of 2**30 bytes for a month
    writes: float  # of 1,000 creates, replacements or listings
    reads: float  # of 1,000 reads
    where: str
    source: str

    def monthly(self, size: int) -> float:
        return self.storage * size / (1 << 30)

    def requests(self, asked: "Requests") -> float:
        return (self.writes * asked.writes + self.reads * asked.reads) / 1000

    def __str__(self) -> str:
        return f"{self.where} ({self.source})"


# As on these pages when they were last read; `--prices` overrides them.
PRICES = {
    "gs": Price(
        *(0.020, 0.005, 0.0004),
        f"Standard storage, us-central1, {_READ_IN}",
        "https://cloud.google.com/storage/pricing",
    ),
    "s3": Price(
        *(0.023, 0.005, 0.0004),
        f"S3 Standard, us-east-1, to 50 TB, {_READ_IN}",
        "https://aws.amazon.com/s3/pricing",
    ),
}


@dataclass(frozen=True)
class Requests:
    """Requests to a bucket, by what they are priced as. Deleting is free."""

    creates: int
    lists: int
    reads: int

    @property
    def writes(self) -> int:
        return self.creates + self.lists


# The requests for one unit, besides its shards, as `test_requests.py` counts them. Creates: the
# unit's other files, the record, and a heartbeat that claims the unit. Lists: the records and
# twice the heartbeats of its group, and its own files. Reads: the record and the statistics, for
# the segment. Other workers in the same group add none: a listing shows which units they hold.
UNIT_REQUESTS = Requests(creates=len(BESIDE) + 2, lists=4, reads=2)
BEATS_AN_HOUR = 360  # of a worker, with the default --stale-after


def price_of(url: str, given: str | None = None) -> Price | None:
    """Return the prices of a bucket; None if the URL is not a bucket.

    Args:
        given: the value of `--prices`: dollars for storage, writes and reads.

    Raises:
        ConfigError: if `given` is not three numbers.
    """
    public = PRICES.get(url.partition("://")[0])
    if given is None or public is None:
        return public
    try:
        storage, writes, reads = (float(part) for part in given.split(","))
        if not all(0 <= value < 1e6 for value in (storage, writes, reads)):
            raise ValueError
    except ValueError:
        raise ConfigError(
            "--prices must be the dollars for 1 GiB a month, for 1,000 writes or listings and for "
            f"1,000 reads, such as 0.023,0.005,0.0004; got {given!r}"
        ) from None
    return replace(
        public, storage=storage, writes=writes, reads=reads, where="--prices", source=given
    )


def requests_of(rows: Ints, taps: Mapping[str, TapInfo], shard_bytes: int) -> Requests:
    """Return the requests that write units, without the heartbeats in between.

    Args:
        rows: the number of rows of each unit.
        shard_bytes: the largest shard.
    """
    shards = sum(int((-(-rows * info.row_bytes // shard_bytes)).sum()) for info in taps.values())
    return Requests(
        creates=shards + UNIT_REQUESTS.creates * len(rows),
        lists=UNIT_REQUESTS.lists * len(rows),
        reads=UNIT_REQUESTS.reads * len(rows),
    )
