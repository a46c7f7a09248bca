"""`--pool` and `--reduce`: which recipes can be pooled, and the spans of documents."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spile.core.config import Recipe
from spile.core.errors import ConfigError, InputError
from spile.core.humanize import size
from spile.core.index import ROLES
from spile.core.options import listed
from spile.core.pool import COVARIANCE, DOCUMENT, JACOBIAN, ROLE, SPEAKERS, TURN, Pool, reduced_by
from spile.core.recipe import ResolvedRecipe
from spile.corpus.character_spans import NONE, spans_of_tokens
from spile.corpus.chats.rows import RowReader
from spile.corpus.documents import CorpusDocument, Documents
from spile.corpus.formats.token_ids import TokenIds
from spile.corpus.programs.program import is_program
from spile.corpus.reader import CorpusReader
from spile.corpus.tokenize import TextTokenizer
from spile.corpus.units import sampled_files
from spile.dataset.codec.quantization import QUANTIZED
from spile.dataset.format import MAX_WIDTH, covariance_width
from spile.models.config.arch import Arch
from spile.models.sites import BLOCK, LENSES
from spile.models.taps import Tap, parse_taps, place_of


def reducing(recipe: Recipe) -> Recipe:
    """Return a recipe whose `pool` says what `reduce` and `by` ask for."""
    pool = reduced_by(recipe.reduce, recipe.by)
    if recipe.pool not in (None, pool):
        raise ConfigError("--pool and --reduce exclude each other: each says what a row is")
    if recipe.store_dtype is not None:
        raise ConfigError("--reduce stores float64; leave out --store-dtype")
    return replace(recipe, pool=pool, reduce=None, by=None)


def refuse_pool(
    recipe: ResolvedRecipe,
    taps: Sequence[Tap],
    arch: Arch,
    encoded: Collection[str],
    reading: RowReader | None,
) -> None:
    """Raise if the values of a recipe cannot be pooled as it says."""
    pool = Pool.parse(recipe.pool) if recipe.pool else None
    if pool is None:
        return
    asked = pool.flag
    if pool.by_speaker and reading is None and not is_program(recipe.corpus_source):
        raise ConfigError(
            f"{asked}: the corpus holds no chats; name their column with --messages, or "
            + ("choose another column" if pool.labels else f"pool over the document ({pool.by})")
        )
    if pool.column and reading is not None and not isinstance(reading, TokenIds):
        raise ConfigError(
            f"{asked}: a column gives characters of a text, and chats are rendered; pool over "
            f"{pool.by}:{TURN} or a role"
        )
    if pool.by == JACOBIAN and recipe.compute_dtype == "float8_e4m3":
        raise ConfigError(
            f"{asked}: products in 8 bits have no gradient; give another --compute-dtype"
        )
    refuse_sums(pool, recipe.store_dtype, recipe.seq_len, taps, arch, encoded)


def refuse_sums(
    pool: Pool,
    store_dtype: str,
    seq_len: int,
    taps: Sequence[Tap],
    arch: Arch,
    encoded: Collection[str],
) -> None:
    """Raise if the values of taps cannot be pooled or reduced together, whatever the corpus is.

    Args:
        encoded: the taps that are stored as latents.
    """
    if not pool.sums:
        return
    asked = pool.flag
    if store_dtype in QUANTIZED:
        raise ConfigError(
            f"{asked}: {store_dtype} saves little where one row stands for many tokens; "
            "give --store-dtype bfloat16, float16 or float32"
        )
    if any(tap.site in LENSES for tap in taps):
        raise ConfigError(f"{asked}: a lens predicts after each token; leave lens_top out")
    ids = [tap.name for tap in taps if tap.dtype(store_dtype).startswith("int")]
    if ids:
        raise ConfigError(
            f"{asked}: {ids[0]} holds ids or ranks, which are not pooled; leave it out"
        )
    widest = max(taps, key=lambda tap: tap.width(arch, seq_len))
    channels = widest.width(arch, seq_len)
    if pool.beside:
        channels += _beside(pool, taps, arch).width(arch, seq_len)
    if pool.by == JACOBIAN:
        _refuse_jacobian(pool, taps, arch)
    if pool.by == COVARIANCE and covariance_width(channels) > MAX_WIDTH:
        raise ConfigError(
            f"{asked}: {widest.name} has {channels:,} channels, whose covariance would take "
            f"{size(4 * channels * (channels + 3))} for each label; choose narrower taps"
        )
    if encoded and pool.labels is not None:
        raise ConfigError(f"{asked}: latents are not reduced by label; leave out --encode")


def _beside(pool: Pool, taps: Sequence[Tap], arch: Arch) -> Tap:
    """Return the tap that `cov:TAP` or `jacobian:TAP` names, if each of the taps can have it."""
    try:
        (other,) = parse_taps(pool.beside or "", arch)
    except ConfigError as error:
        raise ConfigError(error.message.replace("--taps", pool.flag, 1)) from None
    if other.name != pool.beside or other.heads or other.kind.stage != BLOCK:
        raise ConfigError(f"{pool.flag}: write the name of a tap in a block, as in resid_post.27")
    if other in taps:
        raise ConfigError(f"{pool.flag}: leave {other.name} out of --taps")
    return other


def _refuse_jacobian(pool: Pool, taps: Sequence[Tap], arch: Arch) -> None:
    """Raise unless the target depends on each tap's values, which change the model there."""
    target = Tap.from_name(pool.beside or "")
    for tap in (*taps, target):
        if tap.heads or not tap.kind.spliced or tap.kind.shape != ("width",):
            raise ConfigError(
                f"{pool.flag}: {tap.name} is no vector of the residual stream's width"
            )
    late = [tap.name for tap in taps if place_of(tap, arch) >= place_of(target, arch)]
    if late:
        raise ConfigError(
            f"{pool.flag}: {target.name} does not depend on {late[0]}, which comes later; tap "
            "earlier layers"
        )


