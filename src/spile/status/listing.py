"""List the files of a dataset, from its records alone."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from spile.core.errors import ConfigError
from spile.dataset.format import Done
from spile.dataset.ledger import Ledger
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


def list_files(
    objects: Objects, unit: int | None = None, tap: str | None = None
) -> list[ListedFile]:
    """List the files of the finished units; only those of one unit or tap, if given."""
    ledger = Ledger(objects)
    table = ledger.table()
    known = (*table.taps, *_BESIDE)
    if tap is not None and tap not in known:
        raise ConfigError(f"--tap {tap}: not in {objects.url}; it has {', '.join(known)}")
    records: Iterable[Done] = ()
    if unit is not None:
        if not 0 <= unit < len(table.units):
            raise ConfigError(f"--unit {unit}: the units are 0 to {len(table.units) - 1}")
        record = ledger.read_done(unit)
        if record is None:
            raise ConfigError(f"--unit {unit}: is not done yet")
        records = [record]
    else:
        manifest = ledger.read_manifest()
        records = ledger.catalog(table, manifest) if manifest else ledger.catalog_so_far(table)

    def files() -> Iterator[ListedFile]:
        for done in records:
            for file in done.files():
                info = table.taps.get(file.tap)
                yield ListedFile(
                    file.key,
                    done.unit,
                    file.tap,
                    file.first,
                    file.count,
                    file.bytes,
                    file.digest,
                    info.dtype if info else None,
                )

    return [file for file in files() if tap is None or file.tap == tap]


def to_json(files: list[ListedFile]) -> dict[str, object]:
    """Return the files as JSON, with their totals by tap."""
    taps: dict[str, dict[str, object]] = {}
    for file in files:
        of_tap = taps.setdefault(file.tap, {"dtype": file.dtype, "files": 0, "rows": 0, "bytes": 0})
        for name, amount in (("files", 1), ("rows", file.rows), ("bytes", file.bytes)):
            of_tap[name] = of_tap[name] + amount  # type: ignore[operator]
    return {
        "units": len({file.unit for file in files}),
        "files": len(files),
        "bytes": sum(file.bytes for file in files),
        "taps": taps,
        "shards": [asdict(file) for file in files],
    }
