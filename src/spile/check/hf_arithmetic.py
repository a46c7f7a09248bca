"""How HF's model computes: in float64 throughout, in bfloat16 rounded once, in emulated float8.

A model's code requests float32 in places (norms, softmax, rotary angles), whatever the dtype of its
weights: in float64 all of those are float64, too.
"""

# Strict, but for values that torch's own types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spile.check.hf_modules import find_attention, find_mlp, find_shared_expert, find_space
from spile.models.config.specs import FLOAT8_TERMS

_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
_MATRIX_PRODUCTS = (torch.bmm, torch.matmul, Tensor.bmm, Tensor.matmul, Tensor.__matmul__)
_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
# Projections of a linear layer to a number or two for each head, or to the decay of channels.
_NARROW = ("in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj", "forget_gate")


class InFloat64(TorchDispatchMode):
    """Give float64 to any code that requests float32 from torch."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        given = {name: wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(wide, args), **given)


class RoundedProducts(TorchDispatchMode):
    """Multiply matrices of bfloat16 in float32 and round the results.

    So do processors that multiply bfloat16. On others torch takes several times as long.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _PRODUCTS or args[-1].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        return func(*(each.float() for each in args), **(kwargs or {})).bfloat16()


def float8_modules(block: Any) -> list[Any]:
    """The modules of a block that multiply by a matrix, without experts and their router."""
    mlp = find_mlp(block)
    parts = [find_attention(block), find_space(block)]
    parts.append(find_shared_expert(block) if hasattr(mlp, "experts") else mlp)
    named = (getattr(parts[0], name, None) for name in _NARROW)
    narrow = {each for part in named if part is not None for each in part.modules()}
    found: dict[int, Any] = {}
    for module in (module for part in parts if part is not None for module in part.modules()):
        linear = isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
        if linear and module not in narrow:
            found[id(module)] = module
    return list(found.values())


def mixtures(block: Any) -> list[Any]:
    """The modules of a block's experts: one at most."""
    named = (getattr(each, "experts", None) for each in (find_mlp(block), block))
    return list(filter(None, named))[:1]


def mixed_in_float8(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    with _Float8Products():
        return forward(*args, **named)


class _Float8Products(TorchFunctionMode):
    """Rounds the factors of matrix products to float8, by token and by channel.

    Products that Spile does not multiply in float8 keep their factors.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named: dict[str, Any] = kwargs or {}
        if func is torch.nn.functional.linear:
            x, weight, *bias = args
            bias = bias[0] if bias else named.get("bias")
        elif func in _MATRIX_PRODUCTS:
            x, weight, bias = args[0], args[1].mT, None
        else:
            return func(*args, **named)
        if weight.shape[-1] % FLOAT8_TERMS:
            return func(*args, **named)
        y = _rounded_product(x, weight)
        return y if bias is None else y + bias


def float8_product(module: Any, exact: int, x: Tensor) -> Tensor:
    """The output of a module whose factors are rounded to float8, by token and by channel.

    Args:
        exact: number of the last channels that are not rounded.
    """
    weight = module.weight if isinstance(module, torch.nn.Linear) else module.weight.T  # Conv1D
    y = _rounded_product(x, weight)
    if exact:
        y[..., -exact:] = x @ weight[-exact:].T
    return y if module.bias is None else y + module.bias


def _rounded_product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply [..., in] by [..., out, in], both rounded to float8."""
    (values, by_token), (w, by_channel) = _scaled_to_float8(x), _scaled_to_float8(weight)
    return (values @ w.mT * by_token * by_channel.mT).to(x.dtype)


def _scaled_to_float8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values as float8 holds them, in float32, and the scale of each row."""
    wide = values.float()
    largest = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / _FLOAT8_MAX, 1.0)
    return (wide / scale).to(torch.float8_e4m3fn).float(), scale
