"""Ingestion exactly once: killed at random moments, every document is there once, bit for bit."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer

from chaos.harness import launch, run
from interop.ingest.conftest import Answers, Same
from interop.ingest.test_vllm import TAPS, written
from spile.models.files.demo import demo_model

KILLS = 100


@pytest.mark.full
def test_a_hundred_kills_leave_every_document_once(
    answers: Answers, tmp_path: Path, same: Same
) -> None:
    rng = random.Random(11)
    folder = written(tmp_path / "hs", answers, 1, 3)
    caught = 0
    for number in range(KILLS):
        out = tmp_path / f"out-{number}"
        words = ("ingest", folder, "--model", answers.model, "--taps", TAPS, "--out", out,
                 "--unit-tokens", 8)  # fmt: skip
        process = launch({}, *words)
        # Half of them while it writes, the others from its first moment on.
        while number % 2 and not out.exists() and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1 if number % 2 else 1.0))
        process.kill()
        process.communicate()
        caught += process.returncode != 0
        done = run(*words)
        assert done.code == 0, done.err
        same(out, answers.tokens, answers.layers(1, 3))
        audit = run("verify", out, "--json")
        assert audit.json["faults"] == [], audit.out
    assert caught > 0.5 * KILLS


TEXTS = (
    "The old mill by the river had not turned for twenty years, and the boys of the village",
    "def area(radius):\n    return 3.14159 * radius ** 2",
    "In the beginning of the year the harbour was frozen, and no ship came in or out of it.",
    "Water boils at a hundred degrees, unless one stands on a mountain, where it boils sooner.",
)


@pytest.mark.full
@pytest.mark.parametrize("late", [0, 1])
def test_the_layer_of_real_rows_in_bfloat16_is_named(tmp_path: Path, late: int) -> None:
    """HF in bfloat16 is the engine: it writes the demo model's streams, or those one later."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(demo_model(), dtype="bfloat16")
    tokenizer = Tokenizer.from_file(str(demo_model() / "tokenizer.json"))
    (tmp_path / "hs").mkdir()
    for number, text in enumerate(TEXTS):
        ids = torch.tensor(tokenizer.encode(text).ids)
        with torch.no_grad():
            streams = model(ids[None], output_hidden_states=True).hidden_states
        rows = torch.stack([streams[layer + late][0] for layer in (9, 20)], dim=1)
        saved = {"hidden_states": rows.contiguous(), "token_ids": ids}
        save_file(saved, tmp_path / "hs" / f"hs_{number}.safetensors")
    made = run(
        "ingest", tmp_path / "hs", "--model", "demo", "--out", tmp_path / "out",
        "--taps", "aux_hidden_states[9],aux_hidden_states[20]",
    )  # fmt: skip
    assert made.code == 0, made.err
    checked = run("check", tmp_path / "out")
    assert checked.code == (3 if late else 0), checked.out + checked.err
    for right, wrong in ((8, 9), (19, 20)):
        told = checked.out.splitlines()
        (line,) = (each for each in told if each.startswith(f"resid_post.{right} "))
        assert line.endswith(f": these are rows of resid_post.{wrong}") is bool(late)
