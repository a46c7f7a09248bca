"""In float32 Spile is as close to float64 as HF transformers is: `bench/exactness.py` measures."""

import importlib.util
from pathlib import Path
from types import ModuleType

import jax
import pytest

from spile.models.files.demo import demo_model
from support.families import FAMILIES

# Relative to HF's own distance. Both are sums of roundings, so neither is always smaller.
MOST = 1.5
COPIED = ("embed", "resid_pre.0")  # of a model that scales no embeddings
ARCHITECTURES = (
    "llama-gqa", "llama3-rope", "mistral-gqa", "qwen2", "qwen2-yarn", "qwen3-gqa", "gemma-gqa",
    "gemma2-gqa", "gemma3-gqa", "gpt2", "neox", "phi3-gqa", "phi3-longrope", "olmo2-gqa",
    "mixtral-gqa", "qwen3moe-gqa", "gptoss-gqa", "starcoder2-gqa",
)  # fmt: skip
ON_A_CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="compares on a CPU")


@pytest.fixture(scope="module")
def exactness() -> ModuleType:
    path = Path(__file__).parents[3] / "bench" / "exactness.py"
    spec = importlib.util.spec_from_file_location("exactness", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full  # tests/models/forward/test_ops.py tests what it depends on
@ON_A_CPU
def test_the_demo_model_is_as_near_to_float64_as_hf(exactness: ModuleType) -> None:
    contexts = exactness.demo_contexts(8, 128)
    found = exactness.measure(demo_model(), contexts, (), ways=("eager", "spile"))
    ratios = exactness.ratios(found)
    assert len(ratios) >= 62
    assert {tap: ratio for tap, ratio in ratios.items() if not ratio <= MOST} == {}
    # rounding is seen at all: float32 is not compared with itself
    assert all(by[way].mean > 1e-8 for tap, by in found.items() for way in by if tap not in COPIED)


@ON_A_CPU
@pytest.mark.full
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_as_near_to_float64_as_hf(name: str, exactness: ModuleType) -> None:
    ratios = exactness.family_ratios(FAMILIES[name], seeds=3)
    assert {tap: ratio for tap, ratio in ratios.items() if not ratio <= MOST} == {}
