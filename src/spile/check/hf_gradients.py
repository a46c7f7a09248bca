"""Gradients of an objective with respect to HF's taps, by torch's autograd: the ground truth."""

# Strict, but for values that torch's and transformers' types leave unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spile.check.backward import ContextAim
from spile.check.hf_hooks import wide
from spile.check.hf_modules import Point
from spile.models.objectives import DIRECTION, LOGIT_DIFF, LOGPROB, LOSS
from spile.models.sites import SPLICED

# Of the logits [tokens, vocab], the token ids, and the values of the tap that it reads, if any.
TorchObjective = Callable[..., Tensor]
# HF has these values before an activation, or a gate.
_NOT_AS_THEY_ARE = ("attn_gate", "ssm_gate", "shared_expert_out")


def logprob(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the sum of the log-probabilities of all next tokens."""
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None]).sum()


def objective_of(aim: ContextAim | None) -> TorchObjective:
    """Return the objective of a context, written with torch."""
    if aim is None or aim.kind == LOGPROB:
        return logprob

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        assert aim.counts is not None
        each = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return -(each * torch.from_numpy(aim.counts).to(each)[1:]).sum()

    def difference(logits: Tensor, ids: Tensor) -> Tensor:
        if aim.answers is None:
            return 0.0 * logits.sum()
        return logits[-1, aim.answers[0]] - logits[-1, aim.answers[1]]

    def along(logits: Tensor, ids: Tensor, read: Tensor) -> Tensor:
        assert aim.vector is not None
        return (read * torch.from_numpy(aim.vector).to(read)).sum()

    return {LOSS: loss, LOGIT_DIFF: difference, DIRECTION: along}[aim.kind]


def differentiable(points: Iterable[Point]) -> list[Point]:
    """Return the points at which a gradient can be read."""
    sites = {*SPLICED} - {*_NOT_AS_THEY_ARE}
    return [point for point in points if point.name.partition(".")[0] in sites]


def gradients(
    model: Any,
    points: Iterable[Point],
    ids: Tensor,
    objective: TorchObjective,
    read: str | None = None,
) -> dict[str, np.ndarray]:
    """Return the gradient at each point, by its name, for one context [tokens].

    Args:
        read: the name of the point whose values the objective takes, too.
    """
    seen: dict[Point, Tensor] = {}
    points = [*points]

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
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        values = [p.take(own) * p.scale for p, own in seen.items() if p.name == read][-1:]
        objective(logits, ids, *values).backward()
    return {
        point.name: (point.take(tensor.grad) / point.scale).detach().cpu().to(wide(tensor)).numpy()
        for point, tensor in seen.items()
        if tensor.grad is not None
    }
