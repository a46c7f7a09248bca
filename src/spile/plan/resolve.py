"""Resolve a recipe: find its files, compute their identities, fill in defaults. No jax.

If the store already holds a dataset, options that were not given come from there, and options that
were given must agree with it. With --more, its corpus may have grown (`growth.py`).
"""

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import zip_longest
from typing import Any

from spile.core.config import MAX_DOC_BYTES, PREVIEW, Recipe, flag_of
from spile.core.errors import ConfigError, DriftError, InputError
from spile.core.expressions import RowFilter
from spile.core.identity import contents_digest, sampled_digests
from spile.core.pool import COVARIANCE, JACOBIAN, Pool, is_reduced, label_columns, reduces
from spile.core.recipe import OF_EACH_ROW, TOPS, ResolvedRecipe
from spile.corpus.chat_layouts import refuse_other_layout, settle_chats
from spile.corpus.chats.rows import RowReader, read_as
from spile.corpus.files import find_files, lasting
from spile.corpus.formats.contract import CorpusFile, ReadOptions
from spile.corpus.formats.token_ids import read_ids, settle_ids
from spile.corpus.named_columns import keep_spelled, settled_columns
from spile.corpus.programs.program import Program, is_program
from spile.corpus.reader import CorpusReader
from spile.corpus.tokenize import TextTokenizer
from spile.dataset import format as fmt
from spile.dataset.records.ledger import Ledger
from spile.dataset.records.table import Table, read_tokenizer
from spile.models.files.checkpoint import Checkpoint, open_checkpoint
from spile.models.files.encoders.sae import SparseEncoder
from spile.models.objectives import LOGPROB, LOSS, answer_columns
from spile.models.taps import Tap, sites_on_paths, tops_of
from spile.objects import exists, open_objects
from spile.objects.hub.names import continued, newest, pinned
from spile.objects.paths import AnyPath
from spile.plan.baselines import AT_ONCE, baseline_source, find_baseline
from spile.plan.compute_dtype import settled_compute_dtype
from spile.plan.cross_layer import identities
from spile.plan.cutting import cut_corpus, make_table
from spile.plan.encoders import each_source, find_encoders, gain_before, stored_taps
from spile.plan.growth import (
    can_grow,
    changed_files,
    growth_of,
    in_stored_order,
    refuse_other_growth,
)
from spile.plan.job import ExtractionJob
from spile.plan.lenses import find_lens
from spile.plan.objectives import find_objective, objective_source
from spile.plan.objectives import names_program as names_own_objective
from spile.plan.pooling import reducing, refuse_pool
from spile.plan.roofline import cpu_unit_tokens
from spile.plan.splices import (
    SAE,
    each_splice_source,
    find_splices,
    names_program,
)
from spile.plan.tapped import seq_len_of, taps_of, writers_of

_log = logging.getLogger("spile.plan")

# Fixed when the unit table is made: a unit should take minutes, not hours, to redo.
_UNIT_TOKENS = 4_000_000  # on accelerators
# A unit stores a covariance for each label and tap, so units of this many times the tokens.
_UNITS_OF_COVARIANCES = 8
# Options that need no default.
_AS_GIVEN = (
    "latents", "steps", "text_column", "tokens_column", "roles_column", "logprobs_column",
    "tokens_dtype", "doc_separator", "messages",
    "prompt_column", "response_column", "prompt_prefix", "prompt_suffix", "system", "filter",
    "shuffle_docs", "fraction", "holdout", "min_tokens", "max_doc_tokens", "max_docs", "max_tokens",
)  # fmt: skip
_SOURCES = {"model": "model", "lora": "model", "corpus": "dataset"}  # repository kinds


