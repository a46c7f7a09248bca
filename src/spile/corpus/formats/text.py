"""Plain text files: each line is a document, or the whole file is one."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

from spile.core.units import Span
from spile.corpus.documents import CorpusDocument
from spile.corpus.formats.byte_files import ByteFormat, line_ends, no_ends
from spile.corpus.formats.contract import UnitBuilder
from spile.corpus.select import TOO_LARGE
from spile.objects.paths import size_of


class TextFormat(ByteFormat):
    """Plain text."""

    title = "text"
    suffixes = (".txt", ".text")
    has_columns: ClassVar[bool] = False

    @property
    def _whole(self) -> bool:
        return self.options.text_documents == "file"

    def cut(self, builder: UnitBuilder, first: int, byte: int) -> None:
        ends_in = no_ends if self._whole else line_ends
        self.cut_bytes(builder, self.chunks(), ends_in, first, byte)

    def read(self, span: Span) -> Iterator[CorpusDocument]:
        return self._documents(self.lines(span, whole=self._whole), span.first)

    def sample(self) -> tuple[Iterable[CorpusDocument], int]:
        lines, size = self.sampled_lines(whole=self._whole)
        return self._documents(lines, 0), size

    def times_longer(self, taken: int) -> float:
        if not self._whole or self.file.compression or not taken:
            return 1.0
        return max(1.0, size_of(self.file.path) / taken)

    def _documents(self, lines: Iterable[bytes | None], first: int) -> Iterator[CorpusDocument]:
        for number, line in enumerate(lines, first):
            if line is None or len(line) > self.options.max_doc_bytes:
                yield CorpusDocument(skipped=TOO_LARGE)
                continue
            text = line if self._whole else line.removesuffix(b"\r")
            yield CorpusDocument.of_bytes(text, cut_mark=number == 0)
