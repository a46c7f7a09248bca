"""Which columns are kept of each document: those named by `--keep`, or what identifies it."""

from contextlib import closing

from spile.core.errors import ConfigError, InputError
from spile.core.index import DOCUMENT_COLUMNS
from spile.corpus.chats.rows import Reading
from spile.corpus.files import CorpusFile
from spile.corpus.reader import CorpusReader

_DEFAULT = ("id", "url")
_NONE = "none"
_SAMPLED_FILES = 4


def parse_keep(keep: str) -> tuple[str, ...]:
    """The columns that `--keep` names, in one order: another is no other dataset."""
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


def spelled(keep: tuple[str, ...]) -> str:
    """What `parse_keep` reads."""
    return ",".join(keep) or _NONE


def _can_be_named(name: str) -> bool:
    """Whether `--keep` could name it: on resuming, the stored names are read so."""
    if name in ("", _NONE, *DOCUMENT_COLUMNS):
        return False
    return name == name.strip() and name.isprintable() and "," not in name


def usual_columns(reader: CorpusReader) -> tuple[str, ...]:
    """Where nothing is named: id and url, if the first file has them; of a program's documents
    all that it says of them."""
    file = reader.files[0]
    if file.kind in ("text", "bin"):
        return ()
    found = reader.columns_of(0)
    if file.program:
        return tuple(sorted(filter(_can_be_named, found)))
    return tuple(name for name in _DEFAULT if name in found)


def refuse_missing(reader: CorpusReader, named: tuple[str, ...]) -> None:
    """Stop where a column that was named is not there.

    Of tables every file says what it has, when it is cut; of others the first rows of a few do.
    """
    if not named:
        return
    last = len(reader.files) - 1
    for number in sorted({round(i * last / (_SAMPLED_FILES - 1)) for i in range(_SAMPLED_FILES)}):
        file = reader.files[number]
        if file.kind in ("text", "bin"):
            raise InputError(f"{file.path}: such a file has no columns, which --keep names")
        if not file.is_table:
            found = reader.columns_of(number)
            for name in named:
                if name not in found:
                    raise InputError(
                        f"{file.path}: no {name!r} in its first documents, which --keep names; "
                        f"they have {', '.join(sorted(found)) or 'none'}"
                    )


def settled_columns(
    keep: str | None, files: list[CorpusFile], text_column: str | None, reading: Reading | None
) -> tuple[str, ...]:
    if keep is not None:
        return parse_keep(keep)
    with closing(CorpusReader(files, text_column, "line", reading=reading)) as reader:
        return usual_columns(reader)
