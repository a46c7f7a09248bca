"""Import the examples from their own folder, as users start them."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def imported() -> Iterator[Callable[[str], Any]]:
    """Import an example, without the strict promotion of tests: users do not have that."""
    sys.path.insert(0, str(EXAMPLES))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield import_module
    sys.path.remove(str(EXAMPLES))
