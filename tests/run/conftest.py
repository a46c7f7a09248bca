"""Models that more than one of these tests need."""

from pathlib import Path

import numpy as np
import pytest

import tiny
from spile.core.tensors import write_tensors


@pytest.fixture(scope="session")
def infinite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama; not finite are its embeddings of token 0, which also pads, and of BOS."""
    directory = tiny.write_model(tmp_path_factory.mktemp("model") / "infinite")
    tensors = tiny.random_tensors(tiny.CONFIG)
    tensors["model.embed_tokens.weight"][0, :3] = [np.inf, -np.inf, np.nan]
    tensors["model.embed_tokens.weight"][tiny.BOS, 5] = np.inf
    (directory / "model.safetensors").unlink()
    write_tensors(directory / "model.safetensors", tensors)
    return directory
