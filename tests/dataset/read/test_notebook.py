"""What a notebook shows of a dataset: text, never markup of the corpus."""

from pathlib import Path

import spile
from support import stored


def test_a_notebook_shows_taps_rows_bytes_and_the_recipe_as_text(tmp_path: Path) -> None:
    ds = spile.open(stored.copied(tmp_path / "out").path)
    html = ds._repr_html_()
    for wanted in ("resid_post.0", "mlp_out.1", f"{ds.num_tokens:,} per tap", ds.fingerprint):
        assert wanted in html
    object.__setattr__(ds.recipe, "corpus_source", "<script>alert(1)</script>")
    assert "<script>" not in ds._repr_html_()
