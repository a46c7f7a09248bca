"""`--pool` and `--reduce`: which tokens make one row together, and how."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from spile.core.errors import ConfigError
from spile.core.index import ROLES

POOLED_BY = ("mean", "max", "last", "first")
DOCUMENT, TURN = "document", "turn"
SPEAKERS = tuple(role for role in ROLES if role != "template")
MOMENTS = "moments"  # mean and variance
COVARIANCE = "covariance"  # mean and covariance
REDUCED_TO = ("count", "mean", "var", "cov")
_ASKED = {MOMENTS: "mean,var", COVARIANCE: "mean,cov"}
ROLE = "role"  # in place of a column: who speaks


@dataclass(frozen=True)
class Pool:
    """How tokens become a row.

    Attributes:
        by: one of `POOLED_BY`, or `MOMENTS`, or `COVARIANCE`.
        over: the tokens of one row: those of a `document`, of a `turn` of a chat, of a role in a
            document, or of a span that the column of this name gives.
        labels: with `--reduce`, a row is of all tokens of a unit with the same values of these
            columns instead; none: of all.
    """

    by: str
    over: str = DOCUMENT
    labels: tuple[str, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `--pool`, or what `reduced_by` returns."""
        if text.startswith("reduce "):
            _, asked, *more = text.split(" ", 3)
            columns = _names(more[1], "--by") if more[:1] == ["by"] and len(more) > 1 else ()
            return cls(_moments_of(asked), labels=columns)
        by, colon, over = text.partition(":")
        if by not in POOLED_BY or (colon and not over):
            raise ConfigError(
                f"--pool must be {', '.join(POOLED_BY[:-1])} or {POOLED_BY[-1]}, alone or with "
                f":{TURN}, a role ({', '.join(SPEAKERS)}) or a column, as in mean:{TURN}; got "
                f"{text!r}"
            )
        return cls(by, over or DOCUMENT)

    def __str__(self) -> str:
        if self.labels is not None:
            return f"reduce {_ASKED.get(self.by, self.by)}" + (
                f" by {','.join(self.labels)}" if self.labels else ""
            )
        return self.by if self.over == DOCUMENT else f"{self.by}:{self.over}"

    @property
    def flag(self) -> str:
        """The option as it was given, for messages."""
        if self.labels is None:
            return f"--pool {self}"
        return "--" + str(self).replace(" by ", " --by ")

    @property
    def sums(self) -> bool:
        """Whether values are computed from those of several tokens, and not chosen."""
        return self.by in ("mean", "max", MOMENTS, COVARIANCE)

    @property
    def column(self) -> str | None:
        """The column that gives the spans."""
        own = self.labels is not None or self.over in (DOCUMENT, TURN, *SPEAKERS)
        return None if own else self.over

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns that hold the labels."""
        return tuple(name for name in self.labels or () if name != ROLE)

    @property
    def by_speaker(self) -> bool:
        """Whether spans follow from who speaks, so that the corpus must hold chats."""
        return self.over == TURN or self.over in SPEAKERS or ROLE in (self.labels or ())


def reduced_by(reduce: str | None, by: str | None) -> str:
    """Return the text of `--reduce` and `--by` that a recipe stores as `pool`."""
    if reduce is None:
        raise ConfigError("--by needs --reduce, as in --reduce mean --by label")
    columns = None if by is None else ",".join(_names(by, "--by"))
    return str(Pool.parse(f"reduce {reduce.replace(' ', '')}" + (f" by {columns}" if by else "")))


def reduces(pool: str | None) -> str | None:
    """Return how several tokens' values become one: "mean", "max", `MOMENTS` or `COVARIANCE`."""
    found = Pool.parse(pool) if pool else None
    return found.by if found and found.sums else None


def is_reduced(pool: str | None) -> bool:
    """Return whether rows are the sums of `--reduce`."""
    return pool is not None and Pool.parse(pool).labels is not None


def label_columns(pool: str | None) -> tuple[str, ...]:
    """Return the columns that hold the labels of `--reduce`."""
    return Pool.parse(pool).label_columns if pool else ()


def _moments_of(text: str) -> str:
    asked = _names(text, "--reduce")
    unknown = [name for name in asked if name not in REDUCED_TO]
    if unknown:
        raise ConfigError(
            f"--reduce {text!r}: {unknown[0]!r} is none of {', '.join(REDUCED_TO)}; join several "
            "by commas, as in mean,var"
        )
    if "cov" in asked:
        return COVARIANCE
    return MOMENTS if "var" in asked else "mean"


def _names(text: str, flag: str) -> tuple[str, ...]:
    names: Sequence[str] = [name.strip() for name in text.split(",")]
    if not all(names) or len({*names}) < len(names):
        raise ConfigError(f"{flag} {text!r}: give each name once, joined by commas")
    return tuple(names)