def spans_of(
    pool: Pool | None,
    tokenizer: TextTokenizer,
    documents: Documents,
    tokens: Sequence[np.ndarray],
    flags: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Return the number of each token's span in its document, negative for tokens of none.

    With labels, it is the number of the token's label in the unit. A document without a value in
    one of their columns belongs to none. Empty if documents are the spans, or if nothing is pooled.

    Args:
        tokens: of each usable document.
        flags: of its tokens; empty if the documents have no speakers.
    """
    if pool is None or (pool.labels is None and pool.over == DOCUMENT):
        return []
    said = flags or [np.zeros(len(ids), np.uint16) for ids in tokens]
    if pool.labels is not None:
        return _labelled(pool, documents.usable, said)
    if pool.over in SPEAKERS:
        role = ROLES[pool.over]
        return [np.where(each & role != 0, 0, NONE) for each in said]
    if documents.ids:
        raise InputError(
            f"--pool {pool}: the corpus holds token ids, whose characters are not known; pool over "
            f"the document (--pool {pool.by})"
        )
    places = zip(tokenizer.offsets(documents.texts), documents.usable, said, strict=True)
    return [
        spans_of_tokens(offsets, document.spans or (), each if pool.by_speaker else None)
        for offsets, document, each in places
    ]


def _labelled(
    pool: Pool, documents: Sequence[CorpusDocument], flags: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return the number of each token's label in the unit."""
    speakers = SPEAKERS if ROLE in (pool.labels or ()) else ()
    numbers: dict[tuple[Any, ...], int] = {}
    spans = [np.full(len(each), NONE, np.int64) for each in flags]
    for document, each, own in zip(documents, flags, spans, strict=True):
        values = tuple((document.columns or {}).get(name) for name in pool.label_columns)
        if None in values:
            continue
        for role in speakers:
            chosen = (each & ROLES[role]) != 0
            if chosen.any():
                own[chosen] = numbers.setdefault((*values, role), len(numbers))
        if not speakers:
            own[:] = numbers.setdefault(values, len(numbers))
    return spans


def refuse_missing_spans(pool: Pool | None, reader: CorpusReader) -> None:
    """Raise if no file has the column that is to give the spans, among its first documents."""
    if pool is None or pool.column is None:
        return
    known = {name for file in sampled_files(reader) for name in reader.columns_of(file)}
    if pool.column.partition(".")[0] not in known and pool.column not in known:
        raise InputError(
            f"--pool {pool}: {reader.files[0].path} has no column {pool.column!r}; it has "
            f"{listed(sorted(known))}, and --pool {pool.by} also takes :{TURN} and the roles "
            f"{', '.join(SPEAKERS)}"
        )
