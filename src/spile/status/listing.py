"""List the files of a dataset, from its records alone."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from spile.core.errors import ConfigError
from spile.core.tap_order import sorted_taps
from spile.dataset import format as fmt
from spile.dataset.format import TapInfo
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import readable_passes
from spile.dataset.records.segments import Catalog, TapFiles
from spile.dataset.records.table import Table
from spile.objects import Objects


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


@dataclass(frozen=True)
class _Place:
    """The dataset itself, or one of its passes: its units that are done."""

    units: Catalog
    taps: Mapping[str, TapInfo]
    prefix: str = ""


class Listing:
    """The files of units. Each iteration reads the records again, one segment at a time.

    Attributes:
        taps: the totals of each tap, by layer; then those of the files beside them.
        units: the number of units that have such files.
    """

    def __init__(self, places: Sequence[_Place], only: str | None) -> None:
        """`only`: the tap whose files to list; None: all."""
        self._places = places
        self._info = {tap: info for place in places for tap, info in place.taps.items()}
        found: dict[str, TapFiles] = {}
        for place in places:
            for tap, total in place.units.files_of_taps().items():
                if only in (None, tap):
                    before = found.get(tap, TapFiles())
                    # (A unit of a pass is a unit of the dataset, too.)
                    units = max(before.units, total.units)
                    found[tap] = replace(before + total, units=units)
        beside = [tap for tap in fmt.BESIDE_TAPS if tap in found]
        taps = sorted_taps(found.keys() - {*beside})
        self.taps: dict[str, TapFiles] = {tap: found[tap] for tap in (*taps, *beside)}
        self.units = max((total.units for total in self.taps.values()), default=0)

    def dtype(self, tap: str) -> str | None:
        return self._info[tap].dtype if tap in self._info else None

    @property
    def bytes(self) -> int:
        return sum(total.bytes for total in self.taps.values())

    def __len__(self) -> int:
        return sum(total.files for total in self.taps.values())

    def __iter__(self) -> Iterator[ListedFile]:
        every = ((place.prefix, done) for place in self._places for done in place.units)
        order = {tap: number for number, tap in enumerate(self.taps)}
        for prefix, done in every:
            files = (file for file in done.files() if file.tap in order)
            for file in sorted(files, key=lambda file: order[file.tap]):
                yield ListedFile(
                    prefix + file.key,
                    done.unit,
                    file.tap,
                    file.first,
                    file.count,
                    file.bytes,
                    file.digest,
                    self.dtype(file.tap),
                )


def list_files(objects: Objects, unit: int | None = None, tap: str | None = None) -> Listing:
    """List the files of the finished units; only those of one unit or tap, if given.

    Taps that were added, or are being added, are among them.
    """
    ledger = Ledger(objects)
    table = ledger.table()
    passes = readable_passes(ledger, table)
    tables = {ledger: table, **{each.ledger: found for each, found in passes}}
    taps = sorted_taps({name for each in tables.values() for name in each.taps})
    known = (*taps, *fmt.BESIDE_TAPS)
    if tap is not None and tap not in known:
        raise ConfigError(f"--tap {tap}: not in {objects.url}; it has {', '.join(known)}")
    if unit is not None:
        if not 0 <= unit < len(table.units):
            raise ConfigError(f"--unit {unit}: the units are 0 to {len(table.units) - 1}")
        if ledger.read_done(unit) is None:
            raise ConfigError(f"--unit {unit}: is not done yet")
    return Listing([_place(each, of_each, unit) for each, of_each in tables.items()], tap)


def _place(ledger: Ledger, table: Table, unit: int | None) -> _Place:
    """Return the units that are done, or the one that is asked for."""
    manifest = ledger.derived.read_manifest(ledger.layout)
    if unit is not None:
        record = ledger.read_done(unit)
        units = Catalog.of(ledger.objects, table.layout, [record] if record else [])
    elif manifest is not None:
        units = ledger.derived.catalog(table, manifest)
    else:
        units = ledger.catalog_so_far(table)
    return _Place(units, table.taps, ledger.prefix)


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
