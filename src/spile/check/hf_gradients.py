"""Gradients of an objective with respect to HF's taps, by torch's autograd: the ground truth."""

# Strict, but for values that torch's and transformers' types leave unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spile.check.hf_modules import Point
from spile.models.sites import SPLICED

# Of the logits [tokens, vocab] and the token ids.
TorchObjective = Callable[[Tensor, Tensor], Tensor]
# HF has these values before an activation, or a gate.
_NOT_AS_THEY_ARE = ("attn_gate", "ssm_gate", "shared_expert_out")


def logprob(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the sum of the log-probabilities of all next tokens."""
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None]).sum()


def differentiable(points: Iterable[Point]) -> list[Point]:
    """Return the points at which a gradient can be read."""
    sites = {*SPLICED} - {*_NOT_AS_THEY_ARE}
    return [point for point in points if point.name.partition(".")[0] in sites]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def gradients(
    model: Any, points: Iterable[Point], ids: Tensor, objective: TorchObjective
) -> dict[str, np.ndarray]:
    """Return the gradient at each point, by its name, for one context [tokens]."""
    seen: dict[Point, Tensor] = {}

    def kept(point: Point, tensor: Any) -> Tensor:
        # (What a part of a block reads may be the stream itself, which others read, too.)
        own = tensor.view_as(tensor) if point.name.partition(".")[0].endswith("_in") else tensor
        if own.requires_grad:
            own.retain_grad()
            seen[point] = own
        return own

    def before(point: Point) -> Any:
        def hook(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            place = point.item or 0
            if args:
                return (*args[:place], kept(point, args[place]), *args[place + 1 :]), named
            return args, named | {"hidden_states": kept(point, named["hidden_states"])}

        return hook

    def after(point: Point) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            kept(point, output[point.item or 0] if isinstance(output, tuple) else output)

        return hook

    def starts(module: Any, args: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_()  # (weights have no gradients)

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with ExitStack() as hooks, torch.enable_grad():
        hooks.callback(model.get_input_embeddings().register_forward_hook(starts).remove)
        for point in differentiable(points):
            module = point.module
            registered = (
                module.register_forward_pre_hook(before(point), with_kwargs=True)
                if point.side == "in"
                else module.register_forward_hook(after(point))
            )
            hooks.callback(registered.remove)
        objective(model(input_ids=ids[None], use_cache=False).logits[0], ids).backward()
    return {
        point.name: (point.take(tensor.grad) / point.scale).detach().cpu().to(_wide(tensor)).numpy()
        for point, tensor in seen.items()
        if tensor.grad is not None
    }
