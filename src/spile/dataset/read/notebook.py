"""How a notebook shows a dataset."""

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spile.dataset.read.dataset import Dataset


def dataset_html(dataset: "Dataset") -> str:
    """Return HTML: taps with their shapes, then their origin."""
    recipe = dataset.recipe
    shapes = {tap: "×".join(map(str, dataset.shape(tap))) or "1" for tap in dataset.taps}
    rows = "".join(
        f"<tr><td>{escape(tap)}</td><td>{shape}</td><td>{dataset.stored_dtype(tap)}</td></tr>"
        for tap, shape in shapes.items()
    )
    facts = {
        "rows": f"{dataset.num_tokens:,} per tap",
        "documents": f"{dataset.num_documents:,}",
        "stored": f"{dataset.nbytes / 1e6:,.1f} MB",
        "model": recipe.model_source,
        "corpus": recipe.corpus_source,
        "context": f"{recipe.seq_len:,} tokens",
        "kept rows": recipe.where or "all",
        "fingerprint": dataset.fingerprint,
    }
    told = "".join(
        f"<tr><td>{name}</td><td>{escape(value)}</td></tr>" for name, value in facts.items()
    )
    return (
        f"<b>spile.Dataset</b> {escape(dataset.url)}<table><tr><th>tap</th><th>shape</th>"
        f"<th>stored as</th></tr>{rows}</table><table>{told}</table>"
    )
