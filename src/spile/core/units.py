"""A unit of work, and the spans of the corpus that it consists of.

`corpus` cuts units and reads them; `dataset` stores them as columns. Both use these records.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Span:
    """Consecutive documents of one file.

    In line files `start` and `stop` are offsets into the decompressed bytes, and `digest` is the
    hash of these bytes, computed for the unit table and checked at every reading. In Arrow they are
    the place of the record batch, and the hash of its header.

    Attributes:
        before: rows of its row group or record batch before the first.
        doc: the ordinal of its first document, if that does not follow the previous span.
    """

    file: int
    first: int
    count: int
    start: int = 0
    stop: int = 0
    digest: str = ""
    before: int = 0
    doc: int | None = None

    def part(self, taken: int, count: int) -> "Span":
        """Return the span of some rows of a row group or record batch."""
        return replace(self, first=self.first + taken, count=count, before=self.before + taken)


@dataclass(frozen=True)
class Unit:
    """A fixed range of the corpus: the atom of work. May span several small files."""

    id: int
    first_doc: int  # the ordinal in the corpus of its first document
    num_docs: int
    tokens: int  # an estimate; tokenizing the unit gives the exact count
    spans: tuple[Span, ...]
    skip: tuple[int, ...] = ()  # documents whose text occurred before
    # In a unit merged from several: the number of documents of each, which are packed by themselves
    # so that the rows stay in their order. Empty: all documents are packed together.
    packed: tuple[int, ...] = ()

    @property
    def doc_runs(self) -> list[tuple[int, int]]:
        """The runs of consecutive documents: the ordinal of the first of each, and its length.

        There is one run, except in merged units of a permuted corpus. There, a span that does not
        follow the previous one gives its first document.
        """
        if all(span.doc is None for span in self.spans):
            return [(self.first_doc, self.num_docs)]
        runs = [(self.first_doc, 0)]
        for span in self.spans:
            first, count = runs.pop() if span.doc is None else (span.doc, 0)
            runs.append((first, count + span.count))
        return [run for run in runs if run[1]] or runs[:1]
