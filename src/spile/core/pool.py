"""`--pool` and `--reduce`: which tokens make one row together, and how."""

import re
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
JACOBIAN = "jacobian"  # the mean Jacobian of a later tap with respect to each tap
REDUCED_TO = ("count", "mean", "var", "cov", "cov:TAP", "moments", "jacobian:TAP")
_ASKED = {MOMENTS: "mean,var", COVARIANCE: "mean,cov", JACOBIAN: "jacobian"}
_OF_ANOTHER = re.compile(r"(cov|jacobian):(\w+\.\d{1,9})")
ROLE = "role"  # in place of a column: who speaks


@dataclass(frozen=True)
class Pool:
    """How tokens become a row.

    Attributes:
        by: one of `POOLED_BY`, or `MOMENTS`, `COVARIANCE` or `JACOBIAN`.
        over: the tokens of one row: those of a `document`, of a `turn` of a chat, of a role in a
            document, or of a span that the column of this name gives.
        labels: with `--reduce`, a row is of all tokens of a unit with the same values of these
            columns instead; none: of all.
        beside: the tap whose values stand beside each tap's in a covariance, or of which
            Jacobians are.
    """

    by: str
    over: str = DOCUMENT
    labels: tuple[str, ...] | None = None
    beside: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `--pool`, or what `reduced_by` returns."""
        if text.startswith("reduce "):
            _, asked, *more = text.split(" ", 3)
            columns = _names(more[1], "--by") if more[:1] == ["by"] and len(more) > 1 else ()
            by, beside = _moments_of(asked)
            if by == JACOBIAN and columns:
                raise ConfigError("--reduce jacobian makes one mean of all prompts: leave out --by")
            return cls(by, labels=columns, beside=beside)
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
            of_another = f":{self.beside}" if self.beside else ""
            return f"reduce {_ASKED.get(self.by, self.by)}{of_another}" + (
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
        return self.by in ("mean", "max", MOMENTS, COVARIANCE, JACOBIAN)

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
    """Return how several tokens' values become one, as `Pool.by` has it; None: they do not."""
    found = Pool.parse(pool) if pool else None
    return found.by if found and found.sums else None


def is_reduced(pool: str | None) -> bool:
    """Return whether rows are the sums of `--reduce`."""
    return pool is not None and Pool.parse(pool).labels is not None


def beside(pool: str | None) -> str | None:
    """Return the tap that `--reduce cov:TAP` or `jacobian:TAP` names."""
    return Pool.parse(pool).beside if pool else None


def label_columns(pool: str | None) -> tuple[str, ...]:
    """Return the columns that hold the labels of `--reduce`."""
    return Pool.parse(pool).label_columns if pool else ()


def _moments_of(text: str) -> tuple[str, str | None]:
    """Return what is stored for each label, and the tap that `cov:TAP` or `jacobian:TAP` names."""
    asked = _names(text, "--reduce")
    named = {match[1]: match[2] for match in map(_OF_ANOTHER.fullmatch, asked) if match}
    kinds = {name.partition(":")[0] if _OF_ANOTHER.fullmatch(name) else name for name in asked}
    unknown = kinds - {"count", "mean", "var", "cov", "moments", *named}
    if unknown:
        raise ConfigError(
            f"--reduce {text!r}: {min(unknown)!r} is none of {', '.join(REDUCED_TO)}, where TAP is "
            "a tap such as resid_post.27; join several by commas, as in mean,var"
        )
    if JACOBIAN in kinds:
        if len(asked) > 1:
            raise ConfigError(f"--reduce {text!r}: a Jacobian is reduced alone; leave out the rest")
        return JACOBIAN, named[JACOBIAN]
    if kinds & {"cov", "moments"}:  # second moments follow from covariances
        return COVARIANCE, named.get("cov")
    return MOMENTS if "var" in kinds else "mean", None


def _names(text: str, flag: str) -> tuple[str, ...]:
    names: Sequence[str] = [name.strip() for name in text.split(",")]
    if not all(names) or len({*names}) < len(names):
        raise ConfigError(f"{flag} {text!r}: give each name once, joined by commas")
    return tuple(names)
