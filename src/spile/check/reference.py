"""Every tap of a model run by HF transformers, by hooks on its modules: the ground truth.

It knows the names of modules, but not how a family computes: it uses nothing of what Spile's own
decoder assumes about an architecture.

In float64 it gives the exact result. A model's code requests float32 in places (norms, softmax,
rotary angles), whatever the dtype of its weights: all of those are then float64 too.
"""

# torch and transformers are only partly typed: strict would want casts everywhere.
# pyright: standard

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spile.core.errors import InputError
from spile.models.sites import SITES

# Names of each part; the first that the module has is used.
_NAMES = {
    "blocks": ("layers", "h", "blocks"),
    "final_norm": (
        "norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "embedding_norm"
    ),
    # Some families call any mixer, or an MLP, by the last name: see `_attention`, `_space`, `_mlp`.
    "attention": (
        "self_attn", "attn", "attention", "self_attention", "linear_attn", "conv", "mixer"
    ),
    "space": ("mamba", "mixer"),
    "out_projection": ("o_proj", "c_proj", "dense", "out_proj"),
    "mlp": ("mlp", "ffn", "block_sparse_moe", "feed_forward", "shared_mlp", "mixer"),
    "up_projection": ("fc1",),
    "down_projection": (
        "down_proj", "c_proj", "dense_4h_to_h", "fc_out", "fc2", "w2", "output_linear"
    ),
    "router": ("router", "gate"),
    "head_dim": ("head_dim", "head_size", "head_v_dim", "v_head_dim"),
    "gated_norm": ("norm", "o_norm"),
    "delta_heads": ("num_v_heads", "num_heads"),
    # `post_attention_layernorm` has two meanings: see `_block_points`.
    "norm_after_attention": (
        "post_attention_layernorm",
        "ln_2",
        "final_layer_norm",
        "norm_2",
        "feedforward_layernorm",
        "pre_ff_layernorm",
        "ffn_norm",
    ),
}  # fmt: skip
_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
_ROWS_AT_ONCE = 256  # of logits in float64: a whole context with a large vocabulary takes gigabytes

# Functions of a file of transformers that has layers with a convolution, or a recurrent rule.
_CONVOLUTION, _SPACE_RULE = "causal_conv1d_fn", "mamba2_chunk_scan"
_DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
# Projections of a linear layer to a number or two for each head, or to the decay of channels.
_NARROW = ("in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj", "forget_gate")

Take = Callable[[Any], Tensor]
Change = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Point:
    """One tap: a module's input or output, and the part of it to keep."""

    name: str
    module: Any
    side: Literal["in", "out"]
    take: Take
    # index, for a module that takes or returns several values; None: all that it returns
    item: int | None = 0
    whole: bool = False  # the tap is all of that value: it can be changed there
    scale: float = 1.0  # what the tap is multiplied by


