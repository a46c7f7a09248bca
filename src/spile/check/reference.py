"""Every tap of a model run by HF transformers, by hooks on its modules: the ground truth.

It knows the names of modules, but not how a family computes: it uses nothing of what Spile's own
decoder assumes about an architecture.
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

from spile.check.attended import attended
from spile.check.backward import BackwardPass
from spile.check.hf_arithmetic import (
    InFloat64,
    RoundedProducts,
    float8_modules,
    float8_product,
    mixed_in_float8,
    mixtures,
)
from spile.check.hf_backward import HfBackward, is_backward
from spile.check.hf_gradients import gradients, objective_of
from spile.check.hf_hooks import TorchChange, as_array, change, record, round_again
from spile.check.hf_modules import (
    Point,
    block_points,
    convolves,
    embeds_itself,
    find_attention,
    find_part,
    find_space,
    token_rows,
)
from spile.check.hf_splices import HfSplices
from spile.check.lens_rows import LensRows
from spile.check.next_token import next_token
from spile.core.errors import InputError
from spile.models.sites import SITES

_ATTENDED = ("attn_top_keys", "attn_top_weights", "attn_summary")  # from attention weights

# Functions of a file of transformers that has layers with a convolution, or a recurrent rule.
_CONVOLUTION, _SPACE_RULE = "causal_conv1d_fn", "mamba2_chunk_scan"
_DELTA_RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")


class Reference:
    """Taps of a HF model, by hooks: the ground truth."""

    def __init__(
        self,
        model: torch.nn.Module,
        splices: HfSplices | None = None,
        lens: LensRows | None = None,
    ) -> None:
        """Args:
        splices: changes of taps; the model continues with what they return.
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
        self._splices = splices or HfSplices()
        self._refuse_partial(self._splices.taps)
        self._products = [module for block in blocks for module in float8_modules(block)]
        self._mixtures = [mixture for block in blocks for mixture in mixtures(block)]
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
        backward: BackwardPass | None = None,
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
            backward: How gradients, attributions and edges are made; of the log-probability, with
                no baseline, if not given.

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
        if made := {name for name in sites or () if is_backward(name)}:
            sites = {*(sites or ())} - made
            if replaced or self._float8:
                how = "with values replaced" if replaced else "of products in 8 bits"
                raise InputError(f"check cannot recompute gradients {how}")
            found |= self._backward(token_ids, made, noise, backward or BackwardPass())
            if not sites:
                return found
        with ExitStack() as hooks, torch.no_grad(), self._arithmetic():
            for module in self._products if self._float8 else ():
                module.forward = partial(float8_product, module, self._exact.get(id(module), 0))
                hooks.callback(delattr, module, "forward")
            for module in self._mixtures if self._float8 else ():
                module.forward = partial(mixed_in_float8, module.forward)
                hooks.callback(delattr, module, "forward")
            if self._float8 and self._experts is not None:  # grouped products hide their factors
                self.model.set_experts_implementation("eager")
                hooks.callback(self.model.set_experts_implementation, self._experts)
            for point, function in (*self._changes(), *self._replacing(replaced or {})):
                hooks.callback(change(point, function).remove)
            for point in self.points:  # (these hooks run after those of the changes)
                if wanted(point.name) or looked(point.name) or point.name in lensed:
                    hooks.callback(record(point, found).remove)
            if noise is not None:
                first = find_part(self._body, "blocks")[0]
                hooks.callback(round_again(first, noise).remove)
            if self._rotary is not None or hasattr(self._modules[0], "rotary_dim"):
                hooks.enter_context(self._watched_attention(wanted, found))
            if hasattr(self._modeling, _CONVOLUTION):
                hooks.enter_context(self._watched_functions(wanted, found))
            if any(wanted(site.name) for site in SITES.values() if site.head):
                logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
                read = {"logits": logits}
                if any(wanted(site.name) for site in SITES.values() if site.head and site.dtype):
                    read |= next_token(logits, ids, sized)
                found |= {name: as_array(value) for name, value in read.items() if wanted(name)}
            else:
                self._body(input_ids=ids[None], use_cache=False)
            for name in lensed:
                told = self._read_by_lens(int(name.partition(".")[2]), found[name], sized)
                found |= {n: as_array(value) for n, value in told.items() if wanted(n)}
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

    def _refuse_partial(self, changed: Collection[str]) -> None:
        if missing := {*changed} - self._whole.keys():
            raise InputError(
                f"check cannot recompute a change at {min(missing)}: no module of "
                f"{type(self.model).__name__} takes or returns just that"
            )

    def _changes(
        self, paths: Mapping[str, TorchChange] | None = None
    ) -> list[tuple[Point, TorchChange]]:
        """Return the changes of the model, and one more at each place of a path, after others."""
        paths = paths or {}
        self._refuse_partial(paths)
        taps = dict.fromkeys((*self._splices.taps, *paths))
        return [(self._whole[tap], self._splices.change(tap, paths.get(tap))) for tap in taps]

    def _replacing(self, replaced: Mapping[str, np.ndarray]) -> list[tuple[Point, TorchChange]]:
        self._refuse_partial(replaced)

        def instead(new: np.ndarray) -> TorchChange:
            return lambda old: torch.from_numpy(new).to(old).reshape(old.shape)

        return [(self._whole[name], instead(new)) for name, new in replaced.items()]

    def _backward(
        self, token_ids: np.ndarray, names: Collection[str], noise: int | None, made: BackwardPass
    ) -> dict[str, np.ndarray]:
        """Compute gradients, attributions and edges, by their taps."""
        ids = torch.tensor(token_ids.astype(np.int64), device=self.model.device)

        def of_sites(
            sources: Collection[str], paths: Mapping[str, TorchChange] | None = None
        ) -> dict[str, np.ndarray]:
            with ExitStack() as hooks, self._arithmetic():
                if noise is not None:
                    first = find_part(self._body, "blocks")[0]
                    hooks.callback(round_again(first, noise).remove)
                for point, function in self._changes(paths):
                    hooks.callback(change(point, function).remove)
                read = made.aim.tap if made.aim else None
                found = gradients(self.model, self.points, ids, objective_of(made.aim), read)
            return self._known(sources, found)

        def values(sources: Collection[str]) -> dict[str, np.ndarray]:
            return self.taps(token_ids, sources, noise=noise)

        scale = self._block_scale
        return HfBackward(of_sites, values, self._projection, scale, made).taps(names)

    def _projection(self, tap: str) -> np.ndarray:
        """Return the matrix through which heads are added to the stream: [width, values]."""
        module = self._whole[tap].module
        weight = module.weight if isinstance(module, torch.nn.Linear) else module.weight.T  # Conv1D
        return as_array(weight) * self._whole[tap.replace("z", "attn_out", 1)].scale

    def _block_scale(self, layer: int) -> float:
        """Return what the stream is multiplied with at the end of a block: Gemma 4 learns it."""
        return float(getattr(find_part(self._body, "blocks")[layer], "layer_scalar", 1.0))

    def _known(
        self, sources: Collection[str], found: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the gradients of some taps, in float32 or wider; raise if one is missing."""
        if missing := {*sources} - found.keys():
            name = min(missing)
            why = f"no module of {type(self.model).__name__} takes or returns just those values"
            if name in {point.name for point in self.points}:
                why = (
                    f"in {type(self.model).__name__} the objective does not depend on those "
                    "values, or they come before an activation"
                )
            raise InputError(f"check cannot recompute the gradient at {name}: {why}")
        wide = np.float64 if self.model.dtype == torch.float64 else np.float32
        return {name: found[name].astype(wide) for name in sources}

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
            return InFloat64()
        rounds = self.model.dtype == torch.bfloat16 and self.model.device.type == "cpu"
        native = not rounds or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return nullcontext() if native else RoundedProducts()

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
                    found[f"{site}.{layer}"] = as_array(value[0].transpose(0, 1))
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
                    found[f"{site}.{layer}"] = as_array(value[0].transpose(0, 1))

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
                found[name] = as_array(value())

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


def _forget_longer_contexts(rotary: Any) -> None:
    """Reset HF's "dynamic" RoPE, which keeps the frequencies of the longest context so far."""
    if rotary is None:
        return
    for name, original in list(rotary.named_buffers()):
        if name.endswith("original_inv_freq"):
            prefix = name.removesuffix("original_inv_freq")
            setattr(rotary, f"{prefix}inv_freq", original)
            setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
