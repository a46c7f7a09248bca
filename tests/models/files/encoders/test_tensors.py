"""Tensors of encoders: as they were when it was opened, or refused."""

import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from spile.core.errors import DataError, InputError
from spile.core.tensors import write_tensors
from spile.models.files.encoders import open_sae
from spile.models.files.encoders.tensors import load_arrays
from support import saes

TENSORS = saes.random_tensors("jumprelu")


@pytest.mark.parametrize("file", ["params.npz", "params.safetensors"])
def test_an_encoder_is_loaded_as_it_was_opened_or_refused(file: str, tmp_path: Path) -> None:
    def write(sign: int) -> None:
        tensors = {name: sign * tensor for name, tensor in TENSORS.items()}
        if file.endswith(".npz"):
            np.savez(tmp_path / "new.npz", **tensors)  # type: ignore[arg-type]
        else:
            (tmp_path / "new").unlink(missing_ok=True)
            write_tensors(tmp_path / "new", tensors)
        arrived = tmp_path / ("new.npz" if file.endswith(".npz") else "new")
        (tmp_path / file).write_bytes(arrived.read_bytes())  # into the same file, if it is there

    write(1)
    sae = open_sae(str(tmp_path))
    arrays, digests = load_arrays(sae)
    write(-1)
    assert all(np.array_equal(arrays[name], TENSORS[name]) for name in arrays)
    with pytest.raises(DataError, match=f"{file}: changed while the run read it"):
        load_arrays(sae)
    write(1)
    assert load_arrays(sae)[1] == digests


def test_weights_of_another_dtype_are_widened(tmp_path: Path) -> None:
    narrow = {n: t.astype(ml_dtypes.bfloat16) for n, t in TENSORS.items()}
    write_tensors(tmp_path / "params.safetensors", narrow)
    arrays, _ = load_arrays(open_sae(str(tmp_path)))
    assert arrays["W_enc"].dtype == np.float32
    assert np.array_equal(arrays["W_enc"], narrow["W_enc"].astype(np.float32))


def test_tensors_that_are_missing_are_named(tmp_path: Path) -> None:
    saes.write_sae(tmp_path, "gated", architecture="jumprelu")
    with pytest.raises(InputError, match="no b_enc; no threshold"):
        open_sae(str(tmp_path))


def test_no_pickle_is_read(tmp_path: Path) -> None:
    objects = np.array([{}, print], dtype=object)
    np.savez(tmp_path / "params.npz", W_enc=objects)
    with pytest.raises(InputError, match="params.npz: not an npz file of plain arrays"):
        open_sae(str(tmp_path))
    (tmp_path / "params.npz").rename(tmp_path / "sae.bin")
    with pytest.raises(InputError, match="cfg.json .SAELens.*params.npz.*pickles are never read"):
        open_sae(str(tmp_path))


def test_an_archive_that_lies_about_its_sizes_is_refused(tmp_path: Path) -> None:
    stated = {"descr": "<f4", "fortran_order": False, "shape": (32, 80)}
    with (
        zipfile.ZipFile(tmp_path / "params.npz", "w") as archive,
        archive.open("W_enc.npy", "w") as file,
    ):
        np.lib.format.write_array_header_1_0(file, stated)
    with pytest.raises(InputError, match="W_enc.npy holds no plain numbers"):
        open_sae(str(tmp_path))
    (tmp_path / "params.npz").write_bytes(b"PK\3\4 not a zip")
    with pytest.raises(InputError, match="not an npz file"):
        open_sae(str(tmp_path))
