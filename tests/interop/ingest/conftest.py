"""Rows as an engine would return them: those that Spile computes for the tiny model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import spile
from spile.core.config import Recipe
from support import tiny

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Answers:
    """What a model computed for each text.

    Attributes:
        rows: of each document [tokens, layers, width]: the stream after 0, 1, 2 and 3 blocks, and
            after the final norm.
    """

    model: Path
    texts: list[str]
    tokens: list[np.ndarray]
    rows: list[np.ndarray]

    def layers(self, *numbers: int) -> list[np.ndarray]:
        """The streams after so many blocks, in bfloat16."""
        return [rows[:, list(numbers)].astype(BFLOAT16) for rows in self.rows]


@pytest.fixture(scope="session")
def answers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("answers")
    corpus = tiny.write_corpus(folder / "docs.jsonl", 10, mean=1.3)
    taps = ["resid_pre.0", "resid_post.0", "resid_post.1", "resid_post.2", "final_norm"]
    recipe = Recipe(model=str(model), corpus=str(corpus), taps=",".join(taps),
                    compute_dtype="float32", store_dtype="float32")  # fmt: skip
    spile.extract(recipe, str(folder / "out"))
    ds = spile.open(str(folder / "out"))
    documents = [ds.document(number) for number in range(ds.num_documents)]
    rows = [np.stack([each.read(tap) for tap in taps], axis=1) for each in documents]
    tokens = [each.index["token_id"].astype(np.int64) for each in documents]
    texts = [ds.tokenizer.decode(ids.tolist()) for ids in tokens]
    return Answers(model, texts, tokens, rows)


Same = Callable[[Path, "list[np.ndarray]", "list[np.ndarray]"], None]


@pytest.fixture
def same() -> Same:
    """Check that a dataset has these rows [tokens, layers, width], bit for bit."""

    def check(out: Path, tokens: list[np.ndarray], rows: list[np.ndarray]) -> None:
        ds = spile.open(str(out))
        assert ds.num_documents == len(rows)
        found = [doc for doc in range(len(ds.documents())) if ds.has_document(doc)]
        for doc, ids, values in zip(found, tokens, rows, strict=True):
            document = ds.document(doc)
            assert document.index["token_id"].tolist() == ids.tolist()
            for layer, tap in enumerate(ds.recipe.taps):
                stored = document.read(tap, dtype="stored")
                assert stored.tobytes() == np.ascontiguousarray(values[:, layer]).tobytes()

    return check
