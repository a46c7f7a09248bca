"""Reading small corpora in tests."""

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spile.core.units import Span, Unit
from spile.corpus.chats.rows import RowReader
from spile.corpus.chats.template import Rendered
from spile.corpus.documents import Documents
from spile.corpus.files import find_files
from spile.corpus.formats.contract import CorpusFile, ReadContext, ReadOptions
from spile.corpus.formats.tables import TableFormat
from spile.corpus.reader import CorpusReader
from spile.corpus.units import CutOptions, make_units

NOT_UTF8 = b"caf\xe9"


def units_of(
    files: list[CorpusFile],
    size: int = 1 << 30,
    read: ReadOptions | None = None,
    reading: RowReader | None = None,
    **options: Any,
) -> list[Unit]:
    """The units of a corpus, about `size` bytes each."""
    with closing(CorpusReader(files, read, reading=reading)) as reader:
        return make_units(reader, CutOptions(unit_tokens=size, density=1.0, **options))


def read(corpus: Path | str, column: str | None = None, documents: str = "line") -> Documents:
    """Read the whole corpus as one unit."""
    files = find_files(str(corpus))
    options = ReadOptions(column, documents)
    (unit,) = units_of(files, read=options)
    with closing(CorpusReader(files, options)) as reader:
        return reader.read(unit.spans, unit.first_doc)


def write_parquet(path: Path, columns: dict[str, pa.Array], rows: int = 2) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=rows)
    return path


def token_roles(offsets: Sequence[tuple[int, int]], rendered: Rendered) -> list[str]:
    """The role of each token from its characters, or "template": the definition.

    A token that crosses a border belongs to the assistant if any of its characters does, as in
    `transformers`; otherwise to the role of its first character that has one.
    """
    stops = [stop for _, stop, _ in rendered.roles]
    found: list[str] = []
    for start, stop in offsets:
        role = "template"
        for low, _, owner in rendered.roles[bisect_right(stops, start) :]:
            if low >= stop or start == stop:
                break
            if role == "template" or owner == "assistant":
                role = owner
        found.append(role)
    return found


def groups_of(path: Path, table: type[TableFormat]) -> list[tuple[Span, int]]:
    """Return the row groups or record batches of a table, and their sizes."""
    return list(table(CorpusFile(path, table), 0, ReadContext()).groups())