class Reference:
    """Taps of a HF model, by hooks: the ground truth."""

    def __init__(self, model: torch.nn.Module, changes: Mapping[str, Change] | None = None) -> None:
        """Args:
        changes: by tap: a function of its values [tokens, ...], with whose result the model
            continues.

        Raises:
            InputError: if a tap that is changed is not the whole of what a module takes or returns.
        """
        self._model: Any = model
        self._model.eval()
        # Only eager attention returns its weights. (Some families only look there.)
        self._model.set_attn_implementation("eager")
        decoder: Any = self._model.get_decoder()
        self._body: Any = getattr(decoder, "model", decoder)  # (some give it with its head)
        self._body.config._attn_implementation = "eager"
        # Learned positions are added to the embeddings; rotary ones rotate q and k.
        self._rotary: Any = getattr(self._body, "rotary_emb", None)
        blocks = _part(self._body, "blocks")
        attentions = [_attention(block) for block in blocks]
        self._attentions = {id(attention): i for i, attention in enumerate(attentions)}
        convolved = [_space(block) or _attention(block) for block in blocks]
        self._convolved = [
            i for i, mixer in enumerate(convolved) if hasattr(mixer, "conv1d") or _convolves(mixer)
        ]
        self._modules: list[Any] = attentions
        self._modeling: Any = sys.modules[type(blocks[0]).__module__]
        heads = getattr(self._body.config, "num_attention_heads", 0)
        self._points = [
            # A model that scales its embeddings may do so inside that module or after it.
            _Point("embed", blocks[0], "in", _rows, whole=not _embeds_itself(blocks[0]))
            if hasattr(self._body, "rotary_emb")
            else _Point("embed", self._model.get_input_embeddings(), "out", _rows, whole=True),
            _Point("final_norm", _part(self._body, "final_norm"), "out", _rows),
        ]
        for i, block in enumerate(blocks):
            self._points += _block_points(block, f".{i}", heads)
        whole = {point.name: point for point in self._points if point.whole}
        if missing := {*(changes or {})} - whole.keys():
            raise InputError(
                f"check cannot recompute a change at {min(missing)}: no module of "
                f"{type(self._model).__name__} takes or returns just that"
            )
        self._changes = [(whole[name], change) for name, change in (changes or {}).items()]
        self._products = [module for block in blocks for module in _products(block)]
        # Of projections, the last rows that are not multiplied in 8 bits: steps of a state space.
        spaces = filter(None, map(_space, blocks))
        self._exact = {id(space.in_proj): space.num_heads for space in spaces}
        self._float8 = False
        self._experts = getattr(self._model.config, "_experts_implementation", None)
        if self._model.dtype == torch.float64:
            self._adapt()

    def compute_in(self, dtype: torch.dtype) -> None:
        """Compute in another dtype from now on; weights are rounded if it has fewer digits."""
        if self._model.dtype != dtype:
            self._model.to(dtype)
            self._adapt()

    def multiply_in_float8(self, on: bool) -> None:
        """Multiply the blocks' matrices as `--compute-dtype float8_e4m3` does, from now on or not.

        Experts and routers are not among them.
        """
        self._float8 = on

    def attend_by(self, implementation: str) -> None:
        """Use this attention implementation of HF from now on; only eager returns its weights.

        Raises:
            ValueError: if the model does not have it.
        """
        self._model.set_attn_implementation(implementation)

    def taps(
        self,
        token_ids: np.ndarray,
        sites: Collection[str] | None = None,
        *,
        noise: int | None = None,
    ) -> dict[str, np.ndarray]:
        """Compute the taps of one context, whose first token is at position 0.

        Args:
            token_ids: One dimension.
            sites: Names of sites (`attn_pattern`: all layers) or taps (`attn_pattern.3`); all
                if not given. Sites that the model does not have are left out.
            noise: A seed. The input of the first block is rounded once more, at random, which
                changes all later roundings: the result is different but as correct.

        Returns:
            By tap, one row per token: float32 (float64 if the model is), or int64 for
            `expert_ids`.
        """
        if token_ids.ndim != 1 or not len(token_ids):
            raise ValueError(f"token_ids must be one context, got the shape {token_ids.shape}")

        eager = self._body.config._attn_implementation == "eager"

        def wanted(name: str) -> bool:
            site = name.partition(".")[0]
            hidden = site == "attn_pattern" and not eager
            return not hidden and (sites is None or name in sites or site in sites)

        found: dict[str, np.ndarray] = {}
        ids = torch.tensor(token_ids.astype(np.int64), device=self._model.device)
        _forget_longer_contexts(self._rotary)
        with ExitStack() as hooks, torch.no_grad(), self._arithmetic():
            for module in self._products if self._float8 else ():
                module.forward = partial(_float8_product, module, self._exact.get(id(module), 0))
                hooks.callback(delattr, module, "forward")
            for point, change in self._changes:
                hooks.enter_context(_changed(point, change))
            for point in self._points:  # (these hooks run after those of the changes)
                if wanted(point.name):
                    hooks.enter_context(_hooked(point, found))
            if noise is not None:
                hooks.enter_context(_rounded_again(_part(self._body, "blocks")[0], noise))
            if self._rotary is not None or hasattr(self._modules[0], "rotary_dim"):
                hooks.enter_context(self._watched_attention(wanted, found))
            if hasattr(self._modeling, _CONVOLUTION):
                hooks.enter_context(self._watched_functions(wanted, found))
            if any(wanted(site.name) for site in SITES.values() if site.head):
                logits = self._model(input_ids=ids[None], use_cache=False).logits[0]
                read = {"logits": logits}
                if wanted("logprob") or wanted("entropy"):
                    read |= _next_token(logits, ids)
                found |= {name: _array(value) for name, value in read.items() if wanted(name)}
            else:
                self._body(input_ids=ids[None], use_cache=False)
        return found

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return _InFloat64() if self._model.dtype == torch.float64 else nullcontext()

    def _adapt(self) -> None:
        """Adapt experts and rotary frequencies, which do not follow the model's dtype."""
        if self._experts is not None:  # grouped products do not support float64
            wide = self._model.dtype == torch.float64
            self._model.set_experts_implementation("eager" if wide else self._experts)
        if self._rotary is None:
            return
        with self._arithmetic():  # recompute instead of converting
            made = type(self._rotary)(self._rotary.config)
            for name, values in made.named_buffers():
                setattr(self._rotary, name, values.to(self._model.device))

    @contextmanager
    def _watched_attention(
        self, wanted: Callable[[str], bool], found: dict[str, np.ndarray]
    ) -> Iterator[None]:
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
    ) -> Iterator[None]:
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
    ) -> Iterator[None]:
        """Record what layers convolve, what they read from states, and the norms of states.

        All come from functions that these layers look up in the globals of their own file, one
        layer after another. States are those that the same function returns for one token after
        another, each with the state that the one before it left.
        """
        modeling = self._modeling

        def convolved(layer: int, function: Any, *given: Any, **options: Any) -> Any:
            out = function(*given, **options)
            if _convolves(self._modules[layer]):
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