def resolve(
    recipe: Recipe,
    ledger: Ledger,
    platform: str,
    *,
    capability: float = 0.0,
    cache: str | None = None,
) -> ExtractionJob:
    """Resolve a recipe against a store, which may be empty. Nothing is written to the store.

    Args:
        capability: the compute capability of the GPU that will run it; 0: it is none, or unknown.
        cache: the directory for corpora that are converted to Parquet first.
    """
    if recipe.reduce or recipe.by:
        recipe = reducing(recipe)
    stored = ledger.read_table() or (ledger.of_pass.planned if ledger.of_pass else None)
    growing = growth_of(recipe, stored, ledger.url)
    other = None if recipe.like is None else Ledger(open_objects(recipe.like))
    grown = other.table() if other else None
    like = grown.flattened() if grown else None
    refuse_ingested(stored, ledger.url)
    refuse_ingested(like, f"--like {recipe.like}")
    if stored:
        recipe = completed_recipe(recipe, stored.whole_recipe, moves=growing is not None)
    elif like:
        recipe = _alike(recipe, like.recipe)
    for name in ("model", "corpus", "taps"):
        if getattr(recipe, name) is None:
            raise ConfigError(f"{flag_of(name)} is missing")
    recipe = pinned_recipe(recipe)
    assert recipe.model and recipe.corpus and recipe.taps

    checkpoint = open_checkpoint(recipe.model, recipe.lora)
    taps = taps_of(recipe, checkpoint.arch)
    encoders = find_encoders(recipe, taps, checkpoint.arch, partial(gain_before, checkpoint))
    lens = find_lens(recipe, taps, checkpoint.arch)
    gain = partial(gain_before, checkpoint)
    splices = find_splices(recipe.splice, () if stored else taps, checkpoint.arch, gain)
    known = stored or like
    further = _further_sources(known) if known else ()
    sources = (recipe.corpus, *further)
    if growing and growing.added:
        sources = growing.adding(sources, pinned(growing.added, "dataset"))
    files, gone = _find_all(sources, cache, further)
    if recipe.part == "holdout" and not recipe.holdout:
        raise ConfigError("--part holdout needs --holdout, the share to hold out")
    recipe = settle_ids(recipe, files, checkpoint.arch.vocab_size)
    if not known:
        recipe = settle_chats(recipe, files)
    reading, template = read_as(recipe, checkpoint.directory)
    corpus = corpus_identity(recipe, files, reading)
    found = {str(file.path) for file in files}
    if known:
        files, corpus = in_stored_order(known, files, corpus)
        if gone and not {file["identity"] for file in known.files}.issubset(corpus):
            raise gone
    compute = settled_compute_dtype(recipe.compute_dtype, platform, capability)
    resolved = _settled(recipe, checkpoint, taps, encoders, corpus, platform, template, compute)
    resolved = dataclasses.replace(
        resolved,
        splice=tuple(splice.identity for splice in splices),
        splice_source=each_splice_source(recipe.splice, lambda _, path: lasting(path))
        if recipe.splice and splices
        else None,
        lens=lens.identity if lens else None,
        lens_source=lasting(recipe.lens) if recipe.lens else None,
    )
    objective = find_objective(recipe.objective, taps, checkpoint.arch, compute)
    baseline = find_baseline(recipe, taps, checkpoint.arch, resolved.seq_len, checkpoint.identity)
    if objective and reduces(resolved.pool) == JACOBIAN:
        raise ConfigError("--reduce jacobian: a gradient has none here; tap the sites themselves")
    if (
        objective
        and objective.kind == LOSS
        and reading is None
        and not is_program(resolved.corpus_source)
    ):
        raise ConfigError(
            f"--objective {objective.identity}: the corpus holds no chats; name their column with "
            "--messages"
        )
    resolved = dataclasses.replace(
        resolved,
        objective=objective and objective.identity,
        objective_source=objective and objective_source(recipe.objective or LOGPROB, lasting),
        baseline=baseline and baseline.identity,
        baseline_source=baseline and baseline_source(recipe.baseline, lasting),
    )
    if baseline and baseline.width and recipe.unit_tokens is None:  # a unit holds its rows
        most = max(resolved.seq_len, AT_ONCE // (4 * baseline.width))
        resolved = dataclasses.replace(resolved, unit_tokens=min(resolved.unit_tokens, most))
    refuse_pool(resolved, taps, checkpoint.arch, encoders, reading)
    tokenizer = open_tokenizer(checkpoint, resolved)
    reading = reading or read_ids(resolved, tokenizer, checkpoint.arch.vocab_size)
    keep = settled_columns(recipe.keep, files, recipe.text_column, reading)
    labels = (*label_columns(resolved.pool), *answer_columns(resolved.objective))
    resolved = dataclasses.replace(resolved, keep=tuple(dict.fromkeys((*keep, *labels))))
    if stored:
        kept = growing.kept(resolved, stored) if growing else resolved
        _refuse_drift(ledger, stored, kept, files[: len(kept.corpus)])
    if stored and growing:
        new = len(files) - len(stored.files)
        refuse_other_layout(recipe, files[len(stored.files) :], growing.flag)
        growing.say_known(len(found.difference(str(file.path) for file in files)), new)
        cut = partial(cut_corpus, resolved, tokenizer, reading=reading)
        table = growing.grown(stored, sources, files, resolved, cut)
    else:
        seq_len, dtype = resolved.seq_len, resolved.store_dtype
        table = stored or make_table(
            resolved,
            stored_taps(taps, encoders, checkpoint.arch, seq_len, dtype, resolved.pool),
            tokenizer,
            files,
            reading,
            named=resolved.keep if recipe.keep else labels,
            like=like if grown and grown.generations else None,
        )
    if other and like:
        _refuse_unlike(other, like, table.flattened(), checkpoint.directory)
    return ExtractionJob(
        table.recipe, table, checkpoint, tokenizer, files, taps, reading, encoders, splices,
        compares=table.recipe.compares and ledger.of_pass is None,
        objective=objective, baseline=baseline, lens=lens,
    )  # fmt: skip


def refuse_ingested(table: Table | None, told: str) -> None:
    """Refuse a dataset whose rows no run of the model has made: none can make more of them.

    Args:
        told: names the dataset in the message.
    """
    if table is not None and table.recipe.is_crosscoded:
        raise ConfigError(
            f"{told}: its latents were encoded from the rows of other datasets; `spile encode` "
            "makes such datasets"
        )
    if table is not None and table.recipe.rows_by is not None:
        raise ConfigError(
            f"{told}: its rows were made by {fmt.shown(table.recipe.rows_by)} and ingested, and "
            "spile cannot make such rows again; to compute rows of the same texts, extract those "
            "into another --out"
        )


def open_tokenizer(checkpoint: Checkpoint, resolved: ResolvedRecipe) -> TextTokenizer:
    """Open the model's tokenizer; refuse one that makes ids without an embedding."""
    tokenizer = TextTokenizer(checkpoint.directory, resolved.special_tokens)
    if tokenizer.max_id >= checkpoint.arch.vocab_size:
        raise InputError(
            f"{checkpoint.directory}: the tokenizer makes ids up to {tokenizer.max_id}, but the "
            f"model has {checkpoint.arch.vocab_size} embeddings; use the model's own tokenizer"
        )
    return tokenizer


def store_table(job: ExtractionJob, ledger: Ledger) -> ExtractionJob:
    """Store the job's unit table; if another process has stored one first, use that one."""
    files = {} if exists(ledger.objects, fmt.UNITS) else tokenizer_files(job)
    table, number = ledger.create_table(job.table.at(0), files), len(job.table.generations)
    if len(table.generations) < number:
        table = ledger.create_generation(job.table)
    table = table.at(number)  # (another process may have added more, whose files we do not know)
    if number:
        refuse_other_growth(ledger.objects.url, job.table, table)
    else:
        _refuse_drift(ledger, table, job.recipe, job.files)
    return dataclasses.replace(job, recipe=table.recipe, table=table)


def tokenizer_files(job: ExtractionJob) -> dict[str, bytes]:
    """Return the tokenizer's files, so that the dataset's texts can be read without the model."""
    paths = {name: job.checkpoint.directory / name for name in fmt.TOKENIZER_FILES}
    files = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    if contents_digest(files.values()) != job.recipe.model["tokenizer"]:
        raise InputError(
            f"{job.checkpoint.directory}: the tokenizer's files changed while the corpus was being "
            "cut into units; run the same command again"
        )
    return files


def completed_recipe(recipe: Recipe, stored: ResolvedRecipe, *, moves: bool = False) -> Recipe:
    """Take options that were not given, and commits of those that were, from the stored recipe.

    Args:
        moves: whether to use the newest commit of a corpus on the Hub, not the stored one.
    """
    defaults: dict[str, Any] = {
        **{name: getattr(stored, name, None) for name in Recipe.names()},
        "model": stored.model_source,
        "lora": stored.lora_source,
        "corpus": stored.corpus_source,
        "template": stored.template_source,
        "encode": stored.encode_source,
        "splice": stored.splice_source,
        "lens": stored.lens_source,
        "objective": stored.objective_source,
        "baseline": stored.baseline_source,
        "taps": ",".join(stored.taps),
        "keep": keep_spelled(stored.keep),
    }
    missing = {name for name in Recipe.names() if getattr(recipe, name) is None}
    source = stored.corpus_source
    if "corpus" in missing:
        refuse_own_program(source)
    own = names_program(stored.splice_source) if "splice" in missing else None
    if own:
        raise ConfigError(
            f"a function changes the values of this dataset ({own}), which is not run only because "
            "a store names it; give it with --splice"
        )
    if "objective" in missing and names_own_objective(stored.objective_source):
        raise ConfigError(
            f"a function says what gradients of this dataset are of ({stored.objective_source}), "
            "which is not run only because a store names it; give it with --objective"
        )
    chosen = {name: defaults[name] for name in missing}
    if moves and "corpus" in missing:
        chosen["corpus"] = newest(source, "dataset")
    for name in _SOURCES.keys() - missing - ({"corpus"} if moves else set[str]()):
        if defaults[name] is not None:
            kind = _SOURCES[name]
            chosen[name] = continued(getattr(recipe, name), defaults[name], kind)
    return dataclasses.replace(recipe, **chosen)


def refuse_own_program(source: str) -> None:
    """Refuse to take a corpus from a store if it is a program of the user's."""
    if _is_own_program(source):
        raise ConfigError(
            f"the corpus of this dataset is a program ({source}), which is not run only because a "
            "store names it; give it with --corpus"
        )


def _is_own_program(source: str) -> bool:
    """Return whether a corpus is a program of the user's, which never runs because a store says."""
    return is_program(source) and not Program.parse(source).shipped


def _find_all(
    sources: Sequence[str], cache: str | None, further: Sequence[str]
) -> tuple[list[CorpusFile], InputError | None]:
    """Return the files of all sources.

    Args:
        further: those of them that may be gone, since --corpus may name where their files are
            now. The error about one that is gone is returned, for use if its files are nowhere.
    """
    files, gone = list[CorpusFile](), None
    for source in sources:
        try:
            files += find_files(source, cache)
        except InputError as error:
            if source not in further:
                raise
            gone = gone or error
    return files, gone


def _further_sources(stored: Table) -> tuple[str, ...]:
    """Return where a dataset's files were found, beside the corpus of its recipe."""
    for source in stored.sources[1:]:
        if _is_own_program(source):
            raise ConfigError(
                f"a part of this dataset was made from a program ({source}), which is not run only "
                "because a store names it; use the dataset that the part was merged from"
            )
    return stored.sources[1:]


def _alike(recipe: Recipe, like: ResolvedRecipe) -> Recipe:
    """Take options that were not given from the dataset that `--like` names."""
    given = {name: getattr(recipe, name) for name in _SOURCES if getattr(recipe, name) is not None}
    if recipe.model is not None:  # an adapter belongs to its model, and so do directions in it
        like = dataclasses.replace(
            like, lora_source=None, splice_source=None, objective_source=None
        )
    if recipe.taps is not None and recipe.encode is None:
        like = dataclasses.replace(like, encode_source=None, latents=None, encode_error=False)
    if recipe.taps is not None and recipe.lens is None:
        like = dataclasses.replace(like, lens_source=None)
    if recipe.taps is not None:
        of_taps = (
            *TOPS, "objective", "objective_source", "baseline", "baseline_source", "steps",
            "writers",
        )  # fmt: skip
        like = dataclasses.replace(like, **dict.fromkeys(of_taps))
    return dataclasses.replace(completed_recipe(recipe, like), **given)


def _refuse_unlike(other: Ledger, like: Table, made: Table, directory: AnyPath) -> None:
    """Raise unless a table has, or will have, the same rows as another dataset's."""
    asked = f"--like {other.objects.url}"
    if like.shuffled:
        raise ConfigError(f"{asked}: was shuffled; give the dataset that it was made from")
    if made.shuffled:
        raise ConfigError(
            f"{asked}: the dataset in --out was shuffled, so its rows are in another order; choose "
            "another --out"
        )
    old, new = like.recipe.identity(), made.recipe.identity()
    # Spans of the same tokens; labels are columns of the same documents.
    chosen = ("pool", "where", "every", "keep") if new.get("pool") else ()
    unlike = [
        name
        for name in {**old, **new}
        if name not in (*OF_EACH_ROW, *chosen) and old.get(name) != new.get(name)
    ]
    if unlike:
        told = "; ".join(
            "the corpus has changed"
            if name == "corpus"
            else f"{flag_of(name)} is {old.get(name)} there, {new.get(name)} here"
            for name in unlike
        )
        raise ConfigError(f"{asked}: the rows would differ: {told}")
    if like.recipe.model["tokenizer"] != made.recipe.model["tokenizer"]:
        differs = _other_tokenizer(read_tokenizer(other.objects, like), directory)
        if differs:
            raise ConfigError(f"{asked}: {directory} has another tokenizer: {differs}")
    if like.units != made.units:
        raise ConfigError(
            f"{asked}: its units do not follow from its recipe, as after a compaction, or because "
            "it was itself made like a dataset that had grown; name the dataset it was made from"
        )


def _other_tokenizer(kept: Mapping[str, bytes], directory: AnyPath) -> str | None:
    """Describe how a model's tokenizer.json differs from a dataset's; None if it does not.

    (Its configuration may differ, for example the chat template, which is part of the recipe.)
    """
    name = fmt.TOKENIZER_FILES[0]
    if name not in kept:
        return "its files differ from the original ones, which the dataset does not hold"
    old, new = json.loads(kept[name]), json.loads((directory / name).read_bytes())
    vocab, others = (each.get("model", {}).get("vocab", ()) for each in (old, new))
    if len(vocab) != len(others):
        return f"it has {len(others)} tokens, the dataset's has {len(vocab)}"
    parts = [part for part in {**old, **new} if old.get(part) != new.get(part)]
    return f"{', '.join(parts)} of {name} differ" if parts else None


def pinned_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with commits for sources on the Hub: a branch may move during a run."""
    given = {name: getattr(recipe, name) for name in _SOURCES}
    named = {n: pinned(v, _SOURCES[n]) for n, v in given.items() if v not in (None, "demo")}
    if recipe.encode is not None:
        named["encode"] = each_source(recipe.encode, lambda source: pinned(source, "model"))
    if recipe.splice is not None:
        named["splice"] = each_splice_source(
            recipe.splice, lambda kind, path: pinned(path, "model") if kind == SAE else path
        )
    return dataclasses.replace(recipe, **named)


def _settled(
    recipe: Recipe,
    checkpoint: Checkpoint,
    taps: tuple[Tap, ...],
    encoders: Mapping[str, SparseEncoder],
    corpus: tuple[str, ...],
    platform: str,
    template: str | None,
    compute: str,
) -> ResolvedRecipe:
    arch = checkpoint.arch
    seq_len = seq_len_of(recipe, arch)
    asked_for_float32 = recipe.compute_dtype == "float32"
    assert recipe.model and recipe.corpus
    rows = RowFilter(recipe.where, recipe.every)
    unit_tokens = cpu_unit_tokens(arch, taps, seq_len) if platform == "cpu" else _UNIT_TOKENS
    if reduces(recipe.pool) == COVARIANCE:
        unit_tokens *= _UNITS_OF_COVARIANCES
    elif reduces(recipe.pool) == JACOBIAN:  # each of a target's channels takes a backward pass
        unit_tokens = max(seq_len, _UNITS_OF_COVARIANCES * unit_tokens // arch.width)
    if recipe.steps:  # each site takes as many backward passes
        unit_tokens = max(
            seq_len, unit_tokens // (recipe.steps * max(1, len(sites_on_paths(taps))))
        )
    given: dict[str, Any] = {name: getattr(recipe, name) for name in _AS_GIVEN}
    given |= tops_of(taps, arch, seq_len)
    return ResolvedRecipe(
        **given,
        model_source=lasting(recipe.model),
        lora_source=lasting(recipe.lora) if recipe.lora else None,
        corpus_source=lasting(recipe.corpus),
        template_source=lasting(recipe.template) if recipe.template else None,
        encode_source=each_source(recipe.encode, lasting) if recipe.encode else None,
        model=checkpoint.identity(),
        corpus=corpus,
        taps=tuple(tap.name for tap in taps),
        writers=",".join(tap.name for tap in writers_of(recipe, taps, arch)) or None,
        encode=identities(encoders, errors=bool(recipe.encode_error)),
        encode_error=bool(recipe.encode_error),
        where=rows.where,
        every=rows.every,
        pool=recipe.pool and str(Pool.parse(recipe.pool)),
        seq_len=seq_len,
        pack=recipe.pack or "ffd",
        long_docs=recipe.long_docs or "split",
        special_tokens=recipe.special_tokens
        or ("none" if template not in (None, "none") else "tokenizer"),
        text_documents=recipe.text_documents or "line",
        template=template,
        generation_prompt=bool(recipe.generation_prompt),
        part=recipe.part or "rest",
        dedupe=bool(recipe.dedupe),
        max_doc_bytes=recipe.max_doc_bytes or MAX_DOC_BYTES,
        preview=PREVIEW if recipe.preview is None else recipe.preview,
        unit_tokens=recipe.unit_tokens or unit_tokens,
        compute_dtype=compute,
        # (Sums are stored in float64, whatever it is.)
        store_dtype="float32"
        if is_reduced(recipe.pool)
        else recipe.store_dtype or ("float32" if asked_for_float32 else "bfloat16"),
    )


def corpus_identity(
    recipe: Recipe, files: list[CorpusFile], reading: RowReader | None
) -> tuple[str, ...]:
    """Return the identity of each file: its bytes' digest, unless its format has another."""
    with closing(CorpusReader(files, ReadOptions(recipe.text_column), reading=reading)) as reader:
        own = [reader.opened(number).identity() for number in range(len(files))]
    unnamed = (file.path for file, identity in zip(files, own, strict=True) if not identity)
    digests = iter(sampled_digests(unnamed))
    return tuple(identity or next(digests) for identity in own)


def _refuse_drift(
    ledger: Ledger, stored: Table, now: ResolvedRecipe, files: list[CorpusFile]
) -> None:
    later = (
        "pool",
        "roles_column",
        "logprobs_column",
        "objective",
        "baseline",
        "steps",
        "writers",
        "lens",
    )
    unsaid: dict[str, Any] = {"splice": [], "encode_error": False, **dict.fromkeys((*later, *TOPS))}
    old, new = unsaid | stored.whole_recipe.identity(), unsaid | now.identity()
    differences: dict[str, tuple[object, object]] = {}
    for name in old:
        if old[name] == new[name]:
            continue
        if name == "corpus":
            differences |= changed_files(stored, files, new[name])
        elif name == "splice":
            both = zip_longest(stored.recipe.splice, now.splice)
            for number, (was, is_now) in enumerate(both, 1):
                if was != is_now:
                    differences[f"splice {number}"] = (was, is_now)
        elif name in ("model", "encode"):
            for part in sorted({*old[name], *new[name]}):
                was, is_now = old[name].get(part), new[name].get(part)
                if was != is_now:
                    differences[f"{name} {part}"] = (was, is_now)
        else:
            differences[name] = (old[name], new[name])
    if differences:
        grows = can_grow(old, new, differences)
        holds_rows = grows or ledger.holds_rows()
        new = [tap for tap in now.taps if tap not in stored.recipe.taps]
        others = {name for name in differences if not (name in TOPS and old[name] is None)}
        adds = new if others == {"taps"} and not ledger.of_pass else ()
        raise DriftError(ledger.url, differences, holds_rows=holds_rows, grows=grows, adds=adds)
