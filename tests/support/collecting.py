"""Workers of a whole run begin to collect at different folders, so that each file is compiled once.

Every worker imports all tests. pytest keeps a file whose assertions it has rewritten, which takes
about as long as all else that collecting does, in `__pycache__`. Workers that begin together find
nothing there; workers that begin apart find what the others have kept.
"""

import os
from pathlib import Path

import pytest


def begin_apart(config: pytest.Config) -> None:
    """Make this worker collect the folders of all tests in an order of its own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    places = sorted(path for name in config.args for path in Path(name).iterdir())
    sizes = [len([*place.rglob("test_*.py")]) or place.match("test_*.py") for place in places]
    places, sizes = zip(*[pair for pair in zip(places, sizes, strict=True) if pair[1]], strict=True)
    turn = int(worker.removeprefix("gw")) / int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    first = next(n for n in range(len(places)) if sum(sizes[: n + 1]) > turn * sum(sizes))
    config.args[:] = map(str, places[first:] + places[:first])


def sort(items: list[pytest.Item]) -> None:
    """Put the tests into the order in which pytest collects whole folders."""
    items.sort(key=lambda item: item.path.parts)
