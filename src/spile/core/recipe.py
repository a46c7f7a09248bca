"""A recipe in the form that a store keeps."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from spile.core.config import ALL_LATENTS, MAX_DOC_BYTES, PREVIEW, canonical_json
from spile.core.disagreement import DISAGREEMENT_COLUMNS
from spile.core.errors import ConfigError
from spile.core.options import LIMIT, shown
from spile.core.tap_order import LARGEST

# The version of the rules that turn a recipe into rows. Recipes that store another are refused:
# continuing such a dataset would add units whose rows follow different rules.
RULES = 2


# The fields that decide what is computed and stored for each row. The others decide which rows
# there are.
OF_EACH_ROW = (
    "model", "taps", "encode", "latents", "encode_error", "attn_top", "top_logits", "lens",
    "objective", "baseline", "steps", "writers", "splice", "compute_dtype", "store_dtype",
)  # fmt: skip
# The subset that a pass (taps added to an existing dataset) may set for itself.
OF_A_PASS = (
    "taps", "encode", "latents", "encode_error", "attn_top", "top_logits", "lens", "objective",
    "baseline", "steps", "writers", "compute_dtype", "store_dtype",
)  # fmt: skip
TOPS = (*LARGEST,)  # how many values taps keep that keep the largest
CROSSCODER = "crosscoder "  # how the identity of an encoder of several datasets' rows begins
# How that of an encoder begins whose error is not stored, though the recipe stores errors.
LATENTS_ALONE = "latents alone "
# Fields that are left out of a stored recipe if nothing is given: so fingerprints stay as they were
# before there were any.
_OPTIONAL = (
    "pool", "rows_by", "roles_column", "logprobs_column", "lens", "lens_source", "objective",
    "objective_source", "baseline", "baseline_source", "steps", "writers", *TOPS,
)  # fmt: skip
_LATER: dict[str, Any] = {
    "splice": (), "splice_source": None, "encode_error": False, **dict.fromkeys(_OPTIONAL)
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe:
    """A recipe with every option settled: it is stored, fingerprinted and compared on resume.

    Fields such as `model_source` and `lora_source` say where things were found. A path is not part
    of the identity, so these fields are stored but not fingerprinted.
    """

    model_source: str
    lora_source: str | None
    corpus_source: str
    template_source: str | None = None
    encode_source: str | None = None
    splice_source: str | None = None
    lens_source: str | None = None
    objective_source: str | None = None
    baseline_source: str | None = None
    model: Mapping[str, str]
    corpus: tuple[str, ...]
    taps: tuple[str, ...]
    encode: Mapping[str, str] = field(default_factory=dict[str, str])  # identities, by tap
    # Latents to keep per row, if given, or `ALL_LATENTS`.
    latents: int | None = field(default=None, metadata={"least": ALL_LATENTS})
    encode_error: bool = False  # whether rows less their reconstructions are stored, too
    attn_top: int | None = None  # keys to keep per row and head, if they are tapped
    top_logits: int | None = None  # the same of logits
    objective: str | None = None  # identity of what gradients are of, if they are tapped
    baseline: str | None = None  # identity of what attributions are differences from
    steps: int | None = None  # points on the path of integrated gradients
    writers: str | None = None  # names of what edges come from, if there are some
    lens: str | None = None  # its digest
    splice: tuple[str, ...] = ()  # identities of splices, in the order in which they apply
    where: str | None
    every: int | None
    pool: str | None = None  # how tokens become one row: `Pool`
    seq_len: int
    pack: str
    long_docs: str
    special_tokens: str
    text_column: str | None
    text_documents: str
    tokens_column: str | None = None
    roles_column: str | None = None
    logprobs_column: str | None = None
    tokens_dtype: str | None = None
    doc_separator: str | None = None
    messages: str | None = None
    prompt_column: str | None = None
    response_column: str | None = None
    prompt_prefix: str | None = None
    prompt_suffix: str | None = None
    system: str | None = None
    template: str | None = None  # its hash
    generation_prompt: bool = False
    filter: str | None = None
    shuffle_docs: int | None = field(default=None, metadata={"least": 0})
    fraction: float | None = None
    holdout: float | None = None
    part: str = "rest"
    dedupe: bool = False
    min_tokens: int | None = None
    max_doc_tokens: int | None = None
    max_doc_bytes: int = MAX_DOC_BYTES
    keep: tuple[str, ...] = ()
    preview: int = field(default=PREVIEW, metadata={"least": 0})
    max_docs: int | None
    max_tokens: int | None
    unit_tokens: int
    compute_dtype: str
    store_dtype: str
    rows_by: str | None = None  # the engine that made the rows, if they were ingested
    rules: int = RULES

    @property
    def stored_taps(self) -> tuple[str, ...]:
        """The stored names, in the order of the taps: the tap, or its latents and their ids."""
        return tuple(name for tap in self.taps for name in self.stored_of(tap))

    def stored_of(self, tap: str) -> tuple[str, ...]:
        """Return the stored names of one of the taps; all latents need no ids."""
        if tap not in self.encode:
            return (tap,)
        names = latent_names(tap)
        names = names[:1] if self.latents == ALL_LATENTS else names
        error = self.encode_error and not self.encode[tap].startswith(LATENTS_ALONE)
        return (*names, error_name(tap)) if error else names

    @property
    def compares(self) -> bool:
        """Whether the engine's log-probabilities are compared with the model's.

        A splice makes another model of it, which no engine has run.
        """
        return self.logprobs_column not in (None, "none") and not self.splice

    @property
    def table_columns(self) -> tuple[str, ...]:
        """The columns of the documents table after its own: those kept, and of disagreement."""
        return (*self.keep, *(DISAGREEMENT_COLUMNS if self.compares else ()))

    @property
    def is_crosscoded(self) -> bool:
        """Whether its latents were encoded from the rows of several datasets."""
        return any(each.startswith(CROSSCODER) for each in self.encode.values())

    @property
    def reads_all(self) -> bool:
        """Whether the model reads every token of the documents that are selected by content."""
        lengths = self.min_tokens, self.max_doc_tokens
        return self.long_docs == "split" and lengths == (None, None)

    @property
    def keeps_all(self) -> bool:
        """Whether every token the model reads is stored, as a row of its own."""
        return self.where is None and self.every in (None, 1) and self.pool is None

    def identity(self) -> dict[str, Any]:
        """The fields that define the dataset, as JSON values."""
        everything = self.to_json()
        return {k: v for k, v in everything.items() if not k.endswith("_source")}

    def fingerprint(self) -> str:
        return hashlib.sha256(canonical_json(self.identity())).hexdigest()

    def to_json(self) -> dict[str, Any]:
        everything = json.loads(json.dumps(dataclasses.asdict(self)))
        without = {name for name in _OPTIONAL if getattr(self, name) is None}
        without |= set[str]() if self.splice else {"splice", "splice_source"}
        without |= set[str]() if self.encode_error else {"encode_error"}
        return {name: value for name, value in everything.items() if name not in without}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ResolvedRecipe":
        known = {f.name for f in fields(cls)}
        parts: dict[str, Any] = _LATER | dict(value)
        if set(parts) != known:
            odd = sorted(set(parts) ^ known)
            raise ConfigError(f"stored recipe has missing or unknown fields: {', '.join(odd)}")
        if parts["rules"] != RULES:
            found = shown(parts["rules"])
            raise ConfigError(
                f"stored recipe has rules {found}, and this version of spile knows rules {RULES}: "
                "use the version that began the dataset"
            )
        for name in ("taps", "corpus", "keep", "splice"):
            parts[name] = tuple(parts[name])
        recipe = cls(**parts)
        for f in fields(cls):
            if not _fits(parts[f.name], f.type, f.metadata.get("least", 1)):
                raise ConfigError(f"stored recipe has no usable {f.name}: {shown(parts[f.name])}")
        return recipe


def latent_names(tap: str) -> tuple[str, str]:
    """Return the names under which an encoded tap's latents and their ids are stored."""
    site, dot, layer = tap.partition(".")
    return f"{site}_latents{dot}{layer}", f"{site}_latent_ids{dot}{layer}"


def error_name(tap: str) -> str:
    """Return the name under which the error of an encoded tap's reconstruction is stored."""
    site, dot, layer = tap.partition(".")
    return f"{site}_error{dot}{layer}"


def _fits(value: Any, kind: Any, least: int) -> bool:
    """Return whether a JSON value has the type of a field; an integer must be at least `least`."""
    if kind == tuple[str, ...]:
        return all(type(part) is str for part in value)
    if kind == Mapping[str, str]:
        values = cast(dict[str, Any], value).values() if isinstance(value, dict) else [None]
        return all(type(part) is str for part in values)
    if type(value) is int and not least <= value < LIMIT:
        return False
    return isinstance(value, kind) and (type(value) is not bool or kind is bool)
