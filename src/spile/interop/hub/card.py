"""The card of a dataset on the Hub: what it is, what its rows are, and how to read them."""

import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from spile.dataset.format import TapInfo
from spile.dataset.records.segments import Totals
from spile.dataset.records.table import Table

_FILES = 8  # most corpus files to name
_SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")


def write_card(
    repo: str, table: Table, taps: Mapping[str, TapInfo], made: Totals, download: str
) -> str:
    """Return a README.md: front matter for the Hub, then text. The owner chooses the license.

    Args:
        taps: the recipe's taps, and those added later.
    """
    recipe = table.recipe.to_json()
    model, corpus = _named(recipe["model_source"]), _named(recipe["corpus_source"])
    skipped = ", ".join(f"{n:,} {reason}" for reason, n in sorted(made.skipped.items()))
    lines = [
        "---",
        f"pretty_name: {json.dumps(f'Activations of {model} on {corpus}')}",
        "tags:",
        *(f"- {tag}" for tag in ("activations", "interpretability", "spile")),
        "size_categories:",
        f"- {size_category(int(made.rows))}",
        "viewer: false",  # it would show the records, not the rows
        "---",
        "",
        f"# Activations of {_code(model)} on {_code(corpus)}",
        "",
        f"The activations of {_code(model)} at {len(taps)} places, for every token kept of "
        f"{_code(corpus)}. Made with Spile.",
        "",
        "| rows of each tap | tokens read | documents | left out | bytes |",
        "|---|---|---|---|---|",
        f"| {made.rows:,} | {made.tokens:,} | {made.documents:,} "
        f"| {_cell(skipped or 'none')} | {made.bytes:,} |",
        "",
        "## Load",
        "",
        "```",
        download,
        "```",
        "",
        "```python",
        "import spile",
        "",
        f'ds = spile.open("{PurePath(repo).name}")',
        f'rows = ds.read("{next(iter(taps))}", 0, 4096)  # numpy, float32',
        "index = ds.index(0, 4096)  # token_id, doc, offset, pos, flags",
        "```",
        "",
        "`spile verify` audits every byte.",
        "",
        "## Taps",
        "",
        "| tap | shape of a row | stored as | also known as |",
        "|---|---|---|---|",
        *(
            f"| `{tap}` | {'×'.join(map(str, info.shape)) or '1'} | {info.dtype} "
            f"| {', '.join(map(_code, info.aliases))} |"
            for tap, info in taps.items()
        ),
        "",
        "## Recipe",
        "",
        f"Fingerprint `{table.fingerprint}`. Model and corpus are identified by their content:",
        "",
        "```json",
        json.dumps(_short({**recipe, **_sources(recipe)}), indent=1, ensure_ascii=False),
        "```",
    ]
    return "\n".join(lines) + "\n"


def size_category(rows: int) -> str:
    """Return the Hub's size category for a number of rows."""
    bounds = [10 ** (power + 3) for power in range(len(_SIZES))]
    if rows < bounds[0]:
        return "n<1K"
    if rows > bounds[-1]:
        return "n>1T"
    place = next(i for i, bound in enumerate(bounds[1:]) if rows <= bound)
    return f"{_SIZES[place]}<n<{_SIZES[place + 1]}"


def _sources(recipe: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: _named(value)
        for name, value in recipe.items()
        if name.endswith("_source") and isinstance(value, str)
    }


def _short(recipe: dict[str, Any]) -> dict[str, Any]:
    """Shorten the list of corpus files, which may be long; `units.json` names them all."""
    files: list[str] = recipe["corpus"]
    if len(files) > _FILES:
        recipe = {**recipe, "corpus": [*files[:_FILES], f"and {len(files) - _FILES} more"]}
    return recipe


def _named(source: str) -> str:
    """Return the last part of a path: its folders are private."""
    return PurePath(source).name if PurePath(source).is_absolute() else source


def _code(text: str) -> str:
    return "`" + text.replace("`", "'") + "`" if text else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
