"""How a notebook shows a dataset."""

from collections.abc import Mapping
from html import escape

from spile.core.recipe import ResolvedRecipe


def dataset_html(
    url: str,
    taps: Mapping[str, tuple[tuple[int, ...], str]],
    counts: Mapping[str, str],
    recipe: ResolvedRecipe,
) -> str:
    """Return HTML: taps, each with the shape of a row and its stored dtype, then their origin."""
    rows = "".join(
        f"<tr><td>{escape(tap)}</td><td>{'×'.join(map(str, shape)) or '1'}</td>"
        f"<td>{dtype}</td></tr>"
        for tap, (shape, dtype) in taps.items()
    )
    facts = {
        **counts,
        "model": recipe.model_source,
        "corpus": recipe.corpus_source,
        "context": f"{recipe.seq_len:,} tokens",
        "kept rows": recipe.where or "all",
        "fingerprint": recipe.fingerprint(),
    }
    told = "".join(
        f"<tr><td>{name}</td><td>{escape(value)}</td></tr>" for name, value in facts.items()
    )
    return (
        f"<b>spile.Dataset</b> {escape(url)}<table><tr><th>tap</th><th>shape</th>"
        f"<th>stored as</th></tr>{rows}</table><table>{told}</table>"
    )
