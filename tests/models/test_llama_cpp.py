"""Next-token log-probabilities, compared with llama.cpp, which shares no code with HF or jax."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.models.files.demo import demo_model
from support.llama_cpp import open_server, write_gguf

TOLERANCE = 1e-3  # in nats; 4e-4 was measured
CANDIDATES = 1000  # most likely tokens compared at each place
TEXTS = (
    "The old mill by the river had not turned for twenty years, and the boys of the village",
    "def area(radius):\n    return 3.14159 * radius ** 2",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as directory:  # half a gigabyte: not pytest's, which stays
        path = Path(directory) / "demo.gguf"
        yield open_server(write_gguf(demo_model(), path))


def predictions(server: Any, prompt: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The most likely next tokens, and their log-probabilities."""
    answer = server.handle_completions(
        {"prompt": prompt, "max_tokens": 1, "n_probs": CANDIDATES, "temperature": 0.0}
    )
    top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert len(top) == CANDIDATES
    return np.array([each["id"] for each in top]), np.array([each["logprob"] for each in top])


@pytest.mark.full
def test_the_demo_models_log_probabilities_are_llama_cpps(server: Any, tmp_path: Path) -> None:
    corpus = tmp_path / "docs.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    recipe = spile.Recipe(
        model="demo", corpus=str(corpus), taps="logits,logprob", seq_len=64, compute_dtype="float32"
    )
    spile.extract(recipe, str(tmp_path / "out"))
    ds = spile.open(str(tmp_path / "out"))
    met, places, furthest = 0, 0, 0.0
    for doc in range(len(TEXTS)):
        document = ds.document(doc)
        ids = document.index["token_id"].tolist()
        logits = document.read("logits").astype(np.float64)
        logs = logits - logits.max(axis=-1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(axis=-1, keepdims=True))
        logprob = document.read("logprob")
        for place in range(len(ids)):
            likely, wanted = predictions(server, ids[: place + 1])
            assert np.abs(logs[place, likely] - wanted).max() <= TOLERANCE, (doc, place)
            furthest = max(furthest, np.abs(logs[place - 1, likely] - wanted).max())
            places += 1
            if place + 1 < len(ids) and ids[place + 1] in likely:
                next_one = wanted[likely == ids[place + 1]][0]
                assert abs(logprob[place] - next_one) <= TOLERANCE, (doc, place)
                met += 1
    assert places > 30
    assert met > 0.8 * places, "most texts are likely"
    assert furthest > 1000 * TOLERANCE, "the control, one place off, must fail"
