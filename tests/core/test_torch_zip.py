"""Files of `torch.save`: read as torch reads them, and nothing in them is executed."""

import io
import os
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from security.hostile import only_our_errors
from spile.core.errors import InputError
from spile.core.tensors import TensorInfo
from spile.core.torch_zip import MAX_PICKLE_BYTES, STORAGES, read_torch_zip

_SHAPED = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


def saved(value: Any) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink)
    return sink.getvalue()


def read(data: bytes) -> Any:
    return read_torch_zip(lambda start, length: data[start : start + length], len(data), "x.pt")


def values(data: bytes, info: TensorInfo) -> np.ndarray:
    raw = data[info.start : info.stop]
    return np.ndarray(info.shape, info.dtype, raw, 0, info.strides)


def changed(data: bytes, pickled: Callable[[bytes], bytes], **entries: bytes | None) -> bytes:
    """Rewrite an archive with another pickle; None removes an entry."""
    sink = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(sink, "w") as new:
        for name in old.namelist():
            short = name.partition("/")[2]
            content = pickled(old.read(name)) if short == "data.pkl" else old.read(name)
            content = entries.get(short, content)
            if content is not None:
                new.writestr(name, content)
    return sink.getvalue()


def test_plain_values_are_those_that_were_saved() -> None:
    plain = {
        "a": [1, -5, 300, 70_000, 1 << 40, -(1 << 40), True, False, None, 1.5, ("x", "é" * 300)],
        "b": OrderedDict(c=OrderedDict(), d=((), (1, 2), (1, 2, 3, 4))),
        3: "three",
    }
    assert read(saved(plain)) == plain


@pytest.mark.parametrize("name", STORAGES)
def test_tensors_of_every_dtype_are_read(name: str) -> None:
    dtype = {
        "BoolStorage": torch.bool, "ByteStorage": torch.uint8, "CharStorage": torch.int8,
        "ShortStorage": torch.int16, "IntStorage": torch.int32, "LongStorage": torch.int64,
        "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
        "FloatStorage": torch.float32, "DoubleStorage": torch.float64,
    }[name]  # fmt: skip
    tensor = torch.tensor([[0, 1, 2], [3, 4, 5]]).to(dtype)
    data = saved({"w": tensor, "none": tensor[:0], "one": tensor[1, 2]})
    found = read(data)
    assert found["w"].dtype == STORAGES[name]
    assert np.array_equal(values(data, found["w"]).astype(float), tensor.double().numpy())
    assert values(data, found["none"]).shape == (0, 3)
    assert float(values(data, found["one"])) == float(tensor[1, 2])


def test_views_are_read_by_their_strides() -> None:
    views = {
        "transposed": _SHAPED.permute(2, 0, 1),
        "part": _SHAPED[1:, :, 1::2],
        "column": _SHAPED[:, 1, 3],
        "flipped": _SHAPED[0].T,
    }
    data = saved(views)
    for name, info in read(data).items():
        assert np.array_equal(values(data, info), views[name].numpy()), name


def test_a_modules_state_and_its_parameters_are_read() -> None:
    module = torch.nn.Linear(3, 2)
    for state in (module.state_dict(), dict(module.named_parameters())):
        data = saved(state)
        found = read(data)
        assert list(found) == ["weight", "bias"]
        assert np.array_equal(values(data, found["weight"]), module.weight.detach().numpy())


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


