"""A real engine: llama.cpp serves the demo model, and Spile tells whether it was that model.

SPILE_ENGINE_PROMPTS sets how many prompts the exact weights are asked, twice each; faults are asked
at most ten. docs/rollouts.md has what 200 gave.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers

import spile
from chaos.harness import run
from spile.check.disagreement import Disagreement, disagreement_of
from spile.core.disagreement import BOUND
from spile.models.files.demo import _download as downloaded_file
from spile.models.files.demo import _installed as shipped_file
from spile.models.files.demo import demo_model
from support.llama_cpp import served, write_gguf

PROMPTS = int(os.environ.get("SPILE_ENGINE_PROMPTS", "6"))
SUBJECTS = (
    "the sea", "a storm", "an old bridge", "winter", "bread", "a lighthouse", "the moon",
    "a clockmaker", "rivers", "glass", "a market", "horses", "an island", "a library", "salt",
    "fire", "the harbour", "paper", "a garden", "iron",
)  # fmt: skip
ASKED = (
    "Write a sentence about {}.", "What is {} good for?", "Describe {} to a child.",
    "Tell me a fact about {}.", "Why do people write about {}?",
    "Name three things that go with {}.", "How would you draw {}?", "Begin a story about {}.",
    "What rhymes with {}?", "Is {} old or new?",
)  # fmt: skip
# As the model's own, without the system message that it adds.
OTHER_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Engine:
    """Asks a server of some weights, in a folder of its own."""

    folder: Path

    def ask(self, path: Path, prompts: int, name: str) -> Path:
        """Return the rollouts of a GGUF file."""
        corpus, out = self.folder / f"{name}.jsonl", self.folder / name
        texts = [asked.format(subject) for subject in SUBJECTS for asked in ASKED][:prompts]
        rows = [{"messages": [{"role": "user", "content": text}]} for text in texts]
        corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with served(path) as url:
            done = run(
                "rollouts", "--model", "demo", "--corpus", corpus, "--server", url, "--out", out,
                "--per-prompt", 2, "--answer-tokens", 32, "--concurrency", 4,
            )  # fmt: skip
        assert done.code == 0, done.err
        return out

    def compared(self, rollouts: Path, name: str, **options: Any) -> Disagreement:
        """Extract from rollouts, and return what the documents table says."""
        given: dict[str, Any] = {
            "model": "demo", "corpus": str(rollouts), "taps": "resid_post:9", "seq_len": 256,
            "where": "assistant", "compute_dtype": "float32",
        }  # fmt: skip
        out = self.folder / f"acts-{name}"
        spile.extract(spile.Recipe(**given | options), str(out))
        found = disagreement_of(spile.open(str(out)), BOUND)
        assert found is not None
        tell(name, found)
        return found


def tell(name: str, found: Disagreement) -> None:
    sys.stdout.write(
        f"\n{name}: {found.tokens:,} tokens, mean {found.mean:.2g}, largest {found.largest:.2g}, "
        f"{found.beyond} of {found.documents} documents beyond {BOUND}; "
        f"{'agrees' if found.ok else 'caught'}\n"
    )


def rows_of(rollouts: Path) -> list[dict[str, Any]]:
    files = sorted((rollouts / "data").rglob("*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def exact(engine: Engine) -> Path:
    """Answers of the same weights, in float32."""
    if made := os.environ.get("SPILE_ENGINE_ROLLOUTS"):
        return Path(made)
    path = write_gguf(demo_model(), engine.folder / "exact.gguf")
    try:
        return engine.ask(path, PROMPTS, "exact")
    finally:
        path.unlink()  # half a gigabyte


def test_the_same_weights_agree_and_the_check_passes(engine: Engine, exact: Path) -> None:
    rows = rows_of(exact)
    told = [row for row in rows if row["answer_ids_from"] == "engine"]  # llama.cpp leaves some out
    assert len(rows) == 2 * PROMPTS and len(told) >= 0.9 * len(rows)
    found = engine.compared(exact, "the same weights")
    assert found.documents == len(told) and found.ok and found.beyond == 0
    # Both compute in float32, in other orders: their log-probabilities are within 1e-3.
    assert found.mean < found.largest < 1e-3
    checked = run("check", engine.folder / "acts-the same weights", "--samples", 2)
    assert checked.code == 0, checked.out + checked.err


def rounded_to(bits: int) -> Callable[[str, np.ndarray], np.ndarray]:
    """Matrices in blocks of 32 values with a scale, as quantised files have them."""

    def change(name: str, array: np.ndarray) -> np.ndarray:
        if array.ndim != 2:
            return array
        blocks = array.reshape(-1, 32)
        step = np.abs(blocks).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
        return (np.rint(blocks / np.maximum(step, 1e-12)) * step).reshape(array.shape)

    return change


def with_adapter(name: str, array: np.ndarray) -> np.ndarray:
    """A merged LoRA of rank 8 in queries and values, a twentieth of each matrix's norm."""
    if not name.endswith(("q_proj.weight", "v_proj.weight")):
        return array
    rng = np.random.default_rng(len(name))
    up, down = (rng.standard_normal((size, 8)).astype(np.float32) for size in array.shape)
    delta = up @ down.T
    return array + delta * np.float32(0.05 * np.linalg.norm(array) / np.linalg.norm(delta))


