"""A dataset for drafting heads: three layers, the last block and the final norm, of each token."""

from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import spile
from spile.features.run import FeatureRequest, make_features
from spile.interop.ingest.writer import Writer
from support import tiny, web_page

STREAMS = ("embed", "resid_post.0", "resid_post.1", "resid_post.2")


@dataclass(frozen=True)
class Drafted:
    """A dataset, and what it was made of.

    Attributes:
        rows: by tap, those of each document.
        masks: of each document, what a head should learn.
    """

    path: Path
    tokens: list[np.ndarray]
    rows: dict[str, list[np.ndarray]]
    masks: list[np.ndarray]

    def layers(self, *taps: str) -> list[np.ndarray]:
        """Of each document [tokens, layers, width]."""
        return [np.stack(each, axis=1) for each in zip(*(self.rows[t] for t in taps), strict=True)]


@pytest.fixture(scope="session")
def drafted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """Nine documents, in bfloat16; every third is a chat, of which the assistant says the end."""
    rng = np.random.default_rng(0)
    taps = (*STREAMS, "final_norm")
    made = Drafted(tmp_path_factory.mktemp("drafted") / "out", [], {tap: [] for tap in taps}, [])
    options = {"model": str(model), "taps": taps, "rows_by": "an engine", "unit_tokens": 30}
    with Writer(made.path, **options) as writer:  # type: ignore[arg-type]
        for number in range(9):
            count = int(rng.integers(2, 14))
            tokens = rng.integers(0, 250, count)
            rows = {t: rng.standard_normal((count, 32)).astype(ml_dtypes.bfloat16) for t in taps}
            flags = np.full(count, spile.FLAGS["user"])
            flags[count // 2 :] = spile.FLAGS["assistant"]
            mask = (np.arange(count) >= count // 2) if number % 3 == 0 else np.ones(count, bool)
            writer.add(tokens, rows, flags=flags if number % 3 == 0 else None)
            made.tokens.append(tokens)
            made.masks.append(mask.astype(np.int64))
            for tap in taps:
                made.rows[tap].append(rows[tap])
    return made


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An extraction whose documents have several contexts, packed out of order."""
    folder = tmp_path_factory.mktemp("packed")
    recipe = spile.Recipe(
        model=str(tiny.write_model(folder / "llama")),
        corpus=str(tiny.write_corpus(folder / "docs.jsonl", 8)),
        taps="resid_post:all,final_norm",
        seq_len=24,
        unit_tokens=200,
    )
    spile.extract(recipe, str(folder / "out"))
    return folder / "out"


@pytest.fixture(scope="session")
def counted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two encoded taps, and their features."""
    out = tmp_path_factory.mktemp("counted") / "out"
    built = web_page.build_two_encoders(out, model, web_page.texts())
    for tap in ("resid_post.0", "resid_post.1"):
        make_features(str(built.path), FeatureRequest(tap=tap, logits=0, examples=4))
    return built.path
