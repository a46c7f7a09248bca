"""The arithmetic of built-in changes in torch; e2e/test_splice.py compares it with the device's."""

import numpy as np
import torch

from spile.check.hf_splices import HfSplices
from spile.models.splices import Splice, orthonormal
from spile.models.taps import Tap

RNG = np.random.default_rng(0)


def test_a_change_keeps_shape_and_dtype_of_values_and_has_a_gradient() -> None:
    arrays = {"basis": orthonormal(RNG.standard_normal((1, 16)))}
    splice = Splice(kind="ablate", tap=Tap("z", 1), identity="", arrays=arrays)
    assert splice.flops == 4 * 16 and splice.values == 16
    values = torch.tensor(RNG.standard_normal((5, 4, 4)), requires_grad=True)
    changed = HfSplices([splice]).change("z.1")(values)
    assert changed.shape == values.shape and changed.dtype == values.dtype
    basis = torch.tensor(arrays["basis"][0], dtype=torch.float64)
    assert (changed.reshape(5, 16) @ basis).abs().max() < 1e-6
    (changed.reshape(5, 16) @ basis).sum().backward()
    assert values.grad is not None and values.grad.abs().max() < 1e-6


def test_changes_of_one_tap_apply_in_turn() -> None:
    arrays = {"direction": np.ones(4, np.float32)}
    steer = Splice(kind="steer", tap=Tap("embed"), identity="", arrays=arrays)
    found = HfSplices([steer, steer])
    assert found.taps == ["embed"]
    changed = found.change("embed", lambda values: 10 * values)(torch.zeros(2, 4))
    assert changed.tolist() == [[20.0] * 4] * 2
