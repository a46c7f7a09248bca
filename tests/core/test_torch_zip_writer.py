"""Files for torch, written without it: torch loads them, and so do we."""

import io
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from spile.core.torch_zip import read_torch_zip
from spile.core.torch_zip_writer import write_torch_zip


def written(value: Any) -> bytes:
    sink = io.BytesIO()
    write_torch_zip(sink, value)
    return sink.getvalue()


def loaded(data: bytes, **options: Any) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, **options)


def test_torch_loads_what_was_written() -> None:
    plain = {
        "a": [1, -5, 255, 256, 70_000, 1 << 40, -(1 << 40), True, False, None, 1.5, [], {}],
        "b": {"é": {3: "three", -7: ""}},
    }
    data = written(plain)
    assert loaded(data) == plain
    assert read_torch_zip(lambda at, n: data[at : at + n], len(data), "x.pt") == plain


@pytest.mark.parametrize("dtype", [
    np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_
])  # fmt: skip
def test_torch_loads_arrays_of_every_shape(dtype: Any) -> None:
    arrays = {
        "matrix": np.arange(12).reshape(3, 4).astype(dtype),
        "transposed": np.arange(12).reshape(3, 4).astype(dtype).T,
        "empty": np.zeros((0, 3), dtype),
        "number": np.ones((), dtype),
    }
    found = loaded(written(arrays))
    for name, wanted in arrays.items():
        assert tuple(found[name].shape) == wanted.shape and found[name].is_contiguous()
        assert found[name].double().tolist() == wanted.astype(np.float64).tolist()
    data = written(arrays)
    told = read_torch_zip(lambda at, n: data[at : at + n], len(data), "x.pt")["transposed"]
    assert (told.shape, told.dtype) == ((4, 3), np.dtype(dtype))


def test_equal_values_give_equal_bytes() -> None:
    value = {"J": {0: np.ones((2, 2), np.float16)}, "n_prompts": 3}
    assert written(value) == written(value)


@pytest.mark.parametrize("value", [(1, 2), object(), {"a": np.zeros(2, np.uint32)}, b"bytes"])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot write a value of type"):
        written(value)


def test_layers_of_a_network_take_it_as_their_state() -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(3, 3) for _ in range(2)])
    state = {
        name: np.full(tuple(t.shape), 0.5, np.float32) for name, t in layers.state_dict().items()
    }
    layers.load_state_dict(loaded(written(state)))
    assert float(layers[1].bias.detach().sum()) == 1.5