def _embeds_itself(block: Any) -> bool:
    """Whether blocks have embeddings of their own, which are made of the usual ones, too."""
    return getattr(block, "post_per_layer_input_norm", None) is not None


def _part(module: Any, role: str) -> Any:
    for name in _NAMES[role]:
        if getattr(module, name, None) is not None:
            return getattr(module, name)
    raise ValueError(f"{type(module).__name__} has none of {', '.join(_NAMES[role])} ({role})")


def _attention(block: Any) -> Any:
    """The module that has the projections; some families have it inside another one.

    None if the block has no mixer that attends, applies the delta rule or only convolves.
    """
    named = (getattr(block, name, None) for name in _NAMES["attention"])
    attention = next(filter(None, named), None)
    attention = getattr(attention, "attention", attention)
    mixes = any(hasattr(attention, name) for name in _NAMES["out_projection"])
    return attention if mixes and not _is_space(attention) else None


def _space(block: Any) -> Any:
    """The module of the state space, if the block has one."""
    named = (getattr(block, name, None) for name in _NAMES["space"])
    return next(filter(_is_space, named), None)


def _is_space(mixer: Any) -> bool:
    return hasattr(mixer, "A_log") and hasattr(mixer, "D")


def _convolves(mixer: Any) -> bool:
    """Whether a mixer is a convolution alone."""
    return hasattr(mixer, "conv") and hasattr(mixer, "in_proj")


def _mlp(block: Any) -> Any:
    """The module of the MLP, or the block itself if it has its projections; None: it has none."""
    named = (getattr(block, name, None) for name in _NAMES["mlp"])
    mlp = next(filter(None, named), block)
    parts = ("experts", *_NAMES["down_projection"])
    return mlp if any(hasattr(mlp, part) for part in parts) else None


