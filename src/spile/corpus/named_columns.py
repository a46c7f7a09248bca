"""Columns named by --keep and --filter, and those that are kept by default.

The default is chosen once, from the first rows of the first file, and stored in the recipe: every
worker uses the same columns, and a dataset keeps those it was begun with.
"""

import json
import re
from collections.abc import Sequence
from contextlib import closing

from spile.core.errors import ConfigError, InputError
from spile.core.expressions import DocumentFilter
from spile.core.humanize import plural
from spile.core.index import DOCUMENT_COLUMNS
from spile.core.options import listed
from spile.core.threads import cancellation
from spile.corpus.chats.rows import RowReader
from spile.corpus.files import CorpusFile
from spile.corpus.formats.columns import scalar_columns
from spile.corpus.formats.csv import read_header
from spile.corpus.formats.parquet import mean_sizes
from spile.corpus.reader import CorpusReader, ReadOptions

LABEL = 64  # longest text of a label, in characters
_MOST_LABELS = 32
_MOST_BYTES = 4 * LABEL  # mean size of a value: columns of longer ones are not read
_ALWAYS = ("id", "url")  # kept by default, whatever their values
_NONE = "none"
_SAMPLED_FILES = 4
_READ_SIZE = 1 << 22
_KEY_BYTES = 8192  # longest key and the white space after it, more than --filter can name


def parse_keep(keep: str) -> tuple[str, ...]:
    """Return the columns that `--keep` names, sorted: their order does not change the dataset."""
    if keep == _NONE:
        return ()
    names = [name.strip() for name in keep.split(",")]
    for name in names:
        if not name or not name.isprintable():
            raise ConfigError(f"--keep {keep!r}: columns are separated by commas, as in id,url")
        if name in DOCUMENT_COLUMNS:
            raise ConfigError(
                f"--keep {name}: the documents table has a column of that name; its own are "
                f"{', '.join(DOCUMENT_COLUMNS)}"
            )
    return tuple(sorted({*names}))


def keep_spelled(keep: tuple[str, ...]) -> str:
    """Return the text that `parse_keep` reads back."""
    return ",".join(keep) or _NONE


def _can_be_named(name: str) -> bool:
    """Return whether `--keep` could name a column: on resuming, the stored names are parsed so."""
    if name in ("", _NONE, *DOCUMENT_COLUMNS):
        return False
    return name == name.strip() and name.isprintable() and "," not in name


def refuse_missing_columns(reader: CorpusReader, named: tuple[str, ...]) -> None:
    """Refuse a missing column of --keep, or a column of --filter that no file has.

    The first rows of a few files are checked here; every table is checked when it is cut.
    """
    last = len(reader.files) - 1
    sampled = sorted({round(i * last / (_SAMPLED_FILES - 1)) for i in range(_SAMPLED_FILES)})
    if reader.options.filter:
        _refuse_missing_of_filter(reader, reader.options.filter, sampled)
    for number in sampled if named else ():
        file = reader.files[number]
        if file.kind in ("text", "bin"):
            raise InputError(f"{file.path}: such a file has no columns, which --keep names")
        if not file.is_table:
            found = reader.columns_of(number)
            for name in named:
                if name not in found:
                    raise InputError(
                        f"{file.path}: no {name!r} in its first documents, which --keep names; "
                        f"they have {listed(sorted(found))}"
                    )


def _refuse_missing_of_filter(
    reader: CorpusReader, condition: DocumentFilter, sampled: Sequence[int]
) -> None:
    known = {name for number in sampled for name in reader.columns_of(number)}
    for column in condition.columns:
        # A rare key may occur later, so only a corpus without it is refused.
        if column in known or any(_has_key(file, column) for file in reader.files):
            continue
        more = len(reader.files) - 1
        where = f"{reader.files[0].path}" + (f" and {plural(more, 'more file')}" if more else "")
        raise InputError(condition.missing(where, column, known))


def _has_key(file: CorpusFile, key: str) -> bool:
    """Return whether any object of a JSON file has this key, at any depth, or a CSV has the column.

    Reads all of the JSON, unparsed.
    """
    if file.is_csv:
        header = read_header(file)
        return header is not None and key in header.columns
    if file.kind not in ("jsonl", "json"):
        return False
    # (Quotes within a text are escaped, so none looks like a key.)
    spellings = {json.dumps(key, ensure_ascii=ascii).encode() for ascii in (True, False)}
    pattern = re.compile(rb"(?:" + b"|".join(map(re.escape, spellings)) + rb")\s*:")
    tail = b""
    with file.open() as stream:
        while data := file.read(stream, _READ_SIZE):
            cancellation().check()
            data = tail + data
            if pattern.search(data):
                return True
            tail = data[-_KEY_BYTES:]
    return False


def settled_columns(
    keep: str | None, files: list[CorpusFile], text_column: str | None, reading: RowReader | None
) -> tuple[str, ...]:
    """Return the columns that a recipe keeps, named or by default, from the first file alone."""
    if keep is not None:
        return parse_keep(keep)
    file = files[0]
    if file.kind in ("text", "bin"):
        return ()
    options = ReadOptions(text_column, keep=_scalars(file) if file.is_table else ())
    with closing(CorpusReader(files, options, reading=reading)) as reader:
        if file.program:
            said = {*reader.columns_of(0)} - reader.made_of(0)
            return tuple(sorted(filter(_can_be_named, said)))
        found = [name for name in reader.columns_of(0) if name in _ALWAYS]
        labels = [name for name in _short_columns(reader) if _can_be_named(name)]
        return tuple(sorted({*found, *labels[:_MOST_LABELS]}))


def _short_columns(reader: CorpusReader) -> list[str]:
    """Return columns whose first values are numbers, booleans or short texts, as labels are."""
    sampled, _ = reader.sample(0, render=False)
    rows = [document.columns for document in sampled.every if document.columns]
    made_of = reader.made_of(0)
    short: dict[str, bool] = {}  # False: all values so far are missing or empty
    long = {name.partition(".")[0] for name in made_of} | made_of
    for row in rows:
        for name, value in row.items():
            if value in (None, ""):
                short.setdefault(name, False)
            elif isinstance(value, bool | int | float) or (
                isinstance(value, str) and len(value) <= LABEL
            ):
                short[name] = True
            else:
                long.add(name)
    return [name for name, known in short.items() if known and name not in long]


def _scalars(file: CorpusFile) -> tuple[str, ...]:
    """Return the columns of a table that may be labels, by type and, in Parquet, by size."""
    names = scalar_columns(file.schema())
    if file.kind != "parquet" or not names:
        return names
    sizes = mean_sizes(file.path, names)
    return tuple(name for name in names if sizes.get(name, 0) <= _MOST_BYTES)
