"""Select documents by their hash and their length, independently of their order.

(`DocumentFilter` in `core/expressions.py` selects by columns.)

Every rule looks at one document alone, so the result is the same wherever and whenever it is read.
Excluded documents are counted by reason.
"""

from dataclasses import dataclass

import xxhash

from spile.core.recipe import ResolvedRecipe

FILTERED = "left out by --filter"
TOO_LARGE = "over --max-doc-bytes"
EMPTY = "empty"
BLANK = "white space only"
_SCALE = 1 << 64


@dataclass(frozen=True)
class Selection:
    """The selection rules of a recipe."""

    fraction: float | None = None
    holdout: float | None = None
    part: str = "rest"
    min_tokens: int | None = None
    max_doc_tokens: int | None = None

    @property
    def share(self) -> float:
        """The share of documents that the hash rules keep."""
        held = self.holdout or 0.0
        rest = held if self.part == "holdout" else 1 - held
        return (self.fraction or 1.0) * rest

    @property
    def by_hash(self) -> bool:
        """Whether any rule depends on the contents of documents."""
        return self.fraction is not None or self.holdout is not None

    def refuses_content(self, content: bytes) -> str:
        """Return why a document is excluded; empty if it is not."""
        if self.fraction is not None and _share_of(content, "fraction") >= self.fraction:
            return "beyond --fraction"
        if self.holdout is not None:
            held_out = _share_of(content, "holdout") < self.holdout
            if held_out is not (self.part == "holdout"):
                return "held out" if held_out else "not held out"
        return ""

    def refuses_length(self, tokens: int) -> str:
        if not tokens:
            return "no tokens"
        if self.min_tokens is not None and tokens < self.min_tokens:
            return "under --min-tokens"
        if self.max_doc_tokens is not None and tokens > self.max_doc_tokens:
            return "over --max-doc-tokens"
        return ""


def selection_of(recipe: ResolvedRecipe) -> Selection:
    return Selection(
        recipe.fraction, recipe.holdout, recipe.part, recipe.min_tokens, recipe.max_doc_tokens
    )


def _share_of(content: bytes, rule: str) -> float:
    """Return a number from 0 to 1, determined by the document and the rule."""
    return xxhash.xxh3_64_intdigest(rule.encode() + b"\0" + content) / _SCALE
