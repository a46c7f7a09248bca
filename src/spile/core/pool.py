"""`--pool`: which tokens make one row together, and how."""

from dataclasses import dataclass
from typing import Self

from spile.core.errors import ConfigError
from spile.core.index import ROLES

POOLED_BY = ("mean", "max", "last", "first")
DOCUMENT, TURN = "document", "turn"
SPEAKERS = tuple(role for role in ROLES if role != "template")


@dataclass(frozen=True)
class Pool:
    """How tokens become a pooled row.

    Attributes:
        by: one of `POOLED_BY`.
        over: the tokens of one row: those of a `document`, of a `turn` of a chat, of a role in a
            document, or of a span that the column of this name gives.
    """

    by: str
    over: str = DOCUMENT

    @classmethod
    def parse(cls, text: str) -> Self:
        by, colon, over = text.partition(":")
        if by not in POOLED_BY or (colon and not over):
            raise ConfigError(
                f"--pool must be {', '.join(POOLED_BY[:-1])} or {POOLED_BY[-1]}, alone or with "
                f":{TURN}, a role ({', '.join(SPEAKERS)}) or a column, as in mean:{TURN}; got "
                f"{text!r}"
            )
        return cls(by, over or DOCUMENT)

    def __str__(self) -> str:
        return self.by if self.over == DOCUMENT else f"{self.by}:{self.over}"

    @property
    def sums(self) -> bool:
        """Whether values are computed from those of several tokens, and not chosen."""
        return self.by in ("mean", "max")

    @property
    def column(self) -> str | None:
        """The column that gives the spans."""
        return None if self.over in (DOCUMENT, TURN, *SPEAKERS) else self.over

    @property
    def by_speaker(self) -> bool:
        """Whether spans follow from who speaks, so that the corpus must hold chats."""
        return self.over == TURN or self.over in SPEAKERS


def reduces(pool: str | None) -> str | None:
    """Return how values of several tokens become one, "mean" or "max"; None if they do not."""
    found = Pool.parse(pool) if pool else None
    return found.by if found and found.sums else None
