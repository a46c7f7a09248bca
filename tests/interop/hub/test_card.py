"""The card of a dataset on the Hub: its contents, and what it must not reveal."""

import json
from pathlib import Path

import pytest

from spile.interop.hub.card import size_category, write_card
from support import stored


def card(made: stored.Stored) -> str:
    manifest = made.ledger.derived.read_manifest(made.table.layout)
    assert manifest
    return write_card(
        "me/acts", made.table, made.table.taps, manifest.totals, "hf download me/acts"
    )


def test_the_card_tells_what_is_there_and_how_to_load_it(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", taps=stored.SCALED)
    text = card(made)
    front = text.split("---\n")[1].splitlines()
    assert front[0] == 'pretty_name: "Activations of tiny on tiny.jsonl"'
    assert "- n<1K" in front
    assert "- spile" in front
    assert not any(line.startswith("license") for line in front)
    assert "| 111 | 111 | 8 | 3 no tokens |" in text
    assert "| `q.1` | 2×3 | int8 | `blocks.1.attn.hook_q`, `blocks.1.attn.q.hook_out` |" in text
    assert "| `logprob` | 1 | float32 |  |" in text
    assert 'ds = spile.open("acts")' in text
    assert made.table.fingerprint in text
    recipe = json.loads(text.split("```json\n")[1].split("```")[0])
    assert {k: v for k, v in recipe.items() if not k.endswith("_source")} == (
        made.table.recipe.identity()
    )
    assert "/models/" not in text
    assert "/corpora/" not in text, "where things lay is nobody's business"


def test_the_card_names_a_few_files_of_a_large_corpus(tmp_path: Path) -> None:
    made = stored.build(tmp_path / "out", corpus=tuple(f"{n}-ab" for n in range(100)))
    recipe = json.loads(card(made).split("```json\n")[1].split("```")[0])
    assert recipe["corpus"][-2:] == ["7-ab", "and 92 more"]


@pytest.mark.parametrize(
    ("rows", "category"),
    [
        (0, "n<1K"),
        (999, "n<1K"),
        (1000, "1K<n<10K"),
        (10_000, "1K<n<10K"),
        (10_001, "10K<n<100K"),
        (5_000_000, "1M<n<10M"),
        (10**12, "100B<n<1T"),
        (10**13, "n>1T"),
    ],
)
def test_sizes_are_the_hubs(rows: int, category: str) -> None:
    assert size_category(rows) == category
