"""`--pool`: which recipes can be pooled, and the spans of documents."""

from collections.abc import Collection, Sequence

import numpy as np

from spile.core.errors import ConfigError
from spile.core.index import ROLES
from spile.core.pool import DOCUMENT, Pool
from spile.core.recipe import ResolvedRecipe
from spile.corpus.chats.rows import RowReader
from spile.corpus.programs.program import is_program
from spile.dataset.codec.quantization import QUANTIZED
from spile.models.taps import Tap

_NO_SPAN = -1


def refuse_pool(
    recipe: ResolvedRecipe,
    taps: Sequence[Tap],
    encoded: Collection[str],
    reading: RowReader | None,
) -> None:
    """Raise if the values of a recipe cannot be pooled as it says."""
    pool = Pool.parse(recipe.pool) if recipe.pool else None
    if pool is None:
        return
    asked = f"--pool {pool}"
    if pool.by_speaker and reading is None and not is_program(recipe.corpus_source):
        raise ConfigError(
            f"{asked}: the corpus holds no chats; name their column with --messages, or pool over "
            f"the document (--pool {pool.by})"
        )
    if not pool.sums:
        return
    if recipe.store_dtype in QUANTIZED:
        raise ConfigError(
            f"{asked}: {recipe.store_dtype} saves little where one row stands for many tokens; "
            "give --store-dtype bfloat16, float16 or float32"
        )
    ids = [tap.name for tap in taps if tap.dtype(recipe.store_dtype).startswith("int")]
    if ids:
        raise ConfigError(f"{asked}: {ids[0]} holds ids, which have no {pool.by}; leave it out")
    if encoded:
        raise ConfigError(
            f"{asked}: latents cannot be pooled yet; leave out --encode, or give --pool last"
        )


def spans_of(
    pool: Pool | None, tokens: Sequence[np.ndarray], flags: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the number of each token's span in its document, negative for tokens of none.

    Empty if documents are the spans, or if nothing is pooled.

    Args:
        flags: of each document's tokens; empty if the documents have no speakers.
    """
    if pool is None or pool.over == DOCUMENT:
        return []
    role = ROLES[pool.over]
    said = flags or [np.zeros(len(ids), np.uint16) for ids in tokens]
    return [np.where(each & role, 0, _NO_SPAN) for each in said]
