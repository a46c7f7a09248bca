"""An exploring run (`make chaos-fuzz`): how long each test may take, and what was tried."""

import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from security import hostile


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fuzzed: explores (make chaos-fuzz)")
    if hostile.SECONDS and hostile.LOG not in os.environ:  # workers write into the same
        file, os.environ[hostile.LOG] = tempfile.mkstemp(prefix="spile-fuzz-", suffix=".jsonl")
        os.close(file)
        config.add_cleanup(lambda: Path(os.environ.pop(hostile.LOG)).unlink())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hostile.SECONDS:
        return
    fuzzed = [item for item in items if item.get_closest_marker("fuzzed")]
    config.hook.pytest_deselected(items=[item for item in items if item not in fuzzed])
    items[:] = fuzzed
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    hostile.exploration.seconds_each = hostile.SECONDS * workers / max(1, len(fuzzed))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if hostile.LOG not in os.environ:
        return
    lines = map(json.loads, Path(os.environ[hostile.LOG]).read_text().splitlines())
    tried, begun = defaultdict[str, int](int), dict[tuple[str, int], None]()
    seeds = defaultdict[str, list[int]](list)
    for line in lines:
        test, seed = line["test"], line["seed"]
        if "examples" in line:
            tried[test] += line["examples"]
            begun.pop((test, seed), None)
        else:
            seeds[test].append(seed)
            begun[test, seed] = None
    terminalreporter.section(f"explored: {sum(tried.values())} examples")
    for test, rounds in sorted(seeds.items()):
        name = test.rpartition("/")[2]
        terminalreporter.line(f"{tried[test]:8} examples, {len(rounds):4} seeds  {name}")
    terminalreporter.line(f"seeds: {json.dumps(seeds)}")
    for test, seed in begun:
        terminalreporter.line(
            f"the process ended within this round: SPILE_FUZZ_SEED={seed} pytest --chaos-full "
            f"'{test}'"
        )
