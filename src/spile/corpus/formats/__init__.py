"""The table of corpus formats: one file and one row for each."""

from spile.corpus.formats.arrow import ArrowFormat
from spile.corpus.formats.contract import CorpusFormat
from spile.corpus.formats.csv import CsvFormat, TsvFormat
from spile.corpus.formats.json import JsonArrayFormat, JsonLinesFormat
from spile.corpus.formats.parquet import ParquetFormat
from spile.corpus.formats.program import ProgramFormat
from spile.corpus.formats.text import TextFormat
from spile.corpus.formats.token_ids import TokenArrayFormat

FORMATS: tuple[type[CorpusFormat], ...] = (
    ParquetFormat,
    ArrowFormat,
    JsonLinesFormat,
    JsonArrayFormat,
    CsvFormat,
    TsvFormat,
    TextFormat,
    TokenArrayFormat,
    ProgramFormat,
)