class Mine:
    pass


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Hostile(), r"names (posix|nt).system"),
        ({"w": [Hostile()]}, "names posix.system"),
        (Mine(), "names tests.core.test_torch_zip.Mine|names .*copy_reg|names copyreg"),
        (torch.nn.Linear(2, 2), "names torch.nn.modules.linear.Linear"),
        ({"t": torch.float32}, "names torch.float32"),
        ({"s": torch.Size([1])}, "names torch.Size"),
        ({"f": torch.zeros(2).to(torch.float8_e4m3fn)}, "names torch._utils._rebuild_tensor_v3"),
        ({"s": torch.eye(2).to_sparse()}, "names torch._utils._rebuild_sparse_tensor"),
        ({"a": np.zeros(2)}, "names numpy"),
        ({1.5: 1}, "a key of type float"),
        ({"e": torch.zeros(1).expand(5)}, "repeats its values"),
        ({"n": 1 << 80}, "a number of 11 bytes"),
        ({"set"}, "names __builtin__.set"),
        ({"b": b"bytes"}, "names _codecs.encode"),
    ],
)  # fmt: skip
def test_other_values_are_refused_by_name(
    value: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=reason) as refused:
        read(saved(value))
    assert "nothing was executed" in str(refused.value)
    assert "\n" not in str(refused.value) and not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("pickled", "reason"),
    [
        (b"\x80\x02cos\nsystem\n.", "names os.system"),
        (b"\x80\x02(S'touch x'\nios\nsystem\n.", "opcode STRING"),
        (b"\x80\x02(ios\nsystem\n.", "opcode INST"),
        (b"\x80\x02\x8c\x02os\x8c\x06system\x93.", "opcode SHORT_BINUNICODE"),
        (b"\x80\x02}}\x81.", "opcode NEWOBJ"),
        (b"\x80\x02\x82\x01.", "opcode EXT1"),
        (b"\x80\x02\xfe.", "opcode 254"),
        (b"\x80\x04N.", "not a pickle of protocol 2"),
        (b"\x80\x02}}b.", "opcode BUILD"),
        (b"\x80\x02}X\x01\x00\x00\x00accollections\nOrderedDict\ns.", "holds collections.Ord"),
        (b"\x80\x02ccollections\nOrderedDict\n.", "holds collections.OrderedDict by itself"),
        (b"\x80\x02ccollections\nOrderedDict\nN\x85R.", "OrderedDict with 1 arguments"),
        (b"\x80\x02]q\x00h\x00a.", "refers to one list or dictionary twice"),
        (b"\x80\x02]\x85q\x00h\x00\x86.", "refers to one list or dictionary twice"),
        (b"\x80\x02h\x07.", "a value that it does not have"),
        (b"\x80\x02" + b"]" * 40 + b"a" * 39 + b".", "more than 32 deep"),
        (b"\x80\x02(.", "end with one value"),
        (b"\x80\x02N(a.", "a value that is not there"),
        (b"\x80\x02N.N.", "end with one value"),
        (b"\x80\x02X\xff\xff\xff\xffx.", "cut short"),
        (b"\x80\x02NQ.", "not a storage of torch"),
    ],
)
def test_other_opcodes_are_refused_by_name(pickled: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        read(changed(saved({}), lambda _: pickled))


def test_a_long_tuple_may_be_named_often() -> None:
    pickled = b"\x80\x02](" + b"N" * 100_000 + b"tq\x00" + b"a(" + b"h\x00" * 100_000 + b"e."
    assert len(read(changed(saved({}), lambda _: pickled))) == 100_001


def test_the_stride_of_an_axis_of_one_means_nothing() -> None:
    step = b"\x8a\x08" + b"\xff" * 7 + b"\x3f"
    data = changed(
        saved({"w": torch.arange(3)[None]}),
        lambda old: old.replace(b"K\x03K\x01\x86", step + b"K\x01\x86"),
    )
    assert values(data, read(data)["w"]).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"K\x02K\x03\x86", b"K\x02K\x04\x86"),  # the shape
        (b"K\x02K\x03\x86", b"K\x00\x8a\x08" + b"\xff" * 7 + b"\x1f\x86"),  # of no values
        (b"K\x03K\x01\x86", b"K\x04K\x01\x86"),  # the strides
        (b"QK\x00", b"QK\x01"),  # the offset
        (b"K\x06t", b"K\x07t"),  # the storage's size
        (b"FloatStorage", b"DoubleStorage"),
        (b"QK\x00", b"QJ\xff\xff\xff\xff"),
        (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x001"),
    ],
)
def test_sizes_are_checked_against_the_storage(old: bytes, new: bytes) -> None:
    data = saved({"w": torch.zeros(2, 3)})
    assert read(changed(data, lambda pickled: pickled))["w"].shape == (2, 3)
    with pytest.raises(InputError, match="data.pkl (has a tensor|expects)"):
        read(changed(data, lambda pickled: pickled.replace(old, new)))


