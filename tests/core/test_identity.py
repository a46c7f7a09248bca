"""Digests of files: equal for equal bytes, and different wherever the docs promise it."""

import os
from pathlib import Path

import numpy as np
import pytest

from spile.core.identity import full_digest, sampled_digest

BLOCK, BLOCKS = 1 << 16, 16


def noise(size: int) -> bytearray:
    return bytearray(np.random.default_rng(size).bytes(size))


def write(path: Path, data: bytes | bytearray) -> Path:
    path.write_bytes(data)
    return path


def test_digests_are_these(tmp_path: Path) -> None:
    abc = write(tmp_path / "abc", b"abc")
    assert sampled_digest(abc) == "3-06b05ab6733a618578af5f94892f3950"
    assert (
        full_digest(abc, write(tmp_path / "empty", b""))
        == "3e2f8940c3a0e0fd6f6e07bbf07f015dd7c147431e5fa14bf3f225d782641540"
    )


@pytest.mark.parametrize("size", [0, 1, 1000, BLOCK * BLOCKS, 3 * BLOCK * BLOCKS + 17])
def test_name_place_and_date_are_no_part_of_it(tmp_path: Path, size: int) -> None:
    first = write(tmp_path / "a.txt", noise(size))
    (tmp_path / "elsewhere").mkdir()
    second = write(tmp_path / "elsewhere" / "b.bin", noise(size))
    os.utime(second, (1, 1))
    assert sampled_digest(first) == sampled_digest(second)
    assert full_digest(first) == full_digest(second)


@pytest.mark.parametrize("size", [1, 1000, BLOCK + 1, BLOCK * BLOCKS])
def test_in_a_file_up_to_a_megabyte_every_byte_counts(tmp_path: Path, size: int) -> None:
    data = noise(size)
    before = sampled_digest(write(tmp_path / "f", data))
    for place in {0, size // 3, size // 2, size - 1}:
        data[place] ^= 1
        assert sampled_digest(write(tmp_path / "f", data)) != before, place
        data[place] ^= 1


@pytest.mark.parametrize("size", [BLOCK * BLOCKS + 1, 3 * BLOCK * BLOCKS + 17])
def test_in_a_larger_file_sixteen_even_blocks_count_with_both_ends(
    tmp_path: Path, size: int
) -> None:
    data = noise(size)
    before = sampled_digest(write(tmp_path / "f", data))
    for block in range(BLOCKS):
        start = (size - BLOCK) * block // (BLOCKS - 1)
        for place in (start, start + BLOCK - 1):
            data[place] ^= 1
            assert sampled_digest(write(tmp_path / "f", data)) != before, place
            data[place] ^= 1
    assert sampled_digest(write(tmp_path / "f", data)) == before


def test_of_a_larger_file_only_the_sample_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 38)  # reading these zeros would take minutes
    assert sampled_digest(path).startswith(f"{1 << 38}-")


@pytest.mark.parametrize("size", [1000, 2 * BLOCK * BLOCKS])
def test_growing_or_shrinking_a_file_changes_its_digest(tmp_path: Path, size: int) -> None:
    zeros = sampled_digest(write(tmp_path / "f", bytes(size)))
    assert sampled_digest(write(tmp_path / "f", bytes(size + 1))) != zeros
    assert sampled_digest(write(tmp_path / "f", bytes(size - 1))) != zeros


def test_where_one_file_ends_and_the_next_begins_counts(tmp_path: Path) -> None:
    ab, c = write(tmp_path / "1", b"ab"), write(tmp_path / "2", b"c")
    a, bc = write(tmp_path / "3", b"a"), write(tmp_path / "4", b"bc")
    digests = {full_digest(ab, c), full_digest(a, bc), full_digest(c, ab), full_digest(ab)}
    assert len(digests) == 4
