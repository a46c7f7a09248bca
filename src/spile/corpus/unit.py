"""A unit: the atom of work, as the unit table has it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from spile.core.errors import DataError
from spile.corpus.files import Span


@dataclass(frozen=True)
class Unit:
    """A fixed range of the corpus: the atom of work. May span several small files."""

    id: int
    first_doc: int  # its ordinal in the corpus; the others follow
    num_docs: int
    tokens: int  # an estimate; the exact count is settled by tokenizing the unit
    spans: tuple[Span, ...]
    skip: tuple[int, ...] = ()  # documents whose text came before

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Unit":
        try:
            parts: dict[str, Any] = {**value}
            parts["spans"] = tuple(Span(**span) for span in parts["spans"])
            parts["skip"] = tuple(parts.get("skip", ()))
            return cls(**parts)
        except (TypeError, KeyError) as error:
            raise DataError(f"the unit table holds what is no unit ({error})") from error