def _shared_expert(block: Any) -> Any:
    """The expert that every token goes to: inside the mixture, or beside it."""
    mlp, beside = _mlp(block), getattr(block, "shared_mlp", None)
    inside = getattr(mlp, "shared_expert", getattr(mlp, "shared_experts", None))
    return beside if inside is None and beside is not mlp else inside


def _products(block: Any) -> list[Any]:
    """The modules of a block that multiply by a matrix, without experts and their router."""
    mlp = _mlp(block)
    parts = [_attention(block), _space(block)]
    parts.append(_shared_expert(block) if hasattr(mlp, "experts") else mlp)
    named = (getattr(parts[0], name, None) for name in _NARROW)
    narrow = {each for part in named if part is not None for each in part.modules()}
    found: dict[int, Any] = {}
    for module in (module for part in parts if part is not None for module in part.modules()):
        linear = isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
        if linear and module not in narrow:
            found[id(module)] = module
    return list(found.values())


def _float8_product(module: Any, exact: int, x: Tensor) -> Tensor:
    """The output of a module whose factors are rounded to float8, by token and by channel.

    Args:
        exact: number of the last channels that are not rounded.
    """
    weight = module.weight if isinstance(module, torch.nn.Linear) else module.weight.T  # Conv1D
    (values, by_token), (w, by_channel) = _scaled_to_float8(x), _scaled_to_float8(weight)
    y = (values @ w.T * by_token * by_channel.squeeze(-1)).to(x.dtype)
    if exact:
        y[..., -exact:] = x @ weight[-exact:].T
    return y if module.bias is None else y + module.bias


