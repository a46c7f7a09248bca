"""Hooks on HF's modules: record a tap's values, or let the model continue with others."""

# Strict, but for values that torch's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from spile.check.hf_modules import Point

# A tap's values [tokens, ...], in float32 or wider -> those with which the model continues.
TorchChange = Callable[[Tensor], Tensor]


def as_array(value: Tensor) -> np.ndarray:
    # a copy: the model may write into the same memory later
    dtype = wide(value) if value.is_floating_point() else torch.int64
    return value.detach().to("cpu", dtype, copy=True).contiguous().numpy()


def wide(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def record(point: Point, found: dict[str, np.ndarray]) -> RemovableHandle:
    """Record a tap in `found` from now on."""

    def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = args[point.item or 0] if args else named["hidden_states"]
        found[point.name] = as_array(_taken(point, given))

    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        value: Any = output
        if point.item is not None and isinstance(output, tuple):
            value = output[point.item]
        found[point.name] = as_array(_taken(point, value))

    return _hook(point, before, after)


def change(point: Point, function: TorchChange) -> RemovableHandle:
    """Let the model continue with other values at a point from now on."""

    def new(value: Tensor) -> Tensor:
        taken = _taken(point, value)
        made = function(taken.to(wide(taken))) / point.scale
        return made.to(value).reshape(value.shape)

    def after(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        return (new(output[0]), *output[1:]) if isinstance(output, tuple) else new(output)

    return _hook(point, partial(_with_input, new), after)


def round_again(block: Any, seed: int) -> RemovableHandle:
    """Perturb a block's input at random, by up to one machine epsilon of each value."""

    def perturbed(stream: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        sign = 2 * torch.rand(stream.shape, generator=rng).to(stream) - 1
        return stream * (1 + sign * torch.finfo(stream.dtype).eps)

    return block.register_forward_pre_hook(partial(_with_input, perturbed), with_kwargs=True)


def _hook(point: Point, before: Any, after: Any) -> RemovableHandle:
    if point.side == "in":
        return point.module.register_forward_pre_hook(before, with_kwargs=True)
    return point.module.register_forward_hook(after)


def _taken(point: Point, value: Any) -> Tensor:
    taken = point.take(value)
    return taken if point.scale == 1.0 else taken * point.scale


def _with_input(
    new: TorchChange, module: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook that changes the input of a module."""
    if args:
        return (new(args[0]), *args[1:]), named
    return args, named | {"hidden_states": new(named["hidden_states"])}
