"""`--add-taps`: settle the pass that adds taps to a dataset. No corpus is read, and no jax."""

import dataclasses
from functools import partial
from itertools import count

from spile.core.config import Recipe, flag_of
from spile.core.errors import ConfigError
from spile.core.recipe import OF_A_PASS, TOPS, ResolvedRecipe
from spile.corpus.files import lasting
from spile.dataset import format as fmt
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.passes import Pass, pass_name, readable_passes, recipe_of_pass
from spile.dataset.records.table import Table
from spile.models.files.checkpoint import open_checkpoint
from spile.models.objectives import LOGPROB
from spile.models.taps import parse_taps, tops_of
from spile.plan.baselines import baseline_source, find_baseline
from spile.plan.cross_layer import identities
from spile.plan.encoders import each_source, find_encoders, gain_before, stored_taps
from spile.plan.lenses import find_lens
from spile.plan.objectives import find_objective, objective_source
from spile.plan.resolve import completed_recipe, pinned_recipe, refuse_ingested
from spile.plan.tapped import taps_of, writers_of


def opened_for(recipe: Recipe, dataset: Ledger) -> tuple[Recipe, Ledger]:
    """Return the recipe to run, and the ledger of what it makes: the dataset, or one of its passes.

    Nothing is written. A pass may not exist yet; its ledger has the table to begin it with.

    Raises:
        ConfigError: if taps cannot be added, because the dataset is not finished or has one of
            them already.
    """
    if recipe.add_taps is None:
        return recipe, dataset
    table = _finished(dataset)
    refuse_ingested(table, f"--add-taps: {dataset.url}")
    if recipe.like is not None:
        raise ConfigError("--like makes a new dataset, --add-taps extends one; give one of them")
    if recipe.more or recipe.add_corpus is not None:
        raise ConfigError(
            "--add-taps adds taps, --more and --add-corpus add documents; use one, then the other"
        )
    # Options that are not given come from the dataset, except those that belong to taps.
    of_taps = (
        "encode_source", "latents", "lens", "lens_source", "objective", "objective_source",
        "baseline", "baseline_source", "steps", "writers",
    )  # fmt: skip
    none = dict.fromkeys((*of_taps, *TOPS))
    stored = dataclasses.replace(table.recipe, encode={}, encode_error=False, **none)
    added = dataclasses.replace(recipe, taps=recipe.add_taps, add_taps=None)
    asked = pinned_recipe(completed_recipe(added, stored))
    assert asked.model and asked.taps
    checkpoint = open_checkpoint(asked.model, asked.lora)
    names = tuple(tap.name for tap in parse_taps(asked.taps, checkpoint.arch))
    for _, begun in readable_passes(dataset, table):
        if begun.recipe.taps == names:  # as when a dataset has grown since: its own options hold
            asked = pinned_recipe(completed_recipe(added, begun.recipe))
    assert asked.model and asked.taps
    if recipe.taps is not None:
        own = tuple(tap.name for tap in parse_taps(recipe.taps, checkpoint.arch))
        if own != table.recipe.taps:
            raise ConfigError(
                f"--taps {recipe.taps}: {dataset.url} was made with {','.join(table.recipe.taps)}; "
                "give --add-taps alone"
            )
    taps = taps_of(asked, checkpoint.arch)
    encoders = find_encoders(asked, taps, checkpoint.arch, partial(gain_before, checkpoint))
    compute_dtype = asked.compute_dtype or table.recipe.compute_dtype
    objective = find_objective(asked.objective, taps, checkpoint.arch, compute_dtype)
    lens = find_lens(asked, taps, checkpoint.arch)
    baseline = find_baseline(
        asked, taps, checkpoint.arch, table.recipe.seq_len, checkpoint.identity
    )
    settled = dataclasses.replace(
        table.recipe,
        model_source=lasting(asked.model),
        lora_source=lasting(asked.lora) if asked.lora else None,
        encode_source=each_source(asked.encode, lasting) if asked.encode else None,
        taps=tuple(tap.name for tap in taps),
        encode=identities(encoders, errors=bool(asked.encode_error)),
        latents=asked.latents,
        lens=lens.identity if lens else None,
        lens_source=lasting(asked.lens) if asked.lens else None,
        encode_error=bool(asked.encode_error),
        **(dict.fromkeys(TOPS) | tops_of(taps, checkpoint.arch, table.recipe.seq_len)),
        objective=objective and objective.identity,
        objective_source=objective and objective_source(asked.objective or LOGPROB, lasting),
        baseline=baseline and baseline.identity,
        baseline_source=baseline and baseline_source(asked.baseline, lasting),
        steps=asked.steps,
        writers=",".join(tap.name for tap in writers_of(asked, taps, checkpoint.arch)) or None,
        compute_dtype=compute_dtype,
        store_dtype=asked.store_dtype or table.recipe.store_dtype,
    )
    planned = dataclasses.replace(
        table,
        recipe=settled,
        fingerprint=settled.fingerprint(),
        taps=stored_taps(
            taps, encoders, checkpoint.arch, settled.seq_len, settled.store_dtype, settled.pool
        ),
        tokenizer={},
    )
    found = _pass_of(dataset, planned)
    _refuse_present(dataset, table, planned, found.name)
    return added, found.ledger


def _finished(dataset: Ledger) -> Table:
    table = dataset.read_table()
    if table is None:
        shuffling = next(iter(dataset.objects.list(fmt.SCRATCH)), None) is not None
        why = "it is being shuffled; add taps to the dataset that it is made from"
        raise ConfigError(
            f"--add-taps: {why if shuffling else f'there is no dataset in {dataset.url} yet'}"
        )
    if table.shuffled:
        raise ConfigError(
            f"--add-taps: {dataset.url} was shuffled; add taps to the dataset that it was made "
            "from, and shuffle that"
        )
    if dataset.derived.read_manifest(table.layout) is None:
        raise ConfigError(
            f"--add-taps: {dataset.url} is not finished; run the same `spile extract` without "
            "--add-taps first"
        )
    return table


def _pass_of(dataset: Ledger, planned: Table) -> Pass:
    """Return the pass with this table's fingerprint; the next one if it was dropped."""
    for number in count():
        found = Pass(dataset, pass_name(planned.fingerprint, number), planned)
        if not found.is_dropped:
            return found
    raise AssertionError


def _refuse_present(dataset: Ledger, table: Table, planned: Table, name: str) -> None:
    """Raise if the dataset or another of its passes already has one of the taps."""
    there = {tap: table.recipe for tap in table.taps}
    for other, found in readable_passes(dataset, table):
        if other.name != name:
            there |= {tap: found.recipe for tap in found.taps}
    both = [tap for tap in planned.taps if tap in there]
    if not both:
        return
    differs = _difference(there[both[0]], planned.recipe)
    advice = "leave it out of --add-taps"
    if both[0] not in table.taps:
        advice += f", or `spile drop {dataset.url} --taps {both[0]}` first"
    raise ConfigError(f"--add-taps: {dataset.url} has {', '.join(both)}{differs}; {advice}")


def _difference(there: ResolvedRecipe, asked: ResolvedRecipe) -> str:
    """Describe how a pass's options, other than its taps, differ from the existing pass's."""
    same = recipe_of_pass(there, asked)
    unlike = [name for name in OF_A_PASS if getattr(there, name) != getattr(same, name)]
    told = [
        f"{flag_of(name)} {getattr(there, name)}"
        for name in unlike
        if name in ("compute_dtype", "store_dtype")
    ]
    return f" (with {', '.join(told)})" if told else ""
