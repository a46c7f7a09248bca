"""Generations: units that were added to a dataset after its table was made.

The table itself never changes. Each generation is one record, created exclusively, that names more
corpus files and more units; those that were there keep their ids, their rows and their order. A
reader opens the newest generation whose units are all done.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from spile.core.errors import ConfigError, CorruptError
from spile.core.threads import mapped
from spile.dataset import format as fmt
from spile.dataset.codec.columns import ColumnFile, named_by_content
from spile.dataset.records.unit_table import UnitColumns, read_units
from spile.objects import Objects

_LIMITS = ("max_docs", "max_tokens")


@dataclass(frozen=True)
class Generation:
    """What was added to a table at once, beside the units themselves.

    Attributes:
        before: how many units there were before.
        files: those of the corpus that follow the ones before.
        sources: where the files of the recipe's corpus are found now, and then the sources that
            this generation adds.
        max_docs: the limit that all units together keep to, if there is one.
        max_tokens: as `max_docs`.
        columns: the file that holds the units; None before it is stored.
    """

    before: int
    files: tuple[Mapping[str, Any], ...]
    sources: tuple[str, ...]
    max_docs: int | None = None
    max_tokens: int | None = None
    columns: ColumnFile | None = None

    def to_json(self, fingerprint: str, units: ColumnFile, count: int) -> dict[str, Any]:
        """Return the record's body; `units`: the file that holds the units that it adds."""
        return {
            "fingerprint": fingerprint,
            "before": self.before,
            "files": list(self.files),
            "sources": list(self.sources),
            **{name: getattr(self, name) for name in _LIMITS},
            "units": {**units.to_json(), "count": count},
        }

    @classmethod
    def from_json(
        cls, body: Mapping[str, Any], fingerprint: str, before: int, prefix: str
    ) -> "Generation":
        """Rebuild and check a record; raise ValueError if it does not follow the ones before.

        Args:
            before: the number of units that there are without it.
            prefix: of the file that holds the units.
        """
        files, sources = body["files"], body["sources"]
        if body["fingerprint"] != fingerprint or body["before"] != before:
            raise ValueError("it belongs to another table")
        if not isinstance(files, list) or not isinstance(sources, list) or not sources:
            raise ValueError("it names no sources")
        known = cast(list[dict[str, Any]], files)
        texts = [file[name] for file in known for name in ("path", "identity")]
        texts += cast(list[Any], sources)
        if not all(map(fmt.is_name, texts)):
            raise ValueError("a name is not a text")
        limits = {name: body[name] for name in _LIMITS}
        if not all(limit is None or fmt.is_count(limit) for limit in limits.values()):
            raise ValueError("a limit is not a number")
        columns = ColumnFile.from_json(body["units"], prefix)
        return cls(before, tuple(known), tuple(cast(list[str], sources)), **limits, columns=columns)


def read_generations(
    objects: Objects, fingerprint: str, before: int
) -> list[tuple[Generation, UnitColumns]]:
    """Return all generations in order, each with its units.

    Args:
        fingerprint: that of the table.
        before: the number of units of the table alone.
    """
    found: list[tuple[Generation, UnitColumns]] = []
    for number, body in _records(objects):
        key, folder = fmt.generation_key(number), fmt.generation_folder(number)
        if number > fmt.MOST_GENERATIONS:
            raise CorruptError(key, f"is one too many ({fmt.MOST_GENERATIONS:,} may be there)")
        prefix = f"{folder}{fmt.UNIT_COLUMNS}"
        try:
            made = Generation.from_json(body, fingerprint, before, prefix)
            units = read_units(objects, body["units"], prefix)
            if not 0 < len(units) <= fmt.MOST_UNITS - before:
                raise ValueError("it adds no units, or too many")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CorruptError(key, f"is not a generation ({fmt.shown(error)})") from error
        before += len(units)
        found.append((made, units))
    return found


def _records(objects: Objects) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of generations with their numbers, until there is none."""

    def read(number: int) -> dict[str, Any] | None:
        return fmt.read_record(objects, fmt.generation_key(number), "generation")

    first = read(1)
    if first is None:  # as of most datasets: nothing is read ahead
        return
    yield 1, first
    for number, body in enumerate(mapped(read, itertools.count(2), objects.parallel), 2):
        if body is None:
            return
        yield number, body


def create_generation(
    objects: Objects, number: int, made: Generation, fingerprint: str, units: UnitColumns
) -> None:
    """Store a generation, unless one is there. The file of its units is created before it."""
    if number > fmt.MOST_GENERATIONS:
        raise ConfigError(
            f"{objects.url}: has grown {fmt.MOST_GENERATIONS:,} times, which is the most; "
            "`spile compact` makes one table of it, which can grow"
        )
    prefix = f"{fmt.generation_folder(number)}{fmt.UNIT_COLUMNS}"
    file, data = named_by_content(prefix, units.columns)
    objects.create(file.key, data)
    body = made.to_json(fingerprint, file, len(units))
    objects.create(fmt.generation_key(number), fmt.encode_record("generation", body))
