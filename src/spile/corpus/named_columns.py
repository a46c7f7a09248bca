"""Columns named by --keep and --filter, and those that are kept by default.

The default is chosen once, from the first rows of the first file, and stored in the recipe: every
worker uses the same columns, and a dataset keeps those it was begun with.
"""

from collections.abc import Sequence
from contextlib import closing

from spile.core.disagreement import DISAGREEMENT_COLUMNS
from spile.core.errors import ConfigError, InputError
from spile.core.expressions import DocumentFilter
from spile.core.humanize import plural
from spile.core.index import DOCUMENT_COLUMNS
from spile.core.options import listed
from spile.corpus.chats.rows import RowReader
from spile.corpus.documents import NO_COLUMNS, can_be_named
from spile.corpus.formats.contract import CorpusFile, ReadContext, ReadOptions
from spile.corpus.reader import CorpusReader
from spile.corpus.units import sampled_files

LABEL = 64  # longest text of a label, in characters
_MOST_LABELS = 32
_ALWAYS = ("id", "url")  # kept by default, whatever their values


def parse_keep(keep: str) -> tuple[str, ...]:
    """Return the columns that `--keep` names, sorted: their order does not change the dataset."""
    if keep == NO_COLUMNS:
        return ()
    names = [name.strip() for name in keep.split(",")]
    for name in names:
        if not name or not name.isprintable():
            raise ConfigError(f"--keep {keep!r}: columns are separated by commas, as in id,url")
        if name in (own := (*DOCUMENT_COLUMNS, *DISAGREEMENT_COLUMNS)):
            raise ConfigError(
                f"--keep {name}: the documents table has a column of that name; its own are "
                f"{', '.join(own)}"
            )
    return tuple(sorted({*names}))


def keep_spelled(keep: tuple[str, ...]) -> str:
    """Return the text that `parse_keep` reads back."""
    return ",".join(keep) or NO_COLUMNS


def refuse_missing_columns(reader: CorpusReader, named: tuple[str, ...]) -> None:
    """Refuse a missing column of --keep, or a column of --filter that no file has.

    The first rows of a few files are checked here; every table is checked when it is cut.
    """
    sampled = sampled_files(reader)
    if reader.options.filter:
        _refuse_missing_of_filter(reader, reader.options.filter, sampled)
    for number in sampled if named else ():
        file = reader.files[number]
        if not file.format.has_columns:
            raise InputError(f"{file.path}: such a file has no columns, but --keep names some")
        if not file.format.has_schema:
            found = reader.columns_of(number)
            for name in named:
                if name not in found:
                    raise InputError(
                        f"{file.path}: no {name!r} in its first documents, which --keep or --by "
                        f"names; they have {listed(sorted(found))}"
                    )


def _refuse_missing_of_filter(
    reader: CorpusReader, condition: DocumentFilter, sampled: Sequence[int]
) -> None:
    known = {name for number in sampled for name in reader.columns_of(number)}
    for column in condition.columns:
        # A rare key may occur later, so only a corpus without it is refused.
        every = range(len(reader.files))
        if column in known or any(reader.opened(file).may_have(column) for file in every):
            continue
        more = len(reader.files) - 1
        where = f"{reader.files[0].path}" + (f" and {plural(more, 'more file')}" if more else "")
        raise InputError(condition.missing(where, column, known))


def settled_columns(
    keep: str | None, files: list[CorpusFile], text_column: str | None, reading: RowReader | None
) -> tuple[str, ...]:
    """Return the columns that a recipe keeps, named or by default, from the first file alone."""
    if keep is not None:
        return parse_keep(keep)
    first = files[0].format
    if not first.has_columns:
        return ()
    scalars = first(files[0], 0, ReadContext()).scalar_columns()
    options = ReadOptions(text_column, keep=scalars)
    with closing(CorpusReader(files, options, reading=reading)) as reader:
        if first.keeps_all:
            said = {*reader.columns_of(0)} - reader.made_of(0)
            return tuple(sorted(filter(can_be_named, said)))
        found = [name for name in reader.columns_of(0) if name in _ALWAYS]
        labels = [name for name in _short_columns(reader) if can_be_named(name)]
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