def test_an_archive_that_is_not_torchs_is_refused() -> None:
    data = saved({"w": torch.zeros(2, 3)})
    sink = io.BytesIO()
    torch.save({}, sink, _use_new_zipfile_serialization=False)
    with pytest.raises(InputError, match="before version 1.6, a plain pickle"):
        read(sink.getvalue())
    for hostile, reason in (
        (pickle.dumps({}), "does not begin as a zip"),
        (b"", "does not begin"),
        (data[:-1], "truncated"),
        (data + b" ", "truncated"),
        (b"PK" + data, "damaged"),
        (changed(data, bytes, byteorder=b"big"), "big-endian"),
        (changed(data, lambda _: b"\x80\x02" + b"N" * MAX_PICKLE_BYTES), "data.pkl has"),
        (changed(data, bytes, **{"data/0": None}), "data/0, which is not there"),
    ):
        with pytest.raises(InputError, match=reason):
            read(hostile)
    program = io.BytesIO(data)
    with zipfile.ZipFile(program, "a") as archive:
        archive.writestr("archive/constants.pkl", b"\x80\x02).")
    with pytest.raises(InputError, match="TorchScript"):
        read(program.getvalue())


def test_compressed_or_overlapping_entries_are_refused() -> None:
    data = saved({"w": torch.zeros(40, 30), "v": torch.ones(40, 30)})
    sink = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(sink, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED)
    with pytest.raises(InputError, match="is compressed or encrypted"):
        read(sink.getvalue())
    plain = changed(data, bytes)
    with zipfile.ZipFile(io.BytesIO(plain)) as archive:
        first = archive.getinfo("archive/data/0").header_offset
    directory = plain.index(b"PK\x01\x02")
    named = plain.index(b"data/1", directory)  # its directory entry names the header of data/0
    place = plain.rindex(b"PK\x01\x02", 0, named) + 42
    with pytest.raises(InputError, match="has another name in the directory"):
        read(plain[:place] + struct.pack("<I", first) + plain[place + 4 :])
    larger = plain[: place - 22] + struct.pack("<II", 4900, 4900) + plain[place - 14 :]
    with pytest.raises(InputError, match="overlaps another"):
        read(larger)


def _mutations(count: int) -> None:
    """Mutate files at random: each is read or refused in one line, and nothing is executed."""
    rng = random.Random(count)
    seeds = [
        saved({"w": _SHAPED.permute(2, 0, 1), "n": 3, "l": [1.5, (True, None)], "s": "text"}),
        saved(torch.nn.Linear(3, 2).state_dict()),
        saved([Hostile(), {"w": torch.zeros(3)}]),
    ]
    words = [
        b"cposix\nsystem\n", b"R", b"b", b"Q", b"\x93", b"i", b"o", b"\x81", b"(", b"t", b"q\x00",
        b"h\x00", b".", b"\xff" * 8, b"PK\x01\x02", b"PK\x06\x06", struct.pack("<Q", 1 << 62),
    ]  # fmt: skip
    pickles = [zipfile.ZipFile(io.BytesIO(seed)).read(_pickle_of(seed)) for seed in seeds]
    read_at_all = 0
    for number in range(count):
        which = number % len(seeds)
        inner = number % 2 == 0  # change the pickle, in an archive that fits it
        data = bytearray(pickles[which] if inner else seeds[which])
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            kind = rng.randrange(4)
            if kind == 0:
                data[at] = rng.randrange(256)
            elif kind == 1:
                data[at : at + rng.randint(0, 9)] = rng.choice(words)
            elif kind == 2:
                del data[at : at + rng.randint(1, 40)]
            else:
                data[at:at] = data[at : at + rng.randint(1, 60)]
        content = bytes(data)
        hostile = changed(seeds[which], lambda _, new=content: new) if inner else content
        with only_our_errors():
            _touch(hostile, read(hostile))
            read_at_all += 1
    assert 0 < read_at_all < count and not Path("executed").exists()


def _pickle_of(data: bytes) -> str:
    return next(n for n in zipfile.ZipFile(io.BytesIO(data)).namelist() if n.endswith("data.pkl"))


def _touch(data: bytes, value: Any) -> None:
    if isinstance(value, TensorInfo):
        values(data, value).sum()
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            _touch(data, each)


def test_mutated_files_are_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _mutations(300)


@pytest.mark.full
def test_ten_thousand_mutated_files_are_read_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _mutations(10_000)
