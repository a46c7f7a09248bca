"""One document of a dataset: its rows, its index and its text, in reading order."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from spile.dataset.read.rows import runs

if TYPE_CHECKING:
    from spile.dataset.read.texts import Texts


class DocumentSource(Protocol):
    """The part of `Dataset` that a document needs."""

    @property
    def url(self) -> str: ...
    @property
    def texts(self) -> "Texts": ...
    def about(self, doc: int) -> dict[str, Any]: ...
    def shape(self, tap: str) -> tuple[int, ...]: ...
    def dtype(self, tap: str, dtype: npt.DTypeLike | None = None) -> np.dtype[Any]: ...
    def read_into(self, tap: str, start: int, out: np.ndarray) -> None: ...


@dataclass(frozen=True)
class Document:
    """One document in reading order: its index, its text, and its rows of any tap."""

    index: np.ndarray
    _dataset: DocumentSource
    rows: np.ndarray  # their numbers in the dataset

    @property
    def doc(self) -> int:
        """The document's ordinal in the corpus."""
        return int(self.index["doc"][0])

    @property
    def about(self) -> dict[str, Any]:
        """The document's entry in the documents table: its columns, a preview, counts."""
        return self._dataset.about(self.doc)

    @property
    def tokens(self) -> list[str]:
        """The text of each of the document's stored tokens, one per row."""
        texts = self._dataset.texts
        return [piece for run in texts.runs(self.index) for piece in run]

    @property
    def text(self) -> str:
        """The text of the document's stored tokens, also special ones; `…` marks gaps."""
        return self._dataset.texts.text(self.index)

    def read(self, tap: str, *, dtype: npt.DTypeLike | None = None) -> np.ndarray:
        """Return the document's rows of a tap, in reading order; `dtype` as in `Dataset.read`."""
        shape, given = self._dataset.shape(tap), self._dataset.dtype(tap, dtype)
        out = np.empty((len(self.rows), *shape), given)
        bounds = runs(self.rows)
        for start, stop in zip(bounds, bounds[1:], strict=False):
            self._dataset.read_into(tap, int(self.rows[start]), out[start:stop])
        return out

    __getitem__ = read

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<spile document {self.doc}: {len(self):,} rows of {self._dataset.url}>"
