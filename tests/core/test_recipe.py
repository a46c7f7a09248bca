"""The resolved recipe: when two are the same dataset, and how one is stored."""

import dataclasses
import json
from typing import Any

import pytest

from spile.core.errors import ConfigError
from spile.core.recipe import RULES, ResolvedRecipe

RESOLVED = ResolvedRecipe(
    model_source="models/a",
    lora_source=None,
    corpus_source="texts/a",
    model={"config": "c1", "weights": "w1"},
    corpus=("1-aa", "2-bb"),
    taps=("embed", "resid_post.1"),
    where=None,
    every=None,
    seq_len=128,
    pack="ffd",
    long_docs="split",
    special_tokens="tokenizer",
    text_column=None,
    text_documents="line",
    max_docs=None,
    max_tokens=None,
    unit_tokens=64_000,
    compute_dtype="float32",
    store_dtype="bfloat16",
)
OTHER: dict[str, Any] = {
    "model_source": "models/b",
    "lora_source": "adapters/b",
    "corpus_source": "texts/b",
    "model": {"config": "c1", "weights": "w2"},
    "corpus": ("2-bb", "1-aa"),
    "taps": ("embed", "resid_post.2"),
    "where": "not bos",
    "every": 2,
    "pool": "mean",
    "seq_len": 129,
    "pack": "none",
    "long_docs": "truncate",
    "special_tokens": "bos",
    "text_column": "text",
    "text_documents": "file",
    "tokens_column": "input_ids",
    "roles_column": "mask",
    "logprobs_column": "logs",
    "tokens_dtype": "uint32",
    "doc_separator": "none",
    "template_source": "b.jinja",
    "encode_source": "saes/b",
    "encode": {"embed": "topk 16 2-cd"},
    "latents": 8,
    "encode_error": True,
    "attn_top": 3,
    "top_logits": 9,
    "objective": "logprob",
    "objective_source": "logprob",
    "baseline": "mean b4",
    "baseline_source": "means/b",
    "steps": 5,
    "writers": "embed",
    "lens": "b3",
    "lens_source": "lenses/b",
    "splice_source": "zero:z.1",
    "splice": ("zero z.1",),
    "messages": "chats",
    "prompt_column": "question",
    "response_column": "answer",
    "prompt_prefix": "Q: ",
    "prompt_suffix": " A:",
    "system": "Be brief.",
    "template": "b2",
    "generation_prompt": True,
    "filter": "score > 1",
    "shuffle_docs": 0,
    "fraction": 0.5,
    "holdout": 0.5,
    "part": "holdout",
    "dedupe": True,
    "min_tokens": 1,
    "max_doc_tokens": 1,
    "max_doc_bytes": 1,
    "keep": ("id", "url"),
    "preview": 0,
    "max_docs": 1,
    "max_tokens": 1,
    "unit_tokens": 64_001,
    "compute_dtype": "bfloat16",
    "store_dtype": "float32",
    "rows_by": "vLLM 0.21",
    "rules": 1,
}


def test_every_resolved_field_has_another_value_to_test_with() -> None:
    assert set(OTHER) == {f.name for f in dataclasses.fields(ResolvedRecipe)}


@pytest.mark.parametrize("name", OTHER)
def test_the_fingerprint_changes_with_identity_and_not_with_sources(name: str) -> None:
    changed = dataclasses.replace(RESOLVED, **{name: OTHER[name]})
    assert getattr(changed, name) != getattr(RESOLVED, name)
    is_source = name.endswith("_source")
    assert (changed.fingerprint() == RESOLVED.fingerprint()) is is_source
    assert (changed.identity() == RESOLVED.identity()) is is_source


def test_the_fingerprint_does_not_depend_on_the_order_of_keys() -> None:
    turned = {key: RESOLVED.model[key] for key in reversed(list(RESOLVED.model))}
    assert list(turned) != list(RESOLVED.model)
    assert dataclasses.replace(RESOLVED, model=turned).fingerprint() == RESOLVED.fingerprint()


@pytest.mark.parametrize(
    ("where", "every", "all_kept"),
    [(None, None, True), (None, 1, True), (None, 2, False), ("pos >= 0", None, False),
     ("end", 3, False)],
)  # fmt: skip
def test_a_recipe_says_whether_every_token_is_kept(
    where: str | None, every: int | None, all_kept: bool
) -> None:
    assert dataclasses.replace(RESOLVED, where=where, every=every).keeps_all is all_kept


def test_a_resolved_recipe_survives_json() -> None:
    for recipe in (RESOLVED, ResolvedRecipe(**{**OTHER, "rules": RULES})):
        back = ResolvedRecipe.from_json(json.loads(json.dumps(recipe.to_json())))
        assert back == recipe
        assert back.fingerprint() == recipe.fingerprint()


@pytest.mark.parametrize("rules", [None, 1, 3, "2"])
def test_a_stored_recipe_of_other_rules_is_refused(rules: object) -> None:
    stored = RESOLVED.to_json()
    assert stored.pop("rules") == 2
    stored |= {} if rules is None else {"rules": rules}
    with pytest.raises(ConfigError, match="rules"):
        ResolvedRecipe.from_json(stored)


def test_a_recipe_without_splices_is_stored_as_before_there_were_any() -> None:
    stored = RESOLVED.to_json()
    assert not {"splice", "splice_source"} & stored.keys()
    spliced = dataclasses.replace(RESOLVED, splice=("zero z.1",), splice_source="zero:z.1")
    assert ResolvedRecipe.from_json(spliced.to_json()) == spliced
    assert ResolvedRecipe.from_json(stored) == RESOLVED


def test_missing_and_unknown_fields_of_a_recipe_are_refused_by_name() -> None:
    stored = RESOLVED.to_json()
    del stored["pack"]
    stored["colour"] = "red"
    with pytest.raises(ConfigError, match="colour, pack"):
        ResolvedRecipe.from_json(stored)
