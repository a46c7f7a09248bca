"""List the files of a dataset, from its records alone."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from spile.core.errors import ConfigError
from spile.dataset.format import TapInfo
from spile.dataset.ledger import Ledger
from spile.dataset.segments import Catalog, TapFiles
from spile.objects import Objects

_BESIDE = ("index", "statistics", "documents")


@dataclass(frozen=True)
class ListedFile:
    """One file of a unit: a shard of a tap, or a file beside the shards."""

    key: str
    unit: int
    tap: str  # or index, statistics, documents
    first: int  # row within the unit
    rows: int
    bytes: int
    digest: str
    dtype: str | None  # None for files beside the shards


class Listing:
    """The files of units. Each iteration reads the records again, one segment at a time.

    Attributes:
        taps: the totals of each tap, in the order of a unit's files.
        units: the number of units that have such files.
    """

    def __init__(self, units: Catalog, taps: Mapping[str, TapInfo], only: str | None) -> None:
        """`only`: the tap whose files to list; None: all."""
        self._units, self._info, self._only = units, taps, only
        found = units.files_of_taps()
        self.taps: dict[str, TapFiles] = {
            tap: total for tap, total in found.items() if only in (None, tap)
        }
        self.units = max((total.units for total in self.taps.values()), default=0)

    def dtype(self, tap: str) -> str | None:
        return self._info[tap].dtype if tap in self._info else None

    @property
    def bytes(self) -> int:
        return sum(total.bytes for total in self.taps.values())

    def __len__(self) -> int:
        return sum(total.files for total in self.taps.values())

    def __iter__(self) -> Iterator[ListedFile]:
        for done in self._units:
            for file in done.files():
                if file.tap in self.taps:
                    yield ListedFile(
                        file.key,
                        done.unit,
                        file.tap,
                        file.first,
                        file.count,
                        file.bytes,
                        file.digest,
                        self.dtype(file.tap),
                    )


def list_files(objects: Objects, unit: int | None = None, tap: str | None = None) -> Listing:
    """List the files of the finished units; only those of one unit or tap, if given."""
    ledger = Ledger(objects)
    table = ledger.table()
    known = (*table.taps, *_BESIDE)
    if tap is not None and tap not in known:
        raise ConfigError(f"--tap {tap}: not in {objects.url}; it has {', '.join(known)}")
    if unit is not None:
        if not 0 <= unit < len(table.units):
            raise ConfigError(f"--unit {unit}: the units are 0 to {len(table.units) - 1}")
        record = ledger.read_done(unit)
        if record is None:
            raise ConfigError(f"--unit {unit}: is not done yet")
        return Listing(Catalog.of(objects, table.layout, [record]), table.taps, tap)
    manifest = ledger.read_manifest()
    units = ledger.catalog(table, manifest) if manifest else ledger.catalog_so_far(table)
    return Listing(units, table.taps, tap)


def json_pieces(files: Listing) -> Iterator[str]:
    """Yield one JSON object in pieces: the totals, those of each tap, and then every file."""
    taps = {
        tap: {"dtype": files.dtype(tap), "files": of.files, "rows": of.rows, "bytes": of.bytes}
        for tap, of in files.taps.items()
    }
    totals = {"units": files.units, "files": len(files), "bytes": files.bytes, "taps": taps}
    yield json.dumps(totals).removesuffix("}") + ', "shards": ['
    before = ""
    for file in files:
        yield before + json.dumps(asdict(file))
        before = ", "
    yield "]}"
