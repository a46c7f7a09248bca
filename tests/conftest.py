"""Tests run hostile: strict dtype promotion, no implicit rank promotion, warnings are errors."""

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest

from spile.core.errors import naming_flags
from spile.core.tensors import write_tensors
from support import collecting, quick, tiny, zygote

gc.disable()  # until all tests are imported: little garbage is made until then
# Threads that do little each would mostly wait for one another: a thread keeps Python for 5 ms.
sys.setswitchinterval(5e-4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-full", action="store_true", help="run the full number of kills")


def pytest_configure(config: pytest.Config) -> None:
    """Let the suite try the same examples every time, and `make chaos` new ones."""
    hypothesis.settings.register_profile("suite", derandomize=True, database=None)
    if not config.getoption("--chaos-full"):
        hypothesis.settings.load_profile("suite")
        # Compiling well would be a good part of the suite's time; `make chaos` runs what users run.
        os.environ.setdefault("XLA_FLAGS", quick.FLAGS)
        # Threads of torch and numpy that wait for others are busy meanwhile, and models are tiny.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes start
    sys.dont_write_bytecode = False
    _compile_once(config)
    collecting.begin_apart(config)
    zygote.environment = tiny.environment()


def _compile_once(config: pytest.Config) -> None:
    """Compile each program once for all processes of a session: tests repeat programs."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        made = tempfile.TemporaryDirectory(prefix="spile-xla-", ignore_cleanup_errors=True)
        config.add_cleanup(made.cleanup)
        folder = made.name
    settings: dict[str, Any] = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    collecting.sort(items)
    if config.getoption("--chaos-full"):
        for item in items:
            if item.get_closest_marker("varied"):
                item.add_marker("full")  # (`-m full` selects it, too)
        return
    left = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_report_header(config: pytest.Config) -> list[str]:
    if config.getoption("--chaos-full"):
        return []
    return ["--chaos-full adds the long and the varied tests, which are deselected here"]


def pytest_collection_finish() -> None:
    """Freeze what is imported by now, so that collections do not scan torch and jax each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _programs(pytestconfig: pytest.Config) -> Iterator[None]:
    """Most tests extract what others have extracted already."""
    with nullcontext() if pytestconfig.getoption("--chaos-full") else quick.shared_programs():
        yield


@pytest.fixture(scope="session", autouse=True)
def _syncs(pytestconfig: pytest.Config) -> Iterator[None]:
    """No test looks at the disk after a power cut, except in processes of its own, which sync."""
    with nullcontext() if pytestconfig.getoption("--chaos-full") else quick.unsynced():
        yield


@pytest.fixture(scope="session", autouse=True)
def _flags() -> Iterator[None]:
    """Messages name options as in a command; tests/core/test_errors.py has Python's names."""
    with naming_flags():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return tiny.write_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short documents."""
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus") / "docs.jsonl")


@pytest.fixture(scope="session")
def infinite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose embeddings of token 0 (also the padding) and of BOS are not finite."""
    directory = tiny.write_model(tmp_path_factory.mktemp("model") / "infinite")
    tensors = tiny.random_tensors(tiny.CONFIG)
    tensors["model.embed_tokens.weight"][0, :3] = [np.inf, -np.inf, np.nan]
    tensors["model.embed_tokens.weight"][tiny.BOS, 5] = np.inf
    (directory / "model.safetensors").unlink()
    write_tensors(directory / "model.safetensors", tensors)
    return directory