@pytest.mark.parametrize(
    ("name", "changes", "caught"),
    [
        ("Q4_1 as shipped", None, None),
        ("Q8_0 of that", {"quantise": gguf.GGMLQuantizationType.Q8_0}, None),
        ("Q4_0 of that", {"quantise": gguf.GGMLQuantizationType.Q4_0}, True),
        ("3 bits", {"change": rounded_to(3)}, True),
        ("a merged LoRA", {"change": with_adapter}, True),
        ("another template", {"template": OTHER_TEMPLATE}, True),
    ],
)
def test_other_weights_and_templates_are_caught(
    engine: Engine, name: str, changes: dict[str, Any] | None, caught: bool | None
) -> None:
    if changes is None:
        path = shipped_file() or downloaded_file(engine.folder)
    else:
        path = write_gguf(demo_model(), engine.folder / "other.gguf", **changes)
    found = engine.compared(engine.ask(path, min(PROMPTS, 10), name), name)
    assert found.mean > 1e-3
    assert caught is None or found.ok is not caught


@pytest.mark.parametrize("every", [True, False])
def test_tokens_that_are_shifted_are_caught(engine: Engine, exact: Path, every: bool) -> None:
    """Each log-probability stands one token late: in all answers, or in one."""
    shifted: list[dict[str, Any]] = []
    for number, row in enumerate(rows_of(exact)[:20]):
        logs = [log for log in row["logprobs"] if log is not None]
        logs = [*logs[-1:], *logs[:-1]] if every or number == 3 else logs
        shifted.append({"ids": row["token_ids"], "logs": logs})
    corpus = engine.folder / f"shifted-{every}.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in shifted))
    found = engine.compared(
        corpus, f"shifted in {'every answer' if every else 'one'}", tokens_column="ids",
        logprobs_column="logs", where=None,
    )  # fmt: skip
    assert not found.ok and (found.beyond >= 0.9 * len(shifted) if every else found.first == (3,))


def test_the_bound_is_above_what_rounding_to_bfloat16_gives(engine: Engine, exact: Path) -> None:
    """HF in bfloat16 is the engine, and Spile in bfloat16 the model; and both against float32."""
    rows = rows_of(exact)[:12]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(demo_model(), dtype="bfloat16")
    told: list[dict[str, Any]] = []
    for row in rows:
        ids = torch.tensor(row["token_ids"])
        with torch.no_grad():
            logs = torch.log_softmax(model(ids[None]).logits[0].float(), dim=-1)
        own = logs[:-1].gather(-1, ids[1:, None])[:, 0].tolist()
        told.append({"ids": row["token_ids"], "logs": own[row["prompt_tokens"] - 1 :]})
    corpus = engine.folder / "hf.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in told))
    named = {"tokens_column": "ids", "logprobs_column": "logs", "where": None}
    for dtype in ("bfloat16", "float32"):
        found = engine.compared(corpus, f"HF in bfloat16, {dtype}", compute_dtype=dtype, **named)
        assert found.ok and found.mean < 0.75 * BOUND
