"""Hostile counts and sizes: nothing is allocated before the bytes exist."""

import dataclasses
import io
import os
import resource
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.core.errors import CorruptError, InputError, StoreError
from spile.dataset import format as fmt
from spile.dataset.codec.compression import PlaneReader
from spile.dataset.maintain.verify import verify
from spile.dataset.records.unit_table import UnitColumns
from spile.models.files.encoders import open_sae
from spile.objects import LocalObjects
from support import saes, stored

HUGE = 1 << 50


@pytest.fixture
def dataset(tmp_path: Path) -> stored.Stored:
    return stored.build(tmp_path / "out", ((30, 20), (25,)))


def forge(dataset: stored.Stored, key: str, kind: str, change: Any) -> None:
    """Change a record and compute its checksum again, as an attacker would."""
    path = dataset.path / key
    body = fmt.decode_record(key, path.read_bytes(), kind)
    change(body)
    path.write_bytes(fmt.encode_record(kind, body))


def test_documents_that_are_not_there_are_a_fault_and_cost_nothing(dataset: stored.Stored) -> None:
    first, second, *others = dataset.table.units
    units = UnitColumns.of([first, dataclasses.replace(second, num_docs=HUGE), *others])
    stored.replace_table(dataset.objects, dataclasses.replace(dataset.table, units=units))
    faults = verify(LocalObjects(dataset.path)).faults
    assert any("does not name each document of its unit once" in fault for fault in faults)


def test_a_record_of_gigabytes_is_refused_before_it_is_read(dataset: stored.Stored) -> None:
    os.truncate(dataset.path / fmt.UNITS, 4 << 30)  # (of holes)
    with pytest.raises(StoreError, match=r"units\.json: is too large for a record \(4,294,967,296"):
        spile.open(dataset.path)


@pytest.mark.parametrize("shape", [[HUGE], [1 << 20, 1 << 20]])
def test_rows_wider_than_any_are_refused(dataset: stored.Stored, shape: list[int]) -> None:
    def widen(body: dict[str, Any]) -> None:
        next(iter(body["taps"].values()))["shape"] = shape

    forge(dataset, fmt.UNITS, "units", widen)
    with pytest.raises(CorruptError, match="is not a unit table"):
        spile.open(str(dataset.path))
    assert not verify(LocalObjects(dataset.path)).ok


def test_statistics_of_another_width_are_refused(dataset: stored.Stored) -> None:
    def widen(body: dict[str, Any]) -> None:
        for info in body["taps"].values():
            info["shape"] = [1 << 27]

    forge(dataset, fmt.UNITS, "units", widen)
    ds = spile.open(str(dataset.path))
    with pytest.raises(CorruptError, match="of another size"):
        ds.statistics(ds.taps[0])


def test_a_compressed_file_that_promises_gigabytes_takes_none() -> None:
    frames, plain, packed = 128, 64 << 20, 4096
    table = struct.pack("<III", packed, plain, 0) * frames
    head = struct.pack("<II", 0x184D2A5E, len(table) + 9)
    data = bytes(packed * frames) + head + table + struct.pack("<IBI", frames, 0x80, 0x8F92EAB1)
    reader = PlaneReader("f", len(data), lambda start, stop: data[start:stop])
    assert reader.size == 8 << 30
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptError, match="frame 0 does not decompress"):
        reader.read(0, reader.size, 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB


def test_an_encoder_that_promises_gigabytes_is_refused(tmp_path: Path) -> None:
    arrays = saes.random_tensors("jumprelu", 1, 24576).items()
    flat: dict[str, Any] = {name: array for name, array in arrays if array.ndim == 1}
    np.savez(tmp_path / "params.npz", **flat)
    header = io.BytesIO()
    told = {"descr": "<f4", "fortran_order": False, "shape": (1 << 15, 24576)}
    np.lib.format.write_array_header_1_0(header, told)
    small, size = header.getvalue(), len(header.getvalue()) + (3 << 30)
    with zipfile.ZipFile(tmp_path / "params.npz", "a") as archive:
        archive.writestr("W_enc.npy", small)
    data = (tmp_path / "params.npz").read_bytes()
    told_twice = struct.pack("<II", len(small), len(small))  # before the entry, and at the end
    assert data.count(told_twice) == 2
    data = data.replace(told_twice, struct.pack("<II", len(small), size))
    (tmp_path / "params.npz").write_bytes(data)
    with pytest.raises(InputError, match=f"W_enc.npy: {len(small)} .* cannot hold {size}"):
        open_sae(str(tmp_path))
