"""Every tap of a model run by HF transformers, by hooks on its modules: the ground truth.

It knows the names of modules, but not how a family computes: it uses nothing of what Spile's own
decoder assumes about an architecture.

In float64 it gives the exact result. A model's code requests float32 in places (norms, softmax,
rotary angles), whatever the dtype of its weights: all of those are then float64 too.
"""

# Strict, but for values that torch's and transformers' types leave unknown.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import sys
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from spile.check.attended import attended
from spile.check.backward import ContextAim
from spile.check.hf_gradients import gradients, objective_of
from spile.check.hf_modules import (
    Point,
    block_points,
    convolves,
    embeds_itself,
    find_attention,
    find_mlp,
    find_part,
    find_shared_expert,
    find_space,
    token_rows,
)
from spile.check.lens_rows import LensRows
from spile.check.next_token import next_token
from spile.core.errors import InputError
from spile.models.config.specs import FLOAT8_TERMS
from spile.models.sites import BACKWARD, GRADIENT, SITES

_ATTENDED = ("attn_top_keys", "attn_top_weights", "attn_summary")  # from attention weights
_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
_MATRIX_PRODUCTS = (torch.bmm, torch.matmul, Tensor.bmm, Tensor.matmul, Tensor.__matmul__)
_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)

# Functions of a file of transformers that has layers with a convolution, or a recurrent rule.
_CONVOLUTION, _SPACE_RULE = "causal_conv1d_fn", "mamba2_chunk_scan"
_DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
# Projections of a linear layer to a number or two for each head, or to the decay of channels.
_NARROW = ("in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj", "forget_gate")

_Change = Callable[[np.ndarray], np.ndarray]


