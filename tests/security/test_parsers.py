"""Whatever a stranger wrote: each parser returns, or says in one line what is wrong.

The suite tries a few changed files for each parser, always the same; `make chaos-fuzz` explores.
What it found stays in `finds/`.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from security.hostile import SECONDS, SEED, exploration, fuzz, mutated, only_our_errors
from security.parsers import FINDS, PARSERS
from support.marks import some

SLOW = {"chat template", "chats"}  # each example is a process; the suite has others of them


@pytest.fixture(scope="module", params=some(PARSERS, *({*PARSERS} - SLOW)))
def parser(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(parser: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("parser")


@pytest.fixture(scope="module")
def seeds(parser: str, folder: Path) -> list[bytes]:
    return PARSERS[parser].seeds(folder)


def test_valid_files_are_read(parser: str, folder: Path, seeds: list[bytes]) -> None:
    for seed in seeds:
        PARSERS[parser].use(seed, folder)


@fuzz(40)
@given(data=st.data())
def test_a_file_that_was_changed_anywhere_is_refused_or_read(
    parser: str, folder: Path, seeds: list[bytes], data: st.DataObject
) -> None:
    changed = data.draw(mutated(seeds, PARSERS[parser].words))
    if (
        SECONDS or SEED
    ):  # kept if it fails, or ends the process; the last of a round is the simplest
        (FINDS / parser).mkdir(parents=True, exist_ok=True)
        (FINDS / parser / str(exploration.seed)).write_bytes(changed)
    with only_our_errors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PARSERS[parser].use(changed, folder)
    if SECONDS or SEED:
        (FINDS / parser / str(exploration.seed)).unlink()


@pytest.mark.parametrize(
    "find", sorted(FINDS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_what_was_found_once_stays_refused(find: Path, tmp_path: Path) -> None:
    with only_our_errors():
        PARSERS[find.parent.name].use(find.read_bytes(), tmp_path)