def _scaled_to_float8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values as float8 holds them, in float32, and the scale of each row."""
    wide = values.float()
    largest = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / _FLOAT8_MAX, 1.0)
    return (wide / scale).to(torch.float8_e4m3fn).float(), scale


def _block_points(block: Any, layer: str, heads: int) -> Iterator[_Point]:
    attention, space, mlp = _attention(block), _space(block), _mlp(block)
    yield _Point("resid_pre" + layer, block, "in", _rows, whole=True)
    if attention is not None:
        yield from _attention_points(block, attention, layer, heads)
    if space is not None:
        yield from _space_points(block, space, layer)
    if mlp is not None:
        yield from _mlp_points(block, mlp, layer, mixes=bool(attention or space))
    if _embeds_itself(block):
        embedded = block.post_per_layer_input_norm
        yield _Point("layer_embed" + layer, block, "in", _rows, item=1)
        yield _Point("layer_embed_out" + layer, embedded, "out", _rows)
    yield _Point("resid_post" + layer, block, "out", _rows, whole=True)


def _attention_points(block: Any, attention: Any, layer: str, heads: int) -> Iterator[_Point]:
    # Beside a state space, attention may read what it reads, but scaled.
    space = _space(block)
    yield _Point("attn_in" + layer, space or attention, "in", _rows, whole=space is None)
    projection = added = _part(attention, "out_projection")
    # If the MLP's result is normalised, so is attention's, by the norm "post attention"; otherwise
    # that name means the norm between the stream and the MLP.
    if hasattr(block, "post_feedforward_layernorm"):
        added = block.post_attention_layernorm
    elif hasattr(block, "post_mlp_layernorm"):
        added = block.post_self_attn_layernorm
    scale = getattr(block, "residual_multiplier", 1.0) * getattr(block, "attn_out_multiplier", 1.0)
    yield _Point("attn_out" + layer, added, "out", _rows, whole=True, scale=scale)
    if _convolves(attention):
        yield _Point("conv_gate" + layer, attention.in_proj, "out", lambda x: x[0].chunk(3, -1)[1])
        return
    head_dim = _part(attention, "head_dim")
    if hasattr(attention, "conv1d"):
        norm = _part(attention, "gated_norm")
        opens = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}[norm.activation]

        def gate(value: Tensor) -> Tensor:
            heads = _part(attention, "delta_heads")
            return opens(value.to(torch.float32)).reshape(-1, heads, head_dim)

        yield _Point("attn_gate" + layer, norm, "in", gate, item=1)
    else:
        if hasattr(attention, "kv_a_layernorm"):
            yield from _latent_points(attention, layer)
        else:
            found = _projections(attention, heads, head_dim)
            modules = [projected for projected, _ in found.values()]
            for site, (projected, take) in found.items():
                alone = modules.count(projected) == 1
                yield _Point(site + layer, projected, "out", take, whole=alone)
        # [batch, head, query, key], as returned: not every family computes them in one function
        yield _Point("attn_pattern" + layer, attention, "out", lambda x: x[0].transpose(0, 1), 1)
    yield _Point("z" + layer, projection, "in", _split(head_dim), whole=True)


def _space_points(block: Any, space: Any, layer: str) -> Iterator[_Point]:
    factors = getattr(space, "mup_vector", None)
    scale = getattr(block, "residual_multiplier", 1.0) * getattr(block, "ssm_out_multiplier", 1.0)

    def gate(value: Tensor) -> Tensor:
        value = value if factors is None else value * factors
        wide = value[0, :, : space.intermediate_size].to(torch.float32)
        return torch.nn.functional.silu(wide).unflatten(-1, (-1, space.head_dim))

    yield _Point("ssm_in" + layer, space, "in", _rows)
    yield _Point("ssm_gate" + layer, space.in_proj, "out", gate)
    yield _Point("ssm_z" + layer, space.out_proj, "in", _split(space.head_dim))
    yield _Point("ssm_out" + layer, space.out_proj, "out", _rows, whole=True, scale=scale)


def _mlp_points(block: Any, mlp: Any, layer: str, *, mixes: bool) -> Iterator[_Point]:
    experts, shared = hasattr(mlp, "experts"), _shared_expert(block)
    if apart := mlp is not block and hasattr(block, "experts"):  # experts beside a plain MLP
        shared = block.post_feedforward_layernorm_1
    down = mlp if experts else _part(mlp, "down_projection")
    sandwich = hasattr(block, "post_feedforward_layernorm")
    added = block.post_feedforward_layernorm if sandwich else down
    added = getattr(block, "post_mlp_layernorm", added)
    scale = getattr(block, "residual_multiplier", 1.0) * getattr(mlp, "down_multiplier", 1.0)
    if mixes and not getattr(block, "use_parallel_residual", False):
        if sandwich:
            reader = getattr(block, "pre_feedforward_layernorm", mlp)
        else:
            norms = (getattr(block, name, None) for name in _NAMES["norm_after_attention"])
            reader = next(filter(None, norms), None)
        if reader is not None:  # else attention and MLP share a norm
            yield _Point("resid_mid" + layer, reader, "in", _rows)
    reads = _part(block, "up_projection") if mlp is block else mlp
    yield _Point("mlp_in" + layer, reads, "in", _rows, whole=not apart and mlp is not block)
    if experts or apart:
        yield from _expert_points(block if apart else mlp, shared, layer)
    if not experts:
        yield _Point("mlp_hidden" + layer, down, "in", _rows, whole=True)
    if experts and shared is getattr(block, "shared_mlp", block):  # beside the others
        yield _Point(
            "mlp_out" + layer, mlp, "in", lambda x: _rows((mlp.forward(x) + shared(x)) * scale)
        )
    else:
        yield _Point("mlp_out" + layer, added, "out", _rows, whole=True, scale=scale)


def _expert_points(mlp: Any, shared: Any, layer: str) -> Iterator[_Point]:
    router = _part(mlp, "router")

    def routed(found: Any) -> Any:
        if len(found) == 3:
            return found
        weights, logits = found  # of all experts: zero for those that are not chosen
        return logits, *weights.topk(router.top_k)

    def by_weight(found: Any, item: int) -> Tensor:
        _, weights, _ = values = routed(found)
        order = weights.argsort(dim=-1, descending=True, stable=True)
        return values[item].gather(-1, order)

    # Routers return values without the batch dimension; some do not sort them, and some return
    # probabilities in place of their projection's output.
    if (projection := getattr(router, "proj", None)) is not None:
        yield _Point("router_logits" + layer, projection, "out", _rows)
    else:
        yield _Point("router_logits" + layer, router, "out", lambda x: routed(x)[0], None)
    yield _Point("expert_weights" + layer, router, "out", partial(by_weight, item=1), None)
    yield _Point("expert_ids" + layer, router, "out", partial(by_weight, item=2), None)
    gate = getattr(mlp, "shared_expert_gate", None)
    if gate is not None:

        def weighed(x: Tensor) -> Tensor:
            return torch.sigmoid(torch.nn.functional.linear(x, gate.weight)) * shared(x)

        yield _Point("shared_expert_out" + layer, gate, "in", weighed)
    elif shared is not None:
        yield _Point("shared_expert_out" + layer, shared, "out", _rows)


def _latent_points(attention: Any, layer: str) -> Iterator[_Point]:
    """Of attention whose keys and values come from a latent; all heads share a part of the keys."""
    down, up = attention.kv_a_proj_with_mqa, attention.kv_b_proj
    own, shared = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    queries = getattr(attention, "q_b_proj", None) or attention.q_proj

    def split(value: Tensor) -> Tensor:
        return value.reshape(value.shape[-2], -1, own + attention.v_head_dim)  # batch: one

    def keys(x: Tensor) -> Tensor:
        latent, last = down(x).split([attention.kv_lora_rank, shared], dim=-1)
        first = split(up(attention.kv_a_layernorm(latent)))[..., :own]
        return torch.cat([first, last[0, :, None].expand(-1, first.shape[1], -1)], dim=-1)

    yield _Point("kv_latent" + layer, attention.kv_a_layernorm, "out", _rows)
    yield _Point("q" + layer, queries, "out", _split(own + shared))
    yield _Point("k" + layer, attention, "in", keys)
    yield _Point("v" + layer, up, "out", lambda x: split(x)[..., own:])


def _projections(attention: Any, heads: int, head_dim: int) -> dict[str, tuple[Any, Take]]:
    """The modules that project q, k and v, and the place of each in the module's output."""
    queries = getattr(attention, "q_proj", None)
    if queries is not None and queries.out_features == 2 * heads * head_dim:  # each with its gate
        return {
            "q": (queries, lambda x: _split(2 * head_dim)(x)[..., :head_dim]),
            "attn_gate": (queries, lambda x: _split(2 * head_dim)(x)[..., head_dim:].sigmoid()),
            "k": (attention.k_proj, _split(head_dim)),
            "v": (attention.v_proj, _split(head_dim)),
        }
    if queries is not None:
        keys = getattr(attention, "k_proj", None)  # None: those of an earlier layer
        values = getattr(attention, "v_proj", None) or keys
        found = {"q": queries, "k": keys, "v": values}
        taken = {site: (part, _split(head_dim)) for site, part in found.items() if part is not None}
        if (gate := getattr(attention, "gate_proj", None)) is not None:
            taken["attn_gate"] = gate, lambda x: _split(head_dim)(x).sigmoid()
        return taken
    if (fused := getattr(attention, "query_key_value", None)) is not None:
        keys = getattr(attention, "num_kv_heads", heads)  # for each, its queries, itself, its value

        def split(x: Tensor) -> Tensor:
            return x[0].unflatten(-1, (keys, heads // keys + 2, head_dim))

        return {
            "q": (fused, lambda x: split(x)[:, :, :-2].flatten(1, 2)),
            "k": (fused, lambda x: split(x)[:, :, -2]),
            "v": (fused, lambda x: split(x)[:, :, -1]),
        }
    for name in ("qkv_proj", "c_attn", "Wqkv"):  # all q, all k, all v
        if (fused := getattr(attention, name, None)) is not None:
            return {
                "q": (fused, lambda x: _split(head_dim)(x)[:, :heads]),
                "k": (fused, lambda x: _split(head_dim)(x)[:, heads:].chunk(2, dim=1)[0]),
                "v": (fused, lambda x: _split(head_dim)(x)[:, heads:].chunk(2, dim=1)[1]),
            }
    raise ValueError(f"{type(attention).__name__} has no known projections of q, k and v")


def _rows(value: Tensor) -> Tensor:
    """Some modules are given tokens without the batch dimension."""
    return value[0] if value.ndim > 2 else value


def _split(head_dim: int) -> Take:
    return lambda value: value[0].unflatten(-1, (-1, head_dim))


def _array(value: Tensor) -> np.ndarray:
    # a copy: the model may write into the same memory later
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    dtype = wide if value.is_floating_point() else torch.int64
    return value.detach().to("cpu", dtype, copy=True).contiguous().numpy()


@contextmanager
def _hooked(point: _Point, found: dict[str, np.ndarray]) -> Iterator[None]:
    def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = args[point.item or 0] if args else named["hidden_states"]
        found[point.name] = _taken(point, given)

    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        value: Any = output
        if point.item is not None and isinstance(output, tuple):
            value = output[point.item]
        found[point.name] = _taken(point, value)

    if point.side == "in":
        handle = point.module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = point.module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def _taken(point: _Point, value: Any) -> np.ndarray:
    taken = point.take(value)
    return _array(taken if point.scale == 1.0 else taken * point.scale)


@contextmanager
def _changed(point: _Point, change: Change) -> Iterator[None]:
    """Let the model continue with other values at a point."""

    def new(value: Tensor) -> Tensor:
        made = torch.from_numpy(change(_taken(point, value))) / point.scale
        return made.to(value).reshape(value.shape)

    def before(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if args:
            return (new(args[0]), *args[1:]), named
        return args, named | {"hidden_states": new(named["hidden_states"])}

    def after(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        return (new(output[0]), *output[1:]) if isinstance(output, tuple) else new(output)

    if point.side == "in":
        handle = point.module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = point.module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _rounded_again(block: Any, seed: int) -> Iterator[None]:
    """Perturb a block's input at random, by up to one machine epsilon of each value."""

    def change(module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        stream = args[0] if args else named["hidden_states"]
        rng = torch.Generator().manual_seed(seed)
        sign = 2 * torch.rand(stream.shape, generator=rng).to(stream) - 1
        changed = stream * (1 + sign * torch.finfo(stream.dtype).eps)
        return ((changed, *args[1:]), named) if args else (args, named | {"hidden_states": changed})

    handle = block.register_forward_pre_hook(change, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _forget_longer_contexts(rotary: Any) -> None:
    """Reset HF's "dynamic" RoPE, which keeps the frequencies of the longest context so far."""
    if rotary is None:
        return
    for name, original in list(rotary.named_buffers()):
        if name.endswith("original_inv_freq"):
            prefix = name.removesuffix("original_inv_freq")
            setattr(rotary, f"{prefix}inv_freq", original)
            setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)


def _next_token(logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """The next token's log-probability (0 for the last) and the distribution's entropy, in nats."""
    targets = torch.cat([ids[1:], ids[:1]]).to(logits.device)
    logprob, entropy = [], []
    for rows, target in zip(logits.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True):
        logs = rows.double().log_softmax(-1)
        logprob.append(logs.gather(-1, target[:, None])[:, 0])
        entropy.append(torch.special.entr(logs.exp()).sum(-1))
    known = torch.cat(logprob)
    known[-1] = 0.0
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return {"logprob": known.to(dtype), "entropy": torch.cat(entropy).to(dtype)}
