"""Tests run hostile: strict dtype promotion, no implicit rank promotion, warnings are errors."""

from pathlib import Path

import jax
import pytest

import tiny

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-full", action="store_true", help="run the full number of kills")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return tiny.write_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short documents."""
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus") / "docs.jsonl")
