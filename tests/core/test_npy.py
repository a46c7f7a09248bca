"""Headers of .npy files: their shape and dtype, or an error of one line."""

import io
import struct
from typing import Any

import numpy as np
import pytest

from spile.core.npy import read_npy_header


def npy(header: str, version: tuple[int, int] = (1, 0)) -> io.BytesIO:
    text = header.encode("latin-1")
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return io.BytesIO(b"\x93NUMPY" + bytes(version) + size + text + b"values")


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<f2", "<i8", "|u1"])
def test_the_stream_is_at_the_first_value(version: tuple[int, int], dtype: str) -> None:
    array, stream = np.ones((2, 3), dtype), io.BytesIO()
    np.lib.format.write_array(stream, array, version)
    stream.seek(0)
    assert read_npy_header(stream) == ((2, 3), array.dtype)
    assert stream.read() == array.tobytes()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (4,)",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (4,), }\0",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-4,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (4.0,)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (True,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (4,)}",
        "{'descr': '<U4', 'fortran_order': False, 'shape': (4,)}",
        "{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (4,)}",
        "{'descr': 3, 'fortran_order': False, 'shape': (4,)}",
        "(" * 5000,
        "[" * 200,
        "x" * 70_000,
        "__import__('os')",
        "",
    ],
)
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_what_is_no_header_of_numbers_is_refused_in_one_line(
    header: str, version: tuple[int, int]
) -> None:
    if version == (1, 0) and len(header) > 65535:
        header = header[:65535]
    with pytest.raises(ValueError, match=r"^[^\n]{3,300}$"):
        read_npy_header(npy(header, version))


@pytest.mark.parametrize(
    "data", [b"", b"\x93NUM", b"\x93NUMPY\x03\0", b"\x93NUMPY\x01\0\xff", b"PK"]
)
def test_what_is_no_npy_file_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="no .npy header"):
        read_npy_header(io.BytesIO(data))
