"""How much may be stored: `--max-bytes`, and what it costs a month. No jax."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from spile.core.index import INDEX_DTYPE
from spile.core.tensors import HEADER_ALIGN
from spile.core.threads import mapped
from spile.dataset.ledger import Ledger, Table

# Bytes, roughly: of a token's text; of a document's entry in the table, and of each column kept.
_CHARACTERS = 4
_DOCUMENT = 32
_KEPT = 64


@dataclass(frozen=True)
class Price:
    """Of keeping bytes in a bucket."""

    dollars: float  # a month for 2**30 bytes
    where: str
    source: str

    def monthly(self, size: int) -> float:
        return self.dollars * size / (1 << 30)


# Requests and traffic out of the cloud are not in it.
PRICES = {
    "gs": Price(0.020, "Standard storage, us-central1", "https://cloud.google.com/storage/pricing"),
    "s3": Price(0.023, "S3 Standard, us-east-1, to 50 TB", "https://aws.amazon.com/s3/pricing"),
}


def price_of(url: str) -> Price | None:
    return PRICES.get(url.partition("://")[0])


def row_bytes(table: Table) -> int:
    """Of every tap and the index together."""
    return sum(info.row_bytes for info in table.taps.values()) + INDEX_DTYPE.itemsize


def unit_overhead(table: Table, unit: Mapping[str, Any]) -> int:
    """Beside its rows a unit has statistics, and each of its files a header; and its documents."""
    taps, recipe = table.taps.values(), table.recipe
    headers = sum(HEADER_ALIGN + 16 * info.width for info in taps) + 3 * HEADER_ALIGN
    characters = min(unit["num_docs"] * recipe.preview, _CHARACTERS * unit["tokens"])
    return headers + characters + unit["num_docs"] * (_DOCUMENT + _KEPT * len(recipe.keep))


class Budget:
    """Whether a unit may still be begun.

    What is done is counted by its records, what is in hand or about to be by its estimate, put
    right by how the estimates of the done ones turned out.
    """

    def __init__(self, table: Table, ledger: Ledger, limit: int | None) -> None:
        self._ledger, self._limit = ledger, limit
        each = row_bytes(table)
        self._estimated = {
            int(unit["id"]): int(unit["tokens"] * table.kept) * each + unit_overhead(table, unit)
            for unit in table.units
        }
        self._stored: dict[int, int] = {}  # by unit, of those that are done
        self.spent = False  # whether a unit was refused

    def allows(self, unit: int, done: Collection[int], in_hand: Collection[int]) -> bool:
        """Args:
        in_hand: units that anybody is at work on.
        """
        if self._limit is None:
            return True
        new = sorted({*done} & {*self._estimated} - {*self._stored})
        for record in mapped(self._ledger.read_done, new, self._ledger.objects.parallel):
            if record is not None:
                self._stored[record.unit] = sum(file.bytes for file in record.files())
        stored = sum(self._stored.values())
        guessed = sum(self._estimated[unit] for unit in self._stored)
        coming = sum(self._estimated[u] for u in {*in_hand, unit} - {*self._stored})
        expected = stored + coming * (stored / guessed if guessed else 1.0)
        self.spent = self.spent or expected > self._limit
        return not self.spent