class Reference:
    """Taps of a HF model, by hooks: the ground truth."""

    def __init__(
        self,
        model: torch.nn.Module,
        changes: Mapping[str, _Change] | None = None,
        lens: LensRows | None = None,
    ) -> None:
        """Args:
        changes: for a tap, a function of its values [tokens, ...]; the model continues with what
            it returns.

        lens: the lens whose predictions are taps, too.

        Raises:
            InputError: if a tap that is changed is not the whole of what a module takes or returns.
        """
        self.model: Any = model
        self._lens = lens
        self.model.eval()
        # Only eager attention returns its weights. (Some families only look there.)
        self.model.set_attn_implementation("eager")
        decoder: Any = self.model.get_decoder()
        self._body: Any = getattr(decoder, "model", decoder)  # (some give it with its head)
        self._body.config._attn_implementation = "eager"
        # Learned positions are added to the embeddings; rotary ones rotate q and k.
        self._rotary: Any = getattr(self._body, "rotary_emb", None)
        blocks = find_part(self._body, "blocks")
        attentions = [find_attention(block) for block in blocks]
        self._attentions = {id(attention): i for i, attention in enumerate(attentions)}
        convolved = [find_space(block) or find_attention(block) for block in blocks]
        self._convolved = [
            i for i, mixer in enumerate(convolved) if hasattr(mixer, "conv1d") or convolves(mixer)
        ]
        self._modules: list[Any] = attentions
        self._modeling: Any = sys.modules[type(blocks[0]).__module__]
        heads = getattr(self._body.config, "num_attention_heads", 0)
        self.points = [
            # A model that scales its embeddings may do so inside that module or after it.
            Point("embed", blocks[0], "in", token_rows, whole=not embeds_itself(blocks[0]))
            if hasattr(self._body, "rotary_emb")
            else Point("embed", self.model.get_input_embeddings(), "out", token_rows, whole=True),
            Point("final_norm", find_part(self._body, "final_norm"), "out", token_rows),
        ]
        for i, block in enumerate(blocks):
            self.points += block_points(block, f".{i}", heads)
        self._whole = {point.name: point for point in self.points if point.whole}
        self._refuse_partial(changes or {})
        self._changes = [(self._whole[name], change) for name, change in (changes or {}).items()]
        self._products = [module for block in blocks for module in _products(block)]
        self._mixtures = [mixture for block in blocks for mixture in _mixtures(block)]
        # The last rows of projections, not multiplied in 8 bits: steps of a state space.
        spaces = filter(None, map(find_space, blocks))
        self._exact = {id(space.in_proj): space.num_heads for space in spaces}
        self._float8 = False
        self._experts = getattr(self.model.config, "_experts_implementation", None)
        if self.model.dtype == torch.float64:
            self._adapt()

    def compute_in(self, dtype: torch.dtype) -> None:
        """Compute in another dtype from now on; weights are rounded if it has fewer digits."""
        if self.model.dtype != dtype:
            self.model.to(dtype)
            self._adapt()

    def multiply_in_float8(self, on: bool) -> None:
        """Multiply blocks' matrices as `--compute-dtype float8_e4m3` does, from now on or not."""
        self._float8 = on

    def attend_by(self, implementation: str) -> None:
        """Use this attention implementation of HF from now on; only eager returns its weights.

        Raises:
            ValueError: if the model does not have it.
        """
        self.model.set_attn_implementation(implementation)

    def taps(
        self,
        token_ids: np.ndarray,
        sites: Collection[str] | None = None,
        *,
        noise: int | None = None,
        tops: Mapping[str, int] | None = None,
        replaced: Mapping[str, np.ndarray] | None = None,
        baseline: Mapping[str, np.ndarray] | None = None,
        aim: ContextAim | None = None,
    ) -> dict[str, np.ndarray]:
        """Compute the taps of one context, whose first token is at position 0.

        Args:
            token_ids: One dimension.
            sites: Names of sites (`attn_pattern`: all layers) or taps (`attn_pattern.3`); all
                if not given. Sites that the model does not have are left out.
            noise: A seed. The input of the first block is rounded once more, at random, which
                changes all later roundings: the result is different but as correct.
            tops: How many values to keep at sites that keep the largest, by the option that says
                so.
            replaced: Values with which the model continues, in place of its own, by tap.
            aim: What the objective of gradients reads, if it is not the log-probability.
            baseline: What attributions are differences from, by tap: [tokens, ...], or a row.

        Returns:
            By tap, one row per token: float32 (float64 if the model is), or int64 for ids.
        """
        if token_ids.ndim != 1 or not len(token_ids):
            raise ValueError(f"token_ids must be one context, got the shape {token_ids.shape}")

        eager = self._body.config._attn_implementation == "eager"

        def wanted(name: str) -> bool:
            site = name.partition(".")[0]
            hidden = site in ("attn_pattern", *_ATTENDED) and not eager
            return not hidden and (sites is None or name in sites or site in sites)

        sized = {
            site.name: (tops or {}).get(site.group, site.top)
            for site in SITES.values()
            if site.largest_of
        }

        def looked(name: str) -> bool:
            site, _, layer = name.partition(".")
            return site == "attn_pattern" and any(wanted(f"{each}.{layer}") for each in _ATTENDED)

        lensed = [f"resid_post.{n}" for n in self._lens.layers(wanted)] if self._lens else []
        found: dict[str, np.ndarray] = {}
        ids = torch.tensor(token_ids.astype(np.int64), device=self.model.device)
        _forget_longer_contexts(self._rotary)
        if made := {name for name in sites or () if _is_gradient(name)}:
            sites = {*(sites or ())} - made
            if replaced or self._float8:
                how = "with values replaced" if replaced else "of products in 8 bits"
                raise InputError(f"check cannot recompute gradients {how}")
            found |= self._backward(token_ids, ids, made, noise, baseline or {}, aim)
            if not sites:
                return found
        with ExitStack() as hooks, torch.no_grad(), self._arithmetic():
            for module in self._products if self._float8 else ():
                module.forward = partial(_float8_product, module, self._exact.get(id(module), 0))
                hooks.callback(delattr, module, "forward")
            for module in self._mixtures if self._float8 else ():
                module.forward = partial(_mixed_in_float8, module.forward)
                hooks.callback(delattr, module, "forward")
            if self._float8 and self._experts is not None:  # grouped products hide their factors
                self.model.set_experts_implementation("eager")
                hooks.callback(self.model.set_experts_implementation, self._experts)
            for point, change in (*self._changes, *self._replacing(replaced or {})):
                hooks.callback(_change(point, change).remove)
            for point in self.points:  # (these hooks run after those of the changes)
                if wanted(point.name) or looked(point.name) or point.name in lensed:
                    hooks.callback(_record(point, found).remove)
            if noise is not None:
                first = find_part(self._body, "blocks")[0]
                hooks.callback(_round_again(first, noise).remove)
            if self._rotary is not None or hasattr(self._modules[0], "rotary_dim"):
                hooks.enter_context(self._watched_attention(wanted, found))
            if hasattr(self._modeling, _CONVOLUTION):
                hooks.enter_context(self._watched_functions(wanted, found))
            if any(wanted(site.name) for site in SITES.values() if site.head):
                logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
                read = {"logits": logits}
                if any(wanted(site.name) for site in SITES.values() if site.head and site.dtype):
                    read |= next_token(logits, ids, sized)
                found |= {name: _array(value) for name, value in read.items() if wanted(name)}
            else:
                self._body(input_ids=ids[None], use_cache=False)
            for name in lensed:
                told = self._read_by_lens(int(name.partition(".")[2]), found[name], sized)
                found |= {n: _array(value) for n, value in told.items() if wanted(n)}
                if not wanted(name):
                    del found[name]
        for name in filter(looked, [*found]):
            layer = int(name.partition(".")[2])
            sink = getattr(self._modules[layer], "sinks", None) is not None
            seen = attended(found[name], sized["attn_top_keys"], sink=sink)
            found |= {f"{n}.{layer}": v for n, v in seen.items() if wanted(f"{n}.{layer}")}
            if not wanted(name):
                del found[name]
        return found

    def _refuse_partial(self, changed: Mapping[str, Any]) -> None:
        if missing := {*changed} - self._whole.keys():
            raise InputError(
                f"check cannot recompute a change at {min(missing)}: no module of "
                f"{type(self.model).__name__} takes or returns just that"
            )

    def _replacing(self, replaced: Mapping[str, np.ndarray]) -> list[tuple[Point, _Change]]:
        self._refuse_partial(replaced)

        def instead(new: np.ndarray) -> _Change:
            return lambda old: new.reshape(old.shape).astype(old.dtype)

        return [(self._whole[name], instead(new)) for name, new in replaced.items()]

    def _backward(
        self,
        token_ids: np.ndarray,
        ids: Tensor,
        names: Collection[str],
        noise: int | None,
        baseline: Mapping[str, np.ndarray],
        aim: ContextAim | None,
    ) -> dict[str, np.ndarray]:
        """Compute gradients, and attributions: gradients times values, summed."""
        summed = {name for name in names if BACKWARD[name.partition(".")[0]].summed}
        sources = {name: _source_of(name) for name in summed}
        wanted = {*names} - summed | {_gradient_of(source) for source in sources.values()}
        found = self._gradients(ids, wanted, noise, aim)
        values = self.taps(token_ids, {*sources.values()}, noise=noise) if summed else {}
        for name, source in sources.items():
            compared = values[source] - baseline.get(source, 0.0)
            found[name] = (compared * found[_gradient_of(source)]).sum(axis=-1)
        return {name: found[name] for name in names}

    def _gradients(
        self, ids: Tensor, names: Collection[str], noise: int | None, aim: ContextAim | None
    ) -> dict[str, np.ndarray]:
        """Compute gradients of an objective, by their taps."""
        if self._changes:
            raise InputError("check cannot recompute gradients of a model with --splice")
        with ExitStack() as hooks, self._arithmetic():
            if noise is not None:
                first = find_part(self._body, "blocks")[0]
                hooks.callback(_round_again(first, noise).remove)
            found = gradients(
                self.model, self.points, ids, objective_of(aim), aim.tap if aim else None
            )
        wide = np.float64 if self.model.dtype == torch.float64 else np.float32
        named = {_gradient_of(name): values.astype(wide) for name, values in found.items()}
        if missing := {*names} - named.keys():
            if _source_of(min(missing)) in {point.name for point in self.points}:
                raise InputError(
                    f"check cannot recompute {min(missing)}: in {type(self.model).__name__} the "
                    "objective does not depend on those values, or they come before an activation"
                )
            raise InputError(
                f"check cannot recompute {min(missing)}: no module of {type(self.model).__name__} "
                "takes or returns just those values"
            )
        return {name: named[name] for name in names}

    def _read_by_lens(
        self, layer: int, stream: np.ndarray, sized: Mapping[str, int]
    ) -> dict[str, Tensor]:
        """Return what the lens predicts from the stream after a block."""
        assert self._lens
        norm, head = find_part(self._body, "final_norm"), self.model.get_output_embeddings()
        tops = {site: sized[site] for site in ("top_token_ids", "top_logprobs")}
        return self._lens.of(layer, stream, lambda x: head(norm(x)), head.weight, tops)

    def _arithmetic(self) -> AbstractContextManager[Any]:
        if self.model.dtype == torch.float64:
            return _InFloat64()
        rounds = self.model.dtype == torch.bfloat16 and self.model.device.type == "cpu"
        native = not rounds or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return nullcontext() if native else _RoundedProducts()

    def _adapt(self) -> None:
        """Adapt experts and rotary frequencies, which do not follow the model's dtype."""
        if self._experts is not None:  # grouped products do not support float64
            wide = self.model.dtype == torch.float64
            self.model.set_experts_implementation("eager" if wide else self._experts)
        if self._rotary is None:
            return
        with self._arithmetic():  # recompute instead of converting
            made = type(self._rotary)(self._rotary.config)
            for name, values in made.named_buffers():
                setattr(self._rotary, name, values.to(self.model.device))

    @contextmanager
    def _watched_attention(
        self, wanted: Callable[[str], bool], found: dict[str, np.ndarray]
    ) -> Generator[None, None, None]:
        """Record q and k as they enter the score.

        They are no module's input or output. But each attention module looks up the function that
        computes the score: eager attention in the globals of its own file, others in a table of
        transformers. This replaces either one.
        """
        if not hasattr(self._modeling, "eager_attention_forward"):
            with self._watched_methods(wanted, found):
                yield
            return
        name = self._body.config._attn_implementation
        others = getattr(self._modeling, "ALL_ATTENTION_FUNCTIONS", {})
        eager = name == "eager"
        original = self._modeling.eager_attention_forward if eager else others[name]

        def watch(module: Any, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
            layer = self._attentions.get(id(module))  # None: a module of another model
            borrowed = getattr(module, "is_kv_shared_layer", False)  # they are an earlier layer's
            for site, value in (("q_rot", query), ("k_rot", key))[: 1 if borrowed else 2]:
                if layer is not None and wanted(f"{site}.{layer}"):
                    found[f"{site}.{layer}"] = _array(value[0].transpose(0, 1))
            return original(module, query, key, *rest, **options)

        def put(function: Any) -> None:
            if eager:
                self._modeling.eager_attention_forward = function
            else:
                others[name] = function

        put(watch)
        try:
            yield
        finally:
            put(original)

    @contextmanager
    def _watched_methods(
        self, wanted: Callable[[str], bool], found: dict[str, np.ndarray]
    ) -> Generator[None, None, None]:
        """The same for families without such a function.

        Some have a method for the score. Others rotate by a function of their file, and use its
        results as they are.
        """
        running: list[int] = []

        def keep(layer: int, query: Tensor, key: Tensor) -> None:
            shared = key.shape[1] // getattr(self._modules[layer], "num_kv_heads", key.shape[1])
            for site, value in (("q_rot", query), ("k_rot", key[:, ::shared])):
                if wanted(f"{site}.{layer}"):
                    found[f"{site}.{layer}"] = _array(value[0].transpose(0, 1))

        with ExitStack() as changes:
            if hasattr(self._modules[0], "_attn"):
                for layer, module in enumerate(self._modules):

                    def score(
                        query: Tensor, key: Tensor, *rest: Any, layer: int = layer, **named: Any
                    ) -> Any:
                        keep(layer, query, key)
                        return type(self._modules[layer])._attn(
                            self._modules[layer], query, key, *rest, **named
                        )

                    module._attn = score
                    changes.callback(delattr, module, "_attn")
            else:
                rotate = self._modeling.apply_rotary_pos_emb

                def rotated(query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Any:
                    turned = rotate(query, key, *rest, **named)
                    keep(running[-1], *turned)
                    return turned

                for layer, module in enumerate(self._modules):
                    hook = module.register_forward_pre_hook(
                        lambda *_, layer=layer: running.append(layer)
                    )
                    changes.callback(hook.remove)
                self._modeling.apply_rotary_pos_emb = rotated
                changes.callback(setattr, self._modeling, "apply_rotary_pos_emb", rotate)
            yield

    @contextmanager
    def _watched_functions(
        self, wanted: Callable[[str], bool], found: dict[str, np.ndarray]
    ) -> Generator[None, None, None]:
        """Record what layers convolve, what they read from states, and the norms of states.

        All come from functions that these layers look up in the globals of their own file, one
        layer after another. To get the states, that function is called for one token after another,
        each time with the state that the previous call returned.
        """
        modeling = self._modeling

        def convolved(layer: int, function: Any, *given: Any, **options: Any) -> Any:
            out = function(*given, **options)
            if convolves(self._modules[layer]):
                keep(f"conv_in.{layer}", lambda: given[0][0].T)
            keep(f"conv_out.{layer}", lambda: out[0].T)
            return out

        def ruled(layer: int, function: Any, *given: Any, **options: Any) -> Any:
            keep(f"delta_state_norm.{layer}", lambda: _state_norms(function, given, options))
            return function(*given, **options)

        def read(layer: int, function: Any, *given: Any, **options: Any) -> Any:
            out = function(*given, **options)
            keep(f"ssm_read.{layer}", lambda: out[0])
            return out

        def keep(name: str, value: Callable[[], Tensor]) -> None:
            if wanted(name):
                found[name] = _array(value())

        def watched(function: Any, watch: Any) -> Any:
            layers = iter(self._convolved)
            return lambda *given, **options: watch(next(layers), function, *given, **options)

        watches = {_CONVOLUTION: convolved, _SPACE_RULE: read, **dict.fromkeys(_DELTA_RULES, ruled)}
        with ExitStack() as changes:
            for name, watch in watches.items():
                if (function := getattr(modeling, name, None)) is not None:
                    setattr(modeling, name, watched(function, watch))
                    changes.callback(setattr, modeling, name, function)
            yield


def _state_norms(rule: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """The Frobenius norm of each head's state after each token of a context."""
    by_token = {name: options[name] for name in ("g", "beta")}
    others = {name: value for name, value in options.items() if name not in by_token}
    others |= {"initial_state": None, "output_final_state": True}
    norms: list[Tensor] = []
    for token in range(given[0].shape[1]):
        one = slice(token, token + 1)
        now = {name: value[:, one] for name, value in by_token.items()}
        _, others["initial_state"] = rule(*(value[:, one] for value in given), **now, **others)
        norms.append(others["initial_state"][0].flatten(1).norm(dim=-1))
    return torch.stack(norms)


class _InFloat64(TorchDispatchMode):
    """Give float64 to any code that requests float32 from torch."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        given = {name: wide(value) for name, value in (kwargs or {}).items()}
        return func(*map(wide, args), **given)


class _RoundedProducts(TorchDispatchMode):
    """Multiply matrices of bfloat16 in float32 and round the results.

    So do processors that multiply bfloat16. On others torch takes several times as long.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _PRODUCTS or args[-1].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        return func(*(each.float() for each in args), **(kwargs or {})).bfloat16()


def _products(block: Any) -> list[Any]:
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


def _mixtures(block: Any) -> list[Any]:
    """The modules of a block's experts: one at most."""
    named = (getattr(each, "experts", None) for each in (find_mlp(block), block))
    return list(filter(None, named))[:1]


def _mixed_in_float8(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
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


def _float8_product(module: Any, exact: int, x: Tensor) -> Tensor:
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


def _is_gradient(name: str) -> bool:
    return name.partition(".")[0] in BACKWARD


def _source_of(name: str) -> str:
    """The name of the tap whose gradient or attribution this is."""
    site, dot, layer = name.partition(".")
    return f"{BACKWARD[site].of}{dot}{layer}"


def _gradient_of(name: str) -> str:
    """The name of a tap's gradient."""
    site, dot, layer = name.partition(".")
    return f"{site}{GRADIENT}{dot}{layer}"


def _array(value: Tensor) -> np.ndarray:
    # a copy: the model may write into the same memory later
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    dtype = wide if value.is_floating_point() else torch.int64
    return value.detach().to("cpu", dtype, copy=True).contiguous().numpy()


def _record(point: Point, found: dict[str, np.ndarray]) -> RemovableHandle:
    """Record a tap in `found` from now on."""

    def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = args[point.item or 0] if args else named["hidden_states"]
        found[point.name] = _taken(point, given)

    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        value: Any = output
        if point.item is not None and isinstance(output, tuple):
            value = output[point.item]
        found[point.name] = _taken(point, value)

    return _hook(point, before, after)


def _hook(point: Point, before: Any, after: Any) -> RemovableHandle:
    if point.side == "in":
        return point.module.register_forward_pre_hook(before, with_kwargs=True)
    return point.module.register_forward_hook(after)


def _taken(point: Point, value: Any) -> np.ndarray:
    taken = point.take(value)
    return _array(taken if point.scale == 1.0 else taken * point.scale)


def _change(point: Point, change: _Change) -> RemovableHandle:
    """Let the model continue with other values at a point from now on."""

    def new(value: Tensor) -> Tensor:
        made = torch.from_numpy(change(_taken(point, value))) / point.scale
        return made.to(value).reshape(value.shape)

    def after(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        return (new(output[0]), *output[1:]) if isinstance(output, tuple) else new(output)

    return _hook(point, partial(_with_input, new), after)


def _with_input(
    new: Callable[[Tensor], Tensor], module: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook that changes the input of a module."""
    if args:
        return (new(args[0]), *args[1:]), named
    return args, named | {"hidden_states": new(named["hidden_states"])}


def _round_again(block: Any, seed: int) -> RemovableHandle:
    """Perturb a block's input at random, by up to one machine epsilon of each value."""

    def perturbed(stream: Tensor) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        sign = 2 * torch.rand(stream.shape, generator=rng).to(stream) - 1
        return stream * (1 + sign * torch.finfo(stream.dtype).eps)

    return block.register_forward_pre_hook(partial(_with_input, perturbed), with_kwargs=True)


def _forget_longer_contexts(rotary: Any) -> None:
    """Reset HF's "dynamic" RoPE, which keeps the frequencies of the longest context so far."""
    if rotary is None:
        return
    for name, original in list(rotary.named_buffers()):
        if name.endswith("original_inv_freq"):
            prefix = name.removesuffix("original_inv_freq")
            setattr(rotary, f"{prefix}inv_freq", original)
            setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
