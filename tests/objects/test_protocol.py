"""Keys and patterns of keys. What every store must do is in tests/contracts/test_objects.py."""

import glob
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.core.errors import StoreError
from spile.objects import MemoryObjects
from spile.objects.protocol import (
    MOST_HELD,
    check_creates_once,
    check_held,
    check_key,
    exists,
    matches,
    plain_depth,
)
from support.marks import examples

NAMES = ("b.txt", ".hidden", "ab", "a/b.txt", "a/.x/c", "a/b/c.txt", "b/a/b/c", "[x]")
NAMED = st.sampled_from(["*", "a", "b", "?", "*.txt", ".*", "[ab]", "a*", ".hidden", "[[]x]"])
PARTS = NAMED | st.just("**")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("files")
    for name in NAMES:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).touch()
    return top


@examples(200)
@given(pattern=st.lists(PARTS, min_size=1, max_size=4))
def test_a_pattern_finds_what_glob_finds_on_a_disk(folder: Path, pattern: list[str]) -> None:
    files = [p.relative_to(folder).parts for p in folder.rglob("*") if p.is_file()]
    found = glob.glob("/".join(pattern), root_dir=folder, recursive=True)
    # (`file/**` finds `file/`, which is no file.)
    on_disk = {tuple(Path(name).parts) for name in found if os.path.isfile(f"{folder}/{name}")}
    assert {parts for parts in files if matches(parts, pattern)} == on_disk


@pytest.mark.parametrize(
    ("pattern", "depth"), [("a/b/*.txt", 2), ("*/b", 0), ("a/b", 1), ("a", 0), ("a/**/b", 1)]
)
def test_folders_before_the_first_wildcard_are_plain(pattern: str, depth: int) -> None:
    assert plain_depth(pattern.split("/")) == depth


def test_a_key_stays_inside_the_store() -> None:
    assert check_key("memory://x", "a/b.json") == ["a", "b.json"]
    for key in ("/a", "a/../b", "..", "a//b", "", "a\0"):
        with pytest.raises(StoreError, match="memory://x: .* is not a key inside the store"):
            check_key("memory://x", key)


def test_what_is_too_large_to_hold_is_refused() -> None:
    check_held("memory://x", "a", MOST_HELD)
    with pytest.raises(StoreError, match="memory://x/a: is too large"):
        check_held("memory://x", "a", MOST_HELD + 1)


def test_a_store_that_overwrites_records_is_refused_and_left_clean() -> None:
    class Careless(MemoryObjects):
        def create(self, key: str, data: bytes) -> bool:
            self.replace(key, data)
            return True

    good, careless = MemoryObjects(), Careless()
    check_creates_once(good)
    with pytest.raises(StoreError, match="ignores preconditions"):
        check_creates_once(careless)
    assert list(good.list()) == list(careless.list()) == []
    good.create("a", b"1")
    assert exists(good, "a") and not exists(good, "b")
