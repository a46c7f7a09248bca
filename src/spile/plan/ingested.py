"""The job of a dataset whose rows another engine makes: its recipe, taps and empty unit table.

No corpus is read: every document comes with its token ids and its rows. No jax.
"""

from dataclasses import replace
from typing import Any

from spile.core.config import Recipe
from spile.core.errors import ConfigError, DriftError
from spile.core.recipe import ResolvedRecipe
from spile.corpus.files import lasting
from spile.dataset.format import TapInfo
from spile.dataset.records.table import Table
from spile.dataset.records.unit_table import UnitColumns
from spile.models.files.checkpoint import open_checkpoint
from spile.models.taps import Tap, tops_of
from spile.plan.encoders import stored_taps
from spile.plan.job import ExtractionJob
from spile.plan.resolve import open_tokenizer, pinned_recipe
from spile.plan.tapped import taps_of

STORED = ("bfloat16", "float16", "float32", "float8_e4m3")
_UNIT_BYTES = 256 << 20  # of rows; a unit is held in memory until it is written


def ingested_job(recipe: Recipe, *, rows_by: str, corpus: str, identity: str) -> ExtractionJob:
    """Settle what a dataset of given rows is. Nothing is written.

    Args:
        recipe: model, lora, taps, seq_len, keep, unit_tokens and dtypes, as for an extraction.
        rows_by: the engine that makes the rows.
        corpus: where they come from.
        identity: what they are, whatever place they come from.
    """
    if not rows_by.strip():
        raise ConfigError("--rows-by must name the engine that made the rows")
    recipe = pinned_recipe(recipe)
    if recipe.model is None or recipe.taps is None:
        raise ConfigError("--model and --taps are needed: they say what the rows are")
    checkpoint = open_checkpoint(recipe.model, recipe.lora)
    arch = checkpoint.arch
    seq_len = recipe.seq_len or arch.max_positions
    taps = taps_of(replace(recipe, seq_len=seq_len), arch)
    for tap in taps:
        if "keys" in tap.kind.shape:
            raise ConfigError(f"--taps {tap.name}: rows of attention cannot be ingested")
    dtype = recipe.store_dtype or "bfloat16"
    if dtype not in STORED:
        raise ConfigError(f"--store-dtype {dtype}: ingested rows are {', '.join(STORED)}")
    infos = stored_taps(taps, {}, arch, seq_len, dtype)
    tops: dict[str, Any] = {**tops_of(taps, arch, seq_len)}
    settled = ResolvedRecipe(
        model_source=lasting(recipe.model),
        lora_source=lasting(recipe.lora) if recipe.lora else None,
        corpus_source=corpus,
        model=checkpoint.identity(),
        corpus=(identity,),
        taps=tuple(tap.name for tap in taps),
        **tops,
        where=None,
        every=None,
        seq_len=seq_len,
        pack="none",
        long_docs="split",
        special_tokens="none",
        text_column=None,
        text_documents="line",
        keep=tuple(filter(None, (recipe.keep or "").split(","))),
        max_docs=None,
        max_tokens=None,
        unit_tokens=recipe.unit_tokens or _unit_tokens(infos),
        compute_dtype=recipe.compute_dtype or "bfloat16",
        store_dtype=dtype,
        rows_by=rows_by,
    )
    table = Table(
        recipe=settled,
        fingerprint=settled.fingerprint(),
        taps=infos,
        files=({"path": corpus, "identity": identity},),
        units=UnitColumns.of([]),
        kept=1.0,
    )
    tokenizer = open_tokenizer(checkpoint, settled)
    return ExtractionJob(settled, table, checkpoint, tokenizer, [], taps)


def stored_job(recipe: Recipe, table: Table, url: str) -> ExtractionJob:
    """Return the job of a dataset of ingested rows, to recompute some of them.

    Args:
        recipe: where its model is now, if that has moved.

    Raises:
        DriftError: if the model is another.
    """
    stored = table.recipe
    lora = recipe.lora or stored.lora_source
    checkpoint = open_checkpoint(recipe.model or stored.model_source, lora)
    found = checkpoint.identity()
    differences: dict[str, tuple[object, object]] = {
        f"model {part}": (stored.model.get(part), found.get(part))
        for part in sorted({*stored.model, *found})
        if stored.model.get(part) != found.get(part)
    }
    if differences:
        raise DriftError(url, differences)
    taps = tuple(map(Tap.from_name, stored.taps))
    tokenizer = open_tokenizer(checkpoint, stored)
    return ExtractionJob(stored, table, checkpoint, tokenizer, [], taps)


def _unit_tokens(taps: dict[str, TapInfo]) -> int:
    return max(1, _UNIT_BYTES // sum(info.row_bytes for info in taps.values()))
