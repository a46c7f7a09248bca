"""Published safetensors files: only the used parts of a remote file are fetched."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from spile.core.errors import InputError
from spile.core.tensors import write_tensors
from spile.models.files.safetensors import open_tensors, read_header, read_tensor
from support.remote import counted


def test_a_tensor_of_a_local_file_is_a_map_of_it(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_tensors(path, {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    file, header = open_tensors(path, tmp_path)
    tensor = read_tensor(file, header["a"])
    assert isinstance(tensor.base, mmap.mmap)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_header_longer_than_the_first_look_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_tensors(path, {f"{'n' * 100}{i}": np.zeros(1, np.int8) for i in range(20_000)})
    objects, remote = counted(path.read_bytes(), path.name)
    assert read_header(remote, remote) == read_header(path, tmp_path)
    assert len(objects.ranges) <= 3


@pytest.mark.parametrize("data", [b"", b"no weights", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_what_is_no_such_file_is_refused_by_name(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"w\.safetensors: "):
        read_header(path, tmp_path)


def test_a_file_that_is_missing_beside_pickles_says_why_they_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with pytest.raises(InputError, match="w.safetensors: no such file$"):
        read_header(path, tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match="no such file; pickled .bin weights are never read$"):
        read_header(path, tmp_path)


def test_of_weights_the_header_and_what_is_used_of_a_tensor_are_fetched(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
    path = tmp_path / "w.safetensors"
    write_tensors(path, {"a": values, "b": -values})
    objects, remote = counted(path.read_bytes(), path.name)
    header = read_header(remote, remote)
    assert header == read_header(path, tmp_path)
    assert objects.ranges == [(0, 1 << 20)], "a header is most often shorter than that"
    objects.ranges.clear()
    assert np.array_equal(read_tensor(remote, header["b"]), -values)
    rows = read_tensor(remote, header["a"], slice(2048 * 10, 2048 * 20))
    assert np.array_equal(rows[10:20], values[10:20])
    a, b = header["a"], header["b"]
    assert objects.ranges == [(b.start, b.stop), (a.start + 20480, a.start + 40960)]
