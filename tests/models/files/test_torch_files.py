"""Files of `torch.save`, on a disk and behind a URL."""

from pathlib import Path

import numpy as np
import pytest
import torch

from spile.core.errors import InputError
from spile.models.files.safetensors import read_tensor
from spile.models.files.torch_files import open_saved
from spile.objects import MemoryObjects
from spile.objects.paths import RemotePath

_MATRIX = torch.arange(12, dtype=torch.float32).reshape(3, 4)


def test_tensors_are_mapped_or_fetched_by_their_strides(tmp_path: Path) -> None:
    views = {"whole": _MATRIX, "turned": _MATRIX.T, "part": _MATRIX[1:, ::3], "none": _MATRIX[:0]}
    torch.save(views, tmp_path / "x.pt")
    objects = MemoryObjects()
    objects.create("x.pt", (tmp_path / "x.pt").read_bytes())
    for path in (tmp_path / "x.pt", RemotePath(objects, "x.pt")):
        file, found = open_saved(path)
        for name, info in found.items():
            assert np.array_equal(read_tensor(file, info), views[name].numpy())
    assert not read_tensor(*_whole(tmp_path / "x.pt")).flags.writeable, "it is a map of the file"


def _whole(path: Path) -> tuple:
    file, found = open_saved(path)
    return file, found["whole"]


def test_a_pickle_is_refused_by_the_files_name(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1), tmp_path / "x.pt")
    with pytest.raises(InputError, match="x.pt: data.pkl names torch.nn.modules.linear.Linear"):
        open_saved(tmp_path / "x.pt")
